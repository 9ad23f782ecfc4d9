# SPDX-License-Identifier: Apache-2.0
"""Which rank hosts which expert, and which copy of an expert a token takes; for the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from fanfold.testing.floats import Array


def rank_of_experts(placement: Any, num_experts: int, num_ranks: int) -> list[int]:
    """Return the rank of every (physical) expert."""
    if placement == "linear":
        share, extra = divmod(num_experts, num_ranks)
        sizes = [share + (rank < extra) for rank in range(num_ranks)]
        return [rank for rank, size in enumerate(sizes) for _ in range(size)]
    if placement == "round_robin":
        return [expert % num_ranks for expert in range(num_experts)]
    return [int(rank) for rank in getattr(placement, "rank_of_expert", placement)]


def logical_of_experts(placement: Any, num_experts: int) -> list[int]:
    """Return the logical expert that every physical one is a copy of."""
    logical = getattr(placement, "logical_of_expert", None)
    return list(range(num_experts)) if logical is None else [int(each) for each in logical]


def num_logical_experts(placement: Any, num_experts: int) -> int:
    """Return the number of ids that callers may give."""
    return 1 + max(logical_of_experts(placement, num_experts))


def physical_ids(topk_ids: Array, source_rank: int, logical_of: Sequence[int]) -> Array:
    """Map ids ``[T, K]`` as given to those that travel: copies picked, ids past the end -1.

    Of n copies token t of rank r takes number (r + t) mod n, by ascending physical id.
    """
    ids = topk_ids.astype(numpy.int64)
    num_logical = 1 + max(logical_of)
    copies: list[list[int]] = [[] for _ in range(num_logical)]
    for physical, logical in enumerate(logical_of):
        copies[logical].append(physical)
    out = numpy.where(ids >= num_logical, -1, numpy.maximum(ids, -(2**31)))
    for token, k in zip(*numpy.nonzero(out >= 0), strict=True):
        own = copies[out[token, k]]
        out[token, k] = own[(source_rank + int(token)) % len(own)]
    return out
