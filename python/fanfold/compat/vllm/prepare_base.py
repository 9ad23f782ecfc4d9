# SPDX-License-Identifier: Apache-2.0
"""What all drop-ins for vLLM's prepare/finalize classes share."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fanfold import _core
from fanfold.all_to_all import AllToAll
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.vllm import vllm_types, vllm_values
from fanfold.compat.vllm.exchanges import name_of, overlaps, row_bytes, stream_of
from fanfold.compat.vllm.manager_base import All2AllManager
from fanfold.compat.vllm.prepare_rules import (
    Quantize,
    check_experts,
    check_one_expert,
    quantised,
    reduced,
)
from fanfold.errors import InvalidArgument, InvalidState
from fanfold.placement import Placement


class PrepareAndFinalize:
    """The surface of vLLM 0.33.0's ``FusedMoEPrepareAndFinalize``."""

    kernel_kind = "Modular"
    is_batched = False
    _num_dispatchers: int

    @property
    def activation_format(self) -> Any:
        """How rows lie that experts get; vLLM's enumeration where vLLM runs."""
        return vllm_types.activation_format(is_batched=self.is_batched)

    def topk_indices_dtype(self) -> Any:
        """The torch dtype that the router's ids should have; None: any."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """M of a batched format, equal on all ranks; else None."""
        return None

    def num_dispatchers(self) -> int:
        """Ranks that send to one expert."""
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        """Whether ``output`` is complete, so that nobody has to sum over ranks any more."""
        return True

    def post_init_setup(self, fused_experts: Any) -> None:
        """Hear which experts will take the rows."""

    def allocate_fused_expert_output(
        self, shape: Any, dtype: Any, device: Any, weight_and_reduce_impl: Any
    ) -> Any:
        """Where experts may write so that ``finalize`` copies nothing; None: anywhere."""
        return None

    def supports_async(self) -> bool:
        """Whether there are ``prepare_async`` and ``finalize_async``."""
        return False

    def supports_dbo(self) -> bool:
        """Whether two micro-batches may have a round open each."""
        return self.supports_async()

    def supports_deferred_moe_finalize(self) -> bool:
        """False: experts finalize their own results."""
        return False


@dataclass
class Rows:
    """What one rank sends. T tokens, K = top_k.

    Attributes:
        payloads: ``[T, ...]`` each, the tokens first.
        topk_ids: ``[T, K]`` global ids.
        topk_weights: ``[T, K]`` float32.
        weights_dtype: what they were given as.
        dtype: of the tokens before they were quantised; results travel in it.
        hidden: elements of a token.
        num_experts: E, over all ranks.
        device: by name.
        is_weighted: whether the router's weights are in the tokens already.
    """

    payloads: list[Any]
    topk_ids: Any
    topk_weights: Any
    weights_dtype: Any
    dtype: str
    hidden: int
    num_experts: int
    device: str
    is_weighted: bool

    @property
    def config(self) -> dict[str, Any]:
        """What an exchange for them must be, as arguments of ``fanfold.AllToAll``."""
        return {
            "num_experts": self.num_experts,
            "top_k": int(self.topk_ids.shape[1]),
            "dtype": self.dtype,
            "device": self.device,
        }

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return max(1, sum(row_bytes(payload) for payload in self.payloads))


@dataclass
class OpenRound:
    """One dispatch, until ``finalize``."""

    rows: Rows
    exchange: AllToAll
    handle: _core.Round
    received: _core.Received | None = None


class ExchangingClass(PrepareAndFinalize, ABC):
    """Prepare and finalize by an AllToAll.

    Every rank calls them alike, also with zero tokens. Input tensors are only read; a token's
    router weight is multiplied into a copy. What ``prepare`` returns is valid until ``finalize``.
    A ``prepare`` whose ``finalize`` never came ends with the next one of the same micro-batch.

    Args:
        manager: whose exchanges to use; None: that of vLLM's expert-parallel group.
        placement: which rank holds which expert, as ``fanfold.AllToAll`` takes it. An
            ``expert_map`` that says something else is an error.
        quantize: gives, for ``(tokens, quant_config)``, rows to send and their scales ``[T, ...]``
            or None. Without it a ``quant_config`` that asks for quantised rows is not served.
    """

    strategy = ""
    layout = "rank_major"
    weighting = "applied"
    has_gpu_form = False
    max_in_flight = 1

    def __init__(
        self,
        manager: All2AllManager | None,
        num_dispatchers: int,
        *,
        placement: str | Sequence[int] | Placement = "linear",
        quantize: Quantize | None = None,
    ) -> None:
        self._manager = manager if manager is not None else manager_of_vllm()
        self._num_dispatchers = num_dispatchers
        self._placement = placement
        self._quantize = quantize
        self._rounds: dict[int, OpenRound] = {}
        self._checked: tuple[Callable[[], AllToAll | None], Any, Any] = (lambda: None, None, None)

    # --- The two halves -------------------------------------------------------------------------

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
        """Send tokens to their experts' ranks and receive. Collective, waits.

        Args:
            a1: ``[T, H]`` float32, float16 or bfloat16.
            topk_weights: ``[T, K]`` of a floating-point type; they travel as float32.
            topk_ids: ``[T, K]`` int32 or int64 global ids; a negative one selects no expert.
            num_experts: E, over all ranks.
            expert_map: ``[E]`` local position of each expert, -1 of other ranks; or None.
            apply_router_weight_on_input: multiply tokens instead of results; K must be 1.
            quant_config: has ``quant_dtype``, None where experts take rows as they are.
            defer_input_quant: experts quantise by themselves: rows go as they are.

        Returns:
            rows, their scales or None, ``ExpertTokensMetadata`` or None, ids or None, weights or
            None; see the class.

        Raises:
            NotImplementedError: quantised rows that it cannot make; a router's weight on the input
                with K above 1.
            InvalidArgument: shapes, types, too many tokens, ids past E (CPU), an ``expert_map``
                that is not the placement. Nothing was sent.
            Unsupported: tensors of a GPU, where the strategy has no form for it.
            PeerTimeout, PeerAborted, PeerLost: a rank is late or gone (on a GPU a later call
                says so).

        Stream:
            On a GPU everything is enqueued on torch's current stream. The host waits only where an
            exchange is made, in a first round or one that is larger: not in a graph capture.
        """
        rows = self._rows(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        exchange = self._checked_exchange(rows, expert_map)
        received = exchange.dispatch(rows.topk_ids, rows.payloads, **self._dispatch_more(rows))
        opened = OpenRound(rows, exchange, received.handle, received)
        self._rounds[vllm_values.current_ubatch()] = opened
        return self._prepared(opened, quant_config, defer_input_quant)

    def finalize(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Send results home and add them. Collective, waits.

        Args:
            output: ``[T, H]`` float32, float16 or bfloat16, overwritten; zeros for a token without
                an expert.
            fused_expert_output: what experts made of the rows of ``prepare``; see the class.
            topk_weights, topk_ids: those of ``prepare``, or the caller's where it gave None.
            apply_router_weight_on_input: as in ``prepare``.
            weight_and_reduce_impl: vLLM's object that says what is left to do with results.

        Raises:
            InvalidState: no ``prepare`` came before.
            InvalidArgument: shapes or types; the round is still open.
            NotImplementedError: an impl that the class does not take.
            PeerTimeout, PeerAborted, PeerLost: as ``prepare``.

        Stream:
            As ``prepare``, whose round must be on the same one.
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
        opened.exchange.combine(y, opened.handle, output, **more, **stream_of(y))
        del self._rounds[ubatch]

    def allocate_fused_expert_output(
        self, shape: Any, dtype: Any, device: Any, weight_and_reduce_impl: Any
    ) -> Any:
        """Where experts may write so that ``finalize`` copies nothing.

        Returns:
            A tensor of the round's combine buffer, valid until ``finalize``; None where there is
            no round or shape and dtype are not those of its results: then any memory will do.
        """
        opened = self._rounds.get(vllm_values.current_ubatch())
        if opened is None or opened.received is None or name_of(dtype) != opened.rows.dtype:
            return None
        if torch().device(device).type != torch().device(opened.rows.device).type:
            return None
        if int(tuple(shape)[-1]) != opened.rows.hidden:
            return None
        buffer = opened.exchange.combine_buffer(opened.handle, opened.rows.hidden)
        if buffer.numel() != torch().Size(shape).numel():
            return None
        return buffer.view(tuple(shape))

    # --- What classes fill in -------------------------------------------------------------------

    @abstractmethod
    def _exchange(self, rows: Rows) -> AllToAll:
        """The exchange of such rows."""

    def _dispatch_more(self, rows: Rows) -> dict[str, Any]:
        """Arguments of the dispatch beside ids and payloads."""
        return {"topk_weights": rows.topk_weights, **stream_of(rows.payloads[0])}

    @abstractmethod
    def _prepared(
        self, opened: OpenRound, quant_config: Any, defer_input_quant: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        """What ``prepare`` returns."""

    def _combine_more(
        self, topk_weights: Any, apply_router_weight_on_input: bool
    ) -> dict[str, Any]:
        """Arguments of the combine beside results and output."""
        del topk_weights, apply_router_weight_on_input
        return {}

    def _quantised(self, a1: Any, quant_config: Any, defer_input_quant: bool) -> tuple[Any, Any]:
        """Rows to send, and their scales or None."""
        name = type(self).__name__
        return quantised(name, self._quantize, a1, quant_config, defer_input_quant)

    def _results(
        self,
        opened: OpenRound,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Any:
        """The experts' results in the layout of the exchange, one per row."""
        y = reduced(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        return self._in_layout(opened, y)

    @staticmethod
    def _in_layout(opened: OpenRound, y: Any) -> Any:
        if opened.received is None:
            raise InvalidState("finalize: expected the rows of prepare_async to be received first")
        received = opened.received.payloads[0]
        if y.shape[:-1].numel() != received.shape[:-1].numel():
            raise InvalidArgument(
                f"fused_expert_output: expected a result for each row of prepare, "
                f"{list(received.shape[:-1])}, got shape {list(y.shape)}"
            )
        y = y.contiguous().view(*received.shape[:-1], y.shape[-1])
        if any(overlaps(y, payload) for payload in opened.received.payloads):
            return y.clone()  # results that were written over what peers may still write to
        return y

    # --- Within ---------------------------------------------------------------------------------

    def _rows(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        is_weighted: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Rows:
        device = self._manager.check_device(a1, has_gpu_form=self.has_gpu_form)
        if a1.ndim != 2 or topk_ids.ndim != 2 or topk_ids.shape != topk_weights.shape:
            raise InvalidArgument(
                f"expected a1 [T, H], topk_ids and topk_weights [T, K], got {list(a1.shape)}, "
                f"{list(topk_ids.shape)} and {list(topk_weights.shape)}"
            )
        tokens = a1
        if is_weighted:
            check_one_expert(type(self).__name__, topk_ids)
            tokens = a1 * topk_weights.to(a1.dtype)
        sent, scales = self._quantised(tokens, quant_config, defer_input_quant)
        payloads = [sent] if scales is None else [sent, scales]
        return Rows(
            payloads=[payload.contiguous() for payload in payloads],
            topk_ids=topk_ids,
            topk_weights=topk_weights.float(),
            weights_dtype=topk_weights.dtype,
            dtype=name_of(a1.dtype),
            hidden=int(a1.shape[1]),
            num_experts=int(num_experts),
            device=device,
            is_weighted=is_weighted,
        )

    def _checked_exchange(self, rows: Rows, expert_map: Any) -> AllToAll:
        """The exchange of such rows, with a free slot."""
        stale = self._rounds.pop(vllm_values.current_ubatch(), None)
        if stale is not None and not stale.exchange.is_closed:
            # Nobody finalized it, on any rank.
            received = stale.received or stale.exchange.dispatch_recv(stale.handle)
            if received.is_open:
                received.release()
        exchange = self._exchange(rows)
        # Once for each exchange and each content of the map: on a GPU reading it waits.
        version = getattr(expert_map, "_version", None)  # torch counts what writes to a tensor
        known, known_map, known_version = self._checked
        if known() is not exchange or known_map is not expert_map or known_version != version:
            check_experts(exchange, rows.num_experts, expert_map)
            self._checked = weakref.ref(exchange), expert_map, version
        return exchange

    def _round(self, ubatch: int) -> OpenRound:
        if ubatch not in self._rounds:
            raise InvalidState(
                f"{type(self).__name__}.finalize: expected a prepare before it, got none"
            )
        return self._rounds[ubatch]


def manager_of_vllm() -> All2AllManager:
    """The manager of vLLM's expert-parallel group.

    Raises:
        InvalidState: there is none, or it is not one of ours.
    """
    group = vllm_values.group_of("ep")
    manager = getattr(getattr(group, "device_communicator", None), "all2all_manager", None)
    if not isinstance(manager, All2AllManager):
        raise InvalidState(
            "manager: expected one of Fanfold's, or vLLM's expert-parallel group to have one, got "
            f"{manager!r}"
        )
    return manager
