# SPDX-License-Identifier: Apache-2.0
"""Prepare/finalize classes whose rows lie by expert."""

from __future__ import annotations

from typing import Any

from fanfold.all_to_all import AllToAll
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.vllm import vllm_types
from fanfold.compat.vllm.manager_base import All2AllManager
from fanfold.compat.vllm.prepare_base import ExchangingClass, OpenRound, Rows
from fanfold.errors import InvalidArgument, InvalidState


class ByExpert(ExchangingClass):
    """Rows ``[L, R * M, H]``: those of a local expert are dense from 0, by (rank, token).

    Rows past an expert's count are unspecified. R ranks, L local experts, M tokens of a rank.
    """

    is_batched = True
    layout = "expert_major"

    def __init__(
        self, manager: All2AllManager | None, max_tokens: int, num_dispatchers: int, **more: Any
    ) -> None:
        super().__init__(manager, num_dispatchers, **more)
        self._max_tokens = max_tokens
        if num_dispatchers != self._manager.world_size:
            raise InvalidArgument(
                f"num_dispatchers: expected the {self._manager.world_size} ranks of the manager, "
                f"got {num_dispatchers}"
            )

    def max_num_tokens_per_rank(self) -> int | None:
        """M, equal on all ranks."""
        return self._max_tokens

    def _config(self, rows: Rows) -> dict[str, Any]:
        return {
            **rows.config,
            "hidden": rows.hidden,
            "max_tokens_per_rank": self._max_tokens,
            "strategy": self.strategy,
            "layout": self.layout,
            "weighting": self.weighting,
            "placement": self._placement,
            "max_in_flight": self.max_in_flight,
        }

    def _exchange(self, rows: Rows) -> AllToAll:
        return self._manager.exchange(self._config(rows))


class AllToAllBatchedPrepareAndFinalize(ByExpert):
    """vLLM's routed all-to-all of fixed capacity, over strategy ``batched``.

    Rows are ``[L, R * M, H]``; experts give one result each, unweighted. The experts' rank weights
    and adds them in float32 with the weights that travelled, each partial sum is rounded once to
    the tokens' dtype, and the partials are added in float32, ranks ascending. Ids that repeat
    within a token count once, with the sum of their weights. CPU only.

    vLLM 0.33.0 does not have the class; this is the proposed one's contract. Counts are those of
    the L local experts, not of all E.

    Args:
        max_num_tokens: M.
        num_local_experts: L of this rank, which placement and ranks must give.
        num_dispatchers: R.
        rank: of this rank, which is the manager's.
        is_sequence_parallel: kept; ranks are those of the manager in either case.
        manager, placement: see ``ExchangingClass``.

    Raises:
        InvalidArgument: other ranks than the manager has.
        InvalidState: no manager.
    """

    strategy = "batched"
    weighting = "carried"

    def __init__(
        self,
        max_num_tokens: int,
        num_local_experts: int,
        num_dispatchers: int,
        rank: int,
        is_sequence_parallel: bool = False,
        *,
        manager: All2AllManager | None = None,
        placement: Any = "linear",
    ) -> None:
        super().__init__(manager, max_num_tokens, num_dispatchers, placement=placement)
        self.max_num_tokens = max_num_tokens
        self.num_local_experts = num_local_experts
        self.rank = rank
        self.is_sequence_parallel = is_sequence_parallel
        if rank != self._manager.rank:
            raise InvalidArgument(
                f"rank: expected {self._manager.rank}, that of the manager, got {rank}"
            )

    def capacities(self, topk: int) -> tuple[int, int, int]:
        """Tokens that a rank sends another; rows of a token on one rank; rows of an expert."""
        slots = min(topk, self.num_local_experts)
        return self.max_num_tokens, slots, self.max_num_tokens * self._num_dispatchers

    def _quantised(self, a1: Any, quant_config: Any, defer_input_quant: bool) -> tuple[Any, Any]:
        if getattr(quant_config, "quant_dtype", None) is not None or defer_input_quant:
            raise NotImplementedError(
                f"{type(self).__name__}: expected a model without quantisation, got quant_dtype "
                f"{getattr(quant_config, 'quant_dtype', None)}, defer_input_quant "
                f"{defer_input_quant}"
            )
        return a1, None

    def _exchange(self, rows: Rows) -> AllToAll:
        exchange = super()._exchange(rows)
        if len(exchange.local_experts) != self.num_local_experts:
            raise InvalidArgument(
                f"num_local_experts: expected {len(exchange.local_experts)} of "
                f"{rows.num_experts} experts on rank {self.rank}, got {self.num_local_experts}"
            )
        return exchange

    def _dispatch_more(self, rows: Rows) -> dict[str, Any]:
        weights = rows.topk_weights
        return {"topk_weights": torch().ones_like(weights) if rows.is_weighted else weights}

    def _prepared(
        self, opened: OpenRound, quant_config: Any, defer_input_quant: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        del quant_config, defer_input_quant
        return by_expert(opened)

    def _results(
        self,
        opened: OpenRound,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Any:
        # Whatever the impl is: weights and sums are this class's.
        return self._in_layout(opened, fused_expert_output)


def by_expert(opened: OpenRound) -> tuple[Any, Any, Any, Any, Any]:
    if opened.received is None:
        raise InvalidState("prepare_async: expected the hook to have received the rows")
    counts = opened.received.expert_counts
    return opened.received.payloads[0], None, vllm_types.expert_tokens(counts), None, None
