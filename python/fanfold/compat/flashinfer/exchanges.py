# SPDX-License-Identifier: Apache-2.0
"""The exchanges behind one workspace: made when a round first needs them, and used again.

An ``AllToAll`` has one type in which results travel, and room for rows of a certain size; a
FlashInfer workspace takes any. So a workspace keeps exchanges by experts, top-k, type and device,
each with the room that rounds have needed so far, and foresees for each dispatch what its combine
will send: what the last one sent, at first what the first payload is. Where that was wrong the
results go home through another exchange, along the same ids, and the next round is right. All
ranks' calls agree in what decides this, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fanfold import _core
from fanfold.all_to_all import AllToAll
from fanfold.compat.flashinfer.ranks import Ranks
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.errors import InvalidArgument

TIMEOUT_S = 300.0
"""How long a rank may be late, as in FlashInfer, where other ranks may be compiling kernels."""


@dataclass
class Dispatch:
    """What one dispatch is given. R ranks, T tokens of this rank, K = top_k.

    Attributes:
        topk_ids: ``[T, K]`` global ids.
        payloads: each ``[T, ...]``.
        num_experts: E, over all ranks.
        round_max_tokens: m, equal on all ranks.
        topk_weights: ``[T, K]`` float32, or None.
        invalid_expert_id: of rows without a token.
        active: by rank whether it takes part; None: all do.
        stats: ``[n]`` int32 for all ranks, or None.
    """

    topk_ids: Any
    payloads: Sequence[Any]
    num_experts: int
    round_max_tokens: int
    topk_weights: Any = None
    invalid_expert_id: int | None = None
    active: list[bool] | None = None
    stats: Any = None


@dataclass(frozen=True)
class Kind:
    """What exchanges must have in common to stand in for each other."""

    num_experts: int
    top_k: int
    travels: str
    device: str
    max_num_tokens: int
    active: tuple[bool, ...] | None = None  # where the mask belongs to the exchange
    for_stats: bool = False


@dataclass
class Slot:
    """One exchange with at most one open round."""

    name: Hashable
    config: dict[str, Any]
    exchange: AllToAll
    is_open: bool = False

    @property
    def combine_dtype(self) -> str:
        return str(self.config["dtype"])

    def fits(self, dispatch_row_bytes: int, combine_row_bytes: int) -> bool:
        return bool(
            dispatch_row_bytes <= self.config["dispatch_row_bytes"]
            and combine_row_bytes <= self.config["combine_row_bytes"]
        )


LetGo: TypeAlias = Callable[[Slot], None]


@dataclass
class OpenRound:
    """One dispatch and what it received, until ``end``.

    Its first combine ends it among the ranks, since a round of a graph must end in the graph; the
    received rows and the buffers stay as they are. A further combine has a round of its own.

    Attributes:
        payloads: received rows, each ``[R, m, ...]``; those of source r first in ``[r]``.
        counts: ``[R]`` int32: rows from each rank.
        stats: ``[R, n]`` int32 of all ranks, zeros for one that is masked out; or None.
    """

    exchanges: Exchanges
    slot: Slot
    received: _core.Received
    call: Dispatch
    payloads: list[Any]
    counts: Any
    stats: Any = None
    stats_round: OpenRound | None = None
    buffers: dict[tuple[int, Any], Any] = field(default_factory=dict)
    has_combined: bool = False
    has_ended: bool = False

    @property
    def num_tokens(self) -> int:
        return int(self.call.topk_ids.shape[0])

    def combine_buffer(self, hidden: int, dtype: Any) -> Any:
        """``[R, m, hidden]``: where experts write; without a copy where the type was foreseen."""
        key = (hidden, dtype)
        if key not in self.buffers:
            travels, itemsize = _travels_as(dtype)
            is_direct = travels == _name(dtype) and self._takes(travels, hidden * itemsize)
            if is_direct and not self.has_combined:
                self.buffers[key] = self.received.combine_buffer(hidden, dtype)
            else:
                ids = self.call.topk_ids
                shape = (self.exchanges.num_ranks, self.call.round_max_tokens, hidden)
                self.buffers[key] = ids.new_empty(shape, dtype=dtype)
        return self.buffers[key]

    def combine(self, y: Any, out: Any) -> None:
        """Add each token's rows ``y [R, m, H]`` into ``out [T, H]``."""
        hidden = int(y.shape[2])
        travels, itemsize = _travels_as(y.dtype)
        num_bytes = hidden * itemsize
        through = self
        if self.has_combined or not self._takes(travels, num_bytes):
            self.exchanges.foresee(travels, num_bytes)
            through = self._side(travels)
        if any(_overlap(y, payload) for payload in self.payloads):
            # Experts that worked in place: their rows must leave what peers may write to.
            y = through.received.combine_buffer(hidden, y.dtype).copy_(y) if (
                travels == _name(y.dtype)
            ) else y.clone()  # fmt: skip
        stream = stream_of(y)
        try:
            if travels == _name(y.dtype):
                through.received.combine(y, out, **stream)
            else:
                wide = out.new_empty(out.shape, dtype=_wide_dtype())
                through.received.combine(y.to(wide.dtype), wide, **stream)
                out.copy_(wide)
        finally:
            if through is not self:
                through.end()
        self.exchanges.foresee(travels, num_bytes)
        self._finish()

    def end(self) -> None:
        """Give its memory to later rounds, as every rank does."""
        if self.has_ended:
            return
        self.has_ended = True
        for part in self._parts():
            part.slot.is_open = False
        self._finish()

    def reopen(self) -> None:
        """Take ``end`` back, as long as no round came after it: for further combines."""
        self.has_ended = False
        for part in self._parts():
            part.slot.is_open = True

    def lies_in(self, slot: Slot) -> bool:
        """Whether something of it is memory of this exchange."""
        return any(part.slot is slot for part in self._parts())

    def _parts(self) -> list[OpenRound]:
        return [self] if self.stats_round is None else [self, self.stats_round]

    def _finish(self) -> None:
        """End it among the ranks."""
        self.has_combined = True
        for part in self._parts():
            if part.received.is_open:
                part.received.release()

    def _takes(self, travels: str, row_bytes: int) -> bool:
        return self.slot.combine_dtype == travels and self.slot.fits(0, row_bytes)

    def _side(self, travels: str) -> OpenRound:
        """A round along the same ids whose exchange takes such results."""
        ids = self.call.topk_ids
        call = Dispatch(
            topk_ids=ids,
            payloads=[ids.new_zeros((self.num_tokens, 1), dtype=ids.dtype)],
            num_experts=self.call.num_experts,
            round_max_tokens=self.call.round_max_tokens,
            active=self.call.active,
        )
        return self.exchanges.open(call, travels, has_spare=False)


class Exchanges:
    """All exchanges of one rank of one workspace.

    Args:
        ranks: who makes them.
        max_num_tokens: M, the most tokens of a rank in a round.
        bytes_per_token: what a workspace has for one token's rows of dispatch and combine.
        generation: tells these exchanges from earlier ones of the same ranks.
        dispatch_row_bytes: what one token's rows of a dispatch are at least expected to be.
    """

    def __init__(
        self,
        ranks: Ranks,
        max_num_tokens: int,
        bytes_per_token: int,
        generation: int = 0,
        *,
        dispatch_row_bytes: int = 0,
    ) -> None:
        self.rank = ranks.rank
        self.num_ranks = ranks.num_ranks
        self.max_num_tokens = max_num_tokens
        self._ranks = ranks
        self._bytes_per_token = bytes_per_token
        self._generation = generation
        self._dispatch_row_bytes = dispatch_row_bytes
        self._slots: dict[Kind, list[Slot]] = {}
        self._num_made = 0
        self._combine_bytes: dict[str, int] = {}
        self._foreseen: str | None = None

    def foresee(self, travels: str, row_bytes: int) -> None:
        """Expect later combines to send rows of this type and size."""
        self._foreseen = travels
        self._combine_bytes[travels] = max(row_bytes, self._combine_bytes.get(travels, 0))

    def prepare(
        self,
        device: str,
        num_experts: int,
        top_k: int,
        dispatch_row_bytes: int,
        combine_row_bytes: int,
        num_stats: int = 0,
    ) -> None:
        """Make the exchanges of rounds to come, of bfloat16 results. Collective."""
        self._combine_bytes["bfloat16"] = combine_row_bytes
        self._slot(self._kind(num_experts, top_k, "bfloat16", device), dispatch_row_bytes)
        if num_stats:
            self._slot(self._stats_kind(device), 4 * num_stats)

    def open(
        self,
        call: Dispatch,
        travels: str | None = None,
        *,
        has_spare: bool = True,
        let_go: LetGo | None = None,
    ) -> OpenRound:
        """Dispatch. Waits for every active rank (on a GPU torch's current stream does).

        Args:
            call: what to send.
            travels: the type of the results; None: as foreseen.
            has_spare: whether an exchange that is made takes what the workspace has beside the
                payloads, for results that are not known yet.
            let_go: called for an exchange that is given up, before that: of its rounds nothing may
                be kept, since on a GPU what frees their memory may wait for what a peer enqueues.

        Raises:
            InvalidArgument: something does not fit, or the ranks' calls differ.
            PeerTimeout, PeerAborted, PeerLost: as ``AllToAll.dispatch``.
        """
        ids = call.topk_ids
        travels = travels or self._foreseen or _results_of(call.payloads)
        kind = self._kind(
            call.num_experts, int(ids.shape[1]), travels, str(ids.device), call.active
        )
        # All that is made is made first: one thread may run the other ranks after this one, and
        # what is enqueued waits for them.
        num_bytes = sum(row_bytes(payload) for payload in call.payloads)
        slot = self._slot(kind, num_bytes, has_spare=has_spare, let_go=let_go)
        stats_slot = None if call.stats is None else self._stats_slot(call, let_go)
        opened = self._dispatch(slot, call)
        if stats_slot is not None:
            try:
                self._gather(opened, stats_slot)
            except BaseException:
                opened.end()
                raise
        # The caller may reuse its tensor before the results go home.
        call.topk_ids = ids.clone()
        return opened

    def sanitize(self, opened: OpenRound, ids: Any, invalid_expert_id: int) -> None:
        """Overwrite, in place, the ids of rows without a token in ``ids [R, m, K]``."""
        opened.slot.exchange.sanitize(
            ids, opened.counts, invalid_expert_id, out=ids, **stream_of(ids)
        )

    @property
    def is_idle(self) -> bool:
        """Whether no round is open."""
        return not any(slot.is_open for slots in self._slots.values() for slot in slots)

    def close(self) -> None:
        """Give all exchanges up. Collective unless all ranks are of this process."""
        for slots in self._slots.values():
            for slot in slots:
                self._ranks.drop(slot.name, slot.exchange)
        self._slots.clear()

    def _kind(
        self,
        num_experts: int,
        top_k: int,
        travels: str,
        device: str,
        active: list[bool] | None = None,
        *,
        for_stats: bool = False,
    ) -> Kind:
        fixed = tuple(active) if active and self._ranks.has_fixed_masks else None
        rows = 1 if for_stats else self.max_num_tokens
        return Kind(num_experts, top_k, travels, device, rows, fixed, for_stats)

    def _stats_kind(self, device: str, active: list[bool] | None = None) -> Kind:
        ranks = self.num_ranks
        return self._kind(ranks, ranks, "float32", device, active, for_stats=True)

    def _dispatch(self, slot: Slot, call: Dispatch) -> OpenRound:
        active = call.active or [True] * self.num_ranks
        if slot.exchange.active_mask != active:
            slot.exchange.set_active_mask(active)
        received = slot.exchange.dispatch(
            call.topk_ids,
            list(call.payloads),
            topk_weights=call.topk_weights,
            round_max_tokens=call.round_max_tokens,
            invalid_expert_id=call.invalid_expert_id,
            **stream_of(call.topk_ids),
        )
        slot.is_open = True
        return OpenRound(self, slot, received, call, list(received.payloads), received.rank_counts)

    def _stats_slot(self, call: Dispatch, let_go: LetGo | None) -> Slot:
        kind = self._stats_kind(str(call.stats.device), call.active)
        return self._slot(kind, row_bytes(call.stats.view(1, -1)), let_go=let_go)

    def _gather(self, opened: OpenRound, slot: Slot) -> None:
        """Every rank's statistics: one token for all ranks, each the host of one expert."""
        call = opened.call
        stats, num_ranks = call.stats, self.num_ranks
        everyone = torch().arange(num_ranks, dtype=stats.dtype, device=stats.device)
        whole = Dispatch(
            topk_ids=everyone.view(1, -1),
            payloads=[stats.view(1, -1)],
            num_experts=num_ranks,
            round_max_tokens=1,
            active=call.active,
        )
        opened.stats_round = self._dispatch(slot, whole)
        opened.stats = opened.stats_round.payloads[0].view(num_ranks, -1)
        for rank, is_active in enumerate(call.active or []):
            if not is_active:
                opened.stats[rank].zero_()

    def _slot(
        self,
        kind: Kind,
        dispatch_row_bytes: int,
        *,
        has_spare: bool = True,
        let_go: LetGo | None = None,
    ) -> Slot:
        """An exchange of this kind without an open round, and with room."""
        if has_spare and not kind.for_stats:
            dispatch_row_bytes = max(dispatch_row_bytes, self._dispatch_row_bytes)
        results = 0 if kind.for_stats else self._combine_bytes.get(kind.travels, 0)
        combine_row_bytes = max(16, results)
        slots = self._slots.setdefault(kind, [])
        for index, slot in enumerate(slots):
            if slot.is_open:
                continue
            if slot.fits(dispatch_row_bytes, combine_row_bytes):
                return slot
            # It grows: every rank is at this call, so nobody uses it.
            dispatch_row_bytes = max(dispatch_row_bytes, slot.config["dispatch_row_bytes"])
            combine_row_bytes = max(combine_row_bytes, slot.config["combine_row_bytes"])
            del slots[index]
            if let_go is not None:
                let_go(slot)
            self._ranks.drop(slot.name, slot.exchange)
            del slot  # on a GPU what frees memory may wait for what a peer enqueues next
            break
        else:
            if has_spare and not kind.for_stats:
                spare = self._bytes_per_token - dispatch_row_bytes
                combine_row_bytes = max(combine_row_bytes, spare // 16 * 16)
        config = {
            "num_experts": kind.num_experts,
            "top_k": kind.top_k,
            "max_tokens_per_rank": kind.max_num_tokens,
            "hidden": 1,
            "dtype": kind.travels,
            "dispatch_row_bytes": max(dispatch_row_bytes, 1),
            "combine_row_bytes": combine_row_bytes,
            "strategy": "one_sided",
            "layout": "rank_major",
            "timeout_s": TIMEOUT_S,
            "device": kind.device,
        }
        name = (self._generation, self._num_made)
        self._num_made += 1
        made = Slot(name, config, self._ranks.make(name, config, kind.active))
        slots.append(made)
        return made


def row_bytes(tensor: Any) -> int:
    """Bytes of one token's row of a tensor."""
    return int(math.prod(tensor.shape[1:]) * tensor.element_size())


def _overlap(one: Any, other: Any) -> bool:
    begin, start = one.data_ptr(), other.data_ptr()
    return bool(
        begin < start + other.numel() * other.element_size()
        and start < begin + one.numel() * one.element_size()
    )


def stream_of(tensor: Any) -> dict[str, Any]:
    """The stream argument of a call: torch's current one where the tensor lies on a GPU."""
    if tensor.device.type == "cpu":
        return {}
    return {"stream": torch().cuda.current_stream(tensor.device).cuda_stream}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _wide_dtype() -> Any:
    return torch().float32


def _travels_as(dtype: Any) -> tuple[str, int]:
    """In which type results of ``dtype`` travel, and its bytes: FP8 as what holds its sums."""
    name = _name(dtype)
    if name in ("float32", "float16", "bfloat16"):
        return name, int(dtype.itemsize)
    if name == "float8_e4m3fn":
        return "float32", 4
    raise CombineDtype(f"payload: expected float32, float16, bfloat16 or float8_e4m3fn, got {name}")


class CombineDtype(InvalidArgument, TypeError):
    """Results of a type that cannot be added. State: unchanged."""


def _results_of(payloads: Sequence[Any]) -> str:
    """What the experts' results are at first expected to be: what they are fed, or bfloat16."""
    name = _name(payloads[0].dtype) if payloads else ""
    return name if name in ("float32", "float16", "bfloat16") else "bfloat16"
