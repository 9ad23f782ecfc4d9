# SPDX-License-Identifier: Apache-2.0
"""The counters and routing tables of FlashInfer's workspace, worked out from a round.

Fanfold has no use for them; they are there for code that looks into the workspace through the
offset table. Unlike FlashInfer's, slots are in the order of the tokens, and a rank that is masked
out has 0 for what it sent. The tables have 22 columns at most: of a round with more ids per token
they hold -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fanfold.compat.flashinfer.exchanges import OpenRound
from fanfold.compat.flashinfer.sizes import MAX_TOP_K
from fanfold.compat.flashinfer.with_torch import torch


def write(row: Any, offsets: list[int], epochs: tuple[int, int], opened: OpenRound) -> None:
    """Write all fields of the offset table into one rank's row.

    Args:
        row: ``[bytes]`` uint8.
        offsets: of the fields.
        epochs: those of the latest dispatch and combine; each call counts one further.
        opened: the latest dispatch.
    """
    call = opened.call
    ids = call.topk_ids
    active = call.active or [True] * opened.exchanges.num_ranks
    targets, indices, sent = routing_tables(ids, call.num_experts, active)
    _fill(row, offsets[0], [max(epochs)])
    _fill(row, offsets[1], [int(ids.shape[0])])
    _put(row, offsets[2], sent)
    _put(row, offsets[3], opened.counts)
    _fill(row, offsets[4], [epochs[0] * is_active for is_active in active])
    _fill(row, offsets[5], [epochs[1] * is_active for is_active in active])
    if ids.shape[1] > MAX_TOP_K:
        targets = indices = torch().full_like(ids[:, :MAX_TOP_K], -1)
    _put(row, offsets[6], targets)
    _put(row, offsets[7], indices)
    if opened.stats is not None:
        _put(row, offsets[8], opened.stats)


def routing_tables(ids: Any, num_experts: int, active: Sequence[bool]) -> tuple[Any, Any, Any]:
    """Where each token goes. On a GPU kernels alone, which a graph capture may hold.

    Args:
        ids: ``[T, K]`` global ids; those that name no expert go nowhere.
        num_experts: E, over all ranks.
        active: by rank whether it takes part.

    Returns:
        Target ranks ``[T, K]`` and slots there ``[T, K]``, both -1 where the token goes nowhere or
        an earlier column already sent it there; and ``[R]`` tokens for each rank. All int32.
    """
    ep_size = len(active)
    each, more = divmod(num_experts, ep_size)
    wanted = ids.long()
    # The first `more` ranks own one expert more.
    late = torch().div(wanted - more * (each + 1), max(each, 1), rounding_mode="floor") + more
    early = torch().div(wanted, each + 1, rounding_mode="floor")
    owner = torch().where(wanted < more * (each + 1), early, late)
    goes = (wanted >= 0) & (wanted < num_experts)
    for rank, is_active in enumerate(active):
        if not is_active:
            goes &= owner != rank
    safe = owner.clamp(min=0, max=ep_size - 1)
    hits = torch().zeros((ids.shape[0], ep_size + 1), dtype=torch().int64, device=ids.device)
    hits.scatter_(1, torch().where(goes, safe, ep_size), 1)
    hits = hits[:, :ep_size]
    slots = hits.cumsum(0) - 1
    same = (owner[:, :, None] == owner[:, None, :]) & goes[:, :, None] & goes[:, None, :]
    earlier = same.tril(-1).any(2)
    sends = goes & ~earlier
    targets = torch().where(sends, owner, -1)
    indices = torch().where(sends, slots.gather(1, safe), -1)
    return targets.int(), indices.int(), hits.sum(0).int()


def _fill(row: Any, offset: int, values: Sequence[int]) -> None:
    """Write numbers of the host's: equal ones with one kernel each, nothing is copied."""
    words = row[offset : offset + 4 * len(values)].view(torch().int32)
    words.fill_(max(values))
    for index, value in enumerate(values):
        if value != max(values):
            words[index].fill_(value)


def _put(row: Any, offset: int, values: Any) -> None:
    data = values.int().contiguous().view(-1)
    if data.numel():
        row[offset : offset + 4 * data.numel()].copy_(data.view(row.dtype))
