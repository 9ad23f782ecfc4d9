# SPDX-License-Identifier: Apache-2.0
"""The clock of the ranks: a page of 64-bit words that all of them map.

A phase starts at an instant that all ranks agreed on and lasts until the last rank is done.
To agree, each rank writes the time of its arrival; the start is the latest arrival plus a lead.
One word per rank and direction suffices: an arrival counts once it is later than the previous
start, and the two directions alternate, so nobody overwrites a word that is still being read.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from fanfold_bench.stats import Nanoseconds

MAX_RANKS: Final = 64
MAX_ROUNDS: Final = 8192  # per block
_LINE: Final = 8  # words of one cache line
_STOP, _ABORT, _AGREED = 0, _LINE, 2 * _LINE
_ARRIVAL: Final = 4 * _LINE
_CPU: Final = _ARRIVAL + 2 * MAX_RANKS * _LINE
_SAMPLES: Final = _CPU + MAX_RANKS * _LINE
DEADLINE_S: Final = 120.0


class Stopped(RuntimeError):
    """Another rank failed and said so."""


@dataclass(frozen=True)
class Pace:
    """How ranks wait for each other between phases.

    ``sleep``: give the core away while waiting (collectives run helper threads that need it).
    ``lead_ns``: time from the last arrival to the start.
    """

    sleep: bool
    lead_ns: int


HOT: Final = Pace(sleep=False, lead_ns=20_000)
COOL: Final = Pace(sleep=True, lead_ns=300_000)
MEET: Final = Pace(sleep=True, lead_ns=0)


def page_bytes(num_ranks: int) -> int:
    """Size of the page for so many ranks."""
    return 8 * (_SAMPLES + num_ranks * MAX_ROUNDS * 2)


class Clock:
    """One rank's view of the page. Used by one thread."""

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.crowded = num_ranks > len(os.sched_getaffinity(0))
        self._page = mmap.mmap(fd, page_bytes(num_ranks))
        self._words = memoryview(self._page).cast("q")
        shape = (num_ranks, MAX_ROUNDS, 2)
        count = num_ranks * MAX_ROUNDS * 2
        self._samples = np.frombuffer(
            self._page, dtype=np.int64, count=count, offset=8 * _SAMPLES
        ).reshape(shape)
        self._side = 0
        self._start = 0
        self._block = 0

    @property
    def is_leader(self) -> bool:
        """Rank 0 decides for all when to stop."""
        return self.rank == 0

    def line_up(self, pace: Pace) -> int:
        """Wait for all ranks and return the common start instant, in ns, once it has come.

        Raises:
            Stopped: another rank called :meth:`abort`.
            TimeoutError: a rank did not arrive; the text names it.
        """
        words, now = self._words, time.perf_counter_ns
        self._side ^= 1
        first = _ARRIVAL + self._side * MAX_RANKS * _LINE
        arrived = max(now(), self._start + 1)
        words[first + self.rank * _LINE] = arrived
        newest = arrived
        for rank in range(self.num_ranks):
            word = first + rank * _LINE
            stamp = words[word]
            if stamp <= self._start:
                stamp = self._await(word, rank, pace)
            newest = max(newest, stamp)
        start = newest + pace.lead_ns
        self._start = start
        if pace.sleep and start - now() > 120_000:
            time.sleep((start - now() - 100_000) * 1e-9)
        if self.crowded:
            while now() < start:
                os.sched_yield()
        else:
            while now() < start:
                pass
        return start

    def _await(self, word: int, rank: int, pace: Pace) -> int:
        words, give_up, tries = self._words, time.perf_counter() + DEADLINE_S, 0
        while (stamp := words[word]) <= self._start:
            tries += 1
            if pace.sleep:
                time.sleep(5e-6)
            elif self.crowded or tries % 4096 == 0:
                os.sched_yield()
            if tries % 256 == 0:
                if words[_ABORT]:
                    raise Stopped(f"rank {words[_ABORT] - 1} failed")
                if time.perf_counter() > give_up:
                    raise TimeoutError(f"rank {rank} did not arrive within {DEADLINE_S:.0f} s")
        return int(stamp)

    def abort(self) -> None:
        """Make the others' waits fail."""
        self._words[_ABORT] = self.rank + 1

    def agree(self, value: int) -> int:
        """The leader's ``value``, on every rank."""
        if self.is_leader:
            self._words[_AGREED] = value
        self.line_up(MEET)
        agreed = int(self._words[_AGREED])
        self.line_up(MEET)
        return agreed

    def begin_block(self) -> None:
        """Start a new block of rounds; every rank does so equally often."""
        self._block += 1

    def stop_block(self) -> None:
        """Leader: end the block at the next start line."""
        self._words[_STOP] = self._block

    def stopped(self) -> bool:
        """Has the leader ended this block? Ask right after :meth:`line_up`."""
        return bool(self._words[_STOP] == self._block)

    def store(self, index: int, dispatch_ns: int, combine_ns: int) -> None:
        """Keep this rank's times of one round of the block."""
        self._samples[self.rank, index, 0] = dispatch_ns
        self._samples[self.rank, index, 1] = combine_ns

    def store_all(self, dispatch_ns: Nanoseconds, combine_ns: Nanoseconds) -> None:
        """Keep this rank's times of a whole block."""
        self._samples[self.rank, : dispatch_ns.size, 0] = dispatch_ns
        self._samples[self.rank, : combine_ns.size, 1] = combine_ns

    def slowest(self, rounds: int) -> tuple[Nanoseconds, Nanoseconds]:
        """Per round the times of the last rank. Call between two start lines."""
        both = self._samples[:, :rounds].max(axis=0)
        return both[:, 0].copy(), both[:, 1].copy()

    def note_cpu(self) -> None:
        """Publish the processor time of this process, all threads."""
        self._words[_CPU + self.rank * _LINE] = time.process_time_ns()

    def cpu_ns(self) -> int:
        """Published processor time of all ranks together."""
        return sum(int(self._words[_CPU + r * _LINE]) for r in range(self.num_ranks))
