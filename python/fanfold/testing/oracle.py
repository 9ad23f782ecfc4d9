# SPDX-License-Identifier: Apache-2.0
"""What a round must deliver, by naive loops over tokens: the reference of every comparison.

Nothing here calls the library. Floating-point arrays are *stored* values as in
`fanfold.testing.floats`: bfloat16 is uint16 bit patterns. Sums follow the stated order to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from fanfold.testing import fp8
from fanfold.testing.floats import STORED, Array, round_to, widen
from fanfold.testing.placements import logical_of_experts, physical_ids, rank_of_experts

WEIGHTINGS = {
    "rank_major": ("applied",),
    "gathered": ("applied",),
    "flat": ("applied",),
    "expert_major": ("applied", "carried", "origin"),
    "flat_by_expert": ("applied", "carried", "origin"),
}
LAYOUTS = tuple(WEIGHTINGS)


def is_per_expert(layout: str) -> bool:
    """Say whether rows are per (token, local expert) rather than per (token, rank)."""
    return layout in ("expert_major", "flat_by_expert")


def is_flat(layout: str) -> bool:
    """Say whether the layout has as many rows as came."""
    return layout in ("flat", "flat_by_expert")


@dataclass(frozen=True)
class Choice:
    """One expert of one token, duplicates merged."""

    k: int  # place of its first occurrence
    expert: int  # global (physical) id
    weight: numpy.float32  # sum of its occurrences in k order


@dataclass(frozen=True)
class Row:
    """One row that a rank receives."""

    position: tuple[int, ...]  # index into the layout
    source_rank: int
    source_token: int
    choice: Choice | None  # layouts per expert: the expert that it is for


@dataclass(frozen=True)
class Expected:
    """What one rank receives. Padding rows hold zeros, which only `is_zero` ones must."""

    payloads: list[Array]
    scales: Array | None  # with a dispatch_wire
    is_token: Array  # bool, shape of the rows
    is_zero: Array  # bool: rows of zeros that fill up a group of flat_by_expert
    rank_counts: Array  # [R] int32
    expert_counts: Array  # [L] int32
    offsets: Array  # [L + 1] int32
    num_rows: int  # sum of rank_counts; flat_by_expert: rows of the layout
    num_dropped: int  # rows past max_recv_rows
    topk_ids: Array | None  # [.., K] int32; None for layouts per expert
    topk_weights: Array | None  # [.., K], per expert [..] float32
    source_rank: Array  # int32, -1 in padding
    source_token: Array


@dataclass(eq=False)
class OracleRound:
    """One round of all ranks: what each receives, and what comes home from the experts' rows.

    Args:
        topk_ids: of every rank ``[T_r, K]``, any integer type; with replicas logical ids.
        payloads: of every rank a list of ``[T_r, ...]`` arrays.
        topk_weights: of every rank ``[T_r, K]`` float32, or None.
        round_max_tokens: rows per source in the padded layouts; at least every ``T_r``.
        placement: "linear", "round_robin", a table of ranks, or a `fanfold.Placement`.
        active: which ranks take part; None means all.
        max_recv_rows: layouts flat and flat_by_expert: rows past it are dropped.
        dtype: of payload 0; matters where a dispatch_wire packs it.
    """

    num_experts: int
    topk_ids: Sequence[Array]
    payloads: Sequence[Sequence[Array]]
    topk_weights: Sequence[Array] | None = None
    round_max_tokens: int | None = None
    placement: Any = "linear"
    layout: str = "rank_major"
    weighting: str = "applied"
    combine_dtype: str = "float32"
    active: Sequence[bool] | None = None
    invalid_expert_id: int = -1
    expert_alignment: int = 1
    max_recv_rows: int | None = None
    dtype: str = "float32"
    dispatch_wire: str | None = None
    combine_wire: str | None = None
    wire_scale: str = "float32"
    _choices: dict[tuple[int, int], list[Choice]] = field(default_factory=dict, init=False)
    _rows: dict[int, list[Row]] = field(default_factory=dict, init=False)
    _group_begins: dict[int, list[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS[self.layout]:
            raise ValueError(f"layout {self.layout} has no weighting {self.weighting}")
        self.num_ranks = len(self.topk_ids)
        self.num_tokens = [len(ids) for ids in self.topk_ids]
        self.row_capacity = self.round_max_tokens or max(1, *self.num_tokens)
        self.rank_of = rank_of_experts(self.placement, self.num_experts, self.num_ranks)
        logical_of = logical_of_experts(self.placement, self.num_experts)
        self.sent_ids = [physical_ids(i, r, logical_of) for r, i in enumerate(self.topk_ids)]
        self.is_active = [True] * self.num_ranks if self.active is None else list(self.active)

    # -- routing -------------------------------------------------------------------------------

    def local_experts(self, rank: int) -> list[int]:
        """Return the global ids of a rank's experts in ascending order."""
        return [expert for expert, owner in enumerate(self.rank_of) if owner == rank]

    def choices(self, rank: int, token: int) -> list[Choice]:
        """Return the experts of one token in k order: invalid ids left out, duplicates merged."""
        if (rank, token) not in self._choices:
            weights = None if self.topk_weights is None else self.topk_weights[rank][token]
            self._choices[rank, token] = self._merge(self.sent_ids[rank][token], weights)
        return self._choices[rank, token]

    def _merge(self, ids: Array, weights: Array | None) -> list[Choice]:
        merged: dict[int, Choice] = {}
        for k, expert in enumerate(ids.tolist()):
            if expert < 0:
                continue
            weight = numpy.float32(1 if weights is None else weights[k])
            if expert in merged:
                first = merged[expert]
                merged[expert] = Choice(first.k, expert, numpy.float32(first.weight + weight))
            else:
                merged[expert] = Choice(k, expert, weight)
        return list(merged.values())

    def goes_to(self, rank: int, token: int) -> list[int]:
        """Return the active ranks that host an expert of the token, ascending."""
        hosts = {self.rank_of[choice.expert] for choice in self.choices(rank, token)}
        return sorted(host for host in hosts if self.is_active[host])

    def row_shape(self, rank: int) -> tuple[int, ...]:
        """Return the leading dimensions of what a rank receives."""
        if self.layout == "rank_major":
            return (self.num_ranks, self.row_capacity)
        if self.layout == "expert_major":
            return (len(self.local_experts(rank)), self.num_ranks * self.row_capacity)
        return (self.max_recv_rows or self.num_layout_rows(rank),)

    def num_layout_rows(self, rank: int) -> int:
        """Return the rows of a one-dimensional layout, those that are dropped included."""
        all_rows = self._all_rows(rank)
        return self._group_begins[rank][-1] if self.layout == "flat_by_expert" else len(all_rows)

    def rows(self, rank: int) -> list[Row]:
        """Return the rows that a rank keeps, in the order (source rank, source token)."""
        rows = self._all_rows(rank)
        if self.max_recv_rows is None:
            return rows
        return [row for row in rows if row.position[0] < self.max_recv_rows]

    def _all_rows(self, rank: int) -> list[Row]:
        if rank not in self._rows:
            makers = {
                "rank_major": self._rank_major_rows,
                "gathered": self._gathered_rows,
                "flat": self._flat_rows,
                "expert_major": self._expert_major_rows,
                "flat_by_expert": self._flat_by_expert_rows,
            }
            self._rows[rank] = makers[self.layout](rank)
        return self._rows[rank]

    def _sent_tokens(self) -> list[int]:
        return [n if on else 0 for n, on in zip(self.num_tokens, self.is_active, strict=True)]

    def _rank_major_rows(self, rank: int) -> list[Row]:
        rows = []
        for source, num_tokens in enumerate(self._sent_tokens()):
            slot = 0
            for token in range(num_tokens):
                if rank in self.goes_to(source, token):
                    rows.append(Row((source, slot), source, token, None))
                    slot += 1
        return rows

    def _gathered_rows(self, rank: int) -> list[Row]:
        del rank
        tokens = [(s, t) for s, num in enumerate(self._sent_tokens()) for t in range(num)]
        return [Row((i,), source, token, None) for i, (source, token) in enumerate(tokens)]

    def _flat_rows(self, rank: int) -> list[Row]:
        rows = self._rank_major_rows(rank)
        return [Row((i,), row.source_rank, row.source_token, None) for i, row in enumerate(rows)]

    def _expert_major_rows(self, rank: int) -> list[Row]:
        local = {expert: index for index, expert in enumerate(self.local_experts(rank))}
        filled = [0] * len(local)
        rows = []
        for source, num_tokens in enumerate(self._sent_tokens()):
            for token in range(num_tokens):
                for choice in self.choices(source, token):
                    if choice.expert in local:
                        index = local[choice.expert]
                        rows.append(Row((index, filled[index]), source, token, choice))
                        filled[index] += 1
        return rows

    def _flat_by_expert_rows(self, rank: int) -> list[Row]:
        padded = self._expert_major_rows(rank)
        begins = [0]
        for index in range(len(self.local_experts(rank))):
            count = sum(row.position[0] == index for row in padded)
            begins.append(begins[-1] + -(-count // self.expert_alignment) * self.expert_alignment)
        self._group_begins[rank] = begins
        return [
            Row((begins[p[0]] + p[1],), row.source_rank, row.source_token, row.choice)
            for row in padded
            for p in (row.position,)
        ]

    # -- dispatch ------------------------------------------------------------------------------

    def received(self, rank: int) -> Expected:
        """Return what `rank` must find after dispatch."""
        shape, rows = self.row_shape(rank), self.rows(rank)
        source_rank = numpy.full(shape, -1, numpy.int32)
        source_token = numpy.full(shape, -1, numpy.int32)
        sent = [self._sent_payloads(source) for source in range(self.num_ranks)]
        payloads = [
            numpy.zeros((*shape, *payload.shape[1:]), payload.dtype) for payload in sent[rank]
        ]
        for row in rows:
            source_rank[row.position] = row.source_rank
            source_token[row.position] = row.source_token
            for payload, its in zip(payloads, sent[row.source_rank], strict=True):
                payload[row.position] = its[row.source_token]
        rank_counts, expert_counts = self._rank_counts(rank), self._expert_counts(rank)
        is_token = source_rank >= 0
        num_rows, num_dropped = int(rank_counts.sum()), 0
        if is_flat(self.layout):
            num_rows = self.num_layout_rows(rank)
            num_dropped = num_rows - min(num_rows, self.max_recv_rows or num_rows)
        is_zero = numpy.zeros_like(is_token)
        if self.layout == "flat_by_expert":
            is_zero[:num_rows] = ~is_token[:num_rows]
        return Expected(
            payloads=payloads[:-1] if self.dispatch_wire else payloads,
            scales=payloads[-1] if self.dispatch_wire else None,
            is_token=is_token,
            is_zero=is_zero,
            rank_counts=rank_counts,
            expert_counts=expert_counts,
            offsets=self._offsets(rank, expert_counts),
            num_rows=num_rows,
            num_dropped=num_dropped,
            topk_ids=self._received_ids(rank),
            topk_weights=self._received_weights(rank),
            source_rank=source_rank,
            source_token=source_token,
        )

    def _sent_payloads(self, source: int) -> list[Array]:
        """Return the payloads as they travel: with a wire, the scales of payload 0 come last."""
        payloads = list(self.payloads[source])
        if self.dispatch_wire:
            values = widen(payloads[0], self.dtype)
            payloads[0], scales = fp8.pack(values, self.wire_scale)
            payloads.append(scales)
        return payloads

    def _rank_counts(self, rank: int) -> Array:
        if self.layout == "gathered":
            return numpy.array(self._sent_tokens(), numpy.int32)
        tokens = {(row.source_rank, row.source_token) for row in self._all_rows(rank)}
        counts = [sum(source == r for source, _ in tokens) for r in range(self.num_ranks)]
        return numpy.array(counts, numpy.int32)

    def _expert_counts(self, rank: int) -> Array:
        """Count the pairs of a token and an expert of `rank` among the rows that it keeps."""
        counts = dict.fromkeys(self.local_experts(rank), 0)
        for row in self.rows(rank):
            choices = (
                [row.choice] if row.choice else self.choices(row.source_rank, row.source_token)
            )
            for choice in choices:
                if choice.expert in counts:
                    counts[choice.expert] += 1
        return numpy.array(list(counts.values()), numpy.int32)

    def _offsets(self, rank: int, expert_counts: Array) -> Array:
        if self.layout == "flat_by_expert":
            begins = numpy.array(self._group_begins[rank], numpy.int32)
            return numpy.minimum(begins, self.max_recv_rows or begins[-1]).astype(numpy.int32)
        return numpy.concatenate([[0], numpy.cumsum(expert_counts)]).astype(numpy.int32)

    def _received_ids(self, rank: int) -> Array | None:
        if is_per_expert(self.layout):
            return None
        shape = (*self.row_shape(rank), self.topk_ids[rank].shape[1])
        received = numpy.full(shape, self.invalid_expert_id, numpy.int32)
        for row in self.rows(rank):
            received[row.position] = self.sent_ids[row.source_rank][row.source_token]
        return received

    def _received_weights(self, rank: int) -> Array | None:
        if self.topk_weights is None:
            return None
        shape = self.row_shape(rank)
        if not is_per_expert(self.layout):
            shape = (*shape, self.topk_ids[rank].shape[1])
        received = numpy.zeros(shape, numpy.float32)
        for row in self.rows(rank):
            sent = self.topk_weights[row.source_rank][row.source_token]
            received[row.position] = row.choice.weight if row.choice else sent
        return received

    # -- combine -------------------------------------------------------------------------------

    def combine(
        self,
        rank: int,
        ys: Sequence[Array],
        *,
        y_dtype: str,
        out_dtype: str,
        topk_weights: Array | None = None,
    ) -> Array:
        """Return `out` ``[T, H]`` of `rank`, given the experts' rows of every rank.

        Args:
            ys: of every rank its rows in the layout, stored as `y_dtype`.
            topk_weights: weighting origin: this rank's, in place of dispatch's.
        """
        hidden = ys[rank].shape[-1]
        out = numpy.zeros((self.num_tokens[rank], hidden), STORED[out_dtype])
        places = [self._places(host, rank) for host in range(self.num_ranks)]
        for token in range(self.num_tokens[rank]):
            terms = self._terms(rank, token, places, ys, y_dtype, topk_weights)
            total = numpy.zeros(hidden, numpy.float32)
            with numpy.errstate(all="ignore"):
                for term in terms:
                    total = total + term
            out[token] = round_to(total, out_dtype)
        return out

    def _places(self, host: int, source: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """Map (token, expert or -1) of `source` to where its row lies on `host`."""
        return {
            (row.source_token, row.choice.expert if row.choice else -1): row.position
            for row in self.rows(host)
            if row.source_rank == source
        }

    def _terms(
        self,
        rank: int,
        token: int,
        places: Sequence[dict[tuple[int, int], tuple[int, ...]]],
        ys: Sequence[Array],
        y_dtype: str,
        weights: Array | None,
    ) -> list[Array]:
        """Return the float32 rows whose sum, in this order, is the token's result."""
        choices = self.choices(rank, token)
        if weights is not None:
            choices = self._merge(self.sent_ids[rank][token], weights[token])
        choices = [choice for choice in choices if self.is_active[self.rank_of[choice.expert]]]
        nothing = numpy.zeros(ys[rank].shape[-1], numpy.float32)  # of a row that was dropped
        if not is_per_expert(self.layout):
            hosts = [host for host in self.goes_to(rank, token) if (token, -1) in places[host]]
            rows = [ys[host][places[host][token, -1]] for host in hosts]
            return [self._as_partial(widen(row, y_dtype)) for row in rows]

        def weighted(choice: Choice) -> Array:
            host = self.rank_of[choice.expert]
            place = places[host].get((token, choice.expert))
            row = nothing if place is None else widen(ys[host][place], y_dtype)
            return self._weighted(row, choice)

        if self.weighting == "origin":
            return [weighted(choice) for choice in choices]
        partials = []
        for host in self.goes_to(rank, token):
            partial = nothing
            for choice in choices:
                if (token, choice.expert) in places[host]:
                    with numpy.errstate(all="ignore"):
                        partial = partial + weighted(choice)
            partials.append(self._as_partial(partial))
        return partials

    def _weighted(self, row: Array, choice: Choice) -> Array:
        if self.weighting == "applied":
            return row
        if self.weighting == "origin":
            row = self._as_partial(row)  # as it travels
        with numpy.errstate(all="ignore"):
            return row * choice.weight

    def _as_partial(self, values: Array) -> Array:
        """Round values as they travel: to `combine_dtype`, or as the wire packs them."""
        if self.combine_wire:
            return fp8.unpack(*fp8.pack(values[None], self.wire_scale))[0]
        return widen(round_to(values, self.combine_dtype), self.combine_dtype)


oracle = OracleRound
