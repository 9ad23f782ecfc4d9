# SPDX-License-Identifier: Apache-2.0
"""What the functions, the class and the backend check before a byte moves; masks of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fanfold.compat.flashinfer.errors import Refused
from fanfold.compat.flashinfer.exchanges import Dispatch, OpenRound, row_bytes
from fanfold.compat.flashinfer.quantised import Quantiser, Scaling, quantiser
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.flashinfer.workspaces import WorkspaceRank
from fanfold.errors import InvalidArgument

MOE_A2A_RANK_MASK_WORDS = 1
"""Words of a mask of up to 64 ranks; of more ranks it has a word for each 64."""


def moe_a2a_active_rank_mask(active_ranks: Sequence[int], ep_size: int) -> Any:
    """The mask of ranks that take part: bit r of the words is set for rank r.

    Args:
        active_ranks: rank numbers.
        ep_size: number of ranks.

    Returns:
        uint64 on the CPU: one word, and one more for each further 64 ranks, which FlashInfer drops.

    Raises:
        InvalidArgument: a rank outside of the group.
    """
    words = [0] * _num_words(ep_size)
    for rank in active_ranks:
        if not 0 <= rank < ep_size:
            raise InvalidArgument(f"active_ranks: expected 0 to {ep_size - 1}, got {rank}")
        words[rank // 64] |= 1 << (rank % 64)
    return torch().tensor(words, dtype=torch().uint64)


def in_low_precision(payload: Any) -> Any:
    """Results as ones that travelled as FP8 E4M3 without a scale arrive: saturated and rounded.

    Raises:
        Refused: they are not bfloat16, which their sums must be.
    """
    if payload.dtype != torch().bfloat16:
        raise Refused(
            "payload: use_low_precision must produce a bf16 output, so expected bfloat16, got "
            f"{payload.dtype}"
        )
    largest = 448.0  # of FP8 E4M3
    return payload.clamp(-largest, largest).to(torch().float8_e4m3fn).to(payload.dtype)


def active_ranks(enabled: bool, mask: Any, ep_rank: int, ep_size: int) -> list[bool] | None:
    """By rank whether it takes part; None: there is no mask.

    Raises:
        Refused: the mask is missing, unasked for or not one of this group.
    """
    if not enabled:
        if mask is not None:
            raise Refused("active_rank_mask requires enable_rank_mask=True")
        return None
    if mask is None:
        raise Refused("active_rank_mask must be defined when enable_rank_mask=True")
    words = _num_words(ep_size)
    if mask.dtype != torch().uint64 or mask.device.type != "cpu" or list(mask.shape) != [words]:
        raise Refused(
            f"active_rank_mask: expected [{words}] uint64 on the CPU, got {list(mask.shape)} "
            f"{mask.dtype} on {mask.device}"
        )
    values = mask.tolist()
    active = [bool(values[rank // 64] >> (rank % 64) & 1) for rank in range(ep_size)]
    if not active[ep_rank]:
        raise Refused("active_rank_mask must mark the local ep_rank as active")
    return active


def check_mask_of_dispatch(given: list[bool] | None, dispatched: list[bool] | None) -> None:
    """Raise ``Refused`` where a combine names other ranks than its dispatch; no mask: all."""
    ranks = given or dispatched or []
    everyone = [True] * len(ranks)
    if (given or everyone) != (dispatched or everyone):
        raise Refused("active_rank_mask: expected the mask of the dispatch")


def check_ids_to_sanitize(payload: Any, top_k: int, index: int) -> None:
    """Raise ``InvalidArgument`` where a payload cannot be ids that ``sanitize`` overwrites."""
    kinds = (torch().int16, torch().int32, torch().int64)
    if payload.dtype in kinds and list(payload.shape[1:]) == [top_k]:
        return
    raise InvalidArgument(
        f"expert_id_payload_index: expected ids [tokens, {top_k}] int16, int32 or int64 in payload "
        f"{index}, got {list(payload.shape)} {payload.dtype}"
    )


def check_dispatch(kept: WorkspaceRank, call: Dispatch) -> None:
    """Check what can be checked before a byte moves or memory is made."""
    check_call(call, kept.ep_size, kept.max_num_tokens, kept.num_stats)
    width = sum(row_bytes(payload) for payload in call.payloads)
    kept.check_room(kept.ep_size * call.round_max_tokens * width)


def check_call(call: Dispatch, ep_size: int, max_num_tokens: int, num_stats: int) -> None:
    """As ``check_dispatch``, where the memory may grow."""
    rows = call.round_max_tokens
    if not 1 <= rows <= max_num_tokens:
        raise Refused(
            f"runtime_max_tokens_per_rank: expected 1 to {max_num_tokens} (max_num_tokens), "
            f"got {rows}"
        )
    if call.num_experts < ep_size:
        raise Refused(
            f"num_experts must be >= ep_size: expected at least {ep_size}, got {call.num_experts}"
        )
    tokens = int(call.topk_ids.shape[0])
    if tokens > rows:
        raise Refused(
            f"token_selected_experts: expected at most runtime_max_tokens_per_rank ({rows}) "
            f"tokens, got {tokens}"
        )
    if not call.payloads:
        raise Refused("input_payloads: expected at least one payload, got none")
    for index, payload in enumerate(call.payloads):
        if payload.dim() < 1 or payload.shape[0] != tokens:
            raise Refused(
                f"input_payloads: payload {index} first dimension must match local_num_tokens "
                f"({tokens}), got {list(payload.shape)}"
            )
    stats = call.stats
    if stats is not None:
        limit = min(num_stats, call.num_experts)
        if stats.dtype != torch().int32 or stats.dim() != 1 or not 1 <= len(stats) <= limit:
            raise Refused(
                f"eplb_local_stats: expected [1 to {limit}] int32 (eplb_stats_num_experts of "
                f"initialize, num_experts), got {list(stats.shape)} {stats.dtype}"
            )


def combine(
    kept: WorkspaceRank,
    opened: OpenRound,
    payload: Any,
    payload_in_workspace: bool,
    output_dtype: Any,
    output: Any,
    use_low_precision: bool,
    scaling: Scaling,
) -> Any:
    """Check results and output, combine, and give the output."""
    check_results(opened, payload)
    made = quantiser(payload, opened.num_tokens, output_dtype, output, scaling)
    if made is None and output_dtype not in (None, payload.dtype):
        raise Refused(
            "output_dtype without output_scales must match payload dtype: expected "
            f"{payload.dtype}, got {output_dtype}"
        )
    if made is not None and use_low_precision:
        raise Refused("use_low_precision must produce a bf16 output, got output_scales as well")
    output = checked_output(opened, payload, output, made)
    if payload_in_workspace:
        place = opened.combine_buffer(int(payload.shape[2]), payload.dtype)
        if place.data_ptr() != payload.data_ptr():
            raise Refused(
                "payload: tensor pointer mismatch: payload_in_workspace=True expects the tensor "
                "that the workspace gives for results of this shape and type, got another"
            )
    sums = output if made is None else checked_output(opened, payload, None)
    opened.combine(in_low_precision(payload) if use_low_precision else payload, sums)
    if made is not None:
        made.write(sums, output)
    kept.combined()
    return output


def check_results(opened: OpenRound, payload: Any) -> None:
    """Check that ``payload`` has the rows of a round."""
    leading = [opened.exchanges.num_ranks, opened.call.round_max_tokens]
    if payload.dim() != 3 or list(payload.shape[:2]) != leading:
        raise Refused(
            f"payload: expected [{leading[0]}, {leading[1]}, hidden], got {list(payload.shape)}"
        )


def checked_output(
    opened: OpenRound, payload: Any, output: Any, made: Quantiser | None = None
) -> Any:
    """``output`` if it fits the results of a round, or a new one where ``payload`` lies."""
    shape = [opened.num_tokens, int(payload.shape[2])] if made is None else made.shape
    dtype = payload.dtype if made is None else made.dtype
    if output is None:
        return payload.new_empty(shape, dtype=dtype)
    if (
        list(output.shape) != shape
        or output.dtype != dtype
        or output.device != payload.device
        or not output.is_contiguous()
    ):
        kind = "contiguous" if output.is_contiguous() else "not contiguous"
        raise InvalidArgument(
            f"output: expected {shape} {dtype} on {payload.device}, contiguous, got "
            f"{list(output.shape)} {output.dtype} on {output.device}, {kind}"
        )
    return output


def _num_words(ep_size: int) -> int:
    return max(MOE_A2A_RANK_MASK_WORDS, -(-ep_size // 64))
