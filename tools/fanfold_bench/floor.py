# SPDX-License-Identifier: Apache-2.0
"""One rank's side of the floor; the loops themselves are in native/floor.cpp."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fanfold_bench.batch import TORCH_DTYPE, Batch, relative_error
from fanfold_bench.clock import HOT, MAX_ROUNDS, MEET, Clock
from fanfold_bench.native import FloorPlan, load
from fanfold_bench.sizes import CONTROL, inbox_bytes, partial_bytes
from fanfold_bench.stats import Nanoseconds

KINDS: Final = ("ordinary", "non_temporal", "interleaved")  # order of Store in floor.cpp
CONTIGUOUS: Final = KINDS[:2]
HUGE_FROM: Final = 8 << 20  # windows below this size gain nothing from huge pages
BATCHES: Final = 20
EXCHANGES: Final = 100  # per batch
COPY_SIZES: Final = (128 << 10, 32 << 20)


class Machine:
    """The mapped window and what does not depend on a case. Collective."""

    def __init__(self, library: Path, fd: int, clock: Clock) -> None:
        self.lib, self.clock = load(library), clock
        size = os.fstat(fd).st_size
        self.base: int = self.lib.floor_map(fd, size) or 0
        if not self.base:
            raise MemoryError(f"cannot map {size} bytes of shared memory")
        if self.lib.floor_control_bytes() > CONTROL:
            raise RuntimeError("the control area of the floor outgrew its room")
        self._exchanges = 0

    def reset_control(self) -> None:
        """Zero all flags and counters in shared memory."""
        self.clock.line_up(MEET)
        if self.clock.is_leader:
            ctypes.memset(self.base, 0, self.lib.floor_control_bytes())
        self._exchanges = 0
        self.clock.line_up(MEET)

    def flag_latency(self) -> float | None:
        """One-way latency in ns between two cores, the same on every rank; None on one core."""
        clock = self.clock
        if clock.num_ranks < 2 or len(os.sched_getaffinity(0)) < 2:
            return None
        clock.line_up(MEET)
        latency = 0.0
        if clock.rank < 2:
            latency = self.lib.floor_flag_latency(
                self.base, clock.rank, self._exchanges, BATCHES, EXCHANGES
            )
        if latency < 0:
            raise TimeoutError("the other core did not answer while flag latency was measured")
        self._exchanges += BATCHES * EXCHANGES
        clock.line_up(MEET)
        return clock.agree(round(latency * 1000)) / 1000

    def copy_rates(self) -> dict[str, float]:
        """GB/s of a copy in private memory, all ranks at once, as this rank sees it."""
        rates = {}
        for size in COPY_SIZES:
            source = torch.ones(size, dtype=torch.uint8)
            target = torch.zeros(size, dtype=torch.uint8)
            repeats = max(2, (64 << 20) // size)
            for kind, name in enumerate(CONTIGUOUS):
                self.clock.line_up(HOT)
                took = self.lib.floor_copy_seconds(
                    target.data_ptr(), source.data_ptr(), size, repeats, kind
                )
                label = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
                rates[f"{name} {label}"] = round(size * repeats / took / 1e9, 1)
        return rates


class Floor:
    """The floor of one case: equal bytes, equal processes, equal source and result. Collective."""

    def __init__(self, machine: Machine, batch: Batch) -> None:
        self._machine, self._batch = machine, batch
        case = batch.case
        inbox, partial = inbox_bytes(case), partial_bytes(case)
        pairs = case.ranks**2
        at = machine.base + CONTROL
        self._inbox = np.array([at + i * inbox for i in range(pairs)], dtype=np.uint64)
        at += pairs * inbox
        self._partials = np.array([at + i * partial for i in range(pairs)], dtype=np.uint64)
        window = pairs * (inbox + partial)
        self.huge_pages = False
        if window >= HUGE_FROM:
            got = machine.lib.floor_huge_pages(machine.base + CONTROL, window)
            self.huge_pages = bool(got)
        self._source = torch.zeros((case.tokens, case.row_bytes), dtype=torch.uint8)
        payload = self._source[:, : case.payload_bytes]
        payload.copy_(batch.x.view(torch.uint8).view(case.tokens, -1))
        self._out = torch.empty((case.tokens, case.hidden), dtype=TORCH_DTYPE[case.dtype])
        self._rows = np.ascontiguousarray(batch.rows)
        self._plan = FloorPlan(
            rank=batch.rank,
            num_ranks=case.ranks,
            crowded=int(machine.clock.crowded),
            is_float32=int(case.dtype == "float32"),
            tokens=case.tokens,
            hidden=case.hidden,
            row_bytes=case.row_bytes,
            rows=self._rows.ctypes.data,
            inbox=self._inbox.ctypes.data,
            partials=self._partials.ctypes.data,
            source=self._source.data_ptr(),
            out=self._out.data_ptr(),
            control=machine.base,
            last_start=0,
            epoch=0,
            meetings=0,
        )
        machine.reset_control()

    def run(self, rounds: int, kind: int) -> tuple[Nanoseconds, Nanoseconds]:
        """Times of the last rank in ns, by phase; meaningful on the leader.

        Raises:
            TimeoutError: a rank did not come.
        """
        rounds = min(rounds, MAX_ROUNDS)
        times = np.zeros((2, rounds), dtype=np.int64)
        failed = self._machine.lib.floor_run(
            ctypes.byref(self._plan),
            rounds,
            kind,
            HOT.lead_ns,
            times[0].ctypes.data,
            times[1].ctypes.data,
        )
        if failed:
            raise TimeoutError("a rank did not arrive in the floor's round")
        clock = self._machine.clock
        clock.store_all(times[0], times[1])
        clock.line_up(MEET)
        slowest = clock.slowest(rounds)
        clock.line_up(MEET)
        return slowest

    def check(self) -> None:
        """One round of each kind must give the sum of the contiguous partials.

        Raises:
            RuntimeError: it does not.
        """
        rows = torch.from_numpy(self._rows[self._batch.rank])
        index = torch.arange(self._batch.case.tokens).unsqueeze(1)
        times = (index < rows.unsqueeze(0)).sum(1, keepdim=True)
        want = self._batch.x.to(torch.float32) * times
        for kind, name in enumerate(KINDS):
            self._out.fill_(float("nan"))
            self.run(1, kind)
            worst = relative_error(self._out, want)
            if worst > 0.01:
                raise RuntimeError(f"the floor's {name} round gives a wrong sum (off by {worst})")
