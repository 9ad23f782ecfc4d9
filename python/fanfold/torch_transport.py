# SPDX-License-Identifier: Apache-2.0
"""Messages over the gloo part of a torch.distributed group.

What gloo does, and what follows from it:

- A wait that times out closes the connections of the whole group for good. So waits here have no
  deadline; threads do them, which hand over what has come, and a deadline is a wait for them.
- A receive cannot be taken back. So each rank says when it closes, and no receive stays behind.
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
import weakref
from typing import Any

import torch
import torch.distributed as dist

from fanfold.errors import InvalidArgument, InvalidState

_FOREVER = datetime.timedelta(days=365)
_LENGTH = struct.Struct("<q")  # in front of every message
_CLOSED = -1  # in place of a length
_FIRST_TAG = 0x46000000  # away from the small numbers that users take
_NUM_TAGS = 0x1000000
_HAS_CLOSED = "it has closed the communicator"
_PARTING_S = 2.0  # for a last word between ranks that end without close
_POISON_TAG = _FIRST_TAG - 1

_num_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_open: set[TorchTransport] = set()  # those with threads


class _Waiter:
    """A thread that waits for operations on one peer, in order, and tells when one is done."""

    def __init__(self, name: str, peer: int, done: queue.SimpleQueue[tuple[int, str | None]] | None,
                 failed: queue.SimpleQueue[tuple[int, str | None]]) -> None:  # fmt: skip
        self._works: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._peer = peer
        self._done = done
        self._failed = failed
        # A daemon: the interpreter waits for others before it calls what ends this one.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def add(self, work: Any, buffer: Any) -> None:
        """Wait for an operation after those before; the buffer lives until it is done."""
        self._works.put((work, buffer))

    def end(self) -> None:
        """End when nothing is left to wait for."""
        self._works.put(None)

    def _run(self) -> None:
        while (entry := self._works.get()) is not None:
            try:
                entry[0].wait(_FOREVER)
            except Exception as error:
                self._failed.put((self._peer, _reason(error)))
                return
            del entry  # and its buffer
            if self._done is not None:
                self._done.put((self._peer, None))


class TorchTransport:
    """A ``fanfold.Transport`` on a torch.distributed group that has gloo for CPU tensors.

    Every rank of the group makes as many as the others, in the same order: number n of a group uses
    tag n of a range of its own. The group stays usable for anything else.

    Each peer costs two threads, and two buffers of the size of the largest message.
    """

    kind = "gloo"
    is_thread_bound = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        number = _num_made.get(group, 0)
        _num_made[group] = number + 1
        self._tag = _FIRST_TAG + number % _NUM_TAGS
        self._process = os.getpid()
        self._inbox: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._buffers: dict[int, tuple[bytearray, bytearray]] = {}  # the first of a pair is posted
        self._receives: dict[int, _Waiter] = {}
        self._sends: dict[int, _Waiter] = {}
        self._lost: dict[int, str] = {}
        self._is_closed = False

    def start(self, max_message_bytes: int) -> None:
        """Post the first receive from every peer."""
        _open.add(self)
        for peer in range(self.num_ranks):
            if peer == self.rank:
                continue
            size = _LENGTH.size + max_message_bytes
            self._buffers[peer] = (bytearray(size), bytearray(size))
            name = f"fanfold gloo {self.rank}"
            self._receives[peer] = _Waiter(f"{name} <- {peer}", peer, self._inbox, self._inbox)
            self._sends[peer] = _Waiter(f"{name} -> {peer}", peer, None, self._inbox)
            self._post(peer)

    def send(self, peer: int, data: bytearray) -> None:
        """Send a message to another rank; nothing if it is lost."""
        if peer not in self._lost:
            self._send(peer, len(data), data)

    def _send(self, peer: int, length: int, data: bytearray) -> None:
        message = bytearray(_LENGTH.pack(length))
        message += data
        tensor = torch.frombuffer(message, dtype=torch.uint8)
        try:
            work = self._group.send([tensor], peer, self._tag)
        except RuntimeError as error:
            # What it sent before has still to be received.
            self._inbox.put((peer, _reason(error)))
            return
        self._sends[peer].add(work, tensor)

    def receive(self, max_wait_s: float) -> tuple[int, memoryview] | None:
        """Wait for the next message of any rank, at most ``max_wait_s``."""
        deadline = time.monotonic() + max_wait_s
        while (event := self._next(deadline)) is not None:
            message = self._handle(event)
            if message is not None:
                return event[0], message
        return None

    def _next(self, deadline: float) -> tuple[int, str | None] | None:
        """Wait for what happens next: a peer, and None for a message or why it failed."""
        try:
            return self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _handle(self, event: tuple[int, str | None]) -> memoryview | None:
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
            self._lose(peer, _HAS_CLOSED)
            return None
        self._buffers[peer] = (spare, filled)
        self._post(peer)
        return memoryview(filled)[_LENGTH.size : _LENGTH.size + length]

    def _post(self, peer: int) -> None:
        tensor = torch.frombuffer(self._buffers[peer][0], dtype=torch.uint8)
        try:
            work = self._group.recv([tensor], peer, self._tag)
        except RuntimeError as error:
            self._lose(peer, _reason(error))
            return
        self._receives[peer].add(work, tensor)

    def _lose(self, peer: int, reason: str) -> None:
        self._lost.setdefault(peer, reason)
        self._receives[peer].end()

    def lost_reason(self, peer: int) -> str:
        """Say why a rank is known to be gone."""
        return self._lost.get(peer, "")

    def close(self, timeout_s: float) -> None:
        """Tell the peers, and wait until they have told this rank: then no receive is left.

        What is left when the time is up ends with the process.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        for peer, waiter in self._sends.items():
            if self._lost.get(peer, _HAS_CLOSED) == _HAS_CLOSED:
                self._send(peer, _CLOSED, bytearray())
            waiter.end()
        self._part(time.monotonic() + timeout_s)

    def _part(self, deadline: float) -> bool:
        """Wait for the last words of all peers, and for the threads; return whether all is done."""
        while len(self._lost) < len(self._receives):
            event = self._next(deadline)
            if event is None:
                break
            self._handle(event)
        for waiter in (*self._receives.values(), *self._sends.values()):
            if waiter.thread.is_alive():
                waiter.thread.join(max(0.0, deadline - time.monotonic()))
        is_done = not self._has_threads()
        if is_done:
            _open.discard(self)
            self._buffers.clear()
        return is_done

    def _has_threads(self) -> bool:
        waiters = (*self._receives.values(), *self._sends.values())
        return any(waiter.thread.is_alive() for waiter in waiters)

    def _break_group(self) -> None:
        """Close the connections of the group, which ends all waits."""
        for peer in self._receives:
            with contextlib.suppress(RuntimeError):
                work = self._group.recv([torch.empty(1)], peer, _POISON_TAG)
                work.wait(datetime.timedelta(milliseconds=1))


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


@atexit.register
def _end_all() -> None:
    """End all threads: one that came back from a wait later would end the process with SIGABRT."""
    left = [each for each in _open if each._process == os.getpid()]
    for each in left:
        each.close(0.0)
    deadline = time.monotonic() + _PARTING_S
    for each in [one for one in left if not one._part(deadline)]:
        each._break_group()
        each._part(time.monotonic() + _PARTING_S)


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
