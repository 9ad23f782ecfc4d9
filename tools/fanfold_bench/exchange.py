# SPDX-License-Identifier: Apache-2.0
"""Fanfold as it is measured: through its Python interface, with the expert writing in place."""

from __future__ import annotations

from typing import Any

import torch

from fanfold_bench.batch import Batch


def open_communicator(rank: int, num_ranks: int, rendezvous: str) -> Any:
    """A communicator over the rank processes. Collective.

    Raises:
        RuntimeError: Fanfold is not installed.
    """
    try:
        import fanfold
    except ImportError as error:
        raise RuntimeError(f"Fanfold cannot be imported ({error}); run tools/setup") from error

    return fanfold.Communicator.processes(rank=rank, num_ranks=num_ranks, rendezvous=rendezvous)


class FanfoldExchange:
    """One AllToAll and the identity as its expert. Creating and closing it is collective.

    In ``rank_major``, ``gathered`` and ``flat`` a row comes back once per rank: the expert's own
    weighting is part of the (untimed) expert step, as it is in the schemes that are compared. In
    per-expert layouts the weights travel and Fanfold applies them, as ``gloo_batched`` does.
    """

    def __init__(self, comm: Any, batch: Batch, strategy: str, layout: str) -> None:
        import fanfold

        case = batch.case
        self.weighted = layout == "expert_major"
        self._batch, self._layout = batch, layout
        self._a2a = fanfold.AllToAll(
            comm,
            num_experts=case.experts,
            top_k=case.top_k,
            max_tokens_per_rank=case.tokens,
            hidden=case.hidden,
            dtype=batch.x.dtype,
            strategy=strategy,
            layout=layout,
            weighting="carried" if self.weighted else "applied",
            device="cpu",
        )
        self._ids, self._payloads, self._weights = batch.ids, [batch.x], batch.weights
        self._out = torch.empty_like(batch.x)
        self._received: Any = None
        self._areas = self._used_areas()
        first = batch.local_experts
        self._first, self._end = first.start, first.stop

    def _used_areas(self) -> list[tuple[int, int]]:
        """(block, rows) of the receive area that hold tokens, for layouts made of blocks."""
        batch = self._batch
        if self._layout == "rank_major":
            return list(enumerate(batch.rows[:, batch.rank].tolist()))
        if self._layout == "expert_major":
            local = batch.per_expert[:, batch.local_experts.start : batch.local_experts.stop]
            return list(enumerate(local.sum(axis=0).tolist()))
        return []

    def dispatch(self) -> Any:
        """The timed call."""
        return self._a2a.dispatch(self._ids, self._payloads, topk_weights=self._weights)

    def expert(self, received: Any) -> Any:
        """Identity, written where combine reads it."""
        self._received = received
        rows, results = received.payloads[0], received.combine_buffer()
        if self._layout == "gathered":
            ids = received.topk_ids
            mine = ((ids >= self._first) & (ids < self._end)).any(1)
            results.copy_(rows)
            results[~mine] = 0
        elif self._areas:
            for block, count in self._areas:
                results[block, :count].copy_(rows[block, :count])
        else:
            results.copy_(rows)
        return results

    def combine(self, results: Any) -> torch.Tensor:
        """The timed call."""
        out: torch.Tensor = self._received.combine(results, out=self._out)
        return out

    def memory_bytes(self) -> int:
        """What the exchange holds on this rank."""
        return int(self._a2a.workspace_bytes)

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes for other ranks, dispatch and combine, one row per (token, rank)."""
        rows = self._batch.rows[self._batch.rank]
        remote = int(rows.sum() - rows[self._batch.rank])
        case = self._batch.case
        return remote * case.row_bytes, remote * case.payload_bytes

    def close(self) -> None:
        """Free the exchange."""
        self._received = None
        self._a2a.close()
