# SPDX-License-Identifier: Apache-2.0
"""Grouping of (token, expert) picks by the rank that hosts the expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Grouped:
    """Picks ordered by (rank, token), and the rows they share: one per (rank, token).

    Per pick: ``expert``, ``rank``, ``origin`` (its place in the flattened ids), ``row`` (the row
    it belongs to) and ``column`` (its place among the picks of that row).
    Per row: ``row_rank`` and ``row_token``.
    """

    expert: torch.Tensor
    rank: torch.Tensor
    origin: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    row_rank: torch.Tensor
    row_token: torch.Tensor


def group_picks(ids: torch.Tensor, experts_per_rank: int) -> Grouped:
    """Group ``ids [tokens, top_k]``; every rank hosts equally many consecutive experts."""
    tokens, top_k = ids.shape
    expert = ids.reshape(-1).long()
    origin = torch.arange(tokens * top_k)
    if bool((expert < 0).any()):
        origin = (expert >= 0).nonzero().view(-1)
        expert = expert[origin]
    token = torch.div(origin, top_k, rounding_mode="floor")
    rank = torch.div(expert, experts_per_rank, rounding_mode="floor")
    key = rank * tokens + token
    key, order = torch.sort(key)
    expert, origin = expert[order], origin[order]
    begins = torch.ones_like(key, dtype=torch.bool)
    torch.ne(key[1:], key[:-1], out=begins[1:])
    row = begins.cumsum(0) - 1
    begin = begins.nonzero().view(-1)
    row_key = key[begin]
    row_rank = torch.div(row_key, tokens, rounding_mode="floor")
    return Grouped(
        expert=expert,
        rank=row_rank[row],
        origin=origin,
        row=row,
        column=torch.arange(row.numel()) - begin[row],
        row_rank=row_rank,
        row_token=row_key - row_rank * tokens,
    )
