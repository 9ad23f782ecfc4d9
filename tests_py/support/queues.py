# SPDX-License-Identifier: Apache-2.0
"""A transport of Python queues."""

from __future__ import annotations

import queue
import threading


class Queues:
    """A transport between threads of this process, and a note of the calls."""

    kind = "queues"
    is_thread_bound = False

    def __init__(self, rank: int, inboxes: list[queue.SimpleQueue[tuple[int, bytes]]]) -> None:
        self.rank = rank
        self.num_ranks = len(inboxes)
        self.max_message_bytes = 0
        self.threads: set[int] = set()
        self.num_closed = 0
        self.lost = ""
        self._inboxes = inboxes

    def start(self, max_message_bytes: int) -> None:
        assert self.max_message_bytes == 0
        self.max_message_bytes = max_message_bytes

    def send(self, peer: int, data: bytearray) -> None:
        self.threads.add(threading.get_ident())
        assert isinstance(data, bytearray)
        assert 0 < len(data) <= self.max_message_bytes
        assert peer != self.rank
        self._inboxes[peer].put((self.rank, bytes(data)))

    def receive(self, max_wait_s: float) -> tuple[int, bytes] | None:
        self.threads.add(threading.get_ident())
        assert max_wait_s >= 0
        try:
            return self._inboxes[self.rank].get(timeout=max_wait_s)
        except queue.Empty:
            return None

    def lost_reason(self, peer: int) -> str:
        return self.lost

    def close(self, timeout_s: float) -> None:
        assert timeout_s >= 0
        self.num_closed += 1
