# SPDX-License-Identifier: Apache-2.0
"""Prepare/finalize classes whose rows are one per token and rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fanfold.all_to_all import AllToAll
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.vllm import vllm_types
from fanfold.compat.vllm.exchange_managers import (
    FlashInferNVLinkOneSidedManager,
    FlashInferNVLinkTwoSidedManager,
    Handle,
    manager_of,
)
from fanfold.compat.vllm.gather_managers import rounded_up
from fanfold.compat.vllm.manager_base import All2AllManager
from fanfold.compat.vllm.prepare_base import ExchangingClass, OpenRound, Rows
from fanfold.compat.vllm.prepare_rules import Quantize
from fanfold.errors import InvalidArgument, InvalidState


class DeepEPHTPrepareAndFinalize(ExchangingClass):
    """vLLM's class for DeepEP's high-throughput kernels, over strategy ``high_throughput``.

    Experts get ``[N, H]``, one row per token and rank in the order (rank, token), with counts of
    the L local experts, ids ``[N, K]`` and weights ``[N, K]``. Ids are global; one that is not of
    this rank is replaced by another rank's (the last expert on the rank of the first, else expert
    0), so that kernels may count it, and has weight 0; with a single rank it is -1. Experts give
    ``[N, H]``, weighted and added over their rank's experts, or ``[N, K, H]``, which is weighted
    and added here. Any H is served, and any float as well as bfloat16. CPU only.

    ``prepare_async`` and ``finalize_async`` give a receiver that does it all: the number of rows is
    known only when every rank has sent.

    Args:
        buffer: what ``DeepEPHTAll2AllManager.get_handle({})`` gave.
        num_dispatchers: what the method of this name says.
        dp_size: kept.
        rank_expert_offset: the first expert of this rank, which the placement must give.
        placement, quantize: see ``ExchangingClass``.
    """

    strategy = "high_throughput"
    layout = "flat"
    max_in_flight = 2

    def __init__(
        self,
        buffer: Handle,
        num_dispatchers: int,
        dp_size: int,
        rank_expert_offset: int,
        *,
        placement: Any = "linear",
        quantize: Quantize | None = None,
    ) -> None:
        manager = manager_of(buffer)
        super().__init__(manager, num_dispatchers, placement=placement, quantize=quantize)
        self.buffer = buffer
        self.dp_size = dp_size
        self.rank_expert_offset = rank_expert_offset

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: Any) -> int:
        """The same: any hidden size is served."""
        del dtype
        return hidden_size

    def topk_indices_dtype(self) -> Any:
        """int64."""
        return torch().int64

    def supports_async(self) -> bool:
        """True."""
        return True

    def prepare_async(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Callable[[], tuple[Any, Any, Any, Any, Any]]:
        """Send and receive as ``prepare`` does, which waits; the receiver gives what it returns."""
        prepared = self.prepare(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        return lambda: prepared

    def finalize_async(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Send and add as ``finalize`` does, which waits; the receiver does nothing."""
        self.finalize(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        return lambda: None

    def _exchange(self, rows: Rows) -> AllToAll:
        exchange = self.buffer.exchange(
            **rows.config,
            hidden=rows.hidden,
            dispatch_row_bytes=rows.row_bytes,
            max_tokens_per_rank=self._manager.max_tokens_per_rank,
            strategy=self.strategy,
            layout=self.layout,
            placement=self._placement,
            max_in_flight=self.max_in_flight,
        )
        local = exchange.local_experts
        if local and local[0] != self.rank_expert_offset:
            raise InvalidArgument(
                f"rank_expert_offset: expected {local[0]}, the first expert of rank "
                f"{exchange.rank}, got {self.rank_expert_offset}"
            )
        return exchange

    def _prepared(
        self, opened: OpenRound, quant_config: Any, defer_input_quant: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        del quant_config, defer_input_quant
        received = received_of(opened)
        ids = received.topk_ids.long()
        is_here = torch().zeros(opened.rows.num_experts, dtype=torch().bool)
        is_here[opened.exchange.local_experts] = True
        is_local = (ids >= 0) & is_here[ids.clamp(min=0)]
        other = -1
        if opened.exchange.num_ranks > 1:
            other = opened.rows.num_experts - 1 if bool(is_here[0]) else 0
        counts = received.expert_counts.clone()
        payloads = received.payloads
        return (
            payloads[0],
            payloads[1] if len(payloads) > 1 else None,
            vllm_types.expert_tokens(counts, counts),
            torch().where(is_local, ids, other),
            torch().where(is_local, received.topk_weights, 0.0).to(opened.rows.weights_dtype),
        )


class _RankMajor(ExchangingClass):
    """Rows ``[R * m, H]``: those of a source rank first in its m places; ids -1 in the others.

    m is the most tokens that a rank has in this step, by the DP metadata; without metadata it is
    this rank's number, which must then be that of every rank.
    """

    def _room(self, rows: Rows, max_tokens: int) -> dict[str, int]:
        """What an exchange that grows must have room for."""
        itemsize = getattr(torch(), rows.dtype).itemsize
        return {
            "max_tokens_per_rank": max_tokens,
            "hidden": rows.hidden,
            "dispatch_row_bytes": rows.row_bytes,
            "combine_row_bytes": max(1, rows.hidden * itemsize),
        }

    def _max_tokens_of_step(self, rows: Rows) -> int:
        sizes = self._manager.local_sizes()
        return max(sizes) if sizes else int(rows.topk_ids.shape[0])

    def _grown(self, rows: Rows, max_tokens: int) -> AllToAll:
        return self._manager.grown_exchange(
            {
                **rows.config,
                "strategy": self.strategy,
                "layout": self.layout,
                "placement": self._placement,
            },
            self._room(rows, max_tokens),
        )

    def _dispatch_more(self, rows: Rows) -> dict[str, Any]:
        more = super()._dispatch_more(rows)
        return {**more, "round_max_tokens": self._max_tokens_of_step(rows)}

    def _prepared(
        self, opened: OpenRound, quant_config: Any, defer_input_quant: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        del quant_config, defer_input_quant
        received = received_of(opened)
        payloads = [payload.flatten(0, 1) for payload in received.payloads]
        ids = received.topk_ids.flatten(0, 1)
        weights = received.topk_weights.flatten(0, 1).to(opened.rows.weights_dtype)
        scales = payloads[1] if len(payloads) > 1 else None
        return payloads[0], scales, None, ids.to(opened.rows.topk_ids.dtype), weights


class FlashInferNVLinkOneSidedPrepareAndFinalize(_RankMajor):
    """vLLM's class for FlashInfer's one-sided all-to-all, over ``one_sided``. CPU and GPU.

    Experts get ``[R * m, H]`` with ids and weights ``[R * m, K]``; ids are global, those of other
    ranks included, and -1 in places without a token. They give ``[R * m, H]``, weighted and added
    over their rank's experts, or ``[R * m, K, H]``, which is weighted and added here; what they
    give in places without a token is not read.

    Args:
        max_num_tokens, top_k, num_experts, hidden_size, dispatch_format,
            extra_payload_bytes_per_token: given to the manager's ``initialize``.
        num_dispatchers: what the method of this name says.
        manager: a ``FlashInferNVLinkOneSidedManager``; None: that of vLLM's group.
        placement, quantize: see ``ExchangingClass``.

    Raises:
        InvalidState: no such manager.
    """

    strategy = "one_sided"
    has_gpu_form = True

    def __init__(
        self,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        hidden_size: int,
        dispatch_format: Any = None,
        extra_payload_bytes_per_token: int = 0,
        num_dispatchers: int = 1,
        *,
        manager: All2AllManager | None = None,
        placement: Any = "linear",
        quantize: Quantize | None = None,
    ) -> None:
        super().__init__(manager, num_dispatchers, placement=placement, quantize=quantize)
        if not isinstance(self._manager, FlashInferNVLinkOneSidedManager):
            raise InvalidState(
                "manager: expected a FlashInferNVLinkOneSidedManager, got "
                f"{type(self._manager).__name__}"
            )
        self.all2all_manager = self._manager
        self.max_num_tokens = max_num_tokens
        self.top_k = top_k
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.all2all_manager.initialize(
            max_num_tokens=max_num_tokens,
            top_k=top_k,
            num_experts=num_experts,
            hidden_size=hidden_size,
            dispatch_format=dispatch_format,
            extra_payload_bytes_per_token=extra_payload_bytes_per_token,
        )

    def topk_indices_dtype(self) -> Any:
        """int32."""
        return torch().int32

    def _exchange(self, rows: Rows) -> AllToAll:
        # What all layers asked for, so that the first round has room for the last.
        return self._grown(rows, self.all2all_manager.max_num_tokens)

    def _room(self, rows: Rows, max_tokens: int) -> dict[str, int]:
        room = super()._room(rows, max_tokens)
        manager = self.all2all_manager
        itemsize = getattr(torch(), rows.dtype).itemsize
        whole = manager.hidden_size * itemsize
        return {
            **room,
            "hidden": max(room["hidden"], manager.hidden_size),
            "dispatch_row_bytes": max(
                room["dispatch_row_bytes"], whole + manager.extra_payload_bytes_per_token
            ),
            "combine_row_bytes": max(room["combine_row_bytes"], whole),
        }


class FlashInferNVLinkTwoSidedPrepareAndFinalize(_RankMajor):
    """vLLM's class for FlashInfer's two-sided all-to-all, over ``two_sided``. CPU only.

    Rows, ids and results as in ``FlashInferNVLinkOneSidedPrepareAndFinalize``. Memory grows with
    the tokens of a step, in powers of two.

    Args:
        num_dispatchers: what the method of this name says.
        manager: a ``FlashInferNVLinkTwoSidedManager``; None: that of vLLM's group.
        placement, quantize: see ``ExchangingClass``.

    Raises:
        InvalidState: no such manager.
    """

    strategy = "two_sided"

    def __init__(
        self,
        num_dispatchers: int = 1,
        *,
        manager: All2AllManager | None = None,
        placement: Any = "linear",
        quantize: Quantize | None = None,
    ) -> None:
        super().__init__(manager, num_dispatchers, placement=placement, quantize=quantize)
        if not isinstance(self._manager, FlashInferNVLinkTwoSidedManager):
            raise InvalidState(
                "manager: expected a FlashInferNVLinkTwoSidedManager, got "
                f"{type(self._manager).__name__}"
            )
        self.all2all_manager = self._manager

    def _exchange(self, rows: Rows) -> AllToAll:
        self.all2all_manager.ensure_alltoall_workspace_initialized()
        return self._grown(rows, rounded_up(self._max_tokens_of_step(rows)))


def received_of(opened: OpenRound) -> Any:
    """What a round received.

    Raises:
        InvalidState: it did not yet.
    """
    if opened.received is None:
        raise InvalidState("prepare: expected the rows of the round to be received")
    return opened.received
