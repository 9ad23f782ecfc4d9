# SPDX-License-Identifier: Apache-2.0
"""What the tests of FlashInfer's drop-ins share: inputs by rank, experts, expected results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fanfold
from fanfold.compat import flashinfer
from fanfold.testing import spawn_threads

BF16 = torch.bfloat16


def owner(expert: int, num_experts: int, world: int) -> int:
    """The rank of an expert: the first E mod R ranks own one more. -1: nobody."""
    if not 0 <= expert < num_experts:
        return -1
    each, more = divmod(num_experts, world)
    big = more * (each + 1)
    return expert // (each + 1) if expert < big else more + (expert - big) // each


def draw_ids(rank: int, tokens: int, top_k: int, num_experts: int, seed: int = 0xD5) -> Any:
    """``[tokens, top_k]`` distinct experts per token."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    rows = [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).int() if rows else torch.empty((0, top_k), dtype=torch.int32)


def named_tokens(rank: int, tokens: int) -> Any:
    """``[tokens, 1]`` int32 that says which rank's token a row is."""
    return (torch.arange(tokens, dtype=torch.int32) + 100_000 * rank).view(-1, 1)


@functools.lru_cache(maxsize=256)
def noise(rank: int, shape: tuple[int, ...], dtype: Any, seed: int = 1) -> Any:
    """Values that another rank can draw again; not to be written to."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def goes_to(ids: Any, rank: int, num_experts: int, world: int) -> list[int]:
    """Which tokens a rank receives, in order."""
    return [
        token
        for token, row in enumerate(ids.tolist())
        if any(owner(expert, num_experts, world) == rank for expert in row)
    ]


def same_bits(one: Any, other: Any) -> bool:
    """Equal shape, type and bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def check_rows(
    views: Sequence[Any],
    me: int,
    ids_of: Callable[[int], Any],
    payloads_of: Callable[[int], Sequence[Any]],
    num_experts: int,
    active: Sequence[bool] | None = None,
) -> list[int]:
    """Every received row of every payload, in place and bit for bit; returns the counts."""
    world = views[0].shape[0]
    counts = []
    for source in range(world):
        tokens = goes_to(ids_of(source), me, num_experts, world)
        if active is not None and not active[source]:
            tokens = []
        counts.append(len(tokens))
        for view, payload in zip(views, payloads_of(source), strict=True):
            assert same_bits(view[source, : len(tokens)], payload[tokens]), (me, source)
    return counts


def scale_of(experts: Any, num_experts: int) -> Any:
    """What an expert multiplies rows by: differs between experts."""
    return (experts.float() + 1) / num_experts + 0.5


def run_experts(rows: Any, ids: Any, me: int, num_experts: int, more: Any = 0.0) -> Any:
    """``[..., H]``: the sum over this rank's experts of a row, in float32, k ascending, rounded."""
    world_ids = ids.tolist()
    world = len(world_ids)
    mine = torch.zeros(ids.shape, dtype=torch.bool)
    for source, block in enumerate(world_ids):
        for row, experts in enumerate(block):
            for k, expert in enumerate(experts):
                mine[source, row, k] = owner(expert, num_experts, world) == me
    total = torch.zeros(rows.shape, dtype=torch.float32)
    for k in range(ids.shape[2]):
        factor = torch.where(mine[:, :, k], scale_of(ids[:, :, k], num_experts) + more, 0.0)
        total += rows.float() * factor[:, :, None]
    return total.to(rows.dtype)


def combined(x: Any, ids: Any, num_experts: int, world: int, more: Any = 0.0) -> Any:
    """What combine must give for tokens ``x [T, H]``, in the stated order of sums."""
    padded = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(world):
        block = run_experts_of(x, ids, rank, num_experts, world, more)
        padded += block.float()
    return padded.to(x.dtype)


def run_experts_of(x: Any, ids: Any, rank: int, num_experts: int, world: int, more: Any) -> Any:
    """One rank's partial sums of its own tokens' rows."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for k in range(ids.shape[1]):
        mine = torch.tensor(
            [owner(expert, num_experts, world) == rank for expert in ids[:, k].tolist()]
        )
        factor = torch.where(mine, scale_of(ids[:, k], num_experts) + more, 0.0)
        total += x.float() * factor[:, None]
    return total.to(x.dtype)


class Ranks:
    """A workspace that the test allocated, and ranks that are threads: the functions' set-up."""

    def __init__(self, world: int, max_tokens: int, num_bytes: int, stats: int = 0) -> None:
        size = flashinfer.moe_a2a_get_workspace_size_per_rank(
            world, max_tokens, num_bytes, num_bytes, stats
        )
        self.world = world
        self.max_tokens = max_tokens
        self.stats = stats
        self.workspace = torch.zeros((world, size), dtype=torch.uint8)

    def run(self, fn: Callable[[Rank], Any], only: Sequence[int] | None = None) -> list[Any]:
        """Call ``fn`` for every rank, or ``only`` some, each on its own thread."""

        def one(comm: fanfold.Communicator) -> Any:
            if only is not None and comm.rank not in only:
                return None
            return fn(Rank(self, comm.rank))

        return spawn_threads(self.world, one)


class Rank:
    """One of ``Ranks``."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.rank = rank
        self.world = ranks.world
        self.workspace = ranks.workspace
        self.metainfo = flashinfer.moe_a2a_initialize(
            ranks.workspace, rank, ranks.world, ranks.max_tokens, ranks.stats
        )

    def dispatch(
        self, ids: Any, payloads: Sequence[Any], rows: int, num_experts: int, **more: Any
    ) -> Any:
        return flashinfer.moe_a2a_dispatch(
            ids,
            payloads,
            self.workspace,
            self.metainfo,
            rows,
            self.rank,
            self.world,
            ids.shape[1],
            num_experts,
            **more,
        )

    def buffer(self, offset: int, rows: int, hidden: int, dtype: Any = BF16) -> Any:
        num_bytes = self.world * rows * hidden * dtype.itemsize
        return flashinfer.moe_a2a_wrap_payload_tensor_in_workspace(
            self.workspace[self.rank], [self.world, rows], offset, offset + num_bytes, dtype
        )

    def combine(
        self, y: Any, tokens: int, rows: int, top_k: int, offset: int, *args: Any, **more: Any
    ) -> Any:
        return flashinfer.moe_a2a_combine(
            y,
            tokens,
            self.workspace,
            self.metainfo,
            rows,
            self.rank,
            self.world,
            top_k,
            offset,
            *args,
            **more,
        )

    def sanitize(self, ids: Any, invalid: int) -> None:
        flashinfer.moe_a2a_sanitize_expert_ids(
            ids, self.workspace, self.metainfo, self.rank, invalid
        )

    def counter(self, name: str, count: int) -> list[int]:
        """int32 of this rank's row of the workspace, by the name of the offset table."""
        return peek(self.workspace[self.rank], self.metainfo, name, count)


def peek(row: Any, metainfo: Any, name: str, count: int) -> list[int]:
    """int32 that a rank's row of a workspace has under a name."""
    flashinfer.MoeAlltoAll._init_constants()
    index = flashinfer.MoeAlltoAll._METAINFO_INDEX
    offset = metainfo[index[f"{name}_OFFSET_INDEX"]].item()
    values: list[int] = row[offset : offset + 4 * count].view(torch.int32).tolist()
    return values


def mapping(world: int, rank: int) -> flashinfer.Mapping:
    """All ranks share the experts."""
    return flashinfer.Mapping(world, rank, world, tp_size=world, moe_ep_size=world)


def exchange(comm: fanfold.Communicator, *args: Any, **more: Any) -> flashinfer.MoeAlltoAll:
    """The class for one rank of a communicator."""
    config = flashinfer.MnnvlConfig(comm_backend=flashinfer.CommunicatorBackend(comm))
    where = mapping(comm.num_ranks, comm.rank)
    return flashinfer.MoeAlltoAll(where, *args, mnnvl_config=config, **more)
