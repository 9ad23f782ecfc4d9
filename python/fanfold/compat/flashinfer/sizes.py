# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's arithmetic of workspaces: the offset table, sizes, and which rank owns an expert.

Sizes are FlashInfer's byte for byte, so that what callers compute with them still fits. Received
rows do not lie at these offsets: they are in the memory of an ``AllToAll``, whose regions are fixed
by capacity, and the offsets only name them.
"""

from __future__ import annotations

from fanfold.errors import InvalidArgument

MAX_TOP_K = 22
"""Columns that the routing tables of a workspace have room for."""

_ALIGNMENT = 128

METAINFO_NAMES = (
    "FLAG_VAL",
    "LOCAL_TOKEN_COUNTER",
    "SEND_COUNTERS",
    "RECV_COUNTERS",
    "DISPATCH_COMPLETION_FLAGS",
    "COMBINE_COMPLETION_FLAGS",
    "TOPK_TARGET_RANKS",
    "TOPK_SEND_INDICES",
    "EPLB_GATHERED_STATS",
    "PAYLOAD_DATA",
)
NUM_METAINFO_FIELDS = len(METAINFO_NAMES)
METAINFO_INDEX: dict[str, int] = {
    f"{name}_OFFSET_INDEX": index for index, name in enumerate(METAINFO_NAMES)
}
METAINFO_INDEX["NUM_METAINFO_FIELDS"] = NUM_METAINFO_FIELDS


def check_backend(backend: str) -> None:
    """Only one of FlashInfer's backends has a counterpart here."""
    if backend == "cake":
        raise NotImplementedError(
            'backend: "cake" names generated GPU kernels, which are not served; use "trtllm"'
        )
    if backend != "trtllm":
        raise InvalidArgument(f'backend: expected "trtllm", got {backend!r}')


def metainfo_index_pairs() -> tuple[list[str], list[int]]:
    """The names, as FlashInfer exports them, and the indices of the offset table's fields."""
    names = [f"MOE_A2A_{name}" for name in METAINFO_INDEX]
    return names, list(METAINFO_INDEX.values())


def aligned(num_bytes: int) -> int:
    """The next multiple of 128."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def metainfo_offsets(
    ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int = 0
) -> list[int]:
    """The ten offsets of a workspace row, in bytes, in the order of ``METAINFO_NAMES``.

    Raises:
        InvalidArgument: a size below 1, or (statistics) below 0.
    """
    at_least("ep_size", ep_size, 1)
    at_least("max_num_tokens", max_num_tokens, 1)
    at_least("eplb_stats_num_experts", eplb_stats_num_experts, 0)
    flags, table = 4 * ep_size, 4 * MAX_TOP_K * max_num_tokens
    dispatch_flags = aligned(8 + 2 * flags)
    combine_flags = aligned(dispatch_flags + flags)
    targets = aligned(combine_flags + flags)
    indices = aligned(targets + table)
    stats = aligned(indices + table)
    payload = aligned(stats + flags * eplb_stats_num_experts)
    counters = [0, 4, 8, 8 + flags]
    return [*counters, dispatch_flags, combine_flags, targets, indices, stats, payload]


def aux_data_size(ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int = 0) -> int:
    """Bytes of a workspace row before the payloads."""
    return metainfo_offsets(ep_size, max_num_tokens, eplb_stats_num_experts)[-1]


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Bytes of workspace per rank for rounds of these sizes, as FlashInfer counts them.

    Args:
        ep_size: number of ranks.
        max_num_tokens: the most tokens that *one* rank dispatches in a round.
        total_dispatch_payload_size_per_token: bytes of all payload rows of one token.
        combine_payload_size_per_token: bytes of one row of results.
        eplb_stats_num_experts: length of the statistics that dispatch gathers; 0: none.
        backend: "trtllm".

    Raises:
        InvalidArgument: a size that cannot be.
        NotImplementedError: another backend.
    """
    check_backend(backend)
    at_least("total_dispatch_payload_size_per_token", total_dispatch_payload_size_per_token, 0)
    at_least("combine_payload_size_per_token", combine_payload_size_per_token, 0)
    rows = ep_size * max_num_tokens
    return (
        aligned(aux_data_size(ep_size, max_num_tokens, eplb_stats_num_experts))
        + aligned(rows * total_dispatch_payload_size_per_token)
        + aligned(rows * combine_payload_size_per_token)
    )


def moe_workspace_size_per_rank(
    ep_size: int,
    top_k: int,
    max_num_tokens: int,
    hidden_size: int,
    extra_payload_bytes_per_token: int = 0,
    eplb_stats_num_experts: int = 0,
) -> int:
    """The size for 16-bit hidden states, int32 ids, float32 weights and further payload bytes."""
    row = 2 * hidden_size
    return moe_a2a_get_workspace_size_per_rank(
        ep_size,
        max_num_tokens,
        row + 8 * top_k + extra_payload_bytes_per_token,
        row,
        eplb_stats_num_experts,
    )


def first_experts(num_experts: int, ep_size: int) -> list[int]:
    """Where each rank's experts begin, and the end: the first E mod R ranks own one more."""
    each, more = divmod(num_experts, ep_size)
    return [rank * each + min(rank, more) for rank in range(ep_size + 1)]


def at_least(name: str, value: int, least: int) -> None:
    """Check one size."""
    if value < least:
        raise InvalidArgument(f"{name}: expected at least {least}, got {value}")
