# SPDX-License-Identifier: Apache-2.0
"""The only module that touches mpi4py; imported when it is needed."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from typing import Any

from mpi4py import MPI

from fanfold import _core
from fanfold.errors import InvalidArgument, InvalidState

_MESSAGE, _CLOSED = 0, 1  # tags
_HAS_CLOSED = "it has closed the communicator"
_YIELDS = 20  # looks for a message before the first sleep
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_MOVE_S = 1e-3  # between two looks at what sends have left
_open: set[MpiTransport] = set()  # those with a thread
_abandoned: list[Any] = []  # what MPI may still read or write when a close ran out of time


class MpiTransport:
    """A ``fanfold.Transport`` on a duplicate of an mpi4py communicator. Making one is collective.

    MPI moves messages while it is called. What `send` has left over is moved by a thread of this
    object if MPI may be called by several (MPI_THREAD_MULTIPLE, mpi4py's default), else by the next
    call of this rank.
    """

    kind = "mpi"

    def __init__(self, comm: Any) -> None:
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises them
        self.rank: int = self._comm.Get_rank()
        self.num_ranks: int = self._comm.Get_size()
        self.is_thread_bound: bool = MPI.Query_thread() < MPI.THREAD_SERIALIZED
        self._process = os.getpid()
        self._sends: dict[int, deque[tuple[Any, bytearray]]] = {
            peer: deque() for peer in range(self.num_ranks)
        }
        # Of a message that was matched the bytes may still be on their way.
        self._arriving: dict[int, deque[tuple[Any, bytearray, int]]] = {
            peer: deque() for peer in range(self.num_ranks)
        }
        self._lost: dict[int, str] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # held by every call, and by the mover while it looks
        self._is_left = threading.Event()  # a send is not done, or the mover is to end
        self._mover: threading.Thread | None = None

    def start(self, max_message_bytes: int) -> None:
        """Start the thread, if there may be one; messages may have any size."""
        if self.num_ranks > 1 and MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            name = f"fanfold mpi {self.rank}"
            self._mover = threading.Thread(target=self._move, name=name, daemon=True)
            _open.add(self)
            self._mover.start()

    def _move(self) -> None:
        while self._is_left.wait() and not self._is_closed:
            if self._lock.acquire(blocking=False):  # else that call moves them
                try:
                    self._advance()
                    if not any(self._sends.values()):
                        self._is_left.clear()
                finally:
                    self._lock.release()
            time.sleep(_MOVE_S)

    def _end_mover(self) -> None:
        """Needs `_is_closed`."""
        self._is_left.set()
        if self._mover is not None:
            self._mover.join()
        _open.discard(self)

    def send(self, peer: int, data: bytearray) -> None:
        """Send a message to another rank; nothing if it is lost."""
        with self._lock:
            if peer not in self._lost:
                self._send(peer, data, _MESSAGE)
                if self._sends[peer]:
                    self._is_left.set()

    def _send(self, peer: int, data: bytearray, tag: int) -> None:
        try:
            request = self._comm.Isend([data, MPI.BYTE], dest=peer, tag=tag)
        except MPI.Exception as error:
            self._lose(peer, error)
            return
        self._sends[peer].append((request, data))
        self._advance_sends(peer)

    def _advance(self) -> None:
        for peer, sends in self._sends.items():
            if sends:
                self._advance_sends(peer)

    def _advance_sends(self, peer: int) -> None:
        sends = self._sends[peer]
        try:
            while sends and sends[0][0].Test():
                sends.popleft()
        except MPI.Exception as error:
            _abandoned.extend(sends)
            sends.clear()
            self._lose(peer, error)

    def _lose(self, peer: int, error: MPI.Exception) -> None:
        self._lost.setdefault(peer, f"MPI reports: {error.Get_error_string()}")

    def receive(self, max_wait_s: float) -> tuple[int, bytearray] | None:
        """Wait for the next message of any rank, at most ``max_wait_s``."""
        with self._lock:
            return self._receive(max_wait_s)

    def _receive(self, max_wait_s: float) -> tuple[int, bytearray] | None:
        deadline = time.monotonic() + max_wait_s
        looks = 0
        sleep_s = _SLEEP_S
        while True:
            self._advance()
            message = self._take()
            if message is not None:
                return message
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
            else:
                time.sleep(min(sleep_s, left_s))
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _take(self) -> tuple[int, bytearray] | None:
        """Return a message that is complete, each rank's in the order in which they came."""
        status = MPI.Status()
        # One at a time is matched: what comes behind a long message does not need memory yet.
        matched = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if matched is not None:
            source = status.Get_source()
            data = bytearray(status.Get_count(MPI.BYTE))
            request = matched.Irecv([data, MPI.BYTE])
            self._arriving[source].append((request, data, status.Get_tag()))
        for source, arriving in self._arriving.items():
            if not arriving:
                continue
            request, data, tag = arriving[0]
            try:
                if not request.Test():
                    continue
            except MPI.Exception as error:
                _abandoned.append(arriving.popleft())
                self._lose(source, error)
                continue
            arriving.popleft()
            if tag == _CLOSED:
                self._lost.setdefault(source, _HAS_CLOSED)
                continue
            return source, data
        return None

    def lost_reason(self, peer: int) -> str:
        """Say why a rank is known to be gone; MPI seldom tells."""
        return self._lost.get(peer, "")

    def close(self, timeout_s: float) -> None:
        """Tell the peers, and wait until all has left and they have told this rank.

        What is left when the time is up is kept until MPI ends.
        """
        if self._is_closed or MPI.Is_finalized() or os.getpid() != self._process:
            return
        self._is_closed = True
        self._end_mover()
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        for peer in peers:
            if self._lost.get(peer, _HAS_CLOSED) == _HAS_CLOSED:
                self._send(peer, bytearray(), _CLOSED)
        deadline = time.monotonic() + timeout_s
        is_done = False
        with contextlib.suppress(MPI.Exception):
            while not is_done and time.monotonic() <= deadline:
                self._receive(min(1e-3, max(0.0, deadline - time.monotonic())))
                is_done = not any(self._sends.values()) and all(p in self._lost for p in peers)
        if is_done:
            with contextlib.suppress(MPI.Exception):
                self._comm.Free()
        else:
            _abandoned.append((self._comm, self._sends, self._arriving))


@atexit.register
def _end_movers() -> None:
    """No thread may be inside MPI when it ends."""
    for each in list(_open):
        if each._process == os.getpid():
            each._is_closed = True
            each._end_mover()


def mpi_transport(comm: Any) -> MpiTransport:
    """Return a transport on a communicator (None: COMM_WORLD); collective.

    Raises:
        InvalidArgument: no intracommunicator.
        InvalidState: MPI is not initialised or has ended, or may be called on another thread only.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise InvalidState("from_mpi: expected an MPI that is initialised and has not ended")
    if comm is None:
        comm = MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise InvalidArgument(f"comm: expected an mpi4py intracommunicator, got {comm!r}")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        raise InvalidState(
            "from_mpi: expected the main thread, since MPI was initialised for calls on it only"
        )
    return MpiTransport(comm)


def from_mpi(
    comm: Any = None, *, transport: str = "auto", timeout_s: float = 60.0
) -> _core.Communicator:
    """Make a communicator of the ranks of an mpi4py communicator; collective.

    The communicator is duplicated, which MPI does without a deadline. With a thread level below
    MPI_THREAD_SERIALIZED all calls must come from the thread that called this; below
    MPI_THREAD_MULTIPLE other threads must not call MPI at the same time.

    Args:
        comm: an intracommunicator; None means COMM_WORLD.
        transport: "auto" takes shared memory if all ranks are on one host, else MPI;
            "shared_memory" uses MPI only to meet; "mpi" uses it on one host, too.
        timeout_s: deadline for joining and default of every call.

    Returns:
        A communicator whose rank is this process's rank in ``comm``.

    Raises:
        InvalidArgument: no intracommunicator, or an unknown transport.
        InvalidState: MPI is not initialised or has ended, or may be called on another thread only.
        Unsupported: "shared_memory", and the ranks are on different hosts.
    """
    uses = {"auto": "auto", "shared_memory": "shared_memory", "mpi": "always"}
    if transport not in uses:
        raise InvalidArgument(
            f"transport: expected 'auto', 'shared_memory' or 'mpi', got {transport!r}"
        )
    return _core.Communicator.from_transport(
        mpi_transport(comm), use=uses[transport], timeout_s=timeout_s
    )
