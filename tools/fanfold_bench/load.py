# SPDX-License-Identifier: Apache-2.0
"""Foreign load: processor time that somebody else used, or the host took, during a block."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from fanfold_bench.clock import MEET, Clock

STAT = Path("/proc/stat")
_USED = (1, 2, 3, 8)  # user, nice, system, and time stolen by the host


def busy_ns(text: str | None = None) -> int:
    """Processor time used on this machine since boot, in ns; 0 where the kernel does not tell."""
    try:
        fields = (STAT.read_text() if text is None else text).split("\n", 1)[0].split()
        ticks = sum(int(fields[i]) for i in _USED if i < len(fields))
        return ticks * (10**9 // os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class Mark:
    """State of the counters at one instant."""

    wall_ns: int
    busy: int
    own: int


class LoadWatch:
    """Measures foreign load between two meetings of the ranks. Collective."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin = self._mark()

    def _mark(self) -> Mark:
        self._clock.note_cpu()
        self._clock.line_up(MEET)
        mark = Mark(time.perf_counter_ns(), busy_ns(), self._clock.cpu_ns())
        self._clock.line_up(MEET)
        return mark

    def lap(self) -> tuple[float, float]:
        """Foreign load in cores and wall seconds since creation."""
        end, begin = self._mark(), self._begin
        wall = max(1, end.wall_ns - begin.wall_ns)
        foreign = (end.busy - begin.busy) - (end.own - begin.own)
        return max(0, foreign) / wall, wall * 1e-9
