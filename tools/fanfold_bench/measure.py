# SPDX-License-Identifier: Apache-2.0
"""Rounds against the clock: equal for Fanfold and for everything it is compared with."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch

from fanfold_bench.batch import LOSSY_TOLERANCE, TOLERANCE, Batch, relative_error
from fanfold_bench.clock import HOT, MAX_ROUNDS, MEET, Clock, Pace
from fanfold_bench.floor import KINDS, Floor, Machine
from fanfold_bench.load import LoadWatch
from fanfold_bench.stats import Block, Record

WARM_UP: Final = 16  # rounds at the start of a long block that do not count
BLOCK_S: Final = 0.5


class Contender(Protocol):
    """One way to exchange tokens. ``weighted``: returns a row per expert, else per rank."""

    weighted: bool

    def dispatch(self) -> Any:
        """Timed: tokens to the experts."""

    def expert(self, received: Any) -> Any:
        """Not timed: the identity."""

    def combine(self, results: Any) -> torch.Tensor:
        """Timed: results back home."""


@dataclass(frozen=True)
class Limits:
    """How long to measure one contender.

    ``rounds`` and ``budget_s`` quiet ones suffice; ``patience_s`` ends the wait for quiet ones.
    """

    rounds: int
    budget_s: float
    patience_s: float
    min_rounds: int = 5


def check(contender: Contender, batch: Batch, clock: Clock, name: str) -> None:
    """Two rounds with different payloads must both give the expected result.

    Raises:
        RuntimeError: they do not; the text names the contender.
    """
    for _ in range(2):
        batch.x.neg_()
        clock.line_up(MEET)
        received = contender.dispatch()
        results = contender.expert(received)
        clock.line_up(MEET)
        out = contender.combine(results)
        lossy = getattr(contender, "lossy", False)
        worst = relative_error(out, batch.expected(contender.weighted), 1.0 if lossy else 1e-3)
        if worst > (LOSSY_TOLERANCE if lossy else TOLERANCE):
            raise RuntimeError(f"{name} gives a wrong result on rank {batch.rank} (off by {worst})")


def timed_block(
    contender: Contender, clock: Clock, pace: Pace, seconds: float, max_rounds: int
) -> int:
    """Run rounds for so many seconds and leave their times in the clock's page.

    Returns:
        The number of rounds, equal on all ranks.
    """
    dispatch, expert, combine = contender.dispatch, contender.expert, contender.combine
    line_up, store, now = clock.line_up, clock.store, time.perf_counter_ns
    clock.begin_block()
    end = now() + int(seconds * 1e9)
    max_rounds = min(max_rounds, MAX_ROUNDS)
    count = 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        while True:
            start = line_up(pace)
            if clock.stopped():
                return count
            received = dispatch()
            dispatch_ns = now() - start
            results = expert(received)
            start = line_up(pace)
            combine(results)
            combine_ns = now() - start
            del received, results
            store(count, dispatch_ns, combine_ns)
            count += 1
            if clock.is_leader and (count >= max_rounds or now() >= end):
                clock.stop_block()
    finally:
        if collecting:
            gc.enable()


def measure(contender: Contender, clock: Clock, pace: Pace, limits: Limits) -> Record:
    """Blocks of rounds until enough of them were quiet. The record is complete on the leader."""
    record = Record(limits.min_rounds)
    seconds = min(BLOCK_S, limits.budget_s)
    while True:
        watch = LoadWatch(clock)
        rounds = timed_block(contender, clock, pace, seconds, limits.rounds)
        record.blocks.append(_close_block(clock, watch, rounds, rounds))
        enough = record.enough(limits.rounds, limits.budget_s, limits.patience_s)
        if clock.agree(int(enough)):
            return record


def _close_block(clock: Clock, watch: LoadWatch, rounds: int, counted: int) -> Block:
    dispatch, combine = clock.slowest(rounds)
    foreign, seconds = watch.lap()
    skip = WARM_UP if counted >= 4 * WARM_UP else 0
    return Block(dispatch[skip:], combine[skip:], foreign, seconds)


@dataclass
class FloorRecord:
    """Blocks of the floor by kind of store, and flag latencies seen between them."""

    by_kind: dict[str, Record]
    flags: list[float] = field(default_factory=list)
    huge_pages: bool = False


def measure_with_floor(
    contender: Contender | None, floor: Floor, machine: Machine, limits: Limits
) -> tuple[Record, FloorRecord]:
    """Fanfold and the floor by turns, so that both see the same state of the machine.

    Returns:
        The contender's record (empty without one) and the floor's, complete on the leader.
    """
    clock = machine.clock
    ours = Record(limits.min_rounds)
    theirs = FloorRecord({kind: Record(limits.min_rounds) for kind in KINDS})
    theirs.huge_pages = floor.huge_pages
    seconds = min(BLOCK_S, limits.budget_s / 4)
    rounds_of_floor = _floor_rounds(floor, clock, seconds / len(KINDS))
    while True:
        _note_flag(machine, theirs)
        watch = LoadWatch(clock)
        floors = [floor.run(rounds_of_floor, kind) for kind in range(len(KINDS))]
        rounds = 0
        if contender is not None:
            rounds = timed_block(contender, clock, HOT, seconds, limits.rounds)
            block = _close_block(clock, watch, rounds, rounds)
            ours.blocks.append(block)
            foreign, wall = block.foreign, block.seconds
        else:
            foreign, wall = watch.lap()
        for kind, (dispatch, combine) in zip(KINDS, floors, strict=True):
            skip = WARM_UP if dispatch.size >= 4 * WARM_UP else 0
            part = Block(dispatch[skip:], combine[skip:], foreign, wall)
            theirs.by_kind[kind].blocks.append(part)
        judged = ours if contender is not None else theirs.by_kind[KINDS[0]]
        done = judged.enough(limits.rounds, limits.budget_s, limits.patience_s)
        if clock.agree(int(done)):
            _note_flag(machine, theirs)
            return ours, theirs


def _note_flag(machine: Machine, record: FloorRecord) -> None:
    latency = machine.flag_latency()
    if latency is not None:
        record.flags.append(latency)


def _floor_rounds(floor: Floor, clock: Clock, seconds: float) -> int:
    """How many rounds of the floor fill so many seconds; equal on all ranks."""
    probe = 5
    begin = time.perf_counter()
    floor.run(probe, 0)
    each = (time.perf_counter() - begin) / probe
    return clock.agree(int(np.clip(seconds / max(each, 1e-7), 10, MAX_ROUNDS)))
