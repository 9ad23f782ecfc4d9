# SPDX-License-Identifier: Apache-2.0
"""What a Communicator needs of ranks that share no memory: messages."""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """Messages between the ranks of a group, for ``Communicator.from_transport``.

    Messages of one rank to another arrive complete and in the order in which they were sent; those
    of different ranks in any order. Nothing is lost while both ranks live.

    Threads: one call at a time, from the threads that call the communicator and what is made from
    it; only from the one that called ``start`` if ``is_thread_bound``. No call waits for a peer,
    except ``receive`` for at most ``max_wait_s``.

    Errors: what a method raises goes to the caller of the collective. The failure of a single peer
    is not raised: ``lost_reason`` tells it.

    A transport whose messages move only inside its calls has one method more,
    ``has_unsent(peer: int) -> bool``: whether some of those to ``peer`` have not left. Collectives
    then call ``receive`` until all have, so that a rank that computes holds up nobody.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    @property
    def kind(self) -> str:
        """Names it in messages and as ``Communicator.kind``: "mpi", "gloo"."""

    @property
    def is_thread_bound(self) -> bool:
        """Whether only the thread that called ``start`` may make calls."""

    def start(self, max_message_bytes: int) -> None:
        """Get ready. Called once, before all that follows; no message will have more bytes."""

    def send(self, peer: int, data: bytearray) -> None:
        """Send a message to another rank; nothing if it is lost.

        Args:
            peer: its rank.
            data: the message; it belongs to the transport, nobody else reads or writes it.
        """

    def receive(self, max_wait_s: float) -> tuple[int, bytes | bytearray | memoryview] | None:
        """Wait for the next message of any rank, at most ``max_wait_s``.

        Advances what ``send`` left.

        Returns:
            (source, message), the message any contiguous buffer, read before the next call; None if
            none has come.
        """

    def lost_reason(self, peer: int) -> str:
        """Say why a rank is known to be gone, in words that follow "rank 3 is gone: ".

        Empty while it lives, or where the transport cannot tell. Told by ``receive`` before the
        reason appears: all that the rank had sent.
        """

    def close(self, timeout_s: float) -> None:
        """End: give what was sent until ``timeout_s`` to leave and free what is held.

        The last call; must not raise. Messages that peers send afterwards are lost.
        """
