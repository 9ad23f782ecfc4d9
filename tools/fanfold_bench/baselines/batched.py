# SPDX-License-Identifier: Apache-2.0
"""Fixed-capacity exchange over equal-split all-to-alls, with an expert-major result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold_bench.baselines.collectives import Collectives
from fanfold_bench.baselines.grouping import Grouped, group_picks
from fanfold_bench.batch import Batch


@dataclass(frozen=True)
class _Routing:
    """What combine needs from dispatch: where rows lie at home, in transit and at the expert."""

    home: Grouped
    home_slot: torch.Tensor
    from_rank: torch.Tensor
    from_slot: torch.Tensor
    expert: torch.Tensor
    place: torch.Tensor
    weight: torch.Tensor


class Batched:
    """Every rank sends a buffer of ``tokens`` slots to every rank, filled or not.

    Capacity equals the batch here, the best case of this scheme: its cost follows the capacity.
    """

    weighted = True

    def __init__(self, group: Collectives, batch: Batch) -> None:
        case = batch.case
        self._group, self._batch = group, batch
        self._ranks, self._capacity, self._hidden = case.ranks, case.tokens, case.hidden
        self._local = case.experts // case.ranks
        self._columns = min(case.top_k, self._local)
        self._depth = self._ranks * self._capacity  # rows that one expert may get
        self._routing: _Routing | None = None

    def memory_bytes(self) -> int:
        """Estimate of what one rank allocates in a round."""
        slots = self._ranks * self._capacity
        element = self._batch.x.element_size()
        return ((self._local * self._depth + 5 * slots) * element + 12 * slots) * self._hidden

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes one rank hands to the transport for other ranks, dispatch and combine."""
        payload = self._capacity * self._batch.case.payload_bytes
        ids = 8 * (self._capacity * self._columns + 1)
        weights = 4 * self._capacity * self._columns
        others = self._ranks - 1
        return others * (payload + ids + weights), others * payload

    def dispatch(self) -> torch.Tensor:
        """Returns ``[local experts, ranks * capacity, hidden]``."""
        x, ranks, capacity = self._batch.x, self._ranks, self._capacity
        home = group_picks(self._batch.ids, self._local)
        filled = torch.bincount(home.row_rank, minlength=ranks)
        slot = torch.arange(home.row_rank.numel()) - (filled.cumsum(0) - filled)[home.row_rank]

        payload = torch.zeros((ranks, capacity, self._hidden), dtype=x.dtype)
        payload[home.row_rank, slot] = x[home.row_token]
        where = (home.rank, slot[home.row], home.column)
        ids = torch.full((ranks, capacity, self._columns), -1, dtype=torch.int64)
        ids[where] = home.expert - home.rank * self._local
        weights = torch.zeros((ranks, capacity, self._columns), dtype=torch.float32)
        weights[where] = self._batch.weights.reshape(-1)[home.origin]
        table = torch.cat([filled.unsqueeze(1), ids.view(ranks, -1)], dim=1)

        got = self._group.all_to_all(payload)
        got_table = self._group.all_to_all(table)
        got_weights = self._group.all_to_all(weights)

        got_ids = got_table[:, 1:].reshape(ranks, capacity, self._columns)
        used = torch.arange(capacity).view(1, -1, 1) < got_table[:, 0].view(-1, 1, 1)
        from_rank, from_slot, column = (used & (got_ids >= 0)).nonzero(as_tuple=True)
        expert = got_ids[from_rank, from_slot, column]
        place = self._places(expert)
        experts = torch.zeros((self._local, self._depth, self._hidden), dtype=x.dtype)
        experts[expert, place] = got[from_rank, from_slot]
        weight = got_weights[from_rank, from_slot, column]
        self._routing = _Routing(home, slot, from_rank, from_slot, expert, place, weight)
        return experts

    def _places(self, expert: torch.Tensor) -> torch.Tensor:
        """Running count of each pick among those of the same local expert."""
        chosen = expert.unsqueeze(0) == torch.arange(self._local).unsqueeze(1)
        count = chosen.long().cumsum(1)
        return count[expert, torch.arange(expert.numel())] - 1

    def expert(self, received: torch.Tensor) -> torch.Tensor:
        """Identity."""
        return received

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Weights and sums at the expert's rank, returns the buffers, sums at home."""
        routing = self._routing
        if routing is None:
            raise RuntimeError("combine needs a dispatch before it")
        partial = torch.zeros((self._ranks, self._capacity, self._hidden), dtype=torch.float32)
        rows = results[routing.expert, routing.place].float() * routing.weight.unsqueeze(1)
        partial.index_put_((routing.from_rank, routing.from_slot), rows, accumulate=True)
        back = self._group.all_to_all(partial.to(results.dtype))
        out = torch.zeros((self._batch.case.tokens, self._hidden), dtype=results.dtype)
        home = routing.home
        out.index_add_(0, home.row_token, back[home.row_rank, routing.home_slot])
        return out
