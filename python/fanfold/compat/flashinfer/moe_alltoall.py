# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's class for the MoE all-to-all, over Fanfold's exchange."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fanfold import _core
from fanfold.compat.flashinfer import checks, functions, sizes
from fanfold.compat.flashinfer.errors import CalledTooEarly, CallOrder, Refused
from fanfold.compat.flashinfer.exchanges import Dispatch, OpenRound
from fanfold.compat.flashinfer.groups import communicator_of
from fanfold.compat.flashinfer.mnnvl import MnnvlMemory, default_device
from fanfold.compat.flashinfer.quantised import Scaling
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.flashinfer.workspaces import WORKSPACES, WorkspaceRank
from fanfold.errors import InvalidArgument


class MoeAlltoAll:
    """Dispatch and combine of one rank, in place of FlashInfer 0.7.2's class of this name.

    Constructor, methods, attributes, shapes and defaults are FlashInfer's. Objects of equal sizes
    and group share a workspace, as there. What differs, because FlashInfer's answer is a defect:

    - No round can overwrite rows that a slow rank still reads, whatever the order of growing and
      shrinking ``runtime_max_tokens_per_rank`` and payload sets.
    - Objects that share a workspace may have rounds open at the same time.
    - Payloads of any row size and order, also unaligned, and any top-k up to 1024.
    - A negative id selects no expert; one of ``num_experts`` or more is refused on the CPU.
    - More tokens than ``runtime_max_tokens_per_rank`` are refused.
    - A rank that is masked out counts as having sent nothing, so its old rows are sanitised.
    - FP8 results give FP8 sums.
    - Creation includes the barrier; ``checkpoint_restore`` keeps the statistics.
    - A rank that is late for 300 s, or gone, is an error that names it, and nothing is trapped;
      after ``_reset_workspace`` on every rank new objects work.

    Received rows keep the order of the source's tokens, and sums are deterministic, bit for bit.
    The memory is that of the exchange, about ``workspace_size_per_rank``; it is taken when the
    first dispatch says of what kind it is (with ``hidden_size`` or ``enable_rank_mask``: at
    creation), which makes that call collective and, on a GPU, not fit for a graph capture.

    Args:
        mapping: the group's ranks, an own ``Mapping`` or FlashInfer's.
        max_num_tokens: the most tokens of *one* rank in a round.
        top_k: experts per token.
        num_experts: over all ranks; the first E mod R ranks own one more.
        workspace_size_per_rank: bytes that one rank's rows may need; None: what
            ``get_moe_workspace_size_per_rank`` says for ``hidden_size``.
        hidden_size: elements of a row.
        mnnvl_config: has the communication backend; None: see ``MnnvlMemory.get_comm``.
        eplb_stats_num_experts: the longest statistics that a dispatch gathers.
        enable_rank_mask: dispatch and combine take masks. Results other than bfloat16 must have
            been combined once before a rank is gone: memory is made by all ranks.
        backend: "trtllm".

    Raises:
        InvalidArgument: a size is missing or cannot be, or the group is not the mapping's.
        NotImplementedError: ``backend="cake"``.

    Attributes:
        workspace_size_per_rank, max_num_tokens, top_k, num_experts, ep_rank, ep_size,
        eplb_stats_num_experts, enable_rank_mask: as given and worked out.
        mnnvl_mem: the memory of ``workspace``.
        metainfo: the offset table, 10 int64.
    """

    _METAINFO_INDEX: dict[str, int] | None = None
    _WORKSPACE_CACHE: dict[tuple[Any, ...], dict[str, Any]] = {}  # noqa: RUF012
    _cache_lock = threading.Lock()

    @classmethod
    def _init_constants(cls, backend: str = "trtllm") -> None:
        """Fill ``_METAINFO_INDEX``: names without their prefix -> indices."""
        sizes.check_backend(backend)
        if cls._METAINFO_INDEX is None:
            cls._METAINFO_INDEX = dict(sizes.METAINFO_INDEX)

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> int:
        """Bytes per rank for 16-bit rows, ids, weights and further payload bytes."""
        sizes.check_backend(backend)
        return sizes.moe_workspace_size_per_rank(
            ep_size,
            top_k,
            max_num_tokens,
            hidden_size,
            extra_payload_bytes_per_token,
            eplb_stats_num_experts,
        )

    @classmethod
    def get_workspace(
        cls,
        workspace_size_per_rank: int,
        ep_rank: int,
        ep_size: int,
        max_num_tokens: int,
        mapping: Any,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> dict[str, Any]:
        """The workspace of these sizes and of the mapping's group. Collective where it is made.

        Unlike FlashInfer's, its cache tells groups apart.

        Returns:
            A dict with ``workspace_size_per_rank``, ``max_num_tokens``, ``ep_rank``, ``ep_size``,
            ``eplb_stats_num_experts``, ``mnnvl_mem``, ``workspace`` and ``metainfo``.
        """
        return cls._workspace_of(
            MnnvlMemory.get_comm(mapping),
            mapping,
            workspace_size_per_rank,
            (ep_rank, ep_size, max_num_tokens, eplb_stats_num_experts, backend),
        )

    @classmethod
    def _workspace_of(
        cls,
        communicator: _core.Communicator,
        mapping: Any,
        size_per_rank: int,
        known: tuple[int, int, int, int, str],
    ) -> dict[str, Any]:
        """As ``get_workspace``, of a group; ``known``: its arguments in between."""
        key = (size_per_rank, *known, communicator)
        with cls._cache_lock:
            for closed in [each for each in cls._WORKSPACE_CACHE if each[-1].is_closed]:
                del cls._WORKSPACE_CACHE[closed]
            cached = cls._WORKSPACE_CACHE.get(key)
        if cached is not None:
            return cached
        made = _make_workspace(communicator, mapping, size_per_rank, known)
        with cls._cache_lock:
            cls._WORKSPACE_CACHE[key] = made
        communicator.barrier()
        return made

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        sizes.check_backend(backend)
        sizes.at_least("top_k", top_k, 1)
        sizes.at_least("num_experts", num_experts, 1)
        self._init_constants()
        if mnnvl_config is None:
            communicator = MnnvlMemory.get_comm(mapping)
        else:
            communicator = communicator_of(mapping, mnnvl_config)
            MnnvlMemory.set_comm(mapping, communicator)
        self.ep_size = int(mapping.moe_ep_size)
        self.ep_rank = int(mapping.moe_ep_rank)
        if (self.ep_rank, self.ep_size) != (communicator.rank, communicator.num_ranks):
            raise InvalidArgument(
                f"mapping: expected moe_ep_size {communicator.num_ranks}, the ranks of its group, "
                f"got {self.ep_size}; with tensor parallelism name moe_ep_size"
            )
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise InvalidArgument(
                    "hidden_size: expected it or workspace_size_per_rank, got neither"
                )
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                self.ep_size,
                top_k,
                max_num_tokens,
                hidden_size,
                eplb_stats_num_experts=eplb_stats_num_experts,
            )
        self.max_num_tokens = max_num_tokens
        self.top_k = top_k
        self.num_experts = num_experts
        self.workspace_size_per_rank = workspace_size_per_rank
        self.eplb_stats_num_experts = eplb_stats_num_experts
        self.enable_rank_mask = enable_rank_mask
        self._mapping = mapping
        self._backend = backend
        self._communicator: _core.Communicator = communicator
        self._round: OpenRound | None = None
        self._stats: Any = None
        self._take_workspace()
        if hidden_size is not None:
            row = 2 * hidden_size
            self._prepare(row + 8 * top_k, row)
        elif enable_rank_mask:
            # A group that has lost a rank makes no memory: room for any division of the bytes.
            rows = self.ep_size * max_num_tokens
            spare = max(workspace_size_per_rank - self._kept.offsets[-1], 16) // rows
            self._prepare(spare, spare)

    @property
    def workspace(self) -> Any:
        """``[ep_size, bytes]`` uint8: counters and tables of the latest dispatch, as asked for.

        They are written when this is read. Row r is rank r's. Rows of tokens are elsewhere; on a
        GPU the tensor ends before where FlashInfer has them.
        """
        self._check_mapped()
        self._kept.write_counters(self._workspace)
        return self._workspace

    @property
    def eplb_gathered_stats(self) -> Any:
        """``[ep_size, n]`` int32, between a dispatch with statistics and its combine; else None."""
        return self._stats

    def dispatch(
        self,
        token_selected_experts: Any,
        input_payloads: Sequence[Any],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Any = None,
        active_rank_mask: Any = None,
    ) -> list[Any]:
        """Send each token once to each rank that owns one of its experts, and receive.

        Args:
            token_selected_experts: ``[T, top_k]`` int32 global ids; negative: no expert.
            input_payloads: up to 16, each ``[T, ...]``, only read.
            runtime_max_tokens_per_rank: m, equal on all ranks, T <= m <= max_num_tokens.
            invalid_token_expert_id: written to the ids of rows that carry no token.
            expert_id_payload_index: which payload has the ids, ``[T, top_k]``.
            eplb_local_stats: ``[n]`` int32 that every rank receives.
            active_rank_mask: ranks that take part, with ``enable_rank_mask``; None: all.

        Returns:
            For each payload ``[ep_size, m, ...]``; the rows of source r first in ``[r]``, in the
            order of its tokens, and unspecified after them. Valid until the combine.

        Raises:
            CallOrder: the last dispatch has no combine yet.
            Refused, InvalidArgument, WorkspaceTooSmall: something does not fit; nothing was sent.
            PeerTimeout, PeerAborted, PeerLost: a rank is late or gone.

        Stream:
            GPU: enqueued on torch's current stream. CPU: runs and waits on this thread.
        """
        self._check_mapped()
        if self._round is not None:
            raise CallOrder("dispatch called twice without combine")
        if invalid_token_expert_id is not None and expert_id_payload_index is None:
            raise CallOrder("expert_id_payload_index required when invalid_token_expert_id is set")
        columns = token_selected_experts.shape[1:]
        if list(columns) != [self.top_k]:
            raise Refused(
                f"token_selected_experts shape mismatch: expected [tokens, {self.top_k}], got "
                f"{list(token_selected_experts.shape)}"
            )
        index = expert_id_payload_index
        if index is not None and not 0 <= index < len(input_payloads):
            raise InvalidArgument(
                f"expert_id_payload_index: expected 0 to {len(input_payloads) - 1}, got {index}"
            )
        if invalid_token_expert_id is not None and index is not None:
            checks.check_ids_to_sanitize(input_payloads[index], self.top_k, index)
        call = Dispatch(
            topk_ids=token_selected_experts,
            payloads=input_payloads,
            num_experts=self.num_experts,
            round_max_tokens=runtime_max_tokens_per_rank,
            active=self._active(active_rank_mask),
            stats=eplb_local_stats,
        )
        checks.check_dispatch(self._kept, call)
        opened = self._kept.open(call)
        self._round = opened
        self._stats = opened.stats
        if invalid_token_expert_id is not None and index is not None:
            self._kept.exchanges.sanitize(opened, opened.payloads[index], invalid_token_expert_id)
        return opened.payloads

    def combine(
        self,
        payload: Any,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: Any = None,
        output_scales: Any = None,
        output_scalar_scale: float = 1.0,
        sf_layout: Any = None,
        output: Any = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: Any = None,
    ) -> Any:
        """Add up, for each token, what the ranks of its experts made of it; ends the round.

        Args:
            payload: ``[ep_size, m, H]`` float32, float16, bfloat16 or float8_e4m3fn: rows that are
                weighted and summed over this rank's experts already. Only read.
            runtime_max_tokens_per_rank: m, as dispatched.
            payload_in_workspace: ``payload`` is what ``get_combine_payload_tensor_in_workspace``
                gave; nothing is copied.
            output_dtype: None, the payload's, or that of quantised numbers.
            output_scales, output_scalar_scale, sf_layout: as ``moe_a2a_combine``.
            use_low_precision: round bfloat16 results to FP8 E4M3, saturated and without a scale, as
                FlashInfer sends them; here they travel as bfloat16, so it saves nothing.
            output: ``[T, H]`` of the payload's dtype and device, contiguous (FP4: ``[T, H / 2]``
                uint8); overwritten.
            active_rank_mask: as dispatched.

        Returns:
            ``output``, or a new tensor: sums in float32, ranks ascending, rounded once.

        Raises:
            CallOrder: there was no dispatch.
            Refused, InvalidArgument, TypeError: something does not fit; the round is still open.
            PeerTimeout, PeerAborted, PeerLost: a rank is late or gone.

        Stream:
            As ``dispatch``.
        """
        self._check_mapped()
        opened = self._round
        if opened is None:
            raise CallOrder("combine called before successful dispatch")
        self._check_rows(runtime_max_tokens_per_rank)
        checks.check_mask_of_dispatch(self._active(active_rank_mask), opened.call.active)
        self._kept.check_room(
            sum(view.numel() * view.element_size() for view in opened.payloads),
            payload.numel() * payload.element_size(),
        )
        out = checks.combine(
            self._kept,
            opened,
            payload,
            payload_in_workspace,
            output_dtype,
            output,
            use_low_precision,
            Scaling(output_scales, output_scalar_scale, sf_layout),
        )
        opened.end()
        self._round = None
        self._stats = None
        return out

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: Any
    ) -> Any:
        """``[ep_size, m, hidden_size]`` for the experts to write to. Contents are unspecified.

        It never overlaps the received rows, and is valid until the combine.

        Raises:
            CalledTooEarly: there is no open round.
        """
        self._check_mapped()
        if self._round is None:
            raise CalledTooEarly(
                "get_combine_payload_tensor_in_workspace called before successful dispatch"
            )
        self._check_rows(runtime_max_tokens_per_rank)
        return self._round.combine_buffer(hidden_size, dtype)

    def checkpoint_prepare(self) -> None:
        """Give the memory up until ``checkpoint_restore``. Collective, between rounds."""
        self._check_mapped()
        if not self._kept.exchanges.is_idle:
            raise CallOrder("checkpoint_prepare called between dispatch and combine")
        self._kept.close()
        self._is_mapped = False

    def checkpoint_restore(self, comm_backend: Any = None) -> None:
        """Take memory again, of the same sizes, statistics included. Collective.

        Exchanges are made anew at the next dispatch, on the communicator that the object has.

        Args:
            comm_backend: checked to be of the same ranks.
        """
        if comm_backend is not None:
            found = (comm_backend.Get_rank(), comm_backend.Get_size())
            if found != (self.ep_rank, self.ep_size):
                raise InvalidArgument(
                    f"comm_backend: expected rank {self.ep_rank} of {self.ep_size}, as before, "
                    f"got rank {found[0]} of {found[1]}"
                )
        self._communicator.barrier()
        self._is_mapped = True

    def _reset_workspace(self) -> None:
        """Drop the workspace from the cache; this object is not usable any more."""
        with MoeAlltoAll._cache_lock:
            cache = MoeAlltoAll._WORKSPACE_CACHE
            for key in [key for key, value in cache.items() if value is self._shared]:
                del cache[key]
        self._is_mapped = False

    def _take_workspace(self) -> None:
        self._shared = self._workspace_of(
            self._communicator,
            self._mapping,
            self.workspace_size_per_rank,
            (
                self.ep_rank,
                self.ep_size,
                self.max_num_tokens,
                self.eplb_stats_num_experts,
                self._backend,
            ),
        )
        self.mnnvl_mem: MnnvlMemory = self._shared["mnnvl_mem"]
        self.metainfo = self._shared["metainfo"]
        self._workspace = self._shared["workspace"]
        self._kept: WorkspaceRank = WORKSPACES.find(self._workspace, self.ep_rank)
        self._is_mapped = True

    def _prepare(self, dispatch_bytes: int, combine_bytes: int) -> None:
        self._kept.exchanges.prepare(
            self.mnnvl_mem.device,
            self.num_experts,
            self.top_k,
            dispatch_bytes,
            combine_bytes,
            self.eplb_stats_num_experts,
        )

    def _check_mapped(self) -> None:
        if not self._is_mapped:
            raise CalledTooEarly(
                "MNNVL handles are unmapped: checkpoint_prepare or _reset_workspace was called"
            )

    def _check_rows(self, given: int) -> None:
        opened = self._round
        if opened is not None and given != opened.call.round_max_tokens:
            raise Refused(
                f"runtime_max_tokens_per_rank: expected {opened.call.round_max_tokens}, as "
                f"dispatched, got {given}"
            )

    def _active(self, mask: Any) -> list[bool] | None:
        if mask is None:
            return None
        return checks.active_ranks(self.enable_rank_mask, mask, self.ep_rank, self.ep_size)


def _make_workspace(
    communicator: _core.Communicator,
    mapping: Any,
    size_per_rank: int,
    known: tuple[int, int, int, int, str],
) -> dict[str, Any]:
    ep_rank, ep_size, max_num_tokens, num_stats, backend = known
    num_bytes = sizes.aux_data_size(ep_size, max_num_tokens, num_stats)
    if size_per_rank < num_bytes:
        raise InvalidArgument(
            f"workspace_size_per_rank: expected at least {num_bytes} bytes, got {size_per_rank}"
        )
    device = default_device()
    # Shared memory of the host takes up no room before it is touched; a GPU's does.
    reserved = size_per_rank if device == "cpu" else num_bytes
    memory = MnnvlMemory(mapping, reserved, device=device, communicator=communicator)
    workspace = memory.as_torch_strided_tensor(torch().uint8)
    metainfo = functions.attach(
        workspace,
        ep_rank,
        ep_size,
        max_num_tokens,
        num_stats,
        size_per_rank=size_per_rank,
        backend=backend,
    )
    return {
        "workspace_size_per_rank": size_per_rank,
        "max_num_tokens": max_num_tokens,
        "ep_rank": ep_rank,
        "ep_size": ep_size,
        "eplb_stats_num_experts": num_stats,
        "mnnvl_mem": memory,
        "workspace": workspace,
        "metainfo": metainfo,
    }
