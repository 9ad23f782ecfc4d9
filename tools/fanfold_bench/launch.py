# SPDX-License-Identifier: Apache-2.0
"""Starts the rank processes of a group of cases and collects their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from fanfold_bench.cases import Case
from fanfold_bench.clock import page_bytes
from fanfold_bench.machine import rank_environment
from fanfold_bench.native import build
from fanfold_bench.rank import Plan
from fanfold_bench.sizes import window_bytes

START_UP_S: Final = 60.0


class RunFailed(RuntimeError):
    """A rank failed; the text says which one and why."""


def _shared(name: str, size: int) -> int:
    """Anonymous shared memory of ``size`` zero bytes, as a file descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def run_group(
    cases: list[Case],
    schemes: list[str],
    sched: str,
    rounds: int,
    budget_s: float,
    patience_s: float,
) -> list[dict[str, Any]]:
    """Run ``cases``, all of the same number of ranks, in one set of processes.

    Returns:
        One result per case, as case_result() makes them.

    Raises:
        RunFailed: a rank failed or the group ran out of time.
    """
    num_ranks = cases[0].ranks
    library = build()
    with tempfile.TemporaryDirectory(prefix="fanfold-bench-") as folder:
        clock_fd = _shared("clock", page_bytes(num_ranks))
        window_fd = _shared("floor", window_bytes(cases))
        try:
            plan = Plan(
                cases=cases,
                schemes=schemes,
                sched=sched,
                rounds=rounds,
                budget_s=budget_s,
                patience_s=patience_s,
                clock_fd=clock_fd,
                window_fd=window_fd,
                library=str(library),
                folder=folder,
            )
            path = Path(folder) / "plan"
            plan.save(path)
            limit = START_UP_S + len(cases) * (1 + len(schemes)) * (2 * patience_s + 20)
            _run_processes(path, num_ranks, [clock_fd, window_fd], limit)
            results = Path(folder) / "results"
            return [json.loads(line) for line in results.read_text().splitlines()]
        finally:
            os.close(clock_fd)
            os.close(window_fd)


def _run_processes(plan: Path, num_ranks: int, fds: list[int], limit_s: float) -> None:
    command = [sys.executable, "-m", "fanfold_bench.rank", str(plan)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            processes.append(
                subprocess.Popen([*command, str(rank)], pass_fds=fds, env=rank_environment())
            )
        _wait(processes, plan.parent, time.monotonic() + limit_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    grace: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        now = time.monotonic()
        if all(code == 0 for code in codes):
            return
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed and grace is None:
            grace = now + 3.0  # the others notice by themselves and say more
        if failed and (None not in codes or (grace is not None and now > grace)):
            raise RunFailed(_reason(folder, failed, codes))
        if now > deadline:
            raise RunFailed("the ranks did not finish in time and were stopped")
        time.sleep(0.05)


def _reason(folder: Path, failed: list[int], codes: list[int | None]) -> str:
    """The cause: a rank that died without a word, else the first sentence that is no echo."""
    notes = {int(path.suffix[1:]): path for path in folder.glob("error.*")}
    for rank in failed:
        code = codes[rank]
        if rank not in notes and code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            return f"rank {rank} {how}"
    causes = sorted(notes.values(), key=lambda path: path.name.startswith("error.Stopped"))
    return causes[0].read_text()
