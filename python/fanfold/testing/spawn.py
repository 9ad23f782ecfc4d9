# SPDX-License-Identifier: Apache-2.0
"""Runs a function once per rank: ranks as threads of this process, or as processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fanfold

# After one rank failed, the others are given this long to notice.
GRACE_S = 20.0
BOOT = (
    "import pickle, sys; start = pickle.load(sys.stdin.buffer); sys.path[:] = start['sys_path'];"
    " from fanfold.testing import _rank; _rank.main(start)"
)


class RankEnded(RuntimeError):
    """A rank's process ended without a result, or badly after it.

    Attributes:
        rank: which one.
        signal: number of the signal that ended it, or None.
    """

    def __init__(self, message: str, rank: int, signal_number: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal_number


@dataclass
class Outcome:
    """How one rank ended: a value, or the error that it raised or died of."""

    value: Any = None
    error: BaseException | None = None
    order: int = -1  # position in which the ranks ended
    text: str = ""  # the traceback


def _raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise the error that came first; one that only tells of a peer comes after the others."""
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if not failed:
        return
    tells_of_peer = (fanfold.PeerLost, fanfold.PeerAborted, fanfold.PeerTimeout)
    rank, first = min(
        failed, key=lambda item: (isinstance(item[1].error, tells_of_peer), item[1].order)
    )
    error = first.error
    if error is None:
        return
    note = f"rank {rank} of {len(outcomes)} failed"
    for other, outcome in failed:
        if other != rank:
            note += f"; then rank {other}: {type(outcome.error).__name__}: {outcome.error}"
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
        if first.text:
            error.add_note(first.text.rstrip())
    raise error


# -- threads -------------------------------------------------------------------------------------


def thread_outcomes(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Outcome]:
    """Run `fn(comm, *args)` on one thread per rank and return how each ended.

    Raises:
        TimeoutError: a rank was still running after `timeout_s`; its thread goes on as a daemon.
    """
    comms = fanfold.Communicator.threads(num_ranks, timeout_s=timeout_s)
    outcomes: list[Outcome] = [Outcome() for _ in range(num_ranks)]
    lock = threading.Lock()
    ended: list[int] = []

    def run(rank: int, comm: fanfold.Communicator) -> None:
        try:
            outcome = Outcome(value=fn(comm, *args))
        except BaseException as error:
            outcome = Outcome(error=error)
        with lock:
            outcome.order = len(ended)
            ended.append(rank)
            outcomes[rank] = outcome
        # A peer that waits for this rank gets PeerLost; after an error nobody is waited for.
        with contextlib.suppress(fanfold.Error):
            comm.close(timeout_s=timeout_s if outcome.error is None else 0.0)

    threads = [
        threading.Thread(target=run, args=(rank, comm), name=f"rank {rank}", daemon=True)
        for rank, comm in enumerate(comms)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        for comm in comms:
            with contextlib.suppress(fanfold.Error):
                comm.abort("the test ran out of time")
        raise TimeoutError(f"ranks {late} of {num_ranks} did not end within {timeout_s:g} s")
    return outcomes


def spawn_threads(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run `fn(comm, *args)` once per rank, each rank a thread, and return the results by rank.

    A rank's communicator is closed when its function ends, so that a peer that still waits for it
    gets `PeerLost`.

    Args:
        fn: called with the rank's `Communicator` and `args`, which the ranks share.
        timeout_s: for all ranks together, and default deadline of the communicator's calls.

    Raises:
        BaseException: what a rank raised: the first one, those that tell of a peer last. A note
            names the rank.
        TimeoutError: a rank did not end in time.
    """
    outcomes = thread_outcomes(num_ranks, fn, *args, timeout_s=timeout_s)
    _raise_first(outcomes)
    return [outcome.value for outcome in outcomes]


# -- processes -----------------------------------------------------------------------------------


class _Child:
    """One rank's process, started by exec, and the pipe on which its outcome comes."""

    def __init__(self, rank: int, num_ranks: int, start: bytes, environment: dict[str, str]):
        self.rank = rank
        self.num_ranks = num_ranks
        self.received = bytearray()
        self.outcome: Outcome | None = None
        read_end, write_end = os.pipe()
        self.pipe = read_end
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT],
                stdin=subprocess.PIPE,
                pass_fds=[write_end],
                env=environment,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.pidfd = os.pidfd_open(self.process.pid)
        head = pickle.dumps({"sys_path": sys.path, "rank": rank, "result_fd": write_end})
        stdin = self.process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(head + start)
                stdin.flush()  # stays open: its end tells the child that this process is gone

    def read(self) -> bool:
        """Take what has come; returns False at the end."""
        chunk = os.read(self.pipe, 1 << 16)
        self.received += chunk
        return bool(chunk)

    def drain(self) -> None:
        """Take what the process had written before it ended."""
        os.set_blocking(self.pipe, False)
        with contextlib.suppress(BlockingIOError):
            while self.read():
                pass

    def finish(self, order: int) -> Outcome:
        """Return how the ended process ended."""
        status = self.process.wait()
        self.drain()
        outcome = Outcome()
        if self.received:
            outcome = pickle.loads(bytes(self.received))
        if outcome.error is None and (status != 0 or not self.received):
            outcome.error = self._bad_end(status)
        outcome.order = order
        self.outcome = outcome
        return outcome

    def _bad_end(self, status: int) -> RankEnded:
        what = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited {status}"
        after = "after its result" if self.received else "without a result"
        message = f"rank {self.rank} of {self.num_ranks} {what} {after}"
        return RankEnded(message, self.rank, -status if status < 0 else None)

    def kill(self) -> None:
        """End the process, stopped or not, and take its status; frees what this object holds."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        os.close(self.pipe)
        os.close(self.pidfd)


def _start_message(
    num_ranks: int, rendezvous: Path, timeout_s: float, fn: Callable[..., Any], args: Sequence[Any]
) -> bytes:
    """Pickle what a child needs, all but its rank."""
    call = pickle.dumps((fn, tuple(args)))
    preparation = multiprocessing.spawn.get_preparation_data("rank")
    preparation.pop("authkey", None)
    if b"__main__" not in call:  # the child need not run this program's main module
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
    group = {"num_ranks": num_ranks, "rendezvous": str(rendezvous), "timeout_s": timeout_s}
    return pickle.dumps((preparation, group, call))


def _wait_all(children: Sequence[_Child], timeout_s: float) -> None:
    """Wait until every child has ended; raises TimeoutError with the ranks that have not."""
    deadline = time.monotonic() + timeout_s
    limit = f"within {timeout_s:g} s"
    running = {child.rank for child in children}
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
            selector.register(child.pidfd, selectors.EVENT_READ, child)
        while running:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {sorted(running)} of {len(children)} did not end {limit}"
                )
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                child = key.data
                if key.fd == child.pipe:
                    if not child.read():
                        selector.unregister(child.pipe)
                    continue
                selector.unregister(child.pidfd)
                outcome = child.finish(order=len(children) - len(running))
                running.remove(child.rank)
                if outcome.error is not None and time.monotonic() + GRACE_S < deadline:
                    limit = f"within {GRACE_S:g} s after rank {child.rank} failed: {outcome.error}"
                    deadline = time.monotonic() + GRACE_S


def process_outcomes(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run `fn(comm, *args)` in one process per rank and return how each ended.

    Args:
        environment: of the children; default this process's.

    Raises:
        TimeoutError: a rank did not end in time, or within twenty seconds of another one's failure.
    """
    folder = Path(tempfile.mkdtemp(prefix="fanfold-"))
    children: list[_Child] = []
    try:
        start = _start_message(num_ranks, folder / "ep", timeout_s, fn, args)
        for rank in range(num_ranks):
            children.append(_Child(rank, num_ranks, start, environment or dict(os.environ)))
        _wait_all(children, timeout_s)
    finally:
        for child in children:
            child.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return [child.outcome or Outcome() for child in children]


def spawn_processes(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run `fn(comm, *args)` once per rank, each rank a new process, and return the results.

    Processes are started by exec, import nothing that `fn` and `args` do not need, and are gone
    when this returns or raises. If this process dies, they end too.

    Args:
        fn: a function that pickle finds by name, called with the rank's `Communicator` and `args`.
        timeout_s: for all ranks together, and default deadline of the communicator's calls.

    Raises:
        BaseException: what a rank raised: the first one, those that tell of a peer last. A note
            names the rank.
        RankEnded: a rank was killed (the message names the signal) or exited without a result.
        TimeoutError: a rank did not end in time.
    """
    outcomes = process_outcomes(num_ranks, fn, *args, timeout_s=timeout_s)
    _raise_first(outcomes)
    return [outcome.value for outcome in outcomes]


def describe_error(error: BaseException) -> str:
    """Return the traceback of an error as text."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
