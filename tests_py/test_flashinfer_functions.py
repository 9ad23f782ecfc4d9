# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's matrix of one-GPU tests, with ranks that are threads, compared row by row.

Scaled for the CPU: rows of 32768 elements (five widths of them) have 2048, and the capacity, which
takes up memory at once, is twice the tokens of a rank rather than the tokens of all ranks.
All else has FlashInfer's sizes. Quantised results: ``test_flashinfer_quantised.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.flashinfer_rounds import (
    BF16,
    Rank,
    Ranks,
    check_rows,
    combined,
    draw_ids,
    named_tokens,
    noise,
    run_experts,
    same_bits,
)

import fanfold
from fanfold.compat import flashinfer
from fanfold.compat.flashinfer import exchanges
from fanfold.compat.flashinfer.checks import in_low_precision
from fanfold.compat.flashinfer.workspaces import WORKSPACES


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "TIMEOUT_S", 20.0)


def payloads_of(rank: int, tokens: int, width: int, dtypes: list[Any]) -> list[Any]:
    """Who each row is, then rows of growing width."""
    rows = [noise(rank, (tokens, width * (i + 1)), dtype, seed=i) for i, dtype in enumerate(dtypes)]
    return [named_tokens(rank, tokens), *rows]


FIVE = [torch.float16, BF16, torch.int32, torch.uint8]


def run_dispatch(
    world: int,
    tokens: int,
    width: int,
    num_experts: int,
    top_k: int = 1,
    dtypes: list[Any] | None = None,
    active: list[bool] | None = None,
) -> list[Any]:
    """Dispatch on every (active) rank and compare every row with its source's."""
    kinds = FIVE if dtypes is None else dtypes
    num_bytes = 4 + sum(width * (i + 1) * kind.itemsize for i, kind in enumerate(kinds))
    ranks = Ranks(world, 2 * tokens, num_bytes)
    mask = {}
    if active is not None:
        alive = [rank for rank in range(world) if active[rank]]
        mask = {
            "enable_rank_mask": True,
            "active_rank_mask": flashinfer.moe_a2a_active_rank_mask(alive, world),
        }

    def ids_of(rank: int) -> Any:
        return draw_ids(rank, tokens, top_k, num_experts)

    def one(rank: Rank) -> Any:
        views, offset, stats = rank.dispatch(
            ids_of(rank.rank),
            payloads_of(rank.rank, tokens, width, kinds),
            tokens,
            num_experts,
            **mask,
        )
        assert stats is None
        counts = check_rows(
            views,
            rank.rank,
            ids_of,
            lambda source: payloads_of(source, tokens, width, kinds),
            num_experts,
            active,
        )
        assert rank.counter("RECV_COUNTERS", world) == counts
        return rank, views, offset, counts

    only = None if active is None else [rank for rank in range(world) if active[rank]]
    return ranks.run(one, only)


@pytest.mark.parametrize(("world", "tokens", "width"), [(2, 5, 8), (4, 32, 2048), (8, 16, 2048)])
def test_every_row_of_five_payloads_arrives_bit_for_bit(
    world: int, tokens: int, width: int
) -> None:
    found = run_dispatch(world, tokens, width, num_experts=world)
    assert sum(sum(counts) for *_, counts in found) == world * tokens


@pytest.mark.parametrize(
    ("world", "tokens", "width", "num_experts"), [(4, 16, 32, 6), (5, 16, 64, 8), (3, 16, 16, 10)]
)
def test_experts_need_not_divide_among_the_ranks(
    world: int, tokens: int, width: int, num_experts: int
) -> None:
    run_dispatch(world, tokens, width, num_experts)


@pytest.mark.parametrize("top_k", [6, 8, 10, 16, 22])
def test_four_ranks_take_any_top_k(top_k: int) -> None:
    for dtypes, width in (([torch.uint8], 1024), ([BF16], 64), ([torch.int32], 22)):
        run_dispatch(4, 4, width, num_experts=64, top_k=top_k, dtypes=dtypes)


@pytest.mark.parametrize("count", [5, 6, 15])
def test_many_payloads_travel_together(count: int) -> None:
    run_dispatch(8, 16, 256 if count > 6 else 2048, 8, dtypes=[torch.int32] * count)


@pytest.mark.parametrize(("world", "tokens", "width", "dead"), [(4, 16, 32, 2), (5, 16, 64, 0)])
def test_ranks_that_are_masked_out_need_not_come(
    world: int, tokens: int, width: int, dead: int
) -> None:
    active = [rank != dead for rank in range(world)]
    num_experts = world
    alive = [rank for rank in range(world) if active[rank]]
    mask = flashinfer.moe_a2a_active_rank_mask(alive, world)
    ranks = Ranks(world, 2 * tokens, 2 * width + 4)
    more = {"enable_rank_mask": True, "active_rank_mask": mask}

    def inputs(rank: int) -> list[Any]:
        return [named_tokens(rank, tokens), noise(rank, (tokens, width), BF16)]

    def one(rank: Rank) -> None:
        ids = draw_ids(rank.rank, tokens, 1, num_experts)
        views, offset, _ = rank.dispatch(ids, inputs(rank.rank), tokens, num_experts, **more)
        counts = check_rows(
            views,
            rank.rank,
            lambda source: draw_ids(source, tokens, 1, num_experts),
            inputs,
            num_experts,
            active,
        )
        assert counts[dead] == 0
        assert rank.counter("RECV_COUNTERS", world) == counts
        assert rank.counter("SEND_COUNTERS", world)[dead] == 0
        out = rank.combine(views[1], tokens, tokens, 1, offset, **more)
        expected = inputs(rank.rank)[1].clone()
        expected[ids[:, 0] == dead] = 0
        assert same_bits(out, expected)

    ranks.run(one, alive)


def test_a_mask_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    ranks = Ranks(2, 4, 64)

    def one(rank: Rank) -> None:
        ids = torch.zeros((1, 1), dtype=torch.int32)
        mine = flashinfer.moe_a2a_active_rank_mask([rank.rank], 2)
        other = flashinfer.moe_a2a_active_rank_mask([1 - rank.rank], 2)
        for error in (ValueError, RuntimeError, fanfold.InvalidArgument):
            with pytest.raises(error, match="must mark the local ep_rank as active"):
                rank.dispatch(ids, [ids], 2, 2, enable_rank_mask=True, active_rank_mask=other)
        with pytest.raises(ValueError, match="requires enable_rank_mask=True"):
            rank.dispatch(ids, [ids], 2, 2, active_rank_mask=mine)
        with pytest.raises(ValueError, match="must be defined when enable_rank_mask=True"):
            rank.dispatch(ids, [ids], 2, 2, enable_rank_mask=True)
        with pytest.raises(ValueError, match=r"expected \[1\] uint64 on the CPU"):
            rank.dispatch(ids, [ids], 2, 2, enable_rank_mask=True, active_rank_mask=mine.long())
        views, _, _ = rank.dispatch(ids, [named_tokens(rank.rank, 1)], 2, 2)
        assert rank.rank == 1 or views[0][:, 0, 0].tolist() == [0, 100_000]

    ranks.run(one)


def test_masks_have_a_word_for_each_64_ranks() -> None:
    assert flashinfer.MOE_A2A_RANK_MASK_WORDS == 1
    assert flashinfer.moe_a2a_active_rank_mask([0, 63], 64).tolist() == [1 | 1 << 63]
    wide = flashinfer.moe_a2a_active_rank_mask([1, 64, 129], 130)
    assert (wide.dtype, wide.tolist()) == (torch.uint64, [2, 1, 2])
    with pytest.raises(fanfold.InvalidArgument, match="active_ranks: expected 0 to 3, got 4"):
        flashinfer.moe_a2a_active_rank_mask([4], 4)


@pytest.mark.parametrize(
    ("world", "tokens", "width", "num_experts"), [(2, 5, 8, 32), (4, 16, 16, 32), (8, 8, 8, 64)]
)
def test_every_rank_receives_the_statistics_of_all(
    world: int, tokens: int, width: int, num_experts: int
) -> None:
    count = num_experts // 2
    ranks = Ranks(world, 2 * tokens, 2 * width, stats=num_experts)

    def stats_of(rank: int) -> Any:
        return torch.arange(count, dtype=torch.int32) * (rank + 1)

    def one(rank: Rank) -> None:
        for _ in range(3):
            ids = draw_ids(rank.rank, tokens, 2, num_experts)
            _, _, stats = rank.dispatch(
                ids,
                [noise(rank.rank, (tokens, width), BF16)],
                tokens,
                num_experts,
                eplb_local_stats=stats_of(rank.rank),
            )
            assert same_bits(stats, torch.stack([stats_of(source) for source in range(world)]))
            flat = rank.counter("EPLB_GATHERED_STATS", world * count)
            assert flat == stats.flatten().tolist()

    ranks.run(one)


@pytest.mark.parametrize(("world", "tokens"), [(2, 64), (4, 32), (8, 16)])
def test_sanitize_marks_just_the_rows_without_a_token(world: int, tokens: int) -> None:
    ranks = Ranks(world, 2 * tokens, 5)

    def one(rank: Rank) -> None:
        ids = draw_ids(rank.rank, tokens, 1, world)
        real = torch.ones((tokens, 1), dtype=torch.bool)
        views, _, _ = rank.dispatch(ids, [ids, real], tokens, world)
        rank.sanitize(views[0], -3)
        counts = rank.counter("RECV_COUNTERS", world)
        for source, count in enumerate(counts):
            assert views[1][source, :count].all()
            assert (views[0][source, :count] == rank.rank).all()
            assert (views[0][source, count:] == -3).all()

    ranks.run(one)


# Ranks, tokens, hidden size and top-k.
COMBINES = [
    (4, 16, 4096, 2),
    (4, 16, 2880, 4),
    (8, 16, 5120, 6),
    (8, 16, 7168, 8),
    (8, 16, 4096, 8),
    (8, 16, 4096, 10),
    (8, 16, 4096, 16),
    (8, 16, 4096, 22),
]


def run_combine(
    case: tuple[int, int, int, int],
    *,
    zero_copy: bool,
    lora: bool = False,
    dtype: Any = BF16,
    low: bool = False,
) -> None:
    """Dispatch, experts that differ, combine; sums bit for bit in the stated order."""
    world, tokens, hidden, top_k = case
    num_experts = world * top_k
    ranks = Ranks(world, 2 * tokens, hidden * dtype.itemsize + 4 * top_k + 5)

    def adapters(rank: int) -> Any:
        return (torch.arange(tokens, dtype=torch.int32) + rank).remainder(8).view(-1, 1)

    def one(rank: Rank) -> None:
        ids = draw_ids(rank.rank, tokens, top_k, num_experts)
        x = noise(rank.rank, (tokens, hidden), dtype)
        odd = torch.full((tokens, 1), rank.rank, dtype=torch.uint8)
        payloads = [ids, x, odd, *([adapters(rank.rank)] if lora else [])]
        views, offset, _ = rank.dispatch(ids, payloads, tokens, num_experts)
        rank.sanitize(views[0], -1)
        more = views[3][:, :, 0].float() + 1 if lora else 0.0
        y = run_experts(views[1], views[0], rank.rank, num_experts, more)
        if zero_copy:
            y = rank.buffer(offset, tokens, hidden, dtype).copy_(y)
        mine = adapters(rank.rank)[:, 0].float() + 1 if lora else 0.0
        expected = combined(x, ids, num_experts, world, mine, low=low)
        for _ in range(2):  # the round stays open for another combine
            more = {"use_low_precision": True} if low else {}
            out = rank.combine(y, tokens, tokens, top_k, offset, zero_copy, **more)
            assert same_bits(out, expected), rank.rank

    ranks.run(one)


@pytest.mark.parametrize("case", COMBINES)
def test_combine_adds_up_what_the_experts_made(case: tuple[int, int, int, int]) -> None:
    run_combine(case, zero_copy=True)


@pytest.mark.parametrize(
    ("case", "zero_copy"),
    [((8, 16, 7168, 8), True), ((4, 16, 4096, 2), True), (COMBINES[4], False)],
)
def test_combine_of_rows_with_an_adapter_of_their_own(
    case: tuple[int, int, int, int], zero_copy: bool
) -> None:
    run_combine(case, zero_copy=zero_copy, lora=True)


@pytest.mark.parametrize(
    ("case", "zero_copy"), [(COMBINES[0], True), ((8, 16, 7168, 8), True), (COMBINES[4], False)]
)
def test_combine_of_results_in_low_precision(
    case: tuple[int, int, int, int], zero_copy: bool
) -> None:
    run_combine(case, zero_copy=zero_copy, low=True)


def test_results_past_fp8_saturate() -> None:
    """1000 becomes 448, 1.0625 is halfway and becomes 1; NaN stays."""
    assert in_low_precision(torch.tensor([1000.0, -1000.0, 1.0625], dtype=BF16)).tolist() == [
        448.0, -448.0, 1.0,
    ]  # fmt: skip
    assert in_low_precision(torch.tensor([torch.nan], dtype=BF16)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_combine_of_other_types(dtype: Any, zero_copy: bool) -> None:
    run_combine((3, 7, 45, 3), zero_copy=zero_copy, dtype=dtype)


def test_fp8_sums_are_rounded_once() -> None:
    """272 + 2^-9 lies above the middle of two FP8 numbers, but float16 would round it to that."""
    ranks, parts = Ranks(3, 1, 16), [256.0, 16.0, 2.0**-9]

    def one(rank: Rank) -> None:
        ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        views, offset, _ = rank.dispatch(ids, [torch.ones((1, 4), dtype=BF16)], 1, 3)
        assert views[0].shape == (3, 1, 4)
        y = torch.full((3, 1, 4), parts[rank.rank]).to(torch.float8_e4m3fn)
        assert rank.combine(y, 1, 1, 3, offset).float().tolist() == [[288.0] * 4]

    ranks.run(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_results_of_the_payloads_type_lie_where_peers_read_them(dtype: Any) -> None:
    ranks = Ranks(2, 2, 64)

    def one(rank: Rank) -> None:
        ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
        _, offset, _ = rank.dispatch(ids, [noise(rank.rank, (2, 8), dtype)], 2, 2)
        opened = WORKSPACES.find(rank.workspace, rank.rank).own
        assert opened is not None
        place = rank.buffer(offset, 2, 8, dtype)
        assert place.data_ptr() == opened.received.combine_buffer(8, dtype).data_ptr()
        rank.combine(place.fill_(1), 2, 2, 2, offset, True)

    ranks.run(one)


@pytest.mark.parametrize("top_k", [1, 3, 5, 7, 12, 14, 18, 21, 30])
def test_no_top_k_is_left_out(top_k: int) -> None:
    run_combine((3, 5, 24, top_k), zero_copy=False)


@pytest.mark.parametrize("world", [1, 3, 6, 7, 16, 32, 64])
def test_any_number_of_ranks(world: int) -> None:
    run_combine((world, 4, 33, 2), zero_copy=True)


def test_what_is_not_served_is_refused_and_the_round_goes_on() -> None:
    ranks = Ranks(2, 8, 64)

    def one(rank: Rank) -> None:
        ids = draw_ids(rank.rank, 4, 1, 2)
        x = noise(rank.rank, (4, 32), BF16)
        views, offset, _ = rank.dispatch(ids, [x], 4, 2)
        y = views[0]
        with pytest.raises(ValueError, match="must produce a bf16 output, so expected bfloat16"):
            rank.combine(y.float(), 4, 4, 1, offset, use_low_precision=True)
        with pytest.raises(NotImplementedError, match='"cake" names generated GPU kernels'):
            rank.combine(y, 4, 4, 1, offset, backend="cake")
        assert same_bits(rank.combine(y, 4, 4, 1, offset), x)

    ranks.run(one)


def test_an_output_that_does_not_fit_is_a_value_error() -> None:
    ranks = Ranks(1, 4, 64)

    def one(rank: Rank) -> None:
        ids = torch.zeros((4, 1), dtype=torch.int32)
        x = noise(0, (4, 16), BF16)
        views, offset, _ = rank.dispatch(ids, [x], 4, 1)
        for output in (
            torch.empty((4, 16), dtype=BF16, device="meta"),
            torch.empty((16, 4), dtype=BF16).t(),
            torch.empty((4, 16), dtype=torch.float32),
            torch.empty((3, 16), dtype=BF16),
        ):
            with pytest.raises(ValueError, match=r"output: expected \[4, 16\] torch.bfloat16"):
                rank.combine(views[0], 4, 4, 1, offset, output=output)
        out = torch.empty((4, 16), dtype=BF16)
        assert rank.combine(views[0], 4, 4, 1, offset, output=out) is out
        assert same_bits(out, x)

    ranks.run(one)


# --- The forms of the results -------------------------------------------------------------------


def test_dispatch_can_give_two_results_or_three() -> None:
    ranks = Ranks(1, 2, 64)

    def one(rank: Rank) -> None:
        ids = torch.zeros((2, 1), dtype=torch.int32)
        arguments = (ids, [ids], rank.workspace, rank.metainfo, 2, 0, 1, 1, 1)
        assert len(flashinfer.moe_a2a_dispatch(*arguments)) == 3
        views, offset = flashinfer.moe_a2a_dispatch_pair(*arguments)
        assert same_bits(views[0][0], ids)
        assert offset % 128 == 0

    ranks.run(one)


def test_the_module_gives_offsets_that_name_the_rows() -> None:
    """ep 2, three tokens, rows of 16, 4 and 1 bytes: starts P, P+96, P+120; results from P+128."""
    module = flashinfer.get_moe_alltoall_module()
    workspace = torch.zeros((2, 8192), dtype=torch.uint8)
    base = module.moe_a2a_get_aux_data_size(2, 3, 4)

    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        metainfo = module.moe_a2a_initialize(workspace, me, 2, 3, 4)
        assert metainfo.tolist()[-1] == base
        ids = torch.full((3, 1), me, dtype=torch.int32)
        payloads = [noise(me, (3, n), torch.uint8, seed=n) for n in (16, 4, 1)]
        stats = torch.arange(2, dtype=torch.int32) + me
        starts, lengths, offset, stats_offset, count = module.moe_a2a_dispatch(
            ids, payloads, workspace, metainfo, 3, me, 2, 1, 2, None, stats
        )
        first = me * workspace.stride(0) + base
        assert (starts, lengths) == ([first, first + 96, first + 120], [96, 24, 6])
        assert (offset, count) == (base + 128, 2)
        wrap = flashinfer.moe_a2a_wrap_payload_tensor_in_workspace
        for start, length, payload in zip(starts, lengths, payloads, strict=True):
            view = wrap(workspace, [2, 3], start, start + length, torch.uint8)
            assert same_bits(view[me], payload)
        gathered = wrap(workspace[me], [2], stats_offset, stats_offset + 16, torch.int32)
        assert gathered.tolist() == [[0, 1], [1, 2]]
        out = module.moe_a2a_combine(
            wrap(workspace[me], [2, 3], offset, offset + 2 * 3 * 8, torch.float32).fill_(2.5),
            3, workspace, metainfo, 3, me, 2, 1, offset, True,
        )  # fmt: skip
        assert same_bits(out, torch.full((3, 2), 2.5))
        again = (out.new_ones((2, 3, 2)), 3, workspace, metainfo, 3, me, 2, 1, offset, False)
        rest = (None, None, 1.0, None, False, False, False, None)
        assert same_bits(module.moe_a2a_combine(*again, *rest), torch.ones((3, 2)))
        assert module.moe_a2a_combine_into(*again, *rest, out) is None
        assert same_bits(out, torch.ones((3, 2)))
        with pytest.raises(TypeError, match="expected an output"):
            module.moe_a2a_combine_into(*again, *rest)
        _, _, _, none, nothing = module.moe_a2a_dispatch(
            ids, payloads, workspace, metainfo, 3, me, 2, 1, 2
        )
        assert (none, nothing) == (-1, 0)

    fanfold.testing.spawn_threads(2, one)


def test_counters_and_tables_follow_the_rounds() -> None:
    """ids [0, 1, 6, 2] of 8 experts on 4 ranks: owners 0, 0, 3, 1, the second named twice."""
    ranks = Ranks(4, 4, 64)

    def one(rank: Rank) -> None:
        ids = torch.tensor([[0, 1, 6, 2]], dtype=torch.int32)
        assert rank.counter("FLAG_VAL", 1) == [0]
        for number in range(3):
            views, offset, _ = rank.dispatch(ids, [named_tokens(rank.rank, 1)], 1, 8)
            assert rank.counter("FLAG_VAL", 1) == [2 * number + 1]
            assert rank.counter("DISPATCH_COMPLETION_FLAGS", 4) == [2 * number + 1] * 4
            assert rank.counter("TOPK_TARGET_RANKS", 4) == [0, -1, 3, 1]
            assert rank.counter("TOPK_SEND_INDICES", 4) == [0, -1, 0, 0]
            assert rank.counter("SEND_COUNTERS", 4) == [1, 1, 0, 1]
            assert rank.counter("RECV_COUNTERS", 4) == ([0] * 4 if rank.rank == 2 else [1] * 4)
            rank.combine(views[0].float(), 1, 1, 4, offset)
            assert rank.counter("FLAG_VAL", 1) == [2 * number + 2]
            assert rank.counter("COMBINE_COMPLETION_FLAGS", 4) == [2 * number + 2] * 4

    ranks.run(one)


def test_plain_bytes_of_a_workspace_can_be_wrapped() -> None:
    workspace = torch.arange(64, dtype=torch.uint8).view(2, 32)
    wrap = flashinfer.moe_a2a_wrap_payload_tensor_in_workspace
    assert wrap(workspace, [2], 40, 48, torch.uint8).tolist() == [
        [40, 41, 42, 43],
        [44, 45, 46, 47],
    ]
    assert wrap(workspace[1], [1], 0, 4, torch.uint8).tolist() == [[32, 33, 34, 35]]
    with pytest.raises(fanfold.InvalidArgument, match="slice_end: expected at most the end"):
        wrap(workspace, [1], 28, 40, torch.uint8)
    with pytest.raises(fanfold.InvalidArgument, match="a multiple of 8 bytes"):
        wrap(workspace, [2], 0, 12, torch.int32)
