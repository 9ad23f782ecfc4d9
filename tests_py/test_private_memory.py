# SPDX-License-Identifier: Apache-2.0
"""Private memory of an exchange from the caller's own source."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
from support.rounds import ALL_STRATEGIES, make, works

import fanfold
from fanfold.testing import spawn_threads


class Source:
    """Gives arrays that begin on 128 bytes and are full of ones, and remembers them."""

    def __init__(self) -> None:
        self.arrays: list[weakref.ref[numpy.ndarray]] = []

    def __call__(self, num_bytes: int) -> numpy.ndarray:
        array = numpy.full(num_bytes + 128, 0xFF, "uint8")
        self.arrays.append(weakref.ref(array))
        head = -array.ctypes.data % 128
        return array[head : head + num_bytes]

    def num_alive(self) -> int:
        gc.collect()
        return sum(array() is not None for array in self.arrays)


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_an_exchange_takes_its_private_memory_from_the_source(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        source = Source()
        allocator = fanfold.Allocator(comm)
        allocator.set_private_memory(source)
        a2a = make(comm, strategy=strategy, allocator=allocator)
        assert source.num_alive() == 1
        works(a2a, comm.rank)
        a2a.close()
        del a2a
        assert source.num_alive() == 0
        allocator.set_private_memory(None)
        works(make(comm, strategy=strategy, allocator=allocator), comm.rank)
        assert len(source.arrays) == 1

    spawn_threads(2, fn)


def test_a_rank_without_memory_ends_creation_on_all() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        allocator = fanfold.Allocator(comm)

        def none_left(num_bytes: int) -> Any:
            raise MemoryError(num_bytes)

        if comm.rank == 1:
            allocator.set_private_memory(none_left)
        with pytest.raises(MemoryError):
            make(comm, allocator=allocator)
        allocator.set_private_memory(None)
        works(make(comm, allocator=allocator), comm.rank)

    spawn_threads(2, fn)


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    def crooked(num_bytes: int) -> numpy.ndarray:
        array = Source()(num_bytes + 128)
        return array[16:]

    bad: list[tuple[Any, str]] = [
        (
            lambda num_bytes: numpy.zeros(num_bytes - 1, "uint8"),
            "private memory: expected a contig",
        ),
        (lambda num_bytes: 5, "private memory: expected"),
        (crooked, "private memory: expected an address that is a multiple of 128"),
    ]

    def fn(comm: fanfold.Communicator) -> None:
        allocator = fanfold.Allocator(comm)
        for source, text in bad:
            allocator.set_private_memory(source if comm.rank == 0 else None)
            with pytest.raises(fanfold.InvalidArgument, match=text):
                make(comm, allocator=allocator)

    spawn_threads(2, fn)
