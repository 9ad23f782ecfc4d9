# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's ``moe_a2a_*`` functions over a workspace tensor.

A workspace names a group of ranks: those of its ``MnnvlMemory``, or, where the caller allocated it,
ranks that are threads of this process (on a GPU also one thread that runs every rank in turn).
Its bytes hold counters and routing tables; received rows and results lie in memory of Fanfold's,
which the functions find by the workspace. Received rows are valid until the last combine of their
dispatch, the place for results until the next dispatch.

Every call is made by all ranks, masked ones excepted, in the same order; on the CPU it runs and
waits on the calling thread, on a GPU it is enqueued on torch's current stream. There it may be
captured into a graph after one round outside has made the memory; epochs that replays leave in the
workspace are those of the capture. The counters are made by some twenty small kernels a call, which
the class leaves out as long as nobody reads ``workspace``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fanfold.compat.flashinfer import checks, sizes
from fanfold.compat.flashinfer.errors import CalledTooEarly, Refused
from fanfold.compat.flashinfer.exchanges import Dispatch, OpenRound
from fanfold.compat.flashinfer.quantised import Scaling
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.flashinfer.workspaces import WORKSPACES, WorkspaceRank
from fanfold.errors import InvalidArgument


def moe_a2a_initialize(
    workspace: Any,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> Any:
    """Make one rank's part of a workspace ready.

    Needs no barrier: unlike in FlashInfer, no peer writes into the bytes that this zeroes. Called
    again it begins anew, as every rank must then do; views of before are not to be used.

    Args:
        workspace: ``[ep_size, bytes per rank]`` uint8, contiguous in the rows.
        ep_rank: this rank.
        ep_size: number of ranks.
        max_num_tokens: the most tokens of *one* rank in a round.
        eplb_stats_num_experts: the longest statistics that a dispatch gathers.
        backend: "trtllm".

    Returns:
        The offset table: 10 int64 on the CPU, as ``MoeAlltoAll._METAINFO_INDEX`` names them.

    Raises:
        Refused: the workspace does not fit.
        InvalidArgument: the rank or a size cannot be.
        NotImplementedError: another backend.
    """
    return attach(
        workspace, ep_rank, ep_size, max_num_tokens, eplb_stats_num_experts, backend=backend
    )


def attach(
    workspace: Any,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    num_stats: int,
    *,
    size_per_rank: int | None = None,
    backend: str = "trtllm",
) -> Any:
    """As ``moe_a2a_initialize``; the workspace may have fewer bytes than it stands for."""
    sizes.check_backend(backend)
    if workspace.dtype != torch().uint8 or workspace.dim() != 2 or workspace.shape[0] != ep_size:
        raise Refused(
            f"workspace: expected [{ep_size}, bytes] uint8, got {list(workspace.shape)} "
            f"{workspace.dtype}"
        )
    if not 0 <= ep_rank < ep_size:
        raise Refused(f"ep_rank: expected 0 to {ep_size - 1}, got {ep_rank}")
    num_bytes = sizes.aux_data_size(ep_size, max_num_tokens, num_stats)
    if workspace.shape[1] < num_bytes:
        raise Refused(
            f"workspace: expected at least {num_bytes} bytes per rank, got {workspace.shape[1]}"
        )
    known = {
        "ep_rank": ep_rank,
        "ep_size": ep_size,
        "max_num_tokens": max_num_tokens,
        "num_stats": num_stats,
        "size_per_rank": size_per_rank or int(workspace.shape[1]),
    }
    kept = WORKSPACES.attach(workspace, known)
    workspace[ep_rank, :num_bytes].zero_()
    return torch().tensor(kept.offsets, dtype=torch().int64)


def moe_a2a_dispatch(
    token_selected_experts: Any,
    input_payloads: Sequence[Any],
    workspace: Any,
    metainfo: Any,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: Any = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Any = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: Any = None,
) -> tuple[list[Any], int, Any]:
    """Send each token once to each rank that owns one of its experts, and receive.

    Rows keep the order of the source's tokens. A negative id selects no expert, and an id of
    ``num_experts`` or more is refused on the CPU, where FlashInfer sends both somewhere. Any top-k
    up to 1024 and up to 16 payloads of any row size and order are served.

    Args:
        token_selected_experts: ``[T, top_k]`` int32 global ids.
        input_payloads: each ``[T, ...]``.
        workspace, metainfo: of ``moe_a2a_initialize``.
        runtime_max_tokens_per_rank: m, equal on all ranks, with T <= m <= max_num_tokens.
        ep_rank, ep_size: this rank, and the number of ranks.
        top_k, num_experts: the first E mod R ranks own one expert more.
        enable_pdl: not used.
        eplb_local_stats: ``[n]`` int32 that every rank receives.
        enable_rank_mask, active_rank_mask: which ranks take part, from
            ``moe_a2a_active_rank_mask``.
        backend: "trtllm".
        recv_view_cache: not used: views cost nothing to make.

    Returns:
        Received rows of each payload, ``[ep_size, m, ...]``; the name of the results' bytes for
        ``moe_a2a_wrap_payload_tensor_in_workspace`` and ``moe_a2a_combine``; and the statistics
        ``[ep_size, n]``, or None. Valid until the last combine.

    Raises:
        Refused, InvalidArgument: something does not fit; nothing was sent, and the last dispatch
            can still be combined.
        WorkspaceTooSmall: the payloads need more bytes than the workspace has.
        PeerTimeout, PeerAborted, PeerLost: a rank is late or gone.
    """
    del enable_pdl, recv_view_cache
    sizes.check_backend(backend)
    kept = _kept(workspace, metainfo, ep_rank, ep_size)
    if token_selected_experts.dim() != 2 or token_selected_experts.shape[1] != top_k:
        raise Refused(
            f"token_selected_experts shape mismatch: expected [tokens, {top_k}], got "
            f"{list(token_selected_experts.shape)}"
        )
    active = checks.active_ranks(enable_rank_mask, active_rank_mask, ep_rank, ep_size)
    call = Dispatch(
        topk_ids=token_selected_experts,
        payloads=input_payloads,
        num_experts=num_experts,
        round_max_tokens=runtime_max_tokens_per_rank,
        active=active,
        stats=eplb_local_stats,
    )
    checks.check_dispatch(kept, call)
    opened = kept.open_own(call)
    kept.write_counters(workspace)
    return opened.payloads, kept.combine_offset(), opened.stats


def moe_a2a_dispatch_pair(*args: Any, **kwargs: Any) -> tuple[list[Any], int]:
    """``moe_a2a_dispatch`` as it was before statistics: the first two of its results.

    Import it ``as moe_a2a_dispatch`` for code that unpacks two.
    """
    views, offset, _ = moe_a2a_dispatch(*args, **kwargs)
    return views, offset


def moe_a2a_combine(
    payload: Any,
    local_num_tokens: int,
    workspace: Any,
    metainfo: Any,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: Any = None,
    output_scales: Any = None,
    output_scalar_scale: float = 1.0,
    sf_layout: Any = None,
    output: Any = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Any = None,
    backend: str = "trtllm",
) -> Any:
    """Add up, for each token, the rows that the ranks of its experts made of it.

    The rows are already weighted and summed over a rank's experts. Sums are taken in float32,
    ranks ascending, and rounded once; a token without an expert becomes zeros. FP8 results give
    FP8 sums, where FlashInfer writes past its output. Combine may be called again until the next
    dispatch, by all ranks; the ids then travel once more.

    Args:
        payload: ``[ep_size, m, H]`` float32, float16, bfloat16 or float8_e4m3fn, only read.
        local_num_tokens: T, as dispatched.
        workspace, metainfo, ep_rank, ep_size, runtime_max_tokens_per_rank, top_k: as dispatched.
        combine_payload_offset: of the dispatch.
        payload_in_workspace: ``payload`` lies where
            ``moe_a2a_wrap_payload_tensor_in_workspace`` says; nothing is copied.
        output_dtype: None, the payload's, or that of quantised numbers.
        output_scales: for quantised sums of float16 or bfloat16 rows (``quantised.py``): uint8 with
            ``output_dtype`` float8_e4m3fn (MXFP8) or uint8 (MXFP4), float8_e4m3fn with uint8
            (NVFP4); contiguous, ``ceil(H / block)`` for each token, padded as ``sf_layout`` says;
            overwritten.
        output_scalar_scale: factor of NVFP4's scales.
        sf_layout: FlashInfer's SfLayout or its number; None: linear.
        use_low_precision: round bfloat16 results to FP8 E4M3, saturated and without a scale, as
            FlashInfer sends them; here they travel as bfloat16, so it saves nothing.
        output: ``[T, H]`` of the payload's dtype and device (FP4: ``[T, H / 2]`` uint8),
            contiguous; overwritten.
        enable_pdl: not used.
        enable_rank_mask, active_rank_mask: as dispatched.
        backend: "trtllm".

    Returns:
        ``output``, or a new tensor.

    Raises:
        NotImplementedError: another backend.
        CalledTooEarly: there was no dispatch.
        Refused, InvalidArgument, TypeError: something does not fit; nothing was sent.
        PeerTimeout, PeerAborted, PeerLost: a rank is late or gone.
    """
    del enable_pdl
    sizes.check_backend(backend)
    kept = _kept(workspace, metainfo, ep_rank, ep_size)
    opened = kept.own
    if opened is None:
        raise CalledTooEarly(
            "moe_a2a_combine: expected a dispatch on this workspace before, got none"
        )
    _check_as_dispatched(
        opened,
        local_num_tokens=(local_num_tokens, opened.num_tokens),
        runtime_max_tokens_per_rank=(
            runtime_max_tokens_per_rank,
            opened.call.round_max_tokens,
        ),
        top_k=(top_k, int(opened.call.topk_ids.shape[1])),
        combine_payload_offset=(combine_payload_offset, kept.combine_offset()),
    )
    checks.check_mask_of_dispatch(
        checks.active_ranks(enable_rank_mask, active_rank_mask, ep_rank, ep_size),
        opened.call.active,
    )
    out = checks.combine(
        kept,
        opened,
        payload,
        payload_in_workspace,
        output_dtype,
        output,
        use_low_precision,
        Scaling(output_scales, output_scalar_scale, sf_layout),
    )
    kept.write_counters(workspace)
    return out


def moe_a2a_sanitize_expert_ids(
    expert_ids: Any,
    workspace: Any,
    metainfo: Any,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Overwrite, in place, the ids of rows that carry no token of the latest dispatch.

    Ids of other ranks' experts in rows with a token stay, as in FlashInfer.

    Args:
        expert_ids: ``[ep_size, m, top_k]`` int16, int32 or int64.
        workspace, metainfo, ep_rank: as dispatched.
        invalid_expert_id: what is written.
        enable_pdl: not used.
        backend: "trtllm".

    Raises:
        CalledTooEarly: there was no dispatch.
        InvalidArgument: the ids do not fit.
    """
    del enable_pdl
    sizes.check_backend(backend)
    kept = _kept(workspace, metainfo, ep_rank, int(workspace.shape[0]))
    if kept.latest is None:
        raise CalledTooEarly("moe_a2a_sanitize_expert_ids: expected a dispatch before, got none")
    kept.exchanges.sanitize(kept.latest, expert_ids, invalid_expert_id)


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: Any,
    leading_shape: Sequence[int],
    slice_start: int,
    slice_end: int,
    dtype: Any,
) -> Any:
    """A view of bytes of a workspace: counters as they are, rows where Fanfold has them.

    Args:
        workspace: ``[ep_size, bytes]``, or one rank's row of it.
        leading_shape: leading dimensions of the view; the last is what remains.
        slice_start, slice_end: bytes from the start of ``workspace``. A received payload's, or
            those from a dispatch's combine offset on, mean these rows.
        dtype: of the view.

    Returns:
        ``[*leading_shape, n]``; of rows valid as they are.

    Raises:
        InvalidArgument: the bytes are not those of a whole tensor of this shape.
    """
    num_bytes = slice_end - slice_start
    unit = math.prod(leading_shape) * int(dtype.itemsize)
    if num_bytes < 0 or unit < 1 or num_bytes % unit:
        raise InvalidArgument(
            f"slice_end: expected slice_start + a multiple of {unit} bytes ({list(leading_shape)} "
            f"of {dtype}), got {num_bytes} bytes"
        )
    shape = [*leading_shape, num_bytes // unit]
    kept, place = WORKSPACES.at(workspace, slice_start)
    if kept is not None and kept.latest is not None:
        if place == kept.combine_offset():
            return _results(kept.latest, shape, dtype)
        for region in kept.regions():
            if region.offset == place and num_bytes <= region.num_bytes:
                return _bytes(region.tensor)[:num_bytes].view(dtype).view(shape)
    if workspace.dim() == 1:
        taken = workspace[slice_start:slice_end]
    else:
        row, start = divmod(slice_start, workspace.stride(0))
        taken = workspace[row, start : start + num_bytes]
    if taken.numel() != num_bytes:
        raise InvalidArgument(
            f"slice_end: expected at most the end of a workspace row, got {slice_end}"
        )
    return taken.view(dtype).view(shape)


def _kept(workspace: Any, metainfo: Any, ep_rank: int, ep_size: int) -> WorkspaceRank:
    kept = WORKSPACES.find(workspace, ep_rank)
    if ep_size != kept.ep_size:
        raise Refused(f"ep_size: expected {kept.ep_size}, as initialised, got {ep_size}")
    if metainfo.tolist() != kept.offsets:
        raise Refused(
            f"metainfo: expected the table of moe_a2a_initialize, {kept.offsets}, got "
            f"{metainfo.tolist()}"
        )
    return kept


def _check_as_dispatched(opened: OpenRound, **values: tuple[Any, Any]) -> None:
    for name, (given, expected) in values.items():
        if given != expected:
            raise Refused(f"{name}: expected {expected}, as dispatched, got {given}")


def _results(opened: OpenRound, shape: list[int], dtype: Any) -> Any:
    """The results' rows of a round, if the shape has that many."""
    rows = opened.exchanges.num_ranks * opened.call.round_max_tokens
    hidden, rest = divmod(math.prod(shape), rows)
    if rest:
        raise InvalidArgument(
            f"slice_end: expected a multiple of {rows} rows of results, got shape {shape}"
        )
    return opened.combine_buffer(hidden, dtype).view(shape)


def _bytes(tensor: Any) -> Any:
    return tensor.view(torch().uint8).view(-1)
