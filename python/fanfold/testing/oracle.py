# SPDX-License-Identifier: Apache-2.0
"""What a round must deliver, by naive loops over tokens: the reference of every comparison.

Nothing here calls the library. Floating-point arrays are *stored* values as in
`fanfold.testing.floats`: bfloat16 is uint16 bit patterns. Sums follow the stated order to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from fanfold.testing.floats import STORED, Array, round_to, widen

INT32_MIN = -(2**31)
LAYOUTS = ("rank_major", "gathered", "expert_major")
WEIGHTINGS = {
    "rank_major": ("applied",),
    "gathered": ("applied",),
    "expert_major": ("applied", "carried", "origin"),
}


def rank_of_experts(placement: str | Sequence[int], num_experts: int, num_ranks: int) -> list[int]:
    """Return the rank of every expert."""
    if placement == "linear":
        share, extra = divmod(num_experts, num_ranks)
        sizes = [share + (rank < extra) for rank in range(num_ranks)]
        return [rank for rank, size in enumerate(sizes) for _ in range(size)]
    if placement == "round_robin":
        return [expert % num_ranks for expert in range(num_experts)]
    return [int(rank) for rank in placement]


@dataclass(frozen=True)
class Choice:
    """One expert of one token, duplicates merged."""

    k: int  # place of its first occurrence
    expert: int  # global id
    weight: numpy.float32  # sum of its occurrences in k order


@dataclass(frozen=True)
class Row:
    """One row that a rank receives."""

    position: tuple[int, ...]  # index into the layout
    source_rank: int
    source_token: int
    choice: Choice | None  # expert_major: the expert that it is for


@dataclass(frozen=True)
class Expected:
    """What one rank receives. Padding rows hold zeros and are not part of the promise."""

    payloads: list[Array]
    is_token: Array  # bool, shape of the rows
    rank_counts: Array  # [R] int32
    expert_counts: Array  # [L] int32
    offsets: Array  # [L + 1] int32
    num_rows: int  # sum of rank_counts
    topk_ids: Array | None  # [.., K] int32; None for expert_major
    topk_weights: Array | None  # [.., K], expert_major [..] float32
    source_rank: Array  # int32, -1 in padding
    source_token: Array


@dataclass(eq=False)
class OracleRound:
    """One round of all ranks: what each receives, and what comes home from the experts' rows.

    Args:
        topk_ids: of every rank ``[T_r, K]``, any integer type.
        payloads: of every rank a list of ``[T_r, ...]`` arrays.
        topk_weights: of every rank ``[T_r, K]`` float32, or None.
        round_max_tokens: rows per source in the padded layouts; at least every ``T_r``.
        active: which ranks take part; None means all.
    """

    num_experts: int
    topk_ids: Sequence[Array]
    payloads: Sequence[Sequence[Array]]
    topk_weights: Sequence[Array] | None = None
    round_max_tokens: int | None = None
    placement: str | Sequence[int] = "linear"
    layout: str = "rank_major"
    weighting: str = "applied"
    combine_dtype: str = "float32"
    active: Sequence[bool] | None = None
    invalid_expert_id: int = -1
    _choices: dict[tuple[int, int], list[Choice]] = field(default_factory=dict, init=False)
    _rows: dict[int, list[Row]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS[self.layout]:
            raise ValueError(f"layout {self.layout} has no weighting {self.weighting}")
        self.num_ranks = len(self.topk_ids)
        self.num_tokens = [len(ids) for ids in self.topk_ids]
        self.row_capacity = self.round_max_tokens or max(1, *self.num_tokens)
        self.rank_of = rank_of_experts(self.placement, self.num_experts, self.num_ranks)
        self.is_active = [True] * self.num_ranks if self.active is None else list(self.active)

    # -- routing -------------------------------------------------------------------------------

    def local_experts(self, rank: int) -> list[int]:
        """Return the global ids of a rank's experts in ascending order."""
        return [expert for expert, owner in enumerate(self.rank_of) if owner == rank]

    def choices(self, rank: int, token: int) -> list[Choice]:
        """Return the experts of one token in k order: invalid ids left out, duplicates merged."""
        if (rank, token) not in self._choices:
            weights = None if self.topk_weights is None else self.topk_weights[rank][token]
            self._choices[rank, token] = self._merge(self.topk_ids[rank][token], weights)
        return self._choices[rank, token]

    def _merge(self, ids: Array, weights: Array | None) -> list[Choice]:
        merged: dict[int, Choice] = {}
        for k, expert in enumerate(ids.tolist()):
            if not 0 <= expert < self.num_experts:
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
        if self.layout == "gathered":
            return (sum(self._sent_tokens()),)
        if self.layout == "rank_major":
            return (self.num_ranks, self.row_capacity)
        return (len(self.local_experts(rank)), self.num_ranks * self.row_capacity)

    def rows(self, rank: int) -> list[Row]:
        """Return the rows that a rank receives, in the order (source rank, source token)."""
        if rank not in self._rows:
            makers = {
                "rank_major": self._rank_major_rows,
                "gathered": self._gathered_rows,
                "expert_major": self._expert_major_rows,
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

    # -- dispatch ------------------------------------------------------------------------------

    def received(self, rank: int) -> Expected:
        """Return what `rank` must find after dispatch."""
        shape, rows = self.row_shape(rank), self.rows(rank)
        source_rank = numpy.full(shape, -1, numpy.int32)
        source_token = numpy.full(shape, -1, numpy.int32)
        payloads = [
            numpy.zeros((*shape, *payload.shape[1:]), payload.dtype)
            for payload in self.payloads[rank]
        ]
        for row in rows:
            source_rank[row.position] = row.source_rank
            source_token[row.position] = row.source_token
            for payload, sent in zip(payloads, self.payloads[row.source_rank], strict=True):
                payload[row.position] = sent[row.source_token]
        rank_counts, expert_counts = self._rank_counts(rank), self._expert_counts(rank)
        return Expected(
            payloads=payloads,
            is_token=source_rank >= 0,
            rank_counts=rank_counts,
            expert_counts=expert_counts,
            offsets=numpy.concatenate([[0], numpy.cumsum(expert_counts)]).astype(numpy.int32),
            num_rows=int(rank_counts.sum()),
            topk_ids=self._received_ids(rank),
            topk_weights=self._received_weights(rank),
            source_rank=source_rank,
            source_token=source_token,
        )

    def _rank_counts(self, rank: int) -> Array:
        if self.layout == "gathered":
            return numpy.array(self._sent_tokens(), numpy.int32)
        tokens = {(row.source_rank, row.source_token) for row in self.rows(rank)}
        counts = [sum(source == r for source, _ in tokens) for r in range(self.num_ranks)]
        return numpy.array(counts, numpy.int32)

    def _expert_counts(self, rank: int) -> Array:
        counts = dict.fromkeys(self.local_experts(rank), 0)
        for source, num_tokens in enumerate(self._sent_tokens()):
            for token in range(num_tokens):
                for choice in self.choices(source, token):
                    if choice.expert in counts:
                        counts[choice.expert] += 1
        return numpy.array(list(counts.values()), numpy.int32)

    def _received_ids(self, rank: int) -> Array | None:
        if self.layout == "expert_major":
            return None
        shape = (*self.row_shape(rank), self.topk_ids[rank].shape[1])
        received = numpy.full(shape, self.invalid_expert_id, numpy.int32)
        for row in self.rows(rank):
            ids = self.topk_ids[row.source_rank][row.source_token].astype(numpy.int64)
            kept = numpy.where(ids >= self.num_experts, -1, ids)
            received[row.position] = numpy.maximum(kept, INT32_MIN)
        return received

    def _received_weights(self, rank: int) -> Array | None:
        if self.topk_weights is None:
            return None
        shape = self.row_shape(rank)
        if self.layout != "expert_major":
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
            choices = self._merge(self.topk_ids[rank][token], weights[token])
        choices = [choice for choice in choices if self.is_active[self.rank_of[choice.expert]]]
        if self.layout != "expert_major":
            hosts = self.goes_to(rank, token)
            rows = [ys[host][places[host][token, -1]] for host in hosts]
            return [self._as_partial(widen(row, y_dtype)) for row in rows]
        if self.weighting == "origin":
            return [self._weighted(c, ys, places, token, y_dtype) for c in choices]
        partials = []
        for host in self.goes_to(rank, token):
            partial = None
            for choice in (c for c in choices if self.rank_of[c.expert] == host):
                term = self._weighted(choice, ys, places, token, y_dtype)
                with numpy.errstate(all="ignore"):
                    partial = (numpy.zeros_like(term) if partial is None else partial) + term
            partials.append(self._as_partial(partial))
        return partials

    def _weighted(
        self,
        choice: Choice,
        ys: Sequence[Array],
        places: Sequence[dict[tuple[int, int], tuple[int, ...]]],
        token: int,
        y_dtype: str,
    ) -> Array:
        host = self.rank_of[choice.expert]
        row = widen(ys[host][places[host][token, choice.expert]], y_dtype)
        if self.weighting == "applied":
            return row
        if self.weighting == "origin":
            row = self._as_partial(row)  # as it travels
        with numpy.errstate(all="ignore"):
            return row * choice.weight

    def _as_partial(self, values: Array) -> Array:
        """Round values to `combine_dtype`, as they travel."""
        return widen(round_to(values, self.combine_dtype), self.combine_dtype)


oracle = OracleRound
