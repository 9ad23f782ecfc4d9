# SPDX-License-Identifier: Apache-2.0
"""The prepare/finalize class for decode: rows by expert, two phases, FP8 on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fanfold.all_to_all import AllToAll
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.vllm import vllm_types, vllm_values
from fanfold.compat.vllm.exchange_managers import Handle, manager_of
from fanfold.compat.vllm.exchanges import stream_of
from fanfold.compat.vllm.prepare_base import OpenRound, Rows
from fanfold.compat.vllm.prepare_batched import ByExpert, by_expert
from fanfold.errors import InvalidArgument

_BLOCK = 128


class DeepEPLLPrepareAndFinalize(ByExpert):
    """vLLM's class for DeepEP's low-latency kernels, over strategy ``low_latency``. CPU and GPU.

    Rows are ``[L, R * M, H]``; experts give one result each, unweighted. The token's own rank
    weights and adds them, with the weights that ``finalize`` is given. Any H is served.

    With ``use_fp8_dispatch`` rows travel as FP8 E4M3 with a float32 scale per 128 elements. Experts
    of FP8 in blocks of 128 get them so, with scales ``[L, R * M, ceil(H / 128)]``; experts without
    quantisation get them in the tokens' dtype again. Packed UE8M0 scales are not served.

    ``prepare_async`` and ``finalize_async`` return when rows are sent; their hook receives.

    Args:
        buffer: what ``DeepEPLLAll2AllManager.get_handle`` gave for vLLM's arguments.
        max_tokens_per_rank: M.
        num_dispatchers: R.
        use_fp8_dispatch: see above.
        global_to_physical: ``[E]``: ids are replaced by its entries before they are sent;
            negative ids stay. None: they are sent as they are. It does not change.
        physical_to_global, local_expert_global_ids: kept.
        placement: of the physical experts; see ``ExchangingClass``.
        max_in_flight: rounds that may be open at once: 2 for two micro-batches. Each takes memory.

    Raises:
        InvalidArgument: other ranks than the manager has.
    """

    strategy = "low_latency"
    weighting = "origin"
    has_gpu_form = True

    def __init__(
        self,
        buffer: Handle,
        max_tokens_per_rank: int,
        num_dispatchers: int,
        use_fp8_dispatch: bool = False,
        global_to_physical: Any = None,
        physical_to_global: Any = None,
        local_expert_global_ids: Any = None,
        *,
        placement: Any = "linear",
        max_in_flight: int = 2,
    ) -> None:
        manager = manager_of(buffer)
        super().__init__(manager, max_tokens_per_rank, num_dispatchers, placement=placement)
        self.buffer = buffer
        self.max_tokens_per_rank = max_tokens_per_rank
        self.use_fp8_dispatch = use_fp8_dispatch
        self.global_to_physical = global_to_physical
        self.physical_to_global = physical_to_global
        self.local_expert_global_ids = local_expert_global_ids
        self.max_in_flight = max_in_flight
        self._physical_tables: dict[Any, Any] = {}  # by device and dtype

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int) -> int:
        """The same: any hidden size is served."""
        return hidden_size

    def topk_indices_dtype(self) -> Any:
        """int64."""
        return torch().int64

    def post_init_setup(self, fused_experts: Any) -> None:
        """Refuse experts that would be sent packed UE8M0 scales.

        Raises:
            NotImplementedError: they take such scales, and rows travel as FP8.
        """
        packed = getattr(fused_experts, "supports_packed_ue8m0_act_scales", None)
        if self.use_fp8_dispatch and packed is not None and packed():
            raise NotImplementedError(
                f"{type(self).__name__}: scales are float32; packed UE8M0 scales, as "
                f"{type(fused_experts).__name__} takes them, are not served"
            )

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
    ) -> tuple[Callable[[], None], Callable[[], tuple[Any, Any, Any, Any, Any]]]:
        """Send as ``prepare`` does, without waiting for a peer.

        Returns:
            A hook that receives (it waits), and a receiver that, after it, gives what ``prepare``
            returns.

        Raises:
            As ``prepare``.
        """
        rows = self._rows(
            a1,
            topk_weights,
            self._physical(topk_ids),
            num_experts,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        exchange = self._checked_exchange(rows, expert_map)
        handle = exchange.dispatch_send(rows.topk_ids, rows.payloads, **self._dispatch_more(rows))
        opened = OpenRound(rows, exchange, handle)
        self._rounds[vllm_values.current_ubatch()] = opened

        def receive() -> None:
            if opened.received is None:
                opened.received = exchange.dispatch_recv(handle)

        def receiver() -> tuple[Any, Any, Any, Any, Any]:
            receive()
            return self._prepared(opened, quant_config, defer_input_quant)

        return receive, receiver

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
        """As ``ExchangingClass.prepare``."""
        _, receiver = self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        return receiver()

    def finalize_async(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Send results as ``finalize`` does, without waiting for a peer.

        Returns:
            A hook that writes ``output`` (it waits), and a receiver that does so if the hook did
            not.

        Raises:
            As ``finalize``.
        """
        ubatch = vllm_values.current_ubatch()
        opened = self._round(ubatch)
        y = self._results(
            opened,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        more = self._combine_more(topk_weights, apply_router_weight_on_input)
        opened.exchange.combine_send(y, opened.handle, **stream_of(y))
        del self._rounds[ubatch]
        is_received = False

        def receive() -> None:
            nonlocal is_received
            if not is_received:
                opened.exchange.combine_recv(opened.handle, output, **more)
                is_received = True

        return receive, receive

    def _physical(self, topk_ids: Any) -> Any:
        if self.global_to_physical is None:
            return topk_ids
        where = (topk_ids.device, topk_ids.dtype)
        if where not in self._physical_tables:  # a copy from the host is made once, in no graph
            self._physical_tables[where] = self.global_to_physical.to(*where)
        table = self._physical_tables[where]
        return torch().where(topk_ids < 0, topk_ids, table[topk_ids.clamp(min=0).long()])

    def _exchange(self, rows: Rows) -> AllToAll:
        config = self._config(rows)
        if self.use_fp8_dispatch:
            config["dispatch_wire"] = "fp8_e4m3"
        for name in ("num_experts", "hidden", "max_tokens_per_rank"):
            known = self.buffer.config.get(name, config[name])
            if known != config[name]:
                raise InvalidArgument(
                    f"{name}: expected {known}, as get_handle was told, got {config[name]}"
                )
        return self.buffer.exchange(**config)

    def _quantised(self, a1: Any, quant_config: Any, defer_input_quant: bool) -> tuple[Any, Any]:
        quant_dtype = getattr(quant_config, "quant_dtype", None)
        if quant_dtype is None or defer_input_quant or self._gives_blocks(quant_config):
            return a1, None
        raise NotImplementedError(
            f"{type(self).__name__}: expected float8_e4m3fn in blocks of {_BLOCK} with "
            f"use_fp8_dispatch, or no quantisation, got quant_dtype {quant_dtype}, block_shape "
            f"{getattr(quant_config, 'block_shape', None)}, use_fp8_dispatch "
            f"{self.use_fp8_dispatch}"
        )

    def _gives_blocks(self, quant_config: Any) -> bool:
        """Whether experts take rows as they travel."""
        shape = getattr(quant_config, "block_shape", None)
        return bool(
            self.use_fp8_dispatch
            and getattr(quant_config, "quant_dtype", None) == torch().float8_e4m3fn
            and shape is not None
            and shape[-1] == _BLOCK
        )

    def _dispatch_more(self, rows: Rows) -> dict[str, Any]:
        return stream_of(rows.payloads[0])  # weights stay with the token

    def _prepared(
        self, opened: OpenRound, quant_config: Any, defer_input_quant: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        rows, _, metadata, _, _ = by_expert(opened)
        if not self.use_fp8_dispatch or opened.received is None:
            return rows, None, metadata, None, None
        scales = opened.received.scales
        if self._gives_blocks(quant_config) and not defer_input_quant:
            return rows, scales, metadata, None, None
        wide = scales.repeat_interleave(_BLOCK, dim=-1)[..., : rows.shape[-1]]
        dtype = getattr(torch(), opened.rows.dtype)
        return (rows.float() * wide).to(dtype), None, metadata, None, None

    def _results(
        self,
        opened: OpenRound,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Any:
        if not vllm_types.is_delegate(weight_and_reduce_impl):
            raise NotImplementedError(
                f"{type(self).__name__}: expected TopKWeightAndReduceDelegate, as results travel "
                f"unweighted, got {type(weight_and_reduce_impl).__name__}"
            )
        return self._in_layout(opened, fused_expert_output)

    def _combine_more(
        self, topk_weights: Any, apply_router_weight_on_input: bool
    ) -> dict[str, Any]:
        weights = topk_weights.float()
        if apply_router_weight_on_input:
            weights = torch().ones_like(weights)
        return {"topk_weights": weights}
