# SPDX-License-Identifier: Apache-2.0
"""The counters and routing tables of FlashInfer's workspace, worked out from a round.

Fanfold has no use for them; they are there for code that looks into the workspace through the
offset table. Unlike FlashInfer's, slots are in the order of the tokens, and a rank that is masked
out has 0 for what it sent.
"""

from __future__ import annotations

from typing import Any

from fanfold.compat.flashinfer import sizes
from fanfold.compat.flashinfer.exchanges import OpenRound
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
    ep_size = opened.exchanges.num_ranks
    ids = call.topk_ids
    active = ids.new_tensor(call.active or [True] * ep_size).bool()
    targets, indices, sent = routing_tables(ids, call.num_experts, active)
    _put(row, offsets[0], ids.new_tensor([max(epochs)]))
    _put(row, offsets[1], ids.new_tensor([ids.shape[0]]))
    _put(row, offsets[2], sent)
    _put(row, offsets[3], opened.counts)
    _put(row, offsets[4], active * epochs[0])
    _put(row, offsets[5], active * epochs[1])
    _put(row, offsets[6], targets)
    _put(row, offsets[7], indices)
    if opened.stats is not None:
        _put(row, offsets[8], opened.stats)


def routing_tables(ids: Any, num_experts: int, active: Any) -> tuple[Any, Any, Any]:
    """Where each token goes.

    Args:
        ids: ``[T, K]`` global ids; those that name no expert go nowhere.
        num_experts: E, over all ranks.
        active: ``[R]`` bool: ranks that take part.

    Returns:
        Target ranks ``[T, K]`` and slots there ``[T, K]``, both -1 where the token goes nowhere or
        an earlier column already sent it there; and ``[R]`` tokens for each rank. All int32.
    """
    ep_size = int(active.shape[0])
    first = sizes.first_experts(num_experts, ep_size)
    bounds = torch().tensor(first[1:], device=ids.device)
    wanted = ids.long()
    owner = torch().bucketize(wanted, bounds, right=True)
    valid = (wanted >= 0) & (wanted < num_experts)
    goes = valid & active[owner.clamp(max=ep_size - 1)]
    hits = torch().zeros((ids.shape[0], ep_size + 1), dtype=torch().int64, device=ids.device)
    hits.scatter_(1, torch().where(goes, owner, ep_size), 1)
    hits = hits[:, :ep_size]
    slots = hits.cumsum(0) - 1
    same = (owner[:, :, None] == owner[:, None, :]) & goes[:, :, None] & goes[:, None, :]
    earlier = same.tril(-1).any(2)
    sends = goes & ~earlier
    safe = owner.clamp(max=ep_size - 1)
    targets = torch().where(sends, owner, -1)
    indices = torch().where(sends, slots.gather(1, safe), -1)
    return targets.int(), indices.int(), hits.sum(0).int()


def _put(row: Any, offset: int, values: Any) -> None:
    data = values.int().contiguous().view(-1)
    if data.numel():
        row[offset : offset + 4 * data.numel()].copy_(data.view(row.dtype))
