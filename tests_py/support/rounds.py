# SPDX-License-Identifier: Apache-2.0
"""Small rounds for tests that look at one behaviour. Free of torch, for processes as ranks."""

from __future__ import annotations

from typing import Any

import numpy

import fanfold

STRATEGIES = ("one_sided", "broadcast")
# All that give layout rank_major, and all.
PADDED_STRATEGIES = (*STRATEGIES, "gather_scatter", "batched", "two_sided", "low_latency")
ALL_STRATEGIES = (*PADDED_STRATEGIES, "high_throughput")
MASKING_STRATEGIES = ("one_sided", "low_latency", "high_throughput")
DEFAULTS: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 2,
    "max_tokens_per_rank": 4,
    "hidden": 8,
    "dtype": "float32",
    "extra_bytes_per_token": 64,
    "strategy": "one_sided",
    "layout": "rank_major",
    "weighting": "applied",
    "timeout_s": 20.0,
}


def make(comm: fanfold.Communicator, **config: Any) -> fanfold.AllToAll:
    """Make an AllToAll: four experts, top-2, four tokens, hidden 8, float32 unless told so.

    high_throughput has no padded layouts: flat, unless told so.
    """
    if config.get("strategy") == "high_throughput":
        config = {"layout": "flat", **config}
    return fanfold.AllToAll(comm, **{**DEFAULTS, **config})


def layout_per_expert(strategy: str) -> str:
    """Return a layout per expert that the strategy gives."""
    return "flat_by_expert" if strategy == "high_throughput" else "expert_major"


def of_expert(recv: fanfold.Received, rows: Any, expert: int) -> numpy.ndarray:
    """Return the rows of one local expert, in a layout per expert."""
    count = int(recv.expert_counts[expert])
    if numpy.ndim(recv.source_rank) == 2:
        return numpy.asarray(rows)[expert, :count]
    first = int(recv.offsets[expert])
    return numpy.asarray(rows)[first : first + count]


def counts_for_sanitize(recv: fanfold.Received) -> Any:
    """Return the counts that tell which received ids belong to tokens."""
    return recv.rank_counts if numpy.ndim(recv.topk_ids) == 3 else recv.num_rows


def ids(*rows: list[int], dtype: str = "int32", top_k: int = 2) -> numpy.ndarray:
    """Return ids, one row per token; none at all for T = 0."""
    return numpy.array(rows, dtype).reshape(len(rows), top_k)


def weights(*rows: list[float], top_k: int = 2) -> numpy.ndarray:
    """Return float32 weights, one row per token."""
    return numpy.array(rows, numpy.float32).reshape(len(rows), top_k)


def tokens(
    num_tokens: int, hidden: int = 8, rank: int = 0, dtype: str = "float32"
) -> numpy.ndarray:
    """Return rows that differ from each other and between ranks."""
    rows = numpy.arange(num_tokens * hidden).reshape(num_tokens, hidden) + 1
    return (rows + 1000 * rank).astype(dtype)


def random_ids(
    seed: int, num_tokens: int, top_k: int = 2, num_experts: int = 4, dtype: str = "int32"
) -> numpy.ndarray:
    """Draw valid ids, no expert twice in a token."""
    rng = numpy.random.default_rng(seed)
    return rng.random((num_tokens, num_experts)).argsort(axis=1)[:, :top_k].astype(dtype)


def row_weights(recv: fanfold.Received, local_experts: list[int]) -> numpy.ndarray:
    """Sum each received row's weights over the experts that are here (a layout per rank)."""
    is_local = numpy.isin(numpy.asarray(recv.topk_ids), local_experts)
    if recv.topk_weights is None:
        return is_local.sum(-1).astype(numpy.float32)
    return numpy.where(is_local, numpy.asarray(recv.topk_weights), 0).sum(-1)


def identity_experts(recv: fanfold.Received, a2a: fanfold.AllToAll) -> numpy.ndarray:
    """Return what experts that change nothing give for payload 0, weighted where the rank must."""
    rows = numpy.asarray(recv.payloads[0])
    if recv.topk_ids is None:  # one expert per row
        return rows.copy()
    factors = row_weights(recv, list(a2a.local_experts)).astype(rows.dtype)
    return numpy.where(factors[..., None] != 0, rows * factors[..., None], 0).astype(rows.dtype)


def echo(
    a2a: fanfold.AllToAll,
    topk_ids: numpy.ndarray,
    x: numpy.ndarray,
    topk_weights: numpy.ndarray | None = None,
    **more: Any,
) -> numpy.ndarray:
    """Run one round of experts that change nothing; returns the result."""
    recv = a2a.dispatch(topk_ids, [x], topk_weights=topk_weights, **more)
    return numpy.asarray(recv.combine(identity_experts(recv, a2a)))


def works(a2a: fanfold.AllToAll, rank: int, num_rounds: int = 2) -> None:
    """Run rounds of random distinct ids and check the results; T differs between ranks."""
    top_k, num_experts = int(a2a.metainfo["top_k"]), int(a2a.metainfo["num_experts"])
    limit = int(a2a.metainfo["max_tokens_per_rank"])
    for step in range(num_rounds):
        num_tokens = (rank + step) % (limit + 1)
        topk_ids = random_ids(100 * step + rank, num_tokens, top_k, num_experts)
        x = tokens(num_tokens, rank=rank)
        numpy.testing.assert_array_equal(echo(a2a, topk_ids, x), x * top_k)
