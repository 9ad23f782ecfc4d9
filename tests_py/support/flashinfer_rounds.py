# SPDX-License-Identifier: Apache-2.0
"""What the tests of FlashInfer's drop-ins share: inputs by rank, experts, expected results."""

from __future__ import annotations

import functools
import pickle
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


def combined(
    x: Any, ids: Any, num_experts: int, world: int, more: Any = 0.0, *, low: bool = False
) -> Any:
    """What combine must give for tokens ``x [T, H]``, in the stated order of sums.

    Args:
        low: partial sums are rounded to FP8 before they are added.
    """
    padded = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(world):
        block = run_experts_of(x, ids, rank, num_experts, world, more)
        if low:
            block = block.clamp(-448, 448).to(torch.float8_e4m3fn)
        padded += block.float()
    return padded.to(x.dtype)


def run_experts_of(x: Any, ids: Any, rank: int, num_experts: int, world: int, more: Any) -> Any:
    """One rank's partial sums of its own tokens' rows."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for k in range(ids.shape[1]):
        mine = torch.tensor(
            [owner(expert, num_experts, world) == rank for expert in ids[:, k].tolist()],
            dtype=torch.bool,
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


# -- ranks that are processes --------------------------------------------------------------------


class Callbacks:
    """A backend as frameworks write them: their own collectives, and ``Split`` gives itself."""

    def __init__(self, comm: fanfold.Communicator) -> None:
        self._comm = comm

    def Get_rank(self) -> int:
        return self._comm.rank

    def Get_size(self) -> int:
        return self._comm.num_ranks

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(pickle.loads(part) for part in self._comm.all_gather_bytes(pickle.dumps(data)))

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self._comm.barrier()

    def Split(self, color: int, key: int) -> Callbacks:
        del color, key
        return self


def rounds_in_a_process(comm: fanfold.Communicator) -> list[float]:
    """A few rounds of the class through a framework's own backend."""
    world, me = comm.num_ranks, comm.rank
    config = flashinfer.MnnvlConfig(comm_backend=Callbacks(comm))
    a2a = flashinfer.MoeAlltoAll(
        mapping(world, me), 8, 2, 2 * world, hidden_size=24, mnnvl_config=config
    )
    sums = []
    for tokens in (0, 3, 8, 1):
        mine = min(tokens + me, 8)
        ids, x = draw_ids(me, mine, 2, 2 * world), noise(me, (mine, 24), BF16)
        views = a2a.dispatch(ids, [x, ids], 8, -1, 1)
        y = a2a.get_combine_payload_tensor_in_workspace(8, 24, BF16)
        y.copy_(run_experts(views[0], views[1], me, 2 * world))
        out = a2a.combine(y, 8, payload_in_workspace=True)
        assert same_bits(out, combined(x, ids, 2 * world, world))
        sums.append(float(out.float().sum()))
    return sums


def strided_memory(comm: fanfold.Communicator) -> None:
    """Write to the next rank's part, and find what the rank before wrote."""
    world, me = comm.num_ranks, comm.rank
    where = mapping(world, me)
    flashinfer.MnnvlMemory.initialize()
    backend = flashinfer.CommunicatorBackend(comm)
    flashinfer.MnnvlMemory.set_comm_from_config(where, flashinfer.MnnvlConfig(comm_backend=backend))
    for size, dtype in (
        (4 * 2**20 - 3072, torch.int32),
        (30 * 2**20 - 2048, BF16),
        (7, torch.uint8),
    ):
        memory = flashinfer.MnnvlMemory(where, size)
        rows = memory.as_torch_strided_tensor(dtype)
        assert rows.dtype == dtype
        assert list(rows.shape) == [world, size // dtype.itemsize]
        assert rows.stride() == (memory.rank_stride // dtype.itemsize, 1)
        assert rows.data_ptr() == memory.ptr
        assert not rows[me].any()
        comm.barrier()
        rows[(me + 1) % world].fill_(me + 1)
        comm.barrier()
        assert (rows[me] == (me - 1) % world + 1).all()
        assert all((rows[r] == (r - 1) % world + 1).all() for r in range(world))
        memory.close()
        assert (rows[me] == (me - 1) % world + 1).all()  # the tensor keeps it


def torch_backends(comm: fanfold.Communicator, store: str) -> float:
    """Four processes over gloo: the default group, and halves of it that exchange on their own."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.num_ranks
    )
    backend = flashinfer.TorchDistBackend()
    assert (backend.Get_rank(), backend.Get_size()) == (comm.rank, 4)
    assert backend.allgather(comm.rank) == [0, 1, 2, 3]
    assert backend.bcast(comm.rank, 3) == 3
    assert backend.Split(0, comm.rank) is backend
    half = backend.Split(comm.rank // 2, -comm.rank)
    assert half.allgather(comm.rank) == [comm.rank | 1, comm.rank & ~1]
    one = half.Split(comm.rank, 0)
    assert (one.Get_rank(), one.Get_size()) == (0, 1)
    sums = 0.0
    for size in (4, 2):  # expert-parallel over all ranks, then over two halves
        where = flashinfer.Mapping(4, comm.rank, 4, tp_size=4, moe_ep_size=size)
        config = flashinfer.MnnvlConfig(comm_backend=flashinfer.TorchDistBackend())
        a2a = flashinfer.MoeAlltoAll(where, 2, 1, 4, hidden_size=2, mnnvl_config=config)
        again = flashinfer.MoeAlltoAll(where, 2, 1, 4, hidden_size=2, mnnvl_config=config)
        assert again.mnnvl_mem is a2a.mnnvl_mem
        ids = torch.full((1, 1), comm.rank, dtype=torch.int32)
        views = a2a.dispatch(ids, [torch.ones((1, 2), dtype=BF16)], 1)
        sums += float(a2a.combine(views[0], 1).sum())
    dist.destroy_process_group()
    return sums
