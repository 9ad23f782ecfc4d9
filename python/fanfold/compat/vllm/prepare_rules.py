# SPDX-License-Identifier: Apache-2.0
"""Rules of all prepare/finalize classes: what they take, and what is left to do with results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fanfold.all_to_all import AllToAll
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.vllm import vllm_types
from fanfold.errors import InvalidArgument

Quantize = Callable[[Any, Any], tuple[Any, Any]]


def check_one_expert(who: str, topk_ids: Any) -> None:
    """A router's weight goes on the input where a token has one expert."""
    if topk_ids.shape[1] != 1:
        raise NotImplementedError(
            f"{who}: apply_router_weight_on_input: expected top_k 1, since a token has one input "
            f"for all of its experts, got {topk_ids.shape[1]}"
        )


def check_experts(exchange: AllToAll, num_experts: int, expert_map: Any) -> None:
    """The map, where there is one, says where the exchange sends tokens."""
    if expert_map is None:
        return
    local = expert_map.tolist()
    if len(local) != num_experts:
        raise InvalidArgument(f"expert_map: expected {num_experts} entries, got {len(local)}")
    mapped = sorted((position, expert) for expert, position in enumerate(local) if position >= 0)
    if [expert for _, expert in mapped] != exchange.local_experts:
        raise InvalidArgument(
            f"expert_map: expected the experts of rank {exchange.rank} by placement=, "
            f"{exchange.local_experts}, got {[expert for _, expert in mapped]}"
        )


def quantised(
    who: str, quantize: Quantize | None, a1: Any, quant_config: Any, defer_input_quant: bool
) -> tuple[Any, Any]:
    """Rows to send for experts of this config, and their scales or None."""
    quant_dtype = getattr(quant_config, "quant_dtype", None)
    if quant_dtype is None or defer_input_quant:
        return a1, None
    if quantize is None:
        raise NotImplementedError(
            f"{who}: rows of quant_dtype {quant_dtype} are made by quantize= of the constructor, "
            "which was not given; or let the experts quantise (defer_input_quant)"
        )
    return quantize(a1, quant_config)


def reduced(
    fused_expert_output: Any,
    topk_weights: Any,
    topk_ids: Any,
    apply_router_weight_on_input: bool,
    weight_and_reduce_impl: Any,
) -> Any:
    """One weighted result per row, with what the impl says is left to do.

    None for ``[rows, H]``, and ``TopKWeightAndReduceNoOP``: nothing. None for ``[rows, K, H]``, and
    ``TopKWeightAndReduceDelegate`` for that or ``[rows * K, H]``: weighted and added here, in
    float32, k ascending, results without a local expert being zeros. Any other does it itself.

    Raises:
        InvalidArgument: the impl delegates it, and the results are not one per row and expert.
    """
    if weight_and_reduce_impl is None:
        if fused_expert_output.ndim != 3:
            return fused_expert_output
    elif vllm_types.is_no_op(weight_and_reduce_impl):
        return fused_expert_output
    elif not vllm_types.is_delegate(weight_and_reduce_impl):
        return weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
    rows, num_picks = topk_weights.flatten(0, -2).shape
    if fused_expert_output.shape[:-1].numel() != rows * num_picks:
        raise InvalidArgument(
            f"fused_expert_output: expected a result for each of {rows} rows and {num_picks} "
            f"experts, as TopKWeightAndReduceDelegate says, got shape "
            f"{list(fused_expert_output.shape)}; results that are weighted and added already come "
            "with TopKWeightAndReduceNoOP"
        )
    hidden = fused_expert_output.shape[-1]
    fused_expert_output = fused_expert_output.reshape(rows, num_picks, hidden)
    topk_weights = topk_weights.reshape(rows, num_picks)
    total = torch().zeros_like(fused_expert_output[:, 0], dtype=torch().float32)
    for k in range(fused_expert_output.shape[1]):
        result = fused_expert_output[:, k].float()
        total += result if apply_router_weight_on_input else result * topk_weights[:, k, None]
    return total.to(fused_expert_output.dtype)
