# SPDX-License-Identifier: Apache-2.0
"""``MnnvlMemory`` and the communication backends, for ranks that are threads or processes.

FlashInfer's 768 MiB allocation is left out: on the CPU there are no ranges that it would outgrow.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.flashinfer_rounds import Callbacks, mapping, strided_memory, torch_backends

import fanfold
from fanfold.compat import flashinfer
from fanfold.compat.flashinfer import groups, mnnvl
from fanfold.testing import spawn_processes, spawn_threads, thread_outcomes


@pytest.mark.parametrize("world", [1, 2, 4])
def test_threads_see_each_other_in_one_strided_tensor(world: int) -> None:
    spawn_threads(world, strided_memory)


@pytest.mark.multiproc
def test_processes_see_each_other_in_one_strided_tensor() -> None:
    spawn_processes(2, strided_memory)


def test_sizes_that_differ_are_named_on_every_rank() -> None:
    def one(comm: fanfold.Communicator) -> None:
        where = mapping(2, comm.rank)
        backend = flashinfer.CommunicatorBackend(comm)
        config = flashinfer.MnnvlConfig(comm_backend=backend)
        flashinfer.MnnvlMemory.set_comm_from_config(where, config)
        flashinfer.MnnvlMemory(where, 100 + comm.rank)

    for outcome in thread_outcomes(2, one):
        assert isinstance(outcome.error, fanfold.InvalidArgument)
        assert "rank 0: 100, rank 1: 101" in str(outcome.error)


def test_a_closed_memory_gives_no_tensor_and_its_owner_is_forgotten() -> None:
    memory = flashinfer.MnnvlMemory(flashinfer.Mapping(1, 0), 64)
    rows = memory.as_torch_strided_tensor(torch.uint8)
    assert mnnvl.Owners.find(rows) is memory.comm
    address = rows.untyped_storage().data_ptr()
    memory.close()
    with pytest.raises(RuntimeError, match="the memory is closed"):
        memory.as_torch_strided_tensor(torch.uint8)
    del rows
    gc.collect()
    assert address not in mnnvl.Owners._communicators
    assert flashinfer.MnnvlMemory.supports_mnnvl()
    with pytest.raises(ValueError, match="size: expected at least 1, got 0"):
        flashinfer.MnnvlMemory(flashinfer.Mapping(1, 0), 0)


def test_mapped_files_are_closed() -> None:
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        flashinfer.MnnvlMemory(flashinfer.Mapping(1, 0), 64).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


# --- Backends -----------------------------------------------------------------------------------


class Backend:
    """A backend of the world that can be divided, and counts how often it is asked."""

    def __init__(self, rank: int, size: int, part: Any = None) -> None:
        self.rank, self.size, self.part = rank, size, part
        self.splits: list[tuple[int, int]] = []

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, data: Any) -> Any:
        return [data] * self.size

    def bcast(self, data: Any, root: int) -> Any:
        del root
        return data

    def barrier(self) -> None:
        pass

    def Split(self, color: int, key: int) -> Any:
        self.splits.append((color, key))
        return self if self.part is None else self.part


def test_the_group_is_the_expert_parallel_one() -> None:
    comm = fanfold.Communicator.threads(1)[0]
    world = Backend(5, 8, flashinfer.CommunicatorBackend(comm))
    where = flashinfer.Mapping(8, 5, 8, tp_size=4, pp_size=2, moe_tp_size=4, moe_ep_size=1)
    assert groups.expert_group(where) == (1, 4, 1)
    experts = flashinfer.Mapping(8, 5, 8, tp_size=4, pp_size=2, moe_ep_size=2)
    assert groups.expert_group(experts) == (1, 2, 2)
    alone = flashinfer.Mapping(8, 5, 8, pp_size=8)
    found = groups.communicator_of(alone, flashinfer.MnnvlConfig(comm_backend=world))
    assert found is comm
    assert world.splits == [(5, 0)]
    again = groups.communicator_of(alone, flashinfer.MnnvlConfig(comm_backend=world))
    assert again is comm
    assert world.splits == [(5, 0)]


def test_a_backend_of_other_ranks_is_refused() -> None:
    config = flashinfer.MnnvlConfig(comm_backend=Backend(1, 2))
    with pytest.raises(fanfold.InvalidArgument, match="expected rank 3 of 4, the mapping's expert"):
        groups.communicator_of(mapping(4, 3), config)


def test_a_backend_without_a_method_is_a_type_error() -> None:
    missing = type("NoSplit", (), {k: v for k, v in vars(Backend).items() if k != "Split"})
    config = flashinfer.MnnvlConfig(comm_backend=missing(0, 1))
    with pytest.raises(TypeError, match="got NoSplit without Split"):
        groups.communicator_of(mapping(1, 0), config)
    assert isinstance(Backend(0, 1), flashinfer.CommBackend)


def test_a_world_of_several_ranks_needs_a_backend() -> None:
    with pytest.raises(RuntimeError, match=r"MnnvlConfig\(.*for a world of 2 ranks"):
        groups.communicator_of(mapping(2, 0))


def test_tensor_parallel_ranks_do_not_pass_for_expert_parallel_ones() -> None:
    def one(comm: fanfold.Communicator) -> None:
        config = flashinfer.MnnvlConfig(comm_backend=flashinfer.CommunicatorBackend(comm))
        where = flashinfer.Mapping(2, comm.rank, 2, tp_size=2)
        with pytest.raises(fanfold.InvalidArgument, match="expected moe_ep_size 2"):
            flashinfer.MoeAlltoAll(where, 4, 1, 2, hidden_size=8, mnnvl_config=config)

    spawn_threads(2, one)


def test_backends_gather_broadcast_and_divide() -> None:
    def one(comm: fanfold.Communicator) -> None:
        backend = flashinfer.CommunicatorBackend(comm)
        assert backend.allgather({"rank": comm.rank}) == [{"rank": r} for r in range(4)]
        assert backend.bcast(comm.rank, 2) == 2
        backend.barrier()
        part = backend.Split(comm.rank % 2, -comm.rank)
        assert (part.Get_rank(), part.Get_size()) == (1 - comm.rank // 2, 2)
        assert part.allgather(comm.rank) == [2 + comm.rank % 2, comm.rank % 2]
        with pytest.raises(ValueError, match="color"):
            backend.Split(-1, 0)

    spawn_threads(4, one)


@pytest.mark.multiproc
def test_groups_of_torch_are_backends(tmp_path: Path) -> None:
    assert spawn_processes(4, torch_backends, str(tmp_path / "store")) == [4.0, 4.0, 4.0, 4.0]


def test_one_backend_makes_one_communicator() -> None:
    def one(comm: fanfold.Communicator) -> None:
        backend = flashinfer.CommunicatorBackend(comm)
        assert groups.communicator_from(backend) is comm

    spawn_threads(2, one)
    assert isinstance(Callbacks(fanfold.Communicator.threads(1)[0]), flashinfer.CommBackend)
