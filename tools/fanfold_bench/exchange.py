# SPDX-License-Identifier: Apache-2.0
"""Fanfold as it is measured: through its Python interface, with the expert writing in place."""

from __future__ import annotations

from typing import Any

import torch

from fanfold_bench.batch import Batch
from fanfold_bench.cases import PER_EXPERT, Variant

FP8_BLOCK = 128
CHECKED_ROUNDS = 2  # of measure.check(), which change the payload; the timed ones do not


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

    def __init__(self, comm: Any, batch: Batch, variant: Variant) -> None:
        import fanfold

        case, layout = batch.case, variant.layout
        self.weighted = layout in PER_EXPERT
        self.lossy = variant.fp8
        self._batch, self._layout = batch, layout
        wire = "fp8_e4m3" if variant.fp8 else None
        self._a2a = fanfold.AllToAll(
            comm,
            num_experts=case.experts,
            top_k=case.top_k,
            max_tokens_per_rank=case.tokens,
            hidden=case.hidden,
            dtype=batch.x.dtype,
            strategy=variant.strategy,
            layout=layout,
            dispatch_wire=wire,
            combine_wire=wire,
            weighting="carried" if self.weighted else "applied",
            device="cpu",
        )
        self._ids, self._payloads, self._weights = batch.ids, [batch.x], batch.weights
        self._out = torch.empty_like(batch.x)
        self._received: Any = None
        self._num_unpacked = 0
        self._unpacked: Any = None
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
        """Identity, written where combine reads it.

        Timed rounds of packed rows copy what the last checked one unpacked. That reads and writes
        as many bytes as the copy of rows that are not packed; unpacking takes a dozen temporary
        tensors, which would sweep the caches before the timed call only for these.
        """
        self._received = received
        rows, results = received.payloads[0], received.combine_buffer()
        if self.lossy and self._num_unpacked < CHECKED_ROUNDS:
            self._num_unpacked += 1
            _unpack(rows, received.scales, results, self._areas)
            self._unpacked = results.clone()
            return results
        if self.lossy:
            rows = self._unpacked
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

    def num_rows(self) -> int:
        """Rows of the layout that a round gives the experts of this rank."""
        batch = self._batch
        if self._layout == "gathered":
            return batch.case.ranks * batch.case.tokens
        if self.weighted:
            local = batch.local_experts
            return int(batch.per_expert[:, local.start : local.stop].sum())
        return int(batch.rows[:, batch.rank].sum())

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes for other ranks, dispatch and combine, one row per (token, rank).

        The strategies over collectives send more: every token to every rank, or all slots.
        """
        rows = self._batch.rows[self._batch.rank]
        remote = int(rows.sum() - rows[self._batch.rank])
        case = self._batch.case
        payload = case.payload_bytes
        if self.lossy:
            payload = case.hidden + 4 * -(-case.hidden // FP8_BLOCK)
        indices = case.row_bytes - case.payload_bytes
        return remote * (payload + indices), remote * payload

    def close(self) -> None:
        """Free the exchange."""
        self._received = None
        self._a2a.close()


def _unpack(
    rows: torch.Tensor, scales: torch.Tensor, results: torch.Tensor, areas: list[tuple[int, int]]
) -> torch.Tensor:
    """The identity on packed rows: FP8 times the scale of its block."""
    hidden = rows.shape[-1]
    for block, count in areas:
        wide = scales[block, :count].repeat_interleave(FP8_BLOCK, dim=-1)[:, :hidden]
        results[block, :count] = (rows[block, :count].to(torch.float32) * wide).to(results.dtype)
    return results
