# SPDX-License-Identifier: Apache-2.0
"""What every communicator over messages must do: one function per behaviour, called by each rank.

Each takes a function that makes a new communicator of all ranks, whatever carries it. No torch.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy

import fanfold
from fanfold.testing import Case, checks_for
from fanfold.testing.conformance import run_pairs
from fanfold.testing.spawn import describe_error
from support.rounds import make, works

Make = Callable[[], fanfold.Communicator]
CASES = [
    Case("broadcast", "rank_major", "applied"),
    Case("broadcast", "gathered", "applied"),
    Case("gather_scatter", "gathered", "applied"),
    Case("gather_scatter", "flat", "applied"),
    Case("batched", "expert_major", "carried"),
]
NEED_MEMORY = ("one_sided", "low_latency", "high_throughput", "two_sided")


@contextlib.contextmanager
def raises(error: Any, pattern: str = "") -> Iterator[list[Any]]:
    """Expect an error; it is the one element of what this gives, afterwards."""
    caught: list[Any] = []
    try:
        yield caught
    except error as raised:
        assert re.search(pattern, str(raised)), f"expected {pattern!r}, got {raised}"
        caught.append(raised)
    else:
        raise AssertionError(f"{error} was not raised")


def block(rank: int, rows: int, dtype: str = "float32") -> Any:
    return (numpy.arange(rows * 3).reshape(rows, 3) + 100 * rank).astype(dtype)


def it_says_what_it_is(create: Make, kind: str) -> None:
    with create() as comm:
        assert comm.kind == kind
        assert comm.hosts == [0] * comm.num_ranks
        assert not comm.shares_memory


def collectives_move_rows(create: Make, kind: str) -> None:
    del kind
    with create() as comm:
        me, ranks = comm.rank, range(comm.num_ranks)
        for step in range(6):
            counts = [(rank + step) % 3 * 10 ** (step % 4) for rank in ranks]
            recv = numpy.zeros((sum(counts), 3), numpy.float32)
            comm.all_gather_v(block(me, counts[me]), recv, counts)
            wanted = numpy.concatenate([block(r, counts[r]) for r in ranks])
            numpy.testing.assert_array_equal(recv, wanted)
            part = numpy.zeros((counts[me], 3), numpy.float32)
            comm.reduce_scatter_v(wanted, part, counts)
            first = sum(counts[:me])
            numpy.testing.assert_array_equal(part, comm.num_ranks * wanted[first:][: counts[me]])
            recv = numpy.zeros((comm.num_ranks, 3), numpy.float32)
            comm.all_to_all(block(me, comm.num_ranks), recv)
            wanted = numpy.stack([block(r, comm.num_ranks)[me] for r in ranks])
            numpy.testing.assert_array_equal(recv, wanted)
            tensor = block(me, 5 * step)
            comm.broadcast(tensor, step % comm.num_ranks)
            numpy.testing.assert_array_equal(tensor, block(step % comm.num_ranks, 5 * step))
            comm.all_reduce(tensor, tensor)
            numpy.testing.assert_array_equal(
                tensor, comm.num_ranks * block(step % comm.num_ranks, 5 * step)
            )
            sizes = [(300_000 * r + step) % 700_001 for r in ranks]
            all_bytes = comm.all_gather_bytes(bytes([me]) * sizes[me])
            assert all_bytes == [bytes([r]) * sizes[r] for r in ranks]


def tensors_that_are_not_contiguous_are_refused(create: Make, kind: str) -> None:
    del kind
    with create() as comm:
        wide = numpy.zeros((4, 6), numpy.float32)
        with raises(fanfold.InvalidArgument, "contiguous"):
            comm.broadcast(wide[:, ::2], 0)
        comm.broadcast(wide, 0)


def groups_split(create: Make, kind: str) -> None:
    with create() as comm:
        part = comm.split(comm.rank % 2, -comm.rank)
        assert part is not None
        members = [r for r in range(comm.num_ranks) if r % 2 == comm.rank % 2][::-1]
        assert [each[0] for each in part.all_gather_bytes(bytes([comm.rank]))] == members
        assert part.kind == kind
        for _ in range(3):
            part.barrier()
            comm.barrier()
        part.close()
        assert comm.split(-1) is None


def a_group_that_lives_on_holds_nobody_up(create: Make, kind: str) -> None:
    del kind
    comm = create()
    part = comm.split(0 if comm.rank in (1, 2) else -1)
    begin = time.monotonic()
    comm.close()
    assert time.monotonic() - begin < 5, "expected less than a second, plus what a busy host takes"
    if part is not None:
        for _ in range(3):
            assert part.all_gather_bytes(bytes([part.rank])) == [b"\0", b"\1"]
        part.close()


def arguments_that_differ_are_an_error_on_every_rank(create: Make, kind: str) -> None:
    del kind
    with create() as comm:
        zeros = numpy.zeros(4 + comm.rank, numpy.float32)
        with raises(fanfold.InvalidArgument, r"(?s)rank \d.*rank \d"):
            comm.all_reduce(zeros, zeros)
        comm.barrier()


def an_abort_reaches_every_rank(create: Make, kind: str) -> None:
    del kind
    with create() as comm:
        for turn in range(3):
            who = turn % comm.num_ranks
            begin = time.monotonic()
            if comm.rank == who:
                time.sleep(0.05 * turn)
                comm.abort(f"reason {turn}")
            with raises(fanfold.PeerAborted, f"reason {turn}") as caught:
                comm.barrier()
            assert caught[0].rank == who
            assert time.monotonic() - begin < 5
            comm.reset()
            comm.barrier()


def a_late_rank_is_named_and_a_reset_brings_it_back(create: Make, kind: str) -> None:
    del kind
    with create() as comm:
        for late in (1, 0):
            comm.barrier()
            if comm.rank == late:
                time.sleep(0.8)
            else:
                expected = (fanfold.PeerTimeout, fanfold.PeerAborted)
                begin = time.monotonic()
                with raises(expected) as caught:
                    comm.barrier(timeout_s=0.3)
                assert time.monotonic() - begin < 5
                if isinstance(caught[0], fanfold.PeerTimeout):
                    assert caught[0].rank == late
            comm.reset()
            comm.barrier()


def strategies_that_need_memory_are_refused(create: Make, kind: str) -> None:
    with create() as comm:
        for strategy in NEED_MEMORY:
            with raises(fanfold.Unsupported, r"memory"):
                make(comm, strategy=strategy)
        with make(comm, strategy="auto") as a2a:
            strategy, _, reason = str(a2a.choice()).partition(" ")
            assert not any(name in strategy for name in NEED_MEMORY), (strategy, reason, kind)
            works(a2a, comm.rank)
        with raises(fanfold.Unsupported):
            fanfold.Allocator(comm)


def rounds_conform(create: Make, kind: str) -> None:
    del kind
    with create() as comm:
        pairs = [
            (case, check.name)
            for case in CASES
            for check in checks_for(case)
            if check.is_core and check.num_ranks <= comm.num_ranks
        ]
        results = run_pairs(comm, pairs)
        assert not any(result.error for result in results), results[-1]


def rounds_work_at_any_pace(create: Make, kind: str) -> None:
    del kind
    with create() as comm:
        rng = random.Random(comm.rank)
        exchanges = [make(comm, strategy=name) for name in ("broadcast", "batched", "auto")]
        for _ in range(8):
            for a2a in exchanges:
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.01)
                works(a2a, comm.rank, num_rounds=1)
        for a2a in exchanges:
            a2a.close()


SCENARIOS: tuple[Callable[[Make, str], None], ...] = (
    it_says_what_it_is,
    collectives_move_rows,
    tensors_that_are_not_contiguous_are_refused,
    groups_split,
    a_group_that_lives_on_holds_nobody_up,
    arguments_that_differ_are_an_error_on_every_rank,
    an_abort_reaches_every_rank,
    a_late_rank_is_named_and_a_reset_brings_it_back,
    rounds_conform,
    rounds_work_at_any_pace,
    strategies_that_need_memory_are_refused,
)
NAMES = [scenario.__name__ for scenario in SCENARIOS]


def run_all(create: Make, kind: str) -> dict[str, str]:
    """Run all; returns what each raised, "" if nothing. Those after a failure may not run."""
    errors = {}
    for scenario in SCENARIOS:
        try:
            scenario(create, kind)
            errors[scenario.__name__] = ""
        except Exception as error:
            errors[scenario.__name__] = describe_error(error)
        if errors[scenario.__name__]:
            break
    return errors
