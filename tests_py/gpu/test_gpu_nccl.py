# SPDX-License-Identifier: Apache-2.0
"""Collectives over NCCL: its double on the simulated device, PYTHONPATH=build/sim/python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import fanfold
from fanfold import _core, _nccl, interop_torch

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from support.gpu import Rank, run_ranks

DOUBLE = Path(_core.__file__).parents[2] / "tests_cpp" / "sim" / "libnccl_double.so"


def connect(rank: Rank, **more: Any) -> fanfold.Communicator:
    """Make the communicator over NCCL of a rank."""
    return fanfold.Communicator.from_nccl(
        rank.comm, device=rank.device, library=str(DOUBLE), **more
    )


def test_collectives_on_gpu_tensors() -> None:
    def fn(rank: Rank) -> None:
        comm = connect(rank)
        assert (comm.kind, comm.num_ranks, comm.device_index) == ("nccl", 3, rank.rank)
        send = rank.put(numpy.full(6, rank.rank + 1, dtype=numpy.float32))
        out = rank.empty(18)
        comm.all_gather_v(send, out, [6, 6, 6], stream=rank.stream)
        numpy.testing.assert_array_equal(rank.get(out), numpy.repeat([1.0, 2.0, 3.0], 6))
        comm.all_reduce(send, send, stream=rank.stream)
        numpy.testing.assert_array_equal(rank.get(send), numpy.full(6, 6.0))
        block = rank.empty(2)
        comm.reduce_scatter_v(send, block, [2, 2, 2], stream=rank.stream)
        numpy.testing.assert_array_equal(rank.get(block), [18.0, 18.0])
        other = rank.empty(6)
        comm.all_to_all(send, other, stream=rank.stream)
        comm.all_to_all_v(other, send, [2, 2, 2], [2, 2, 2], stream=rank.stream)
        comm.broadcast(send, 1, stream=rank.stream)
        numpy.testing.assert_array_equal(rank.get(send), numpy.full(6, 6.0))
        comm.check_device()
        comm.barrier()
        comm.close()

    run_ranks(3, fn)


def test_cpu_tensors_and_bytes_go_the_hosts_way() -> None:
    def fn(rank: Rank) -> None:
        comm = connect(rank)
        values = numpy.full(3, rank.rank + 1, dtype=numpy.int32)
        comm.all_reduce(values, values)
        assert values.tolist() == [3, 3, 3]
        assert comm.all_gather_bytes(bytes([rank.rank])) == [b"\0", b"\1"]
        with pytest.raises(fanfold.InvalidArgument, match="expected None for CPU tensors"):
            comm.all_reduce(values, values, stream=rank.stream)
        comm.close()

    run_ranks(2, fn)


def test_a_gpu_tensor_needs_a_stream() -> None:
    def fn(rank: Rank) -> None:
        comm = connect(rank)
        with pytest.raises(fanfold.InvalidArgument, match="stream: expected a CUDA stream"):
            comm.broadcast(rank.empty(3), 0)
        comm.close()

    run_ranks(1, fn)


def test_memory_of_nccl() -> None:
    def fn(rank: Rank) -> None:
        comm = connect(rank)
        allocator = fanfold.Allocator(comm, device=rank.device, kinds=["nccl"])
        block = allocator.allocate(4096)
        assert allocator.memory.kind == "nccl"
        numpy.asarray(block.tensor(1 - rank.rank, "int32", [2]))[rank.rank] = rank.rank + 5
        comm.barrier()
        mine = numpy.asarray(block.tensor(rank.rank, "int32", [2]))
        assert mine[1 - rank.rank] == (1 - rank.rank) + 5
        comm.barrier()

    run_ranks(2, fn)


def test_a_library_that_is_not_there_is_named() -> None:
    def fn(rank: Rank) -> None:
        with pytest.raises(fanfold.Unsupported, match="/nowhere/libnccl"):
            fanfold.Communicator.from_nccl(
                rank.comm, device=rank.device, library="/nowhere/libnccl.so.2"
            )

    run_ranks(2, fn)


def test_the_wheel_is_found_without_importing_torch() -> None:
    script = (
        "import sys; from fanfold import _nccl; print(_nccl.wheel_library());"
        "assert 'torch' not in sys.modules"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert found == _nccl.wheel_library()
    assert not found or Path(found).name == "libnccl.so.2"


def test_handles_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def group_of(backend: Any) -> Any:
        return SimpleNamespace(_get_backend=lambda _: backend)

    with pytest.raises(fanfold.InvalidState, match="init_process_group first"):
        interop_torch.nccl_handle()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert interop_torch.nccl_handle(group_of(SimpleNamespace(_comm_ptr=lambda: 4096))) == 4096
    with pytest.raises(fanfold.InvalidState, match="has not made the communicator yet"):
        interop_torch.nccl_handle(group_of(SimpleNamespace(_comm_ptr=lambda: 0)))
    with pytest.raises(fanfold.Unsupported, match="got SimpleNamespace of torch"):
        interop_torch.nccl_handle(group_of(SimpleNamespace()), "cuda:1")
