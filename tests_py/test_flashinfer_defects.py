# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer gets wrong, by its smallest trigger, and what users asked for."""

from __future__ import annotations

import itertools
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
    exchange,
    named_tokens,
    noise,
    run_experts,
    same_bits,
)

import fanfold
from fanfold.compat import flashinfer
from fanfold.compat.flashinfer import exchanges
from fanfold.compat.flashinfer.ranks import RanksOfProcess
from fanfold.compat.flashinfer.workspaces import WORKSPACES
from fanfold.testing import spawn_threads, thread_outcomes


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "TIMEOUT_S", 20.0)


def span(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def test_results_never_lie_where_rows_of_a_later_round_arrive() -> None:
    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 16, 1, 2, hidden_size=64)
        places, rows = set(), []
        for limit in (1, 16, 3, 16, 1):
            ids = draw_ids(comm.rank, limit, 1, 2)
            views = a2a.dispatch(ids, [noise(comm.rank, (limit, 64), BF16), ids], limit)
            y = a2a.get_combine_payload_tensor_in_workspace(limit, 64, BF16)
            places.add(y.data_ptr())
            rows += [span(view) for view in views]
            a2a.combine(y.copy_(views[0]), limit, payload_in_workspace=True)
        assert len(places) == 1
        place = places.pop()
        assert not any(begin <= place < end for begin, end in rows)

    spawn_threads(2, one)


def test_rounds_may_grow_and_shrink_in_rows_payloads_and_types() -> None:
    world, num_experts, top_k = 3, 6, 2

    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        size = flashinfer.moe_a2a_get_workspace_size_per_rank(world, 8, 400, 400)
        a2a = exchange(comm, 8, top_k, num_experts, workspace_size_per_rank=size)
        kinds = [BF16, torch.float32, torch.float16, BF16, BF16, torch.float32]
        for number, (limit, hidden) in enumerate(itertools.product((1, 8, 2), (8, 40, 17, 40, 9))):
            dtype = kinds[number % len(kinds)]
            tokens = (me + number) % (limit + 1)
            ids, x = draw_ids(me, tokens, top_k, 6, number), noise(me, (tokens, hidden), dtype)
            extra = [named_tokens(me, tokens)] * (number % 3)
            views = a2a.dispatch(ids, [x, ids, *extra], limit, -1, 1)
            y = run_experts(views[0], views[1], me, num_experts)
            if number % 2:
                place = a2a.get_combine_payload_tensor_in_workspace(limit, hidden, dtype)
                y = place.copy_(y)
            out = a2a.combine(y, limit, payload_in_workspace=bool(number % 2))
            assert same_bits(out, combined(x, ids, num_experts, world)), number

    spawn_threads(world, one)


@pytest.mark.parametrize("widths", list(itertools.permutations([1, 2, 5, 7])))
def test_payloads_of_odd_rows_need_no_order(widths: tuple[int, ...]) -> None:
    ranks = Ranks(2, 3, 80)

    def inputs(rank: int) -> list[Any]:
        wide = noise(rank, (3, 8), BF16)
        return [named_tokens(rank, 3), wide, *(noise(rank, (3, n), torch.uint8) for n in widths)]

    def one(rank: Rank) -> None:
        views, _, _ = rank.dispatch(draw_ids(rank.rank, 3, 1, 2), inputs(rank.rank), 3, 2)
        check_rows(views, rank.rank, lambda source: draw_ids(source, 3, 1, 2), inputs, 2)

    ranks.run(one)


def test_fp8_results_give_fp8_sums() -> None:
    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 4, 2, 2, hidden_size=16)
        ids = torch.tensor([[0, 1], [1, -1], [-1, -1], [0, -1]], dtype=torch.int32)
        x = noise(comm.rank, (4, 16), torch.float32).to(torch.float8_e4m3fn)
        for in_workspace in (False, True, False):
            views = a2a.dispatch(ids, [x], 4)
            y = views[0]
            if in_workspace:
                y = a2a.get_combine_payload_tensor_in_workspace(4, 16, y.dtype).copy_(y)
            out = a2a.combine(y, 4, payload_in_workspace=in_workspace)
            times = torch.tensor([[2.0], [1.0], [0.0], [1.0]])
            assert same_bits(out, (x.float() * times + 0.0).to(torch.float8_e4m3fn))

    spawn_threads(2, one)


def test_a_negative_id_goes_nowhere_and_one_too_large_is_refused() -> None:
    ranks = Ranks(2, 2, 64)

    def one(rank: Rank) -> None:
        with pytest.raises(fanfold.InvalidArgument, match="4"):
            rank.dispatch(torch.tensor([[0, 4]], dtype=torch.int32), [torch.ones((1, 8))], 1, 4)
        ids = torch.tensor([[-1, 3]], dtype=torch.int32)
        views, offset, _ = rank.dispatch(ids, [torch.ones((1, 8))], 1, 4)
        assert rank.counter("RECV_COUNTERS", 2) == ([0, 0] if rank.rank == 0 else [1, 1])
        assert rank.counter("TOPK_TARGET_RANKS", 2) == [-1, 1]
        assert rank.combine(views[0], 1, 1, 2, offset).tolist() == [[1.0] * 8]

    ranks.run(one)


def test_rows_of_a_rank_that_was_masked_out_are_not_valid_any_more() -> None:
    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(
            comm, 2, 1, 2, hidden_size=8, eplb_stats_num_experts=1, enable_rank_mask=True
        )
        ids = torch.full((2, 1), 0, dtype=torch.int32)
        stats = torch.tensor([comm.rank + 8], dtype=torch.int32)
        x = noise(comm.rank, (2, 8), BF16)
        views = a2a.dispatch(ids, [x, ids], 2, -1, 1, eplb_local_stats=stats)
        assert a2a.eplb_gathered_stats.tolist() == [[8], [9]]
        if comm.rank == 0:
            assert views[1].flatten().tolist() == [0] * 4
        a2a.combine(views[0], 2)
        if comm.rank == 1:
            return
        mask = flashinfer.moe_a2a_active_rank_mask([0], 2)
        views = a2a.dispatch(ids, [x, ids], 2, -1, 1, eplb_local_stats=stats, active_rank_mask=mask)
        assert a2a.eplb_gathered_stats.tolist() == [[8], [0]]
        assert views[1].flatten().tolist() == [0, 0, -1, -1]
        a2a.combine(views[0], 2, active_rank_mask=mask)

    spawn_threads(2, one)


def test_a_mask_and_statistics_need_nobody_who_is_gone() -> None:
    def one(comm: fanfold.Communicator) -> None:
        size = flashinfer.moe_a2a_get_workspace_size_per_rank(3, 2, 40, 16, 2)
        a2a = exchange(
            comm,
            2,
            1,
            3,
            workspace_size_per_rank=size,
            eplb_stats_num_experts=2,
            enable_rank_mask=True,
        )
        if comm.rank == 1:  # it never comes to a round
            return
        mask = flashinfer.moe_a2a_active_rank_mask([0, 2], 3)
        ids = torch.tensor([[2 - comm.rank], [1]], dtype=torch.int32)
        x = noise(comm.rank, (2, 8), BF16)
        stats = torch.full((2,), comm.rank + 5, dtype=torch.int32)
        for _ in range(2):
            views = a2a.dispatch(
                ids, [x, ids], 2, -1, 1, eplb_local_stats=stats, active_rank_mask=mask
            )
            assert a2a.eplb_gathered_stats.tolist() == [[5, 5], [0, 0], [7, 7]]
            out = a2a.combine(views[0], 2, active_rank_mask=mask)
            assert same_bits(out, torch.cat([x[:1], torch.zeros_like(x[1:])]))

    spawn_threads(3, one)


def test_a_late_rank_is_named_and_new_objects_work_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchanges, "TIMEOUT_S", 0.5)

    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 2, 1, 2, hidden_size=8)
        ids, x = torch.ones((1, 1), dtype=torch.int32), noise(comm.rank, (1, 8), BF16)
        if comm.rank == 0:
            with pytest.raises(fanfold.PeerTimeout, match="rank 1") as late:
                a2a.dispatch(ids, [x], 1)
            assert late.value.rank == 1
        comm.barrier()
        a2a._reset_workspace()
        again = exchange(comm, 2, 1, 2, hidden_size=8)
        views = again.dispatch(ids, [x], 1)
        assert same_bits(again.combine(views[0], 1), x)

    spawn_threads(2, one)


def test_objects_of_one_workspace_may_have_rounds_open_together() -> None:
    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        objects = [exchange(comm, 4, 2, 4, hidden_size=16) for _ in range(3)]
        for number in range(3):
            inputs = [
                (draw_ids(me, 1 + i, 2, 4, number), noise(me, (1 + i, 16), BF16, number + i))
                for i in range(3)
            ]
            views = [
                a2a.dispatch(ids, [x, ids], 4, -1, 1)
                for a2a, (ids, x) in zip(objects, inputs, strict=True)
            ]
            for i in (number, (number + 2) % 3, (number + 1) % 3):
                ids, x = inputs[i]
                y = run_experts(views[i][0], views[i][1], me, 4)
                assert same_bits(objects[i].combine(y, 4), combined(x, ids, 4, 2))

    spawn_threads(2, one)


def test_more_tokens_than_the_round_allows_are_refused() -> None:
    ranks = Ranks(1, 4, 64)

    def one(rank: Rank) -> None:
        ids = torch.zeros((2, 1), dtype=torch.int32)
        with pytest.raises(ValueError, match=r"at most runtime_max_tokens_per_rank \(1\) tokens"):
            rank.dispatch(ids, [ids], 1, 1)
        with pytest.raises(ValueError, match="num_experts must be >= ep_size"):
            rank.dispatch(ids, [ids], 2, 0)

    ranks.run(one)


def test_a_round_maximum_that_differs_between_ranks_is_an_error_on_both() -> None:
    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 8, 1, 2, hidden_size=8)
        ids = torch.zeros((1, 1), dtype=torch.int32)
        a2a.dispatch(ids, [torch.ones((1, 8), dtype=BF16)], 4 + 4 * comm.rank)

    for outcome in thread_outcomes(2, one):
        assert isinstance(outcome.error, fanfold.InvalidArgument)
        assert "round_max_tokens" in str(outcome.error)


def test_a_rank_without_tokens_takes_part() -> None:
    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 2, 1, 2, hidden_size=8)
        for number in range(4):
            tokens = (comm.rank + number) % 2
            ids = torch.full((tokens, 1), 1, dtype=torch.int32)
            x = noise(comm.rank, (tokens, 8), BF16)
            views = a2a.dispatch(ids, [x, ids], 1, 7, 1)
            assert same_bits(a2a.combine(views[0], 1), x)

    spawn_threads(2, one)


def test_initialize_needs_no_barrier_and_begins_anew() -> None:
    ranks = Ranks(3, 4, 64)

    def one(rank: Rank) -> None:
        for _ in range(5):
            again = Rank(ranks, rank.rank)
            assert again.counter("FLAG_VAL", 1) == [0]
            ids = draw_ids(rank.rank, 4, 2, 6)
            x = noise(rank.rank, (4, 16), BF16)
            for _ in range(3):
                views, offset, _ = again.dispatch(ids, [x, ids], 4, 6)
                again.sanitize(views[1], -1)
                y = run_experts(views[0], views[1], rank.rank, 6)
                assert same_bits(again.combine(y, 4, 4, 2, offset), combined(x, ids, 6, 3))

    ranks.run(one)
    entry = WORKSPACES._entries[ranks.workspace.data_ptr()]
    assert entry.of_process is not None
    # One exchange served all rounds, and those of before are gone: (generation, number).
    assert list(entry.of_process._made) == [(5, 0)]


def test_the_caller_may_reuse_its_ids_before_the_combine() -> None:
    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 2, 1, 2, hidden_size=8)
        ids = torch.tensor([[0], [1]], dtype=torch.int32)
        x = noise(comm.rank, (2, 8), BF16)
        views = a2a.dispatch(ids, [x], 2)
        y = views[0].float()  # another type than foreseen: sent along the ids once more
        ids.fill_(-1)
        assert same_bits(a2a.combine(y, 2), x.float())

    spawn_threads(2, one)


def test_one_thread_can_make_the_exchanges_of_all_ranks() -> None:
    ranks = RanksOfProcess(3)
    config = {"num_experts": 3, "top_k": 1, "max_tokens_per_rank": 1, "hidden": 4}
    active = (True, False, True)
    first = ranks.of_rank(0).make("name", config, active)
    assert (first.rank, first.num_ranks, first.active_mask) == (0, 3, [True, False, True])
    last = ranks.of_rank(2).make("name", config, active)
    assert (last.rank, last.active_mask) == (2, [True, False, True])
    with pytest.raises(fanfold.InvalidArgument, match=r"hidden: expected 4.*got 8 on rank 1"):
        ranks.of_rank(1).make("name", config | {"hidden": 8}, active)
    ranks.of_rank(0).drop("name", first)
    with pytest.raises(fanfold.InvalidArgument, match="0 has given this exchange up"):
        ranks.of_rank(0).make("name", config, active)


@pytest.mark.parametrize("has_combined", [False, True])
def test_a_refused_dispatch_leaves_the_last_one_to_be_combined(has_combined: bool) -> None:
    ranks = Ranks(2, 4, 2 * 16)

    def one(rank: Rank) -> None:
        ids = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
        x = noise(rank.rank, (2, 16), BF16)
        views, offset, _ = rank.dispatch(ids, [x], 2, 4)
        y = views[0].clone()
        expected = (x.float() * 2).to(BF16)
        if has_combined:
            assert same_bits(rank.combine(y, 2, 2, 2, offset), expected)
        for _ in range(2):
            with pytest.raises(fanfold.InvalidArgument, match="got 4"):
                rank.dispatch(torch.full_like(ids, 4), [x], 2, 4)
        assert same_bits(views[0], y)
        assert same_bits(rank.combine(y, 2, 2, 2, offset), expected)
        views, offset, _ = rank.dispatch(ids, [x], 2, 4)
        assert same_bits(rank.combine(views[0].clone(), 2, 2, 2, offset), expected)
        made = WORKSPACES.find(rank.workspace, rank.rank).exchanges._slots
        assert sum(slot.is_open for slots in made.values() for slot in slots) == 1

    ranks.run(one)


def test_what_could_not_be_made_or_combined_leaves_no_exchange_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = exchanges.Exchanges(RanksOfProcess(1).of_rank(0), 2, 128)
    ids, x = torch.zeros((2, 1), dtype=torch.int32), torch.ones((2, 16), dtype=BF16)
    stats = torch.ones(1, dtype=torch.int32)

    def broken(*_: Any) -> Any:
        raise MemoryError("none")

    with monkeypatch.context() as patched:
        patched.setattr(made, "_stats_kind", broken)
        with pytest.raises(MemoryError):
            made.open(exchanges.Dispatch(ids, [x], 1, 2, stats=stats))
    assert made.is_idle
    with monkeypatch.context() as patched:
        patched.setattr(made, "_gather", broken)
        with pytest.raises(MemoryError):
            made.open(exchanges.Dispatch(ids, [x], 1, 2, stats=stats))
    assert made.is_idle
    opened = made.open(exchanges.Dispatch(ids, [x], 1, 2))
    wide = opened.payloads[0].float()  # goes home through another exchange
    with pytest.raises(fanfold.InvalidArgument):
        opened.combine(wide, torch.empty((2, 8)))
    opened.end()
    assert made.is_idle
    assert len([slot for slots in made._slots.values() for slot in slots]) == 3


def test_what_was_dispatched_must_be_what_is_combined() -> None:
    ranks = Ranks(1, 4, 64)

    def one(rank: Rank) -> None:
        ids = torch.zeros((2, 1), dtype=torch.int32)
        with pytest.raises(RuntimeError, match="expected a dispatch on this workspace before"):
            rank.combine(torch.ones((1, 4, 8)), 2, 4, 1, 0)
        _, offset, _ = rank.dispatch(ids, [ids], 4, 1)
        y = torch.ones((1, 4, 8))
        for arguments, text in (
            ((y, 3, 4, 1, offset), "local_num_tokens: expected 2, as dispatched, got 3"),
            ((y, 2, 3, 1, offset), "runtime_max_tokens_per_rank: expected 4"),
            ((y, 2, 4, 2, offset), "top_k: expected 1"),
            ((y, 2, 4, 1, offset + 128), "combine_payload_offset: expected"),
        ):
            with pytest.raises(flashinfer.Refused, match=text):
                rank.combine(*arguments)
        assert rank.combine(y, 2, 4, 1, offset).tolist() == [[1.0] * 8] * 2

    ranks.run(one)


def test_a_workspace_that_was_not_initialised_or_does_not_fit_is_named() -> None:
    workspace = torch.zeros((2, 4096), dtype=torch.uint8)
    ids = torch.zeros((1, 1), dtype=torch.int32)
    table = torch.zeros(10, dtype=torch.int64)
    with pytest.raises(
        RuntimeError, match="expected moe_a2a_initialize to be called for ep_rank 1"
    ):
        flashinfer.moe_a2a_dispatch(ids, [ids], workspace, table, 1, 1, 2, 1, 2)
    for wrong, text in (
        (workspace.int(), r"expected \[2, bytes\] uint8"),
        (workspace[:1], r"expected \[2, bytes\] uint8"),
        (workspace[:, :100], "expected at least 1152 bytes per rank, got 100"),
    ):
        with pytest.raises(ValueError, match=text):
            flashinfer.moe_a2a_initialize(wrong, 0, 2, 3)
    with pytest.raises(ValueError, match="ep_rank: expected 0 to 1, got 2"):
        flashinfer.moe_a2a_initialize(workspace, 2, 2, 3)
    flashinfer.moe_a2a_initialize(workspace, 0, 2, 3)
    with pytest.raises(ValueError, match="metainfo: expected the table of moe_a2a_initialize"):
        flashinfer.moe_a2a_dispatch(ids, [ids], workspace, table, 1, 0, 2, 1, 2)


def test_a_workspace_that_is_gone_leaves_nothing() -> None:
    before = len(WORKSPACES._entries)
    ranks = Ranks(2, 2, 64)

    def one(rank: Rank) -> None:
        rank.dispatch(draw_ids(rank.rank, 2, 1, 2), [torch.ones((2, 8))], 2, 2)

    ranks.run(one)
    assert len(WORKSPACES._entries) == before + 1
    del ranks
    assert len(WORKSPACES._entries) == before
