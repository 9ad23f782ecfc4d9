# SPDX-License-Identifier: Apache-2.0
"""Schemes that exchange counts first and then exactly the rows that are needed."""

from __future__ import annotations

import torch

from fanfold_bench.baselines.collectives import Collectives
from fanfold_bench.baselines.grouping import group_picks
from fanfold_bench.batch import Batch


class _Exact:
    """What both have in common: splits of the last dispatch."""

    weighted = True

    def __init__(self, group: Collectives, batch: Batch) -> None:
        self._group, self._batch = group, batch
        self._ranks = batch.case.ranks
        self._local = batch.case.experts // self._ranks
        self._give: list[int] = []
        self._take: list[int] = []

    def _remote(self, rows: list[int]) -> int:
        return sum(rows) - (rows[self._batch.rank] if rows else 0)


class ExactByExpert(_Exact):
    """One row per (token, expert), sorted by expert at both ends."""

    def memory_bytes(self) -> int:
        """Estimate of what one rank allocates in a round."""
        case = self._batch.case
        return case.tokens * case.top_k * (6 * case.payload_bytes + 4 * case.hidden)

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes one rank handed to the transport for other ranks in the last round."""
        counts = 8 * (self._ranks - 1) * self._local
        payload = self._batch.case.payload_bytes
        return self._remote(self._give) * payload + counts, self._remote(self._take) * payload

    def dispatch(self) -> torch.Tensor:
        """Returns rows grouped by local expert, exact count."""
        x, ids = self._batch.x, self._batch.ids.reshape(-1).long()
        top_k, experts = self._batch.case.top_k, self._batch.case.experts
        self._order = torch.argsort(ids, stable=True)
        counts = torch.bincount(ids, minlength=experts).view(self._ranks, self._local)
        arriving = self._group.all_to_all(counts)
        self._give, self._take = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = x[torch.div(self._order, top_k, rounding_mode="floor")]
        got = self._group.all_to_all_v(rows, self._give, self._take)
        expert = torch.arange(self._local).repeat(self._ranks)
        expert = expert.repeat_interleave(arriving.view(-1))
        self._by_expert = torch.argsort(expert, stable=True)
        return got[self._by_expert]

    def expert(self, received: torch.Tensor) -> torch.Tensor:
        """Identity."""
        return received

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """All rows return unweighted; their own rank weights and sums them."""
        rows = torch.empty_like(results)
        rows[self._by_expert] = results
        back = self._group.all_to_all_v(rows, self._take, self._give)
        picks = torch.empty_like(back)
        picks[self._order] = back
        weights = self._batch.weights
        picks = picks.view(*weights.shape, self._batch.case.hidden)
        return (picks.float() * weights.unsqueeze(-1)).sum(1).to(results.dtype)


class ExactByRank(_Exact):
    """One row per (token, rank), with ids and weights in one packed message.

    The expert's rank weights and sums its experts, untimed.
    """

    def memory_bytes(self) -> int:
        """Estimate of what one rank allocates in a round."""
        case = self._batch.case
        return case.ranks * case.tokens * (5 * case.payload_bytes + 4 * case.hidden)

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes one rank handed to the transport for other ranks in the last round."""
        payload = self._batch.case.payload_bytes
        packed = 8 * min(self._batch.case.top_k, self._local)
        counts = 8 * (self._ranks - 1)
        give, take = self._remote(self._give), self._remote(self._take)
        return give * (payload + packed) + counts, take * payload

    def dispatch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rows in source order and ``[rows, 2, columns]``: local ids, weights."""
        picks = group_picks(self._batch.ids, self._local)
        columns = min(self._batch.case.top_k, self._local)
        packed = torch.full((picks.row_token.numel(), 2, columns), -1, dtype=torch.int32)
        packed[picks.row, 0, picks.column] = (picks.expert - picks.rank * self._local).int()
        weights = self._batch.weights.reshape(-1)[picks.origin]
        packed.view(torch.float32)[picks.row, 1, picks.column] = weights
        counts = torch.bincount(picks.row_rank, minlength=self._ranks)
        self._give, self._take = counts.tolist(), self._group.all_to_all(counts).tolist()
        self._token = picks.row_token
        rows = self._batch.x[picks.row_token]
        got = self._group.all_to_all_v(rows, self._give, self._take)
        return got, self._group.all_to_all_v(packed, self._give, self._take)

    def expert(self, received: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rows times the weights that travelled with them."""
        rows, packed = received
        weights = packed.view(torch.float32)[:, 1]
        scale = torch.where(packed[:, 0] >= 0, weights, torch.zeros_like(weights))
        return (rows.float() * scale.sum(1, keepdim=True)).to(rows.dtype)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """One row per rank returns; their own rank sums them."""
        back = self._group.all_to_all_v(results, self._take, self._give)
        total = torch.zeros((self._batch.case.tokens, self._batch.case.hidden))
        total.index_add_(0, self._token, back.float())
        return total.to(results.dtype)
