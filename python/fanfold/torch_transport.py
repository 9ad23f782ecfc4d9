# SPDX-License-Identifier: Apache-2.0
"""Messages over the gloo part of a torch.distributed group.

What gloo does, and what follows from it:

- A wait that times out closes the connections of the whole group for good. So waits here have no
  deadline; threads do them, which hand over what has come, and a deadline is a wait for them.
- A receive cannot be taken back. So each rank says when it closes, and its peers answer: then no
  receive stays behind.
- Nothing tells whether an operation is done but a wait for it, sends too.

The group itself is only called on the threads that call the transport.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import queue
import struct
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from fanfold.errors import InvalidArgument, InvalidState, PeerLost, PeerTimeout

_FOREVER = datetime.timedelta(days=365)
_LENGTH = struct.Struct("<q")  # in front of every message
_CLOSED = -1  # in place of a length
_FIRST_TAG = 0x46000000  # away from the small numbers that users take
_NUM_TAGS = 0x1000000
_POISON_TAG = _FIRST_TAG - 1
_MEETING_TAG = _FIRST_TAG - 2
_MEETING_BYTES = 1 << 14  # the longest thing that a rank says when it meets the others
_HAS_CLOSED = "it has closed the communicator"
_PATIENCE_S = 0.3  # for the last words of peers, which may have reasons not to close for long
_PARTING_S = 2.0  # the same between ranks that end without close

_Event = tuple[int, str | None]  # a peer, and None or why an operation with it failed


class _Waiter:
    """A thread that waits for operations, one after the other, and tells how each has ended."""

    def __init__(self, name: str, told: queue.SimpleQueue[_Event]) -> None:
        self._works: queue.SimpleQueue[tuple[int, Any, Any] | None] = queue.SimpleQueue()
        self._told = told
        # A daemon: the interpreter waits for others before it calls what ends this one.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, peer: int, work: Any, buffer: Any) -> None:
        """Wait for an operation after those before; the buffer lives until it is done."""
        self._works.put((peer, work, buffer))

    def end(self) -> None:
        """End when nothing is left to wait for."""
        self._works.put(None)

    def has_ended(self, deadline: float | None = None) -> bool:
        """Whether it has, or does until the deadline."""
        if deadline is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (entry := self._works.get()) is not None:
            peer = entry[0]
            try:
                entry[1].wait(_FOREVER)
            except Exception as error:
                self._told.put((peer, _reason(error)))
                return
            del entry  # and its buffer
            self._told.put((peer, None))


class _User:
    """What has threads that wait for operations on a group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self._peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        self._process = os.getpid()

    def _send(self, peer: int, tag: int, length: int, data: bytes | bytearray) -> tuple[Any, Any]:
        """Send a message, or in place of its length something else; returns (work, buffer)."""
        message = bytearray(_LENGTH.pack(length))
        message += data
        tensor = torch.frombuffer(message, dtype=torch.uint8)
        return self._group.send([tensor], peer, tag), tensor

    def _receive(self, peer: int, tag: int, buffer: bytearray) -> tuple[Any, Any]:
        """Post a receive; returns (work, buffer)."""
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        return self._group.recv([tensor], peer, tag), tensor

    def _waiters(self) -> list[_Waiter]:
        raise NotImplementedError

    def close(self, timeout_s: float) -> None:
        """End what is needed no more; nothing if it has been called before."""
        raise NotImplementedError

    def _part(self, deadline: float, patience_s: float) -> bool:
        """Wait for the threads to end, and return whether they have; needs `close`.

        Those that wait for peers get `patience_s` at most.
        """
        end = min(deadline, time.monotonic() + patience_s)
        has_ended = all(each.has_ended(end) for each in self._waiters())
        if has_ended:
            _open.discard(self)
        return has_ended

    def _break_group(self) -> None:
        """Close the connections of the group, which ends all waits."""
        for peer in self._peers:
            with contextlib.suppress(Exception):
                nothing = torch.empty(1, device="cpu")
                work = self._group.recv([nothing], peer, _POISON_TAG)
                work.wait(datetime.timedelta(milliseconds=1))


_open: set[_User] = set()  # those with threads
_late: set[_User] = set()  # those of them that were closed before their peers


class Meeting(_User):
    """The ranks of a group tell each other something. Costs a thread until it is closed.

    A deadline that passes leaves the group as it is, unlike those of the group's own collectives;
    but the ranks need another group to meet again. All ranks meet equally often.

    Args:
        group: has gloo for CPU tensors.
        timeout_s: deadline for all of it.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        super().__init__(group)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX / 2)
        self._told: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._is_closed = False
        _wind_up()
        _open.add(self)
        self._waiter = _Waiter(f"fanfold gloo {self.rank} meets", self._told)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close(_PATIENCE_S if exc_info[0] is None else 0.0)

    def _waiters(self) -> list[_Waiter]:
        return [self._waiter]

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return what each rank gives, in rank order; waits until all have got it.

        Raises:
            PeerTimeout: a rank has not called it until the deadline.
            PeerLost: a rank is gone.
            InvalidArgument: more bytes than fit.
        """
        room = _MEETING_BYTES - _LENGTH.size
        if len(data) > room:
            raise InvalidArgument(f"data: expected at most {room} bytes, got {len(data)}")
        buffers = {peer: bytearray(_MEETING_BYTES) for peer in self._peers}
        for peer, buffer in buffers.items():
            try:
                self._waiter.add(peer, *self._receive(peer, _MEETING_TAG, buffer))
                sent = self._send(peer, _MEETING_TAG, len(data), data)
            except RuntimeError as error:
                raise _with_rank(PeerLost, peer, f"is gone: {_reason(error)}") from error
            self._waiter.add(peer, *sent)
        for peer in self._peers:
            self._wait(peer)  # for its message
            self._wait(peer)  # for this rank's to it
        gathered = [data] * self.num_ranks
        for peer, buffer in buffers.items():
            (length,) = _LENGTH.unpack_from(buffer)
            gathered[peer] = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
        return gathered

    def _wait(self, expected: int) -> None:
        """Wait for one operation."""
        try:
            peer, failure = self._told.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            text = f"has not come to meet the others within {self._timeout_s:g} s"
            raise _with_rank(PeerTimeout, expected, text) from None
        if failure is not None:
            raise _with_rank(PeerLost, peer, f"is gone: {failure}")

    def close(self, timeout_s: float) -> None:
        """End the thread, now or when what it waits for has come."""
        if not self._is_closed and os.getpid() == self._process:
            self._is_closed = True
            self._waiter.end()
            if not self._part(time.monotonic() + timeout_s, timeout_s):
                _late.add(self)


class TorchTransport(_User):
    """A ``fanfold.Transport`` on a torch.distributed group that has gloo for CPU tensors.

    The group stays usable for anything else. Each peer costs two threads, and two buffers of the
    size of the largest message.

    Args:
        group: has gloo for CPU tensors.
        number: from 0, the same on all ranks; none of an earlier transport of the group.
    """

    kind = "gloo"
    is_thread_bound = False

    def __init__(self, group: Any, number: int) -> None:
        super().__init__(group)
        self._tag = _FIRST_TAG + number % _NUM_TAGS
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._buffers: dict[int, tuple[bytearray, bytearray]] = {}  # the first of a pair is posted
        self._receives: dict[int, _Waiter] = {}
        self._sends: dict[int, _Waiter] = {}
        self._lost: dict[int, str] = {}
        self._dumb: set[int] = set()  # nothing more can be sent to them
        self._is_closed = False

    def start(self, max_message_bytes: int) -> None:
        """Post the first receive from every peer."""
        _wind_up()
        _open.add(self)
        for peer in self._peers:
            size = _LENGTH.size + max_message_bytes
            self._buffers[peer] = (bytearray(size), bytearray(size))
            name = f"fanfold gloo {self.rank}"
            self._receives[peer] = _Waiter(f"{name} <- {peer}", self._inbox)
            self._sends[peer] = _Waiter(f"{name} -> {peer}", self._outbox)
            self._post(peer)

    def _waiters(self) -> list[_Waiter]:
        return [*self._receives.values(), *self._sends.values()]

    def send(self, peer: int, data: bytearray) -> None:
        """Send a message to another rank; nothing if it is lost."""
        self._look_at_sends()
        self._post_send(peer, len(data), data)

    def _look_at_sends(self) -> None:
        """Send nothing more to whom a send has failed.

        The peer is not lost yet: what it had sent before has still to be received.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                peer, failure = self._outbox.get_nowait()
                if failure is not None:
                    self._dumb.add(peer)

    def _post_send(self, peer: int, length: int, data: bytearray) -> None:
        if peer in self._dumb:
            return
        try:
            sent = self._send(peer, self._tag, length, data)
        except RuntimeError:
            self._dumb.add(peer)
            return
        self._sends[peer].add(peer, *sent)

    def _say_closed(self, peer: int) -> None:
        """Send the last message to a peer, if that has not been done."""
        self._post_send(peer, _CLOSED, bytearray())
        self._dumb.add(peer)
        self._sends[peer].end()

    def receive(self, max_wait_s: float) -> tuple[int, memoryview] | None:
        """Wait for the next message of any rank, at most ``max_wait_s``."""
        self._look_at_sends()
        deadline = time.monotonic() + max_wait_s
        while (event := self._next(deadline)) is not None:
            message = self._handle(event)
            if message is not None:
                return event[0], message
        return None

    def _next(self, deadline: float) -> _Event | None:
        """Wait for what happens next to a receive."""
        try:
            return self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _handle(self, event: _Event) -> memoryview | None:
        peer, failure = event
        if failure is None:
            return self._take(peer)
        self._lose(peer, failure)
        return None

    def _take(self, peer: int) -> memoryview | None:
        """Return the message that has come, and post a receive for the next one."""
        filled, spare = self._buffers[peer]
        (length,) = _LENGTH.unpack_from(filled)
        if length == _CLOSED:
            self._say_closed(peer)  # at once: the peer waits for it
            self._lose(peer, _HAS_CLOSED)
            return None
        self._buffers[peer] = (spare, filled)
        self._post(peer)
        return memoryview(filled)[_LENGTH.size : _LENGTH.size + length]

    def _post(self, peer: int) -> None:
        try:
            posted = self._receive(peer, self._tag, self._buffers[peer][0])
        except RuntimeError as error:
            self._lose(peer, _reason(error))
            return
        self._receives[peer].add(peer, *posted)

    def _lose(self, peer: int, reason: str) -> None:
        self._lost.setdefault(peer, reason)
        self._dumb.add(peer)
        self._receives[peer].end()

    def lost_reason(self, peer: int) -> str:
        """Say why a rank is known to be gone."""
        return self._lost.get(peer, "")

    def close(self, timeout_s: float) -> None:
        """Tell the peers, wait until what was sent has left, and a little for their last words.

        A receive from a peer that has not said its own is ended later: when it has, and another
        transport is started or closed, or else with the process.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        for peer in self._receives:
            self._say_closed(peer)
        _wind_up()
        if not self._part(time.monotonic() + timeout_s, _PATIENCE_S):
            _late.add(self)

    def _part(self, deadline: float, patience_s: float) -> bool:
        patience = min(deadline, time.monotonic() + patience_s)
        while len(self._lost) < len(self._receives):
            has_unsent = any(
                not waiter.has_ended()
                for peer, waiter in self._sends.items()
                if peer not in self._lost
            )
            until = deadline if has_unsent else patience
            # In steps: nothing comes when the last send is done.
            event = self._next(min(until, time.monotonic() + 0.01))
            if event is not None:
                self._handle(event)
            elif time.monotonic() >= until:
                return False
        has_ended = super()._part(deadline, patience_s)
        if has_ended:
            self._buffers.clear()
        return has_ended


def _with_rank(error: type[PeerTimeout] | type[PeerLost], rank: int, text: str) -> Exception:
    made = error(f"from_torch: rank {rank} {text}")
    made.rank = rank
    return made


def _reason(error: Exception) -> str:
    """Why a wait failed, in words that follow "rank 3 is gone: "."""
    text = str(error)
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "its connection was closed"
    if "timeout" in text.lower() or "timed out" in text.lower():
        return (
            "an operation on its torch.distributed group timed out, which closes all connections "
            "of the group"
        )
    return f"gloo reports: {text.splitlines()[0] if text else type(error).__name__}"


def _wind_up() -> None:
    """End those that were closed before their peers, as far as that is possible now."""
    still = []
    for _ in range(len(_late)):
        try:
            each = _late.pop()  # no other thread takes it
        except KeyError:
            break
        if each._process == os.getpid() and not each._part(time.monotonic(), 0.0):
            still.append(each)
    _late.update(still)


@atexit.register
def _end_all() -> None:
    """End all threads: one that came back from a wait later would end the process with SIGABRT."""
    left = [each for each in _open if each._process == os.getpid()]
    for each in left:
        with contextlib.suppress(Exception):
            each.close(0.0)
    deadline = time.monotonic() + _PARTING_S
    for each in left:
        with contextlib.suppress(Exception):
            if not each._part(deadline, _PARTING_S):
                each._break_group()
                each._part(time.monotonic() + _PARTING_S, _PARTING_S)


def gloo_group(group: Any) -> Any | None:
    """Return the group (None: the default one) if it has gloo for CPU tensors, else None.

    Raises:
        InvalidState: torch.distributed is not initialised.
        InvalidArgument: this process is no member of the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidState(
            "from_torch: torch.distributed is not initialised; call init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise InvalidArgument("group: expected one that this process is a member of")
    if group is None:
        group = dist.group.WORLD
    backends = dict(item.split(":", 1) for item in dist.get_backend_config(group).split(","))
    return group if backends.get("cpu") == "gloo" else None
