# SPDX-License-Identifier: Apache-2.0
"""Schemes in which every rank receives every token."""

from __future__ import annotations

import torch

from fanfold_bench.baselines.collectives import Collectives
from fanfold_bench.batch import Batch

Gathered = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Replicated:
    """What both have in common. The expert's rank weights and sums its experts, untimed."""

    weighted = True

    def __init__(self, group: Collectives, batch: Batch) -> None:
        self._group, self._batch = group, batch

    def memory_bytes(self) -> int:
        """Estimate of what one rank allocates in a round."""
        case = self._batch.case
        return case.ranks * case.tokens * (3 * case.payload_bytes + 4 * case.hidden)

    def _others(self) -> int:
        return (self._batch.case.ranks - 1) * self._batch.case.tokens

    def expert(self, received: Gathered) -> torch.Tensor:
        """Rows times the weights of this rank's experts; zero where it has none."""
        x, weights, ids = received
        local = self._batch.local_experts
        mine = (ids >= local.start) & (ids < local.stop)
        return (x.float() * (weights * mine).sum(1, keepdim=True)).to(x.dtype)


class GatherScatter(_Replicated):
    """All-gather of payload, weights and ids; reduce-scatter of partial sums."""

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes one rank hands to the transport for other ranks, dispatch and combine."""
        case = self._batch.case
        return self._others() * case.row_bytes, self._others() * case.payload_bytes

    def dispatch(self) -> Gathered:
        """Tokens of all ranks in source order, with weights and ids."""
        batch, gather = self._batch, self._group.all_gather
        return gather(batch.x), gather(batch.weights), gather(batch.ids)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum."""
        return self._group.reduce_scatter(results)


class BroadcastReduce(_Replicated):
    """One broadcast per rank and tensor; all-reduce of partial sums."""

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes one rank hands to the transport for other ranks, dispatch and combine."""
        case = self._batch.case
        return self._others() * case.row_bytes, 2 * self._others() * case.payload_bytes

    def _spread(self, own: torch.Tensor) -> torch.Tensor:
        ranks, count = self._batch.case.ranks, own.shape[0]
        rows = own.new_empty((ranks, count, own.shape[1]))
        rows[self._batch.rank].copy_(own)
        for root in range(ranks):
            self._group.broadcast(rows[root], root)
        return rows.view(ranks * count, -1)

    def dispatch(self) -> Gathered:
        """Tokens of all ranks in source order, with weights and ids."""
        batch = self._batch
        return self._spread(batch.x), self._spread(batch.weights), self._spread(batch.ids)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Sums every row on every rank and keeps this rank's."""
        self._group.all_reduce(results)
        tokens = self._batch.case.tokens
        return results[self._batch.rank * tokens : (self._batch.rank + 1) * tokens]
