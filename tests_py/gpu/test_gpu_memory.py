# SPDX-License-Identifier: Apache-2.0
"""GPU memory on the simulated device: PYTHONPATH=build/sim/python (preset sim)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import fanfold
from fanfold.testing import spawn_threads

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    gc.collect()


def test_ranks_share_gpu_memory() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        allocator = fanfold.Allocator(comm, device="cuda")
        assert (allocator.memory.device, allocator.memory.kind) == ("cuda:0", None)
        block = allocator.allocate(3 * MIB)
        assert allocator.memory.kind == "fabric"
        assert block.num_bytes == 4 * MIB
        peer = (comm.rank + 1) % comm.num_ranks
        block.tensor(peer, torch.bfloat16, [4, 8])[1] = comm.rank + 1
        comm.barrier()
        mine = block.tensor(comm.rank, torch.bfloat16, [4, 8])
        assert mine.sum().item() == 8 * ((comm.rank - 1) % comm.num_ranks + 1)
        comm.barrier()
        allocator.free(block)
        assert allocator.stats.in_use == 0

    spawn_threads(3, fn)


def test_dtypes_survive_dlpack() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        memory = fanfold.FabricMemory(comm, 1000, kinds=["file_descriptor"])
        assert memory.memory.kind == "file_descriptor"
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
            assert memory.tensor(0, dtype, [8, 2], offset_bytes=256).dtype == dtype
        assert torch.from_dlpack(memory.tensor(0, "float8_e4m3fn", [8])).dtype == (
            torch.float8_e4m3fn
        )
        kept = memory.tensor(0, numpy.float32, [4])
        kept[:] = 7
        memory.close()
        with pytest.raises(fanfold.InvalidState, match="expected a block"):
            memory.tensor(0, "uint8", [1])
        assert kept.tolist() == [7, 7, 7, 7], "a tensor keeps its memory mapped"

    spawn_threads(2, fn)


def test_errors() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.Unsupported, match="rank 0: device: expected 0 to 0, got 3"):
            fanfold.Allocator(comm, device="cuda:3")
        with pytest.raises(fanfold.InvalidArgument, match="device: expected cuda or cuda:N"):
            fanfold.FabricMemory(comm, 5, device="cpu")
        host = [numpy.zeros(8192, "uint8") for _ in range(2)]
        with pytest.raises(
            fanfold.InvalidArgument, match=r"buffers\[0\]: expected memory of a GPU"
        ):
            fanfold.Allocator(comm, host, device=torch.device("cuda:0"))

    spawn_threads(2, fn)


def test_memory_of_the_callers_buffers() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        owner = fanfold.FabricMemory(comm, MIB)
        buffers = [owner.tensor(rank, "uint8", [MIB]) for rank in range(2)]
        allocator = fanfold.Allocator(comm, buffers, device="cuda")
        block = allocator.allocate(100)
        block.tensor(1 - comm.rank, torch.int32, [2])[1] = comm.rank + 5
        comm.barrier()
        assert owner.tensor(comm.rank, torch.int32, [2])[1].item() == (1 - comm.rank) + 5
        comm.barrier()

    spawn_threads(2, fn)


class FakePluggableAllocator:
    """Finds the functions as torch.cuda.memory.CUDAPluggableAllocator does."""

    def __init__(self, path: str, allocate: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.allocate, self.free = getattr(library, allocate), getattr(library, free)
        self.allocate.restype, self.free.restype = ctypes.c_void_p, None
        self.allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def allocator(self) -> FakePluggableAllocator:
        return self


class FakeMemPool:
    """Holds one segment, as the caching allocator would, and frees it when it goes."""

    def __init__(self, functions: FakePluggableAllocator) -> None:
        self.functions = functions
        self.segment = functions.allocate(2 * MIB, 0, None)

    def __del__(self) -> None:
        if self.segment is not None:
            self.functions.free(self.segment, 2 * MIB, 0, None)


def test_torch_allocates_from_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", FakePluggableAllocator)
    monkeypatch.setattr(torch.cuda, "MemPool", FakeMemPool)
    from fanfold.interop_torch import TorchMemoryPool

    def fn(comm: fanfold.Communicator) -> None:
        block = fanfold.Allocator(comm, device="cuda").allocate(4 * MIB)
        pool = TorchMemoryPool(block, comm.rank)
        assert pool.bytes_in_use == 2 * MIB
        whole: Any = block.tensor(comm.rank, torch.uint8, [4 * MIB])
        assert pool.pool.segment == whole.data_ptr()
        assert pool.offset_of(whole[MIB:]) == MIB
        with pytest.raises(fanfold.InvalidArgument):
            pool.offset_of(whole[3 * MIB :])
        held = pool.pool
        with pytest.raises(fanfold.InvalidState, match=f"got {2 * MIB} bytes in use"):
            pool.close()
        del held
        pool.close()
        pool.close()
        with pytest.raises(fanfold.InvalidState, match="closed"):
            _ = pool.pool

    spawn_threads(2, fn)


def test_a_pool_that_torch_cannot_make_is_given_back() -> None:
    from fanfold.interop_torch import TorchMemoryPool

    def fn(comm: fanfold.Communicator) -> None:
        block = fanfold.Allocator(comm, device="cuda").allocate(4 * MIB)
        for _ in range(20):  # more than there are pairs of functions
            with pytest.raises((RuntimeError, AttributeError)):
                TorchMemoryPool(block, comm.rank)

    spawn_threads(1, fn)
