# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory in the caller's own buffers."""

from __future__ import annotations

import gc
from typing import Any

import numpy
import pytest
import torch
from support.rounds import make, works

import fanfold
from fanfold.testing import spawn_threads

NUM_BYTES = 1 << 20


@pytest.mark.parametrize("strategy", ["one_sided", "low_latency", "two_sided"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_an_exchange_lives_in_the_buffers_of_the_caller(strategy: str, framework: str) -> None:
    arrays: list[Any] = [numpy.zeros(NUM_BYTES, "uint8") for _ in range(2)]
    buffers = [torch.from_numpy(array) for array in arrays] if framework == "torch" else arrays

    def fn(comm: fanfold.Communicator) -> None:
        allocator = fanfold.Allocator(comm, buffers, timeout_s=20)
        a2a = make(comm, strategy=strategy, allocator=allocator)
        works(a2a, comm.rank)
        assert 0 < allocator.stats.in_use <= NUM_BYTES
        comm.barrier()
        assert all(array.any() for array in arrays)
        a2a.close()
        with pytest.raises(fanfold.CapacityExceeded):
            make(comm, strategy=strategy, allocator=allocator, max_tokens_per_rank=2**20,
                 channel_bytes=2**22)  # fmt: skip
        works(make(comm, strategy=strategy, allocator=allocator), comm.rank)

    spawn_threads(2, fn)


def test_an_exchange_keeps_its_allocator_and_the_buffers() -> None:
    shared: list[Any] = [numpy.zeros(NUM_BYTES, "uint8") for _ in range(2)]

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, allocator=fanfold.Allocator(comm, list(shared)))
        comm.barrier()
        if comm.rank == 0:
            shared.clear()
            gc.collect()
        comm.barrier()
        works(a2a, comm.rank)
        a2a.close()

    spawn_threads(2, fn)


def test_rules() -> None:
    writable = [numpy.zeros(NUM_BYTES, "uint8") for _ in range(2)]
    read_only = numpy.zeros(NUM_BYTES, "uint8")
    read_only.flags.writeable = False
    rules: list[tuple[Any, str]] = [
        (writable[:1], "buffers: .*2.*1"),
        ([writable[0], read_only], "buffers: expected a tensor that may be written"),
        ([writable[0], writable[1][::2]], "buffers: expected contiguous CPU tensors"),
        (writable[0], "buffers: expected a list of tensors, got numpy.ndarray"),
        ([writable[0], None], "buffers: expected tensors, got None at 1"),
        ([writable[0], 5], "buffers: expected a DLPack tensor, got builtins.int"),
    ]

    def fn(comm: fanfold.Communicator) -> None:
        for buffers, text in rules:
            with pytest.raises(fanfold.InvalidArgument, match=text):
                fanfold.Allocator(comm, buffers)
        mine = writable if comm.rank == 0 else [writable[0], writable[1][: NUM_BYTES // 2]]
        with pytest.raises(fanfold.InvalidArgument):
            fanfold.Allocator(comm, mine)
        works(make(comm, allocator=fanfold.Allocator(comm, writable)), comm.rank)

    spawn_threads(2, fn)
