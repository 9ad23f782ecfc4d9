# SPDX-License-Identifier: Apache-2.0
"""Where and under what conditions a run takes place."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
CLASSES: Final = ("fifo", "batch", "other")
PRIORITY: Final = 5
_PR_SET_PDEATHSIG: Final = 1
_SIGKILL: Final = 9


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def _first_value(path: str, key: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe() -> dict[str, Any]:
    """Processor, memory, kernel and versions; no name of the host and no path."""
    memory = _first_value("/proc/meminfo", "MemTotal").split()
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": cores(),
        "memory_gib": round(int(memory[0]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "fanfold": _version("fanfold"),
        "load_average": [round(v, 2) for v in os.getloadavg()],
    }


def commit() -> str:
    """Short hash of the checked-out commit, with -dirty for uncommitted changes."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def available_bytes() -> int:
    """Memory that can still be had, or a large number where the kernel does not tell."""
    words = _first_value("/proc/meminfo", "MemAvailable").split()
    return int(words[0]) * 1024 if words else 2**62


def set_class(name: str) -> None:
    """Put this process, and threads it starts later, into a scheduling class.

    Raises:
        PermissionError: the class needs a privilege this user lacks.
    """
    policy = {"fifo": os.SCHED_FIFO, "batch": os.SCHED_BATCH, "other": os.SCHED_OTHER}[name]
    os.sched_setscheduler(0, policy, os.sched_param(PRIORITY if name == "fifo" else 0))


def may_use(name: str) -> bool:
    """Whether :func:`set_class` would be allowed; leaves the class as it was."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        set_class(name)
    except PermissionError:
        return False
    os.sched_setscheduler(0, policy, param)
    return True


def choose_class(wanted: str, num_ranks: int) -> tuple[str, str | None]:
    """Scheduling class for a group of ranks, and a sentence when it is not the best one.

    ``auto`` takes fifo while every rank has a core (helper threads of the collectives then need
    not wait for a scheduler tick) and batch beyond, where fifo would starve itself.

    Raises:
        PermissionError: a class asked for by name is refused; the text says what to do.
    """
    if wanted != "auto":
        if not may_use(wanted):
            raise PermissionError(
                f"scheduling class {wanted} is not permitted for this user; run with CAP_SYS_NICE "
                "or an rtprio limit, or leave --sched at auto"
            )
        return wanted, None
    best = "fifo" if num_ranks <= cores() else "batch"
    if may_use(best):
        return best, None
    return "other", (
        f"scheduling class {best} is not permitted here, so ranks run in the default class: "
        "expect the collectives to be several times slower and noisier"
    )


def die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def rank_environment() -> dict[str, str]:
    """Environment of the rank processes.

    One compute thread each, loopback for the collectives, and a C library that keeps freed
    memory: without the latter the large temporaries of the collective schemes are returned and
    faulted in again every round, which costs them a factor of five.
    """
    env = dict(os.environ)
    env.update(
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
        PYTHONWARNINGS="ignore",
        MALLOC_MMAP_THRESHOLD_=str(2**30),
        MALLOC_TRIM_THRESHOLD_=str(2**36),
        MALLOC_TOP_PAD_=str(2**26),
        PYTHONPATH=os.pathsep.join(
            filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        ),
    )
    return env
