# SPDX-License-Identifier: Apache-2.0
"""Prepare/finalize classes over a manager that gathers."""

from __future__ import annotations

from typing import Any

from fanfold.compat.vllm import vllm_values
from fanfold.compat.vllm.prepare_base import PrepareAndFinalize
from fanfold.compat.vllm.prepare_rules import Quantize, check_one_expert, quantised, reduced
from fanfold.errors import InvalidState


class _NaiveDPEP(PrepareAndFinalize):
    """What the modular and the monolithic class share."""

    def __init__(
        self,
        is_sequence_parallel: bool = False,
        num_dispatchers: int = 1,
        *,
        manager: Any = None,
        quantize: Quantize | None = None,
    ) -> None:
        self.is_sequence_parallel = is_sequence_parallel
        self._num_dispatchers = num_dispatchers
        self._manager = manager if manager is not None else vllm_values.group_of("ep")
        self._quantize = quantize
        if self._manager is None:
            raise InvalidState(
                "manager: expected a manager, or vLLM's expert-parallel group, got neither"
            )

    def output_is_reduced(self) -> bool:
        """False: without sequence parallelism tensor-parallel ranks still add their outputs."""
        return False

    def _quantised(self, a1: Any, quant_config: Any, defer_input_quant: bool) -> tuple[Any, Any]:
        name = type(self).__name__
        return quantised(name, self._quantize, a1, quant_config, defer_input_quant)


class MoEPrepareAndFinalizeNaiveDPEPModular(_NaiveDPEP):
    """vLLM's class for gathered tokens and routing, for ``AgRs-`` and ``NaiveAll2AllManager``.

    Experts get the tokens of all ranks ``[sum of T, H]`` with global ids and their weights, and
    give ``[sum of T, H]``, weighted and added over their rank's experts, zeros where it has none;
    or ``[sum of T, K, H]``, which is weighted and added here.

    Args:
        is_sequence_parallel: over which group; see ``GatherManager``.
        num_dispatchers: what the method of this name says.
        manager: a ``GatherManager``; None: vLLM's expert-parallel group, which forwards to its own.
        quantize: see ``ExchangingClass``. Scales of no dimension are not sent.

    Raises:
        InvalidState: there is neither.
    """

    _lora_context: Any = None

    def set_lora_context(self, ctx: Any) -> None:
        """Gather the tokens' LoRA ids along.

        They are read from ``ctx.punica_wrapper.token_mapping_meta.token_lora_mapping``, and those
        of the gathered tokens become ``ctx.local_token_lora_mapping``. None: no longer.
        """
        self._lora_context = ctx

    def prepare(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Gather the tokens of all ranks. Collective, waits.

        Args:
            a1: ``[T, H]``, any dtype. Only read; a weight is multiplied into a copy.
            topk_weights, topk_ids: ``[T, K]``, any dtype.
            num_experts, expert_map: not needed: every token goes everywhere.
            apply_router_weight_on_input: multiply tokens instead of results; K must be 1.
            quant_config: has ``quant_dtype``.
            defer_input_quant: experts quantise by themselves: rows go as they are.

        Returns:
            rows, their scales or None, None, ids, weights: of all ranks' tokens.

        Raises:
            NotImplementedError: quantised rows without ``quantize``; a router's weight on the
                input with K above 1.
            As ``GatherManager.dispatch``.
        """
        tokens = a1
        if apply_router_weight_on_input:
            check_one_expert(type(self).__name__, topk_ids)
            tokens = a1 * topk_weights.to(a1.dtype)
        sent, scales = self._quantised(tokens, quant_config, defer_input_quant)
        extra = [] if scales is None or scales.ndim == 0 else [scales]
        lora = self._lora_context
        if lora is not None:
            mapping = lora.punica_wrapper.token_mapping_meta.token_lora_mapping
            extra.append(mapping[: a1.shape[0]])
        gathered = self._manager.dispatch(
            sent,
            topk_weights,
            topk_ids,
            is_sequence_parallel=self.is_sequence_parallel,
            extra_tensors=extra or None,
        )
        more = list(gathered[3]) if extra else []
        if lora is not None:
            lora.local_token_lora_mapping = more.pop()
        return gathered[0], (more[0] if more else scales), None, gathered[2], gathered[1]

    def finalize(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Add what all ranks made of each token into ``output [T, H]``. Collective, waits.

        Args:
            output: overwritten.
            fused_expert_output: ``[sum of T, H]``, or, where the impl has something left to do,
                ``[sum of T, K, H]`` or ``[sum of T * K, H]``.
            topk_weights, topk_ids: those of ``prepare``.
            apply_router_weight_on_input: as in ``prepare``.
            weight_and_reduce_impl: vLLM's object that says what is left to do with results.

        Raises:
            As ``GatherManager.combine``.
        """
        y = reduced(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        self._manager.combine_into_output(y, output, self.is_sequence_parallel)

    def allocate_fused_expert_output(
        self, shape: Any, dtype: Any, device: Any, weight_and_reduce_impl: Any
    ) -> Any:
        """Where experts may write so that nothing is copied; see ``allocate_combine_input``."""
        return self._manager.allocate_combine_input(shape, dtype, device, self.is_sequence_parallel)


class MoEPrepareAndFinalizeNaiveDPEPMonolithic(_NaiveDPEP):
    """vLLM's class for gathered tokens and router logits; the experts route by themselves.

    Args:
        As ``MoEPrepareAndFinalizeNaiveDPEPModular``.
    """

    kernel_kind = "Monolithic"

    def prepare(
        self,
        a1: Any,
        router_logits: Any,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Gather the tokens and logits of all ranks. Collective, waits.

        Args:
            a1: ``[T, H]``; ``router_logits``: ``[T, E]``; any dtype, only read.
            quant_config, defer_input_quant: as in the modular class.

        Returns:
            rows, their scales or None, logits: of all ranks' tokens.

        Raises:
            As the modular class.
        """
        sent, scales = self._quantised(a1, quant_config, defer_input_quant)
        extra = None if scales is None or scales.ndim == 0 else [scales]
        gathered = self._manager.dispatch_router_logits(
            sent,
            router_logits,
            is_sequence_parallel=self.is_sequence_parallel,
            extra_tensors=extra,
        )
        return gathered[0], (scales if extra is None else gathered[2][0]), gathered[1]

    def finalize(self, fused_expert_output: Any) -> Any:
        """Add what all ranks made of each token. Collective, waits.

        Args:
            fused_expert_output: ``[sum of T, H]``, zeros where this rank has no expert.

        Returns:
            ``[T, H]``.

        Raises:
            As ``GatherManager.combine``.
        """
        return self._manager.combine(
            fused_expert_output, is_sequence_parallel=self.is_sequence_parallel
        )
