# SPDX-License-Identifier: Apache-2.0
"""The only module that touches mpi4py; imported when it is needed."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from fanfold import _core
from fanfold.errors import InvalidArgument, InvalidState, PeerTimeout

_MESSAGE, _CLOSED = 0, 1  # tags
_HAS_CLOSED = "it has closed the communicator"
_YIELDS = 20  # looks for a message before the first sleep
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_MOVE_S = 1e-3  # between two looks at what sends have left
_PATIENCE_S = 0.3  # for the last words of peers, which may have reasons not to close for long
_open: set[MpiTransport] = set()  # those that were started


_left_to_mpi: list[Any] = []


def _leave_to_mpi(kept: Any) -> None:
    """Keep what MPI may still read or write until it ends, which it does after the interpreter."""
    if not _left_to_mpi:
        # Then no end of a module frees the list: MPI refers to it.
        MPI.COMM_WORLD.Set_attr(MPI.Comm.Create_keyval(), _left_to_mpi)
    _left_to_mpi.append(kept)


def _duplicate(comm: Any, timeout_s: float) -> Any:
    """Duplicate a communicator; collective."""
    deadline = time.monotonic() + timeout_s
    made, request = comm.Idup()
    pause = _Pause(deadline)
    while not request.Test():
        if not pause.wait():
            _leave_to_mpi((made, request))
            error = PeerTimeout(
                f"from_mpi: expected a call on every rank of the communicator within "
                f"{timeout_s:g} s, got none on at least one rank"
            )
            error.rank = -1  # MPI does not tell
            raise error
    return made


class _Pause:
    """Lets others work between two looks at MPI; longer after each."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._looks = 0
        self._sleep_s = _SLEEP_S

    def wait(self) -> bool:
        """Pause, or return False: the deadline has passed."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return False
        self._looks += 1
        if self._looks <= _YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(self._sleep_s, left_s))
            self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
        return True


class MpiTransport:
    """A ``fanfold.Transport`` on a duplicate of an mpi4py communicator. Making one is collective.

    MPI moves messages while it is called. What `send` has left over is moved by a thread of this
    object if MPI may be called by several (MPI_THREAD_MULTIPLE, mpi4py's default), else before the
    collective returns.

    Args:
        comm: an intracommunicator.
        timeout_s: deadline for making it.

    Raises:
        PeerTimeout: a rank did not make one in time; its `rank` is -1, since MPI does not tell.
    """

    kind = "mpi"

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self._comm = _duplicate(comm, timeout_s)
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
        self._has_told: set[int] = set()  # the peers that know that nothing more will come
        self._must_probe_each = False  # a probe for any rank fails
        self._is_closed = False
        self._lock = threading.Lock()  # held by every call, and by the mover while it looks
        self._holder: int | None = None  # the thread that holds it
        # What the garbage collector ends on that thread sends and closes meanwhile.
        self._late_sends: deque[tuple[int, bytearray]] = deque()
        self._late_close_s: float | None = None
        self._is_left = threading.Event()  # a send is not done, or the mover is to end
        self._mover: threading.Thread | None = None

    def start(self, max_message_bytes: int) -> None:
        """Start the thread, if there may be one; messages may have any size."""
        _open.add(self)
        if self.num_ranks > 1 and MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            name = f"fanfold mpi {self.rank}"
            self._mover = threading.Thread(target=self._move, name=name, daemon=True)
            self._mover.start()

    def _move(self) -> None:
        while self._is_left.wait() and not self._is_closed:
            if self._lock.acquire(blocking=False):  # else that call moves them
                self._holder = threading.get_ident()
                try:
                    if MPI.Is_finalized():
                        return
                    self._advance()
                    if not any(self._sends.values()):
                        self._is_left.clear()
                    self._send_late()
                finally:
                    self._holder = None
                    self._lock.release()
            time.sleep(_MOVE_S)
        if self._late_close_s is not None:
            self._end(self._late_close_s)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Hold the lock."""
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
                self._send_late()
            finally:
                self._holder = None

    def _is_within(self) -> bool:
        """Whether this thread is in the middle of another call."""
        return self._holder == threading.get_ident()

    def _send_late(self) -> None:
        while self._late_sends:
            self._send_or_keep(*self._late_sends.popleft())

    def _end_mover(self) -> None:
        """Needs `_is_closed`."""
        self._is_left.set()
        if self._mover is not None:
            self._mover.join()
        _open.discard(self)

    def send(self, peer: int, data: bytearray) -> None:
        """Send a message to another rank; nothing if it is lost."""
        _check_not_finalized()
        if self._is_within():
            self._late_sends.append((peer, data))
            return
        with self._inside():
            self._send_or_keep(peer, data)

    def _send_or_keep(self, peer: int, data: bytearray) -> None:
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
            _leave_to_mpi(list(sends))
            sends.clear()
            self._lose(peer, error)

    def _lose(self, peer: int, error: MPI.Exception) -> None:
        self._lost.setdefault(peer, f"MPI reports: {error.Get_error_string()}")

    def receive(self, max_wait_s: float) -> tuple[int, bytearray] | None:
        """Wait for the next message of any rank, at most ``max_wait_s``."""
        _check_not_finalized()
        if self._is_within():
            return None
        with self._inside():
            return self._receive(max_wait_s)

    def _receive(self, max_wait_s: float) -> tuple[int, bytearray] | None:
        pause = _Pause(time.monotonic() + max_wait_s)
        while True:
            self._advance()
            message = self._take()
            if message is not None or not pause.wait():
                return message

    def _take(self) -> tuple[int, bytearray] | None:
        """Return a message that is complete, each rank's in the order in which they came."""
        self._match()
        for source, arriving in self._arriving.items():
            if not arriving:
                continue
            request, data, tag = arriving[0]
            try:
                if not request.Test():
                    continue
            except MPI.Exception as error:
                _leave_to_mpi(arriving.popleft())
                self._lose(source, error)
                continue
            arriving.popleft()
            if tag == _MESSAGE:
                return source, data
            self._say_closed(source)  # at once: the peer waits for it
            self._lost.setdefault(source, _HAS_CLOSED)
        return None

    def _match(self) -> None:
        """Begin to receive a message, if one has come.

        One at a time: what comes behind a long message does not need memory yet.
        """
        status = MPI.Status()
        failure = None
        if not self._must_probe_each:
            try:
                matched = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                if matched is not None:
                    self._begin(status.Get_source(), matched, status)
                return
            except MPI.Exception as error:
                failure = error  # of which rank it does not say
        is_known = self._probe_each(status)
        if failure is not None:
            if not is_known:
                raise failure
            self._must_probe_each = True

    def _probe_each(self, status: Any) -> bool:
        """Begin to receive a message of every rank; return whether one of them was lost by it."""
        num_lost = len(self._lost)
        for source in range(self.num_ranks):
            if source == self.rank or source in self._lost:
                continue
            try:
                matched = self._comm.Improbe(source, MPI.ANY_TAG, status)
            except MPI.Exception as error:
                self._lose(source, error)
                continue
            if matched is not None:
                self._begin(source, matched, status)
        return len(self._lost) > num_lost

    def _begin(self, source: int, matched: Any, status: Any) -> None:
        try:
            data = bytearray(status.Get_count(MPI.BYTE))
            request = matched.Irecv([data, MPI.BYTE])
        except MPI.Exception as error:
            self._lose(source, error)
            return
        self._arriving[source].append((request, data, status.Get_tag()))

    def has_unsent(self, peer: int) -> bool:
        """Whether messages to a rank have not left, where no thread moves them."""
        return self._mover is None and bool(self._sends[peer])

    def lost_reason(self, peer: int) -> str:
        """Say why a rank is known to be gone; MPI seldom tells."""
        return self._lost.get(peer, "")

    def close(self, timeout_s: float) -> None:
        """Tell the peers, wait until what was sent has left, and a little for their last words.

        What is not done then is left to MPI.
        """
        if self._is_closed or MPI.Is_finalized() or os.getpid() != self._process:
            return
        self._is_closed = True
        if threading.current_thread() is self._mover:
            self._late_close_s = timeout_s  # by the mover itself, when it is done with its look
            self._is_left.set()
            return
        self._end_mover()
        self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        """Part from the peers. Of the only thread that still has this object."""
        _open.discard(self)
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        is_done = False
        with contextlib.suppress(MPI.Exception):
            for peer in peers:
                self._say_closed(peer)
            is_done = self._part(peers, time.monotonic() + timeout_s)
        if is_done:
            with contextlib.suppress(MPI.Exception):
                self._comm.Free()
        else:
            _leave_to_mpi(self)

    def _say_closed(self, peer: int) -> None:
        """Send the last message to a peer, if that has not been done."""
        if peer not in self._has_told and peer not in self._lost:
            self._has_told.add(peer)
            self._send(peer, bytearray(), _CLOSED)

    def _part(self, peers: list[int], deadline: float) -> bool:
        """Wait for the end of all sends and the last words of all; return whether all is done."""
        patience = min(deadline, time.monotonic() + _PATIENCE_S)
        pause = _Pause(deadline)
        while True:
            self._advance()
            while self._take() is not None:
                pass
            has_unsent = any(sends for peer, sends in self._sends.items() if peer not in self._lost)
            if not any(self._sends.values()) and all(peer in self._lost for peer in peers):
                return True
            if not has_unsent and time.monotonic() >= patience:
                return False
            if not pause.wait():
                return False


def _check_not_finalized() -> None:
    if MPI.Is_finalized():
        raise InvalidState("expected a call before MPI ends, got one after MPI_Finalize")


@atexit.register
def _end_movers() -> None:
    """No thread may be inside MPI when it ends."""
    for each in list(_open):
        if each._process == os.getpid():
            each._is_closed = True
            each._end_mover()
            if not MPI.Is_finalized():
                _leave_to_mpi(each)


def mpi_transport(comm: Any, timeout_s: float) -> MpiTransport:
    """Return a transport on a communicator (None: COMM_WORLD); collective.

    Raises:
        PeerTimeout: a rank did not make one in time.
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
    return MpiTransport(comm, timeout_s)


def from_mpi(
    comm: Any = None, *, transport: str = "auto", timeout_s: float = 60.0
) -> _core.Communicator:
    """Make a communicator of the ranks of an mpi4py communicator; collective.

    The communicator is duplicated. With a thread level below
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
        InvalidArgument: no intracommunicator, an unknown transport, or a negative time.
        InvalidState: MPI is not initialised or has ended, or may be called on another thread only.
        PeerTimeout: a rank did not call it in time; its ``rank`` is -1 if MPI does not tell.
        Unsupported: "shared_memory", and the ranks are on different hosts.
    """
    uses = {"auto": "auto", "shared_memory": "shared_memory", "mpi": "always"}
    if transport not in uses:
        raise InvalidArgument(
            f"transport: expected 'auto', 'shared_memory' or 'mpi', got {transport!r}"
        )
    if not timeout_s >= 0:
        raise InvalidArgument(f"timeout_s: expected 0 or more, got {timeout_s!r}")
    return _core.Communicator.from_transport(
        mpi_transport(comm, timeout_s), use=uses[transport], timeout_s=timeout_s
    )
