# SPDX-License-Identifier: Apache-2.0
"""The ranks of each workspace tensor: found by the memory that the tensor lies in."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from fanfold.compat.flashinfer import counters, sizes
from fanfold.compat.flashinfer.errors import CalledTooEarly, WorkspaceTooSmall
from fanfold.compat.flashinfer.exchanges import Dispatch, Exchanges, OpenRound, Slot
from fanfold.compat.flashinfer.mnnvl import Owners
from fanfold.compat.flashinfer.ranks import OwnRank, Ranks, RanksOfProcess
from fanfold.errors import InvalidArgument, PeerAborted, PeerLost, PeerTimeout


@dataclass
class Region:
    """Bytes of a workspace row that stand for rows of a round."""

    offset: int  # from the start of this rank's row
    num_bytes: int
    tensor: Any  # [R, m, ...]


@dataclass
class WorkspaceRank:
    """What one rank keeps with a workspace. It does not keep the workspace."""

    ep_rank: int
    ep_size: int
    max_num_tokens: int
    size_per_rank: int
    offsets: list[int]
    num_stats: int
    exchanges: Exchanges
    epochs: tuple[int, int] = (0, 0)  # of the latest dispatch and the latest combine
    latest: OpenRound | None = None  # of whoever dispatched last
    own: OpenRound | None = None  # of the functions, which leave it open for further combines

    def open(self, call: Dispatch) -> OpenRound:
        """Dispatch, and take note of it.

        Raises:
            As ``Exchanges.open``.
        """
        opened = self.exchanges.open(call, let_go=self._let_go)
        self.latest = opened
        self.epochs = (max(self.epochs) + 1, self.epochs[1])
        return opened

    def open_own(self, call: Dispatch) -> OpenRound:
        """As ``open``, for the functions, whose last round ends unless this one is refused."""
        if self.own is not None:
            self.own.end()
        try:
            opened = self.open(call)
        except (PeerTimeout, PeerAborted, PeerLost):
            self.own = self.latest = None  # rows may have been overwritten
            raise
        except Exception:
            if self.own is not None:
                self.own.reopen()
            raise
        self.own = opened
        return opened

    def close(self) -> None:
        """Give all exchanges up, and what lies in them."""
        self.latest = self.own = None
        self.exchanges.close()

    def _let_go(self, slot: Slot) -> None:
        if self.latest is not None and self.latest.lies_in(slot):
            self.latest = None
        if self.own is not None and self.own.lies_in(slot):
            self.own = None

    def regions(self) -> list[Region]:
        """The bytes that name the latest dispatch's payloads, in their order."""
        widths = self._widths()
        rows = self._named_rows(sum(widths))
        offset = self.offsets[-1]
        found = []
        payloads = [] if self.latest is None else self.latest.payloads
        for payload, width in zip(payloads, widths, strict=True):
            found.append(Region(offset, int(payload.numel() * payload.element_size()), payload))
            offset += rows * width
        return found

    def combine_offset(self) -> int:
        """The byte that names the latest dispatch's results: behind the payloads'."""
        width = sum(self._widths())
        return sizes.aligned(self.offsets[-1] + self._named_rows(width) * width)

    def _widths(self) -> list[int]:
        """Bytes of one row of each payload."""
        payloads = [] if self.latest is None else self.latest.payloads
        return [int(math.prod(each.shape[2:]) * each.element_size()) for each in payloads]

    def _named_rows(self, width: int) -> int:
        """Rows that bytes stand for: the capacity, or where those end before it, the round's."""
        rows = self.ep_size * self.max_num_tokens
        if self.latest is None or self.offsets[-1] + rows * width < self.size_per_rank:
            return rows
        return self.ep_size * self.latest.call.round_max_tokens

    def write_counters(self, workspace: Any) -> None:
        """Put counters and routing tables of the latest dispatch into this rank's row."""
        if self.latest is not None:
            counters.write(workspace[self.ep_rank], self.offsets, self.epochs, self.latest)

    def combined(self) -> None:
        """Take note of a combine."""
        self.epochs = (self.epochs[0], max(self.epochs) + 1)

    def check_room(self, payload_bytes: int, combine_bytes: int = 0) -> None:
        """Raise ``WorkspaceTooSmall`` where FlashInfer's workspace would not hold a round."""
        needed = self.offsets[-1] + payload_bytes
        if combine_bytes:
            needed = sizes.aligned(needed) + combine_bytes
        if needed > self.size_per_rank:
            what = "payloads and results" if combine_bytes else "payloads"
            raise WorkspaceTooSmall(
                f"workspace size per rank insufficient: expected at least {needed} bytes for the "
                f"{what} of this round, got {self.size_per_rank}"
            )


class _Entry:
    def __init__(self) -> None:
        self.of_process: RanksOfProcess | None = None
        self.ranks: dict[int, WorkspaceRank] = {}
        self.generations: dict[int, int] = {}
        self.first_byte = 0  # of row 0 in the storage
        self.row_stride = 1


class _Workspaces:
    """Forgets a workspace when its memory goes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    def attach(self, workspace: Any, known: dict[str, int]) -> WorkspaceRank:
        """Make what ``known['ep_rank']`` keeps, in place of what it kept before."""
        rank, size = known["ep_rank"], known["ep_size"]
        size_per_rank = known["size_per_rank"]
        offsets = sizes.metainfo_offsets(size, known["max_num_tokens"], known["num_stats"])
        spare = max(size_per_rank - offsets[-1], 0) // (size * known["max_num_tokens"])
        communicator = Owners.find(workspace)
        storage = workspace.untyped_storage()
        address = storage.data_ptr()
        with self._lock:
            if address not in self._entries:
                self._entries[address] = _Entry()
                weakref.finalize(storage, self._entries.pop, address, None).atexit = False
            entry = self._entries[address]
            entry.first_byte = workspace.storage_offset()
            entry.row_stride = workspace.stride(0)
            ranks: Ranks
            if communicator is not None:
                ranks = OwnRank(communicator)
                if (ranks.rank, ranks.num_ranks) != (rank, size):
                    raise InvalidArgument(
                        f"ep_rank, ep_size: expected {ranks.rank}, {ranks.num_ranks}, as the "
                        f"memory's group has them, got {rank}, {size}"
                    )
            else:
                if entry.of_process is None or entry.of_process.num_ranks != size:
                    entry.of_process = RanksOfProcess(size)
                ranks = entry.of_process.of_rank(rank)
            generation = entry.generations.get(rank, -1) + 1
            entry.generations[rank] = generation
            kept = WorkspaceRank(
                ep_rank=rank,
                ep_size=size,
                max_num_tokens=known["max_num_tokens"],
                size_per_rank=size_per_rank,
                offsets=offsets,
                num_stats=known["num_stats"],
                exchanges=Exchanges(ranks, known["max_num_tokens"], spare, generation),
            )
            before = entry.ranks.get(rank)
            entry.ranks[rank] = kept
        if before is not None:
            before.close()
        return kept

    def find(self, workspace: Any, ep_rank: int) -> WorkspaceRank:
        """What a rank keeps.

        Raises:
            CalledTooEarly: it was not initialised.
        """
        with self._lock:
            entry = self._entries.get(workspace.untyped_storage().data_ptr())
            kept = None if entry is None else entry.ranks.get(ep_rank)
        if kept is None:
            raise CalledTooEarly(
                f"workspace: expected moe_a2a_initialize to be called for ep_rank {ep_rank} on it "
                "first"
            )
        return kept

    def at(self, workspace: Any, offset: int) -> tuple[WorkspaceRank | None, int]:
        """Who keeps something for a byte of a workspace or of one row, and its place there."""
        with self._lock:
            entry = self._entries.get(workspace.untyped_storage().data_ptr())
            if entry is None:
                return None, offset
            rank, begin = divmod(workspace.storage_offset() - entry.first_byte, entry.row_stride)
            if workspace.dim() > 1:
                further, offset = divmod(offset, entry.row_stride)
                rank += further
            return entry.ranks.get(rank), begin + offset


WORKSPACES = _Workspaces()
