# SPDX-License-Identifier: Apache-2.0
"""Parts of a window for frameworks that allocate their own tensors, as torch calls for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

import fanfold
from fanfold.testing import spawn_threads


def functions_of(pool: Any) -> tuple[Callable[..., int | None], Callable[..., None]]:
    """The pool's C functions, found by name as torch finds them."""
    library = ctypes.CDLL(fanfold._core.__file__)
    allocate_name, free_name = pool.give_to_torch()
    allocate, free = getattr(library, allocate_name), getattr(library, free_name)
    allocate.restype, free.restype = ctypes.c_void_p, None
    allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return allocate, free


def test_torchs_functions_allocate_from_the_window() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        memory = fanfold.Allocator(comm).allocate(1 << 16)
        pool = fanfold.MemoryPool(memory, comm.rank)
        allocate, free = functions_of(pool)
        start = memory.view(comm.rank).ctypes.data
        first = allocate(1000, 0, None)
        second = allocate(5000, 0, None)
        assert (first, second) == (start, start + 1024)
        assert allocate(1 << 20, 0, None) is None
        assert pool.bytes_in_use == 1024 + 5120
        tensor = memory.tensor(comm.rank, "float32", [4], offset_bytes=1024)
        assert pool.offset_of(tensor) == 1024
        with pytest.raises(fanfold.InvalidState, match=r"got 6144 bytes in use"):
            pool.take_from_torch()
        free(first, 1000, 0, None)
        free(second, 5000, 0, None)
        pool.take_from_torch()
        assert allocate(10, 0, None) is None, "torch has the pool no more"

    spawn_threads(2, fn)


def test_the_ninth_pool_at_a_time_is_refused() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        memory = fanfold.Allocator(comm).allocate(4096)
        pools = [fanfold.MemoryPool(memory, comm.rank) for _ in range(9)]
        names = {pool.give_to_torch() for pool in pools[:8]}
        assert len(names) == 8
        with pytest.raises(fanfold.InvalidState, match="at most 8 pools"):
            pools[8].give_to_torch()
        pools[3].take_from_torch()
        assert pools[8].give_to_torch() in names
        for pool in pools:
            pool.take_from_torch()

    spawn_threads(1, fn)


def test_rules() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        memory = fanfold.Allocator(comm).allocate(4096)
        with pytest.raises(fanfold.InvalidArgument, match="rank: expected 0 to 0, got 1"):
            fanfold.MemoryPool(memory, 1)
        pool = fanfold.MemoryPool(memory, 0)
        with pytest.raises(fanfold.InvalidArgument, match="offset_of: expected"):
            pool.offset_of(memory.tensor(0, "uint8", [4]))
        from fanfold.interop_torch import TorchMemoryPool

        with pytest.raises(fanfold.InvalidArgument, match="expected a block of GPU memory"):
            TorchMemoryPool(memory, 0)

    spawn_threads(1, fn)


def test_tensors_over_a_window() -> None:
    import numpy
    import torch

    def fn(comm: fanfold.Communicator) -> None:
        memory = fanfold.Allocator(comm).allocate(4096)
        memory.view(0)[64:72] = numpy.frombuffer(b"\x80\x3f\x00\x40\x00\x00\x80\xbf", "uint8")
        tensor = memory.tensor(0, torch.bfloat16, [2, 2], offset_bytes=64)
        assert tensor.tolist() == [[1, 2], [0, -1]]
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.int64):
            assert memory.tensor(0, dtype, [8]).dtype == dtype
        bits = memory.tensor(0, "float8_e4m3fn", [16])
        assert torch.from_dlpack(bits).dtype == torch.float8_e4m3fn
        assert memory.tensor(0, numpy.float32, [0, 5]).shape == (0, 5)
        del memory
        assert tensor.tolist() == [[1, 2], [0, -1]]

    spawn_threads(1, fn)


@pytest.mark.parametrize(
    ("shape", "offset", "text"),
    [
        ([1025], 0, "expected 1025 elements of float32 within the window of 4096 bytes"),
        ([1024], 4, "got offset_bytes 4"),
        ([1], -4, "got offset_bytes -4"),
        ([-1], 0, "shape: expected extents of 0 or more"),
        ([2**40, 2**40], 0, "shape: expected extents"),
        ([1], 2, "offset_bytes: expected a multiple of 4, got 2"),
        ([1] * 9, 0, "at most 8 dimensions, got 9"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shape: list[int], offset: int, text: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        memory = fanfold.Allocator(comm).allocate(4096)
        with pytest.raises(fanfold.InvalidArgument, match=text):
            memory.tensor(0, "float32", shape, offset_bytes=offset)

    spawn_threads(1, fn)


def test_gpu_memory_without_a_driver_is_one_clear_error() -> None:
    if fanfold.build_info()["cuda"]:
        pytest.skip("this build has the GPU backend; one without (the default) runs this")

    def fn(comm: fanfold.Communicator) -> None:
        for make in (
            lambda: fanfold.Allocator(comm, device="cuda"),
            lambda: fanfold.FabricMemory(comm, 4096, device="cuda:1"),
        ):
            with pytest.raises(fanfold.Unsupported, match="expected a build with the GPU backend"):
                make()
        with pytest.raises(fanfold.InvalidArgument, match="kinds: expected fabric"):
            fanfold.Allocator(comm, device="cuda", kinds=["nvlink"])

    spawn_threads(1, fn)
