# SPDX-License-Identifier: Apache-2.0
"""Fanfold as a backend of ``flashinfer.moe_ep``, under a name of its own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import Any

from fanfold import _core
from fanfold.compat.flashinfer import checks, groups, sizes
from fanfold.compat.flashinfer.errors import CalledTooEarly, CallOrder, Refused
from fanfold.compat.flashinfer.exchanges import Dispatch, Exchanges, OpenRound
from fanfold.compat.flashinfer.mnnvl import default_device
from fanfold.compat.flashinfer.ranks import OwnRank
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.errors import InvalidArgument, Unsupported

BACKEND_NAME = "fanfold"


@dataclass
class FanfoldConfig:
    """Options of the backend, for ``create_communication(..., backend=FanfoldConfig(...))``.

    Attributes:
        backend_name: of the registry.
        extra_payload_bytes_per_token: what the rows of a token take beside what the sizes say, such
            as scales; room for it is made from the start.
        eplb_stats_num_experts: the longest statistics that a dispatch gathers.
        enable_rank_mask: dispatch and combine take masks.
        use_low_precision_combine: round bfloat16 results to FP8 E4M3, saturated and without a
            scale, as FlashInfer sends them; here they travel as bfloat16, so it saves nothing.
        comm_backend: a ``CommBackend`` of the group's ranks; None: the bootstrap's process group.
    """

    backend_name: str = BACKEND_NAME
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None


def register(name: str = BACKEND_NAME) -> type:
    """Let ``flashinfer.moe_ep.create_communication`` pick Fanfold by name.

    Args:
        name: in the registry.

    Returns:
        The class that was registered, a ``flashinfer.moe_ep.MoEEpCommunication``.

    Raises:
        Unsupported: flashinfer is not installed, or has no such registry.
    """
    moe_ep = _moe_ep()
    made = implementation(moe_ep, moe_ep.MoEEpCommunication, name)
    registered: type = moe_ep.register_communication(name)(made)
    return made if registered is None else registered


def implementation(moe_ep: Any, base: type, name: str) -> type:
    """A subclass of ``base`` whose rows Fanfold moves."""

    def __init__(  # noqa: N807
        self: Any, bootstrap: Any, params: Any, config: Any = None, **options: Any
    ) -> None:
        moe_ep.MoEEpCommunication.__init__(self, bootstrap, params)
        self.start(bootstrap, params, config, options)

    members = {
        "__init__": __init__,
        "__doc__": RankMajorExchange.__doc__,
        "__module__": __name__,
        "backend_name": name,
        "supports_cuda_graph": True,
        "result_type": moe_ep.MoEEpDispatchResult,
    }
    return type(base)("FanfoldAlltoAll", (RankMajorExchange, base), members)


class RankMajorExchange:
    """Dispatch and combine of one rank with the contract of ``MoEEpCommunication``.

    Received tensors have ``ranks * tokens_per_rank`` rows, those of source r from ``r *
    tokens_per_rank`` on in the order of its tokens, at most one per token and rank; ids are
    global, and rows without a token have ``params.invalid_expert_id``. The experts weight and add
    what is theirs of a row, combine adds over the ranks. Any number of experts is served, any
    top-k up to 1024, and rows of any size; a row that outgrows what ``params`` says makes the
    memory grow, on all ranks.

    On the CPU calls run and wait on the calling thread; on a GPU they are enqueued on torch's
    current stream. One round at a time.
    """

    result_type: Any
    backend_name: str

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Whether rows of this machine's tensors can be moved: on a GPU the build must have it."""
        return not torch().cuda.is_available() or bool(_core.build_info()["cuda"])

    def start(self, bootstrap: Any, params: Any, config: Any, options: dict[str, Any]) -> None:
        """Join the group. Collective.

        Args:
            bootstrap: ``world_size``, ``rank`` and ``process_group`` of the expert-parallel group.
            params: sizes.
            config: any object with fields of ``FanfoldConfig``, or None.
            options: such fields by name.

        Raises:
            TypeError: an option of no known name.
            InvalidArgument: the group is not the bootstrap's, or a size cannot be.
        """
        known = {each.name for each in fields(FanfoldConfig)} - {"backend_name"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise TypeError(f"options: expected {', '.join(sorted(known))}, got {unknown}")
        values = {name: getattr(config, name, None) for name in known} | options
        self._has_low_precision = bool(values["use_low_precision_combine"])
        self._params = params
        self._num_stats = int(values["eplb_stats_num_experts"] or 0)
        self._takes_masks = bool(values["enable_rank_mask"])
        backend = values["comm_backend"]
        if backend is not None:
            self._communicator = groups.communicator_from(backend)
        else:
            self._communicator = _core.Communicator.from_torch(bootstrap.process_group)
        self.rank, self.num_ranks = self._communicator.rank, self._communicator.num_ranks
        if (self.rank, self.num_ranks) != (bootstrap.rank, bootstrap.world_size):
            raise InvalidArgument(
                f"bootstrap: expected rank {self.rank} of {self.num_ranks}, as the group has it, "
                f"got rank {bootstrap.rank} of {bootstrap.world_size}"
            )
        if params.num_experts < self.num_ranks:
            raise InvalidArgument(
                f"num_experts: expected at least {self.num_ranks}, one per rank, got "
                f"{params.num_experts}"
            )
        sizes.at_least("max_tokens_per_rank", params.max_tokens_per_rank, 1)
        self._token_dtype = params.dtype or _bfloat16()
        extra = int(values["extra_payload_bytes_per_token"] or 0)
        sizes.at_least("extra_payload_bytes_per_token", extra, 0)
        row = params.hidden_size * self._token_dtype.itemsize
        dispatched = params.dispatch_bytes_per_token + extra
        self._exchanges = Exchanges(
            OwnRank(self._communicator),
            params.max_tokens_per_rank,
            dispatched + row,
            dispatch_row_bytes=dispatched,
        )
        self._exchanges.foresee(str(self._token_dtype).removeprefix("torch."), row)
        if self._takes_masks:
            # A group that has lost a rank makes no memory.
            self._exchanges.prepare(
                default_device(),
                params.num_experts,
                params.top_k,
                dispatched,
                row,
                self._num_stats,
            )
        self._round: OpenRound | None = None

    def dispatch(
        self,
        hidden_states: Any,
        topk_ids: Any,
        topk_weights: Any = None,
        *,
        hidden_states_scale: Any = None,
        max_tokens_per_rank: int | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Any = None,
        active_rank_mask: Any = None,
    ) -> Any:
        """Send each token once to each rank that owns one of its experts, and receive.

        Args:
            hidden_states: ``[T, *]`` rows, quantised or not.
            topk_ids: ``[T, top_k]`` integers; negative: no expert.
            topk_weights: ``[T, top_k]``, sent as float32; or None.
            hidden_states_scale: ``[T, *]``, or None.
            max_tokens_per_rank: m, equal on all ranks; None: that of ``params``.
            runtime_max_tokens_per_rank: another name for it, of other versions.
            eplb_local_stats: ``[n]`` int32 that every rank receives.
            active_rank_mask: ranks that take part, from ``active_rank_mask``; None: all.

        Returns:
            A ``MoEEpDispatchResult``, valid until the combine.

        Raises:
            CallOrder: the last dispatch has no combine yet.
            Refused, InvalidArgument: something does not fit; nothing was sent.
            PeerTimeout, PeerAborted, PeerLost: a rank is late or gone.
        """
        if self._round is not None:
            raise CallOrder("dispatch called twice without combine")
        params = self._params
        rows = params.max_tokens_per_rank
        for given in (runtime_max_tokens_per_rank, max_tokens_per_rank):
            rows = rows if given is None else given
        if list(topk_ids.shape) != [hidden_states.shape[0], params.top_k]:
            raise Refused(
                f"topk_ids: expected [{hidden_states.shape[0]}, {params.top_k}], got "
                f"{list(topk_ids.shape)}"
            )
        payloads = [hidden_states]
        if hidden_states_scale is not None:
            payloads.append(hidden_states_scale)
        call = Dispatch(
            topk_ids=topk_ids,
            payloads=payloads,
            num_experts=params.num_experts,
            round_max_tokens=rows,
            topk_weights=None if topk_weights is None else topk_weights.float(),
            invalid_expert_id=params.invalid_expert_id,
            active=self._active(active_rank_mask),
            stats=eplb_local_stats,
        )
        checks.check_call(call, self.num_ranks, params.max_tokens_per_rank, self._num_stats)
        opened = self._exchanges.open(call)
        self._round = opened
        received = opened.received
        weights, scale = received.topk_weights, opened.payloads[1:]
        return self.result_type(
            hidden_states=opened.payloads[0].flatten(0, 1),
            topk_ids=received.topk_ids.flatten(0, 1),
            topk_weights=None if weights is None else weights.flatten(0, 1),
            tokens_per_rank=rows,
            hidden_states_scale=scale[0].flatten(0, 1) if scale else None,
            eplb_gathered_stats=opened.stats,
        )

    def get_combine_input_buffer(self, dtype: Any = None) -> Any:
        """``[ranks * m, hidden_size]`` for the experts to write to, so that nothing is copied.

        Args:
            dtype: of the results; None: that of ``params``.

        Raises:
            CalledTooEarly: there is no open round.
        """
        if self._round is None:
            raise CalledTooEarly("get_combine_input_buffer called before dispatch")
        place = self._round.combine_buffer(self._params.hidden_size, dtype or self._token_dtype)
        return place.flatten(0, 1)

    def combine(
        self, expert_output: Any, *, output: Any = None, active_rank_mask: Any = None
    ) -> Any:
        """Add up what the ranks of each token's experts made of it; ends the round.

        Args:
            expert_output: ``[ranks * m, H]`` or ``[ranks, m, H]``, float32, float16, bfloat16 or
                float8_e4m3fn; only read.
            output: ``[T, H]`` of its dtype, contiguous; overwritten.
            active_rank_mask: as dispatched; None: that.

        Returns:
            ``output``, or a new tensor.

        Raises:
            CallOrder: there was no dispatch.
            Refused, InvalidArgument, TypeError: something does not fit; the round is still open.
            PeerTimeout, PeerAborted, PeerLost: a rank is late or gone.
        """
        opened = self._round
        if opened is None:
            raise CallOrder("combine called before dispatch")
        if active_rank_mask is not None:
            checks.check_mask_of_dispatch(self._active(active_rank_mask), opened.call.active)
        rows = self.num_ranks * opened.call.round_max_tokens
        if expert_output.dim() == 2 and expert_output.shape[0] == rows:
            expert_output = expert_output.unflatten(0, (self.num_ranks, -1))
        checks.check_results(opened, expert_output)
        output = checks.checked_output(opened, expert_output, output)
        if self._has_low_precision:
            expert_output = checks.in_low_precision(expert_output)
        opened.combine(expert_output, output)
        opened.end()
        self._round = None
        return output

    def active_rank_mask(self, active_ranks: Any) -> Any:
        """The mask of these ranks, for dispatch and combine."""
        return checks.moe_a2a_active_rank_mask(active_ranks, self.num_ranks)

    def destroy(self) -> None:
        """Give the memory back. Collective, between rounds."""
        if self._round is not None:
            raise CallOrder("destroy called between dispatch and combine")
        self._exchanges.close()

    def _active(self, mask: Any) -> list[bool] | None:
        if mask is None:
            return None
        return checks.active_ranks(self._takes_masks, mask, self.rank, self.num_ranks)


def _moe_ep() -> Any:
    try:
        moe_ep = importlib.import_module("flashinfer.moe_ep")
    except ImportError as error:
        raise Unsupported(
            f"flashinfer.moe_ep: expected flashinfer 0.7.2 to be installed, got {error}"
        ) from error
    for name in ("register_communication", "MoEEpCommunication", "MoEEpDispatchResult"):
        if not hasattr(moe_ep, name):
            raise Unsupported(f"flashinfer.moe_ep: expected {name}, as in 0.7.2, got none")
    return moe_ep


def _bfloat16() -> Any:
    return torch().bfloat16
