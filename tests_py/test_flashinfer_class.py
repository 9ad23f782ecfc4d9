# SPDX-License-Identifier: Apache-2.0
"""``MoeAlltoAll``: FlashInfer's tests of the class and its many-GPU matrix, by rows.

Scaled for the CPU: the matrix has 1 to 33 random or 17 tokens per rank in place of 1 to 99 or 50.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.flashinfer_rounds import (
    BF16,
    check_rows,
    draw_ids,
    exchange,
    mapping,
    noise,
    owner,
    peek,
    rounds_in_a_process,
    run_experts,
    same_bits,
)

import fanfold
from fanfold.compat import flashinfer
from fanfold.compat.flashinfer import exchanges
from fanfold.testing import spawn_processes, spawn_threads


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "TIMEOUT_S", 20.0)


@pytest.mark.parametrize("case", [(902, 7168, 256, 8), (10, 288, 128, 4), (10, 8, 8, 2)])
@pytest.mark.parametrize("in_workspace", [False, True])
@pytest.mark.parametrize("own_output", [False, True])
def test_one_rank_gets_back_what_it_sent(
    case: tuple[int, int, int, int], in_workspace: bool, own_output: bool
) -> None:
    tokens, hidden, num_experts, top_k = case
    ids = draw_ids(0, tokens, top_k, num_experts)
    payloads = [
        noise(0, (tokens, hidden), BF16),
        noise(0, (tokens, 16), torch.float16),
        ids,
        noise(0, (tokens, 7), torch.uint8),
        noise(0, (tokens, 3), torch.int32),
    ]
    size = flashinfer.moe_a2a_get_workspace_size_per_rank(
        1, tokens, sum(each.element_size() * each.shape[1] for each in payloads), 2 * hidden
    )
    a2a = flashinfer.MoeAlltoAll(
        flashinfer.Mapping(1, 0), tokens, top_k, num_experts, workspace_size_per_rank=size
    )
    views = a2a.dispatch(ids, payloads, tokens, -3, 2)
    for view, payload in zip(views, payloads, strict=True):
        assert same_bits(view[0], payload)
    y = views[0]
    if in_workspace:
        y = a2a.get_combine_payload_tensor_in_workspace(tokens, hidden, BF16).copy_(y)
    out = torch.full((tokens, hidden), 7, dtype=BF16) if own_output else None
    got = a2a.combine(y, tokens, payload_in_workspace=in_workspace, output=out)
    assert out is None or got is out
    assert same_bits(got, payloads[0])


def nvfp4_like(rank: int, tokens: int, ids: Any, lora: bool) -> list[Any]:
    """Hidden states as FP4 with float32 scales, ids, bfloat16 weights; perhaps adapters."""
    payloads = [
        noise(rank, (tokens, 512), torch.uint8),
        noise(rank, (tokens, 64), torch.float32),
        ids,
        noise(rank, (tokens, ids.shape[1]), BF16),
    ]
    return [*payloads, noise(rank, (tokens, 1), torch.int32)] if lora else payloads


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_rows_counters_and_tables_of_all_ranks_agree(top_k: int, uniform: bool, lora: bool) -> None:
    world, num_experts = 4, 4 * max(8, -(-top_k // 4))
    counts = [17] * world if uniform else random.Random(top_k).choices(range(1, 34), k=world)
    rows = max(counts)
    per_token = 512 + 256 + 6 * top_k + 4
    size = flashinfer.moe_a2a_get_workspace_size_per_rank(world, rows, per_token, 2048)

    def ids_of(rank: int) -> Any:
        return draw_ids(rank, counts[rank], top_k, num_experts)

    def inputs(rank: int) -> list[Any]:
        return nvfp4_like(rank, counts[rank], ids_of(rank), lora)

    def one(comm: fanfold.Communicator) -> Any:
        me = comm.rank
        a2a = exchange(comm, rows, top_k, num_experts, workspace_size_per_rank=size)
        assert (a2a.ep_size, a2a.ep_rank, a2a.top_k) == (world, me, top_k)
        views = a2a.dispatch(ids_of(me), inputs(me), rows, -1, 2)
        received = check_rows(views, me, ids_of, inputs, num_experts)
        for source, count in enumerate(received):
            assert (views[2][source, count:] == -1).all()
        row = a2a.workspace[me]
        sent = peek(row, a2a.metainfo, "SEND_COUNTERS", world)
        assert peek(row, a2a.metainfo, "RECV_COUNTERS", world) == received
        targets = peek(row, a2a.metainfo, "TOPK_TARGET_RANKS", counts[me] * top_k)
        slots = peek(row, a2a.metainfo, "TOPK_SEND_INDICES", counts[me] * top_k)
        next_slot = [0] * world
        for token, experts in enumerate(ids_of(me).tolist()):
            seen: set[int] = set()
            for k, expert in enumerate(experts):
                rank = owner(expert, num_experts, world)
                at = token * top_k + k
                if rank in seen:  # the first column wins
                    assert (targets[at], slots[at]) == (-1, -1)
                else:
                    seen.add(rank)
                    assert (targets[at], slots[at]) == (rank, next_slot[rank])
                    next_slot[rank] += 1
        assert sent == next_slot
        a2a.combine(torch.zeros((world, rows, 4)), rows)
        return sent, received

    found = spawn_threads(world, one)
    for source in range(world):
        for target in range(world):
            assert found[source][0][target] == found[target][1][source]


def test_dispatch_experts_and_combine_of_a_real_layer() -> None:
    world, hidden, tokens, top_k = 4, 2880, 12, 4
    num_experts = 8 * world
    generator = torch.Generator().manual_seed(3)
    bound = (6 / (2 * hidden)) ** 0.5
    weights = [
        (torch.rand((hidden, hidden), generator=generator) * 2 - 1) * bound for _ in range(world)
    ]  # the experts of a rank share one matrix and differ by a factor

    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        a2a = exchange(comm, tokens, top_k, num_experts, hidden_size=hidden)
        ids, x = draw_ids(me, tokens, top_k, num_experts), noise(me, (tokens, hidden), BF16)
        gates = torch.softmax(noise(me, (tokens, top_k), torch.float32), 1)
        views = a2a.dispatch(ids, [x, ids, gates], tokens, -1, 1)
        mine = views[1] // 8 == me
        factor = torch.where(mine & (views[1] >= 0), views[2] * (views[1] % 8 + 1), 0.0).sum(2)
        y = a2a.get_combine_payload_tensor_in_workspace(tokens, hidden, BF16)
        y.copy_(views[0].float() @ weights[me] * factor[:, :, None])
        out = a2a.combine(y, tokens, payload_in_workspace=True)
        expected = sum(
            x.float()
            @ weights[rank]
            * torch.where(ids // 8 == rank, gates * (ids % 8 + 1), 0.0).sum(1)[:, None]
            for rank in range(world)
        )
        assert torch.isclose(out.float(), expected, atol=2e-2, rtol=2e-2).float().mean() >= 0.99

    spawn_threads(world, one)


@pytest.mark.multiproc
def test_ranks_may_be_processes_that_find_each_other_by_a_backend_of_the_framework() -> None:
    found = spawn_processes(3, rounds_in_a_process)
    assert found == spawn_threads(3, in_threads)


def in_threads(comm: fanfold.Communicator) -> list[float]:
    """What the processes compute."""
    a2a = exchange(comm, 8, 2, 2 * comm.num_ranks, hidden_size=24)
    sums = []
    for tokens in (0, 3, 8, 1):
        mine = min(tokens + comm.rank, 8)
        ids, x = draw_ids(comm.rank, mine, 2, 6), noise(comm.rank, (mine, 24), BF16)
        views = a2a.dispatch(ids, [x, ids], 8, -1, 1)
        y = run_experts(views[0], views[1], comm.rank, 6)
        sums.append(float(a2a.combine(y, 8).float().sum()))
    return sums


# --- The workspace ------------------------------------------------------------------------------


def test_equal_objects_of_one_group_share_a_workspace_and_other_groups_do_not() -> None:
    def one(comm: fanfold.Communicator) -> Any:
        first = exchange(comm, 4, 1, 2, hidden_size=8)
        second = exchange(comm, 4, 1, 2, hidden_size=8)
        longer = exchange(comm, 8, 1, 2, hidden_size=8)
        assert first.workspace.data_ptr() == second.workspace.data_ptr()
        assert first.workspace.data_ptr() != longer.workspace.data_ptr()
        found = flashinfer.MoeAlltoAll.get_workspace(
            first.workspace_size_per_rank, comm.rank, 2, 4, mapping(2, comm.rank)
        )
        assert found["workspace"].data_ptr() == first.workspace.data_ptr()
        assert found["mnnvl_mem"] is first.mnnvl_mem
        assert same_bits(found["metainfo"], first.metainfo)
        assert set(found) == {
            "workspace_size_per_rank", "max_num_tokens", "ep_rank", "ep_size",
            "eplb_stats_num_experts", "mnnvl_mem", "workspace", "metainfo",
        }  # fmt: skip
        assert list(first.workspace.shape) == [2, first.workspace_size_per_rank]
        return first, len(flashinfer.MoeAlltoAll._WORKSPACE_CACHE)

    one_group = spawn_threads(2, one)
    other_group = spawn_threads(2, one)
    addresses = {a2a.workspace.data_ptr() for a2a, _ in one_group + other_group}
    assert len(addresses) == 4  # a mapping each, as processes have


def test_groups_of_the_same_mapping_live_side_by_side() -> None:
    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        other = comm.split(0, -me)  # the same ranks in the opposite order
        assert other is not None
        first = exchange(comm, 4, 1, 2, hidden_size=8)
        second = exchange(other, 4, 1, 2, hidden_size=8)
        third = exchange(comm, 4, 1, 2, hidden_size=8)
        assert first.mnnvl_mem is third.mnnvl_mem is not second.mnnvl_mem
        x = noise(me, (1, 8), BF16)
        for a2a in (first, second, third):
            ids = torch.full((1, 1), a2a.ep_rank, dtype=torch.int32)
            views = a2a.dispatch(ids, [x], 1)
            assert same_bits(views[0][a2a.ep_rank], x)
            assert same_bits(a2a.combine(views[0], 1), x)

    spawn_threads(2, one)


def test_reset_drops_the_workspace_and_ends_the_object() -> None:
    a2a = flashinfer.MoeAlltoAll(flashinfer.Mapping(1, 0), 3, 1, 2, hidden_size=8)
    before = a2a.workspace.data_ptr()
    a2a._reset_workspace()
    with pytest.raises(RuntimeError, match="unmapped"):
        a2a.dispatch(torch.zeros((1, 1), dtype=torch.int32), [torch.zeros((1, 8))], 3)
    again = flashinfer.MoeAlltoAll(flashinfer.Mapping(1, 0), 3, 1, 2, hidden_size=8)
    assert again.mnnvl_mem is not a2a.mnnvl_mem
    assert before != 0


def test_the_size_must_be_given_or_follow_from_the_hidden_size() -> None:
    one = flashinfer.Mapping(1, 0)
    with pytest.raises(ValueError, match="hidden_size: expected it or workspace_size_per_rank"):
        flashinfer.MoeAlltoAll(one, 4, 1, 2)
    with pytest.raises(ValueError, match="workspace_size_per_rank: expected at least 1152 bytes"):
        flashinfer.MoeAlltoAll(one, 4, 1, 2, workspace_size_per_rank=100)
    with pytest.raises(ValueError, match="top_k: expected at least 1, got 0"):
        flashinfer.MoeAlltoAll(one, 4, 0, 2, hidden_size=8)
    with pytest.raises(ValueError, match="num_experts: expected at least 1, got -1"):
        flashinfer.MoeAlltoAll(one, 4, 1, -1, hidden_size=8)
    with pytest.raises(NotImplementedError, match="cake"):
        flashinfer.MoeAlltoAll(one, 4, 1, 2, hidden_size=8, backend="cake")


def test_rounds_that_the_workspace_has_no_room_for_are_refused() -> None:
    size = flashinfer.moe_a2a_get_workspace_size_per_rank(1, 4, 16, 16)
    a2a = flashinfer.MoeAlltoAll(flashinfer.Mapping(1, 0), 4, 1, 1, workspace_size_per_rank=size)
    ids = torch.zeros((4, 1), dtype=torch.int32)
    text = "workspace size per rank insufficient: expected at least"
    with pytest.raises(flashinfer.WorkspaceTooSmall, match=text):
        a2a.dispatch(ids, [torch.zeros((4, 200))], 4)
    views = a2a.dispatch(ids, [torch.ones((4, 4))], 4)
    with pytest.raises(RuntimeError, match=text):
        a2a.combine(torch.zeros((1, 4, 100)), 4)
    assert a2a.combine(views[0], 4).sum() == 16


# --- The order of calls -------------------------------------------------------------------------


def test_dispatch_and_combine_alternate() -> None:
    a2a = flashinfer.MoeAlltoAll(flashinfer.Mapping(1, 0), 4, 1, 1, hidden_size=8)
    ids, x = torch.zeros((2, 1), dtype=torch.int32), torch.ones((2, 8), dtype=BF16)
    y = torch.ones((1, 4, 8), dtype=BF16)
    with pytest.raises(AssertionError, match="combine called before successful dispatch"):
        a2a.combine(y, 4)
    with pytest.raises(RuntimeError, match="called before successful dispatch"):
        a2a.get_combine_payload_tensor_in_workspace(4, 8, BF16)
    with pytest.raises(AssertionError, match="expert_id_payload_index required"):
        a2a.dispatch(ids, [x], 4, -1)
    for wrong, text in (
        ((ids, [x], 5), "runtime_max_tokens_per_rank: expected 1 to 4"),
        ((ids[:, :0], [x], 4), "token_selected_experts shape mismatch"),
        ((ids, [], 4), "at least one payload"),
        ((ids, [x[:1]], 4), "payload 0 first dimension must match local_num_tokens"),
        ((ids, [x], 4, -1, 1), "expert_id_payload_index: expected 0 to 0, got 1"),
    ):
        with pytest.raises(ValueError, match=text):
            a2a.dispatch(*wrong)
    a2a.dispatch(ids, [x], 4)
    with pytest.raises(AssertionError, match="dispatch called twice without combine"):
        a2a.dispatch(ids, [x], 4)
    with pytest.raises(ValueError, match="runtime_max_tokens_per_rank: expected 4, as dispatched"):
        a2a.combine(y, 3)
    with pytest.raises(ValueError, match=r"payload: expected \[1, 4, hidden\]"):
        a2a.combine(y[:, :3], 4)
    with pytest.raises(ValueError, match="tensor pointer mismatch"):
        a2a.combine(y, 4, payload_in_workspace=True)
    with pytest.raises(ValueError, match="must match payload dtype"):
        a2a.combine(y, 4, output_dtype=torch.float32)
    with pytest.raises(TypeError, match="payload: expected float32, float16, bfloat16 or"):
        a2a.combine(y.int(), 4)
    assert a2a.combine(y, 4, output_dtype=BF16).tolist() == [[1.0] * 8] * 2
    with pytest.raises(AssertionError, match="combine called before"):
        a2a.combine(y, 4)


def test_a_mask_must_be_asked_for_at_creation() -> None:
    a2a = flashinfer.MoeAlltoAll(flashinfer.Mapping(1, 0), 4, 1, 1, hidden_size=8)
    ids, x = torch.zeros((2, 1), dtype=torch.int32), torch.ones((2, 8), dtype=BF16)
    mask = flashinfer.moe_a2a_active_rank_mask([0], 1)
    with pytest.raises(ValueError, match="requires enable_rank_mask=True"):
        a2a.dispatch(ids, [x], 4, active_rank_mask=mask)


def test_memory_can_be_given_up_and_taken_again() -> None:
    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 4, 1, 2, hidden_size=8, eplb_stats_num_experts=2)
        ids = torch.tensor([[0], [1]], dtype=torch.int32)
        x = noise(comm.rank, (2, 8), BF16)
        stats = torch.tensor([comm.rank, 9], dtype=torch.int32)
        for _ in range(3):
            views = a2a.dispatch(ids, [x], 2, eplb_local_stats=stats)
            gathered = a2a.eplb_gathered_stats
            assert gathered.tolist() == [[0, 9], [1, 9]]
            with pytest.raises(AssertionError, match="between dispatch and combine"):
                a2a.checkpoint_prepare()
            assert same_bits(a2a.combine(views[0], 2), x)
            assert a2a.eplb_gathered_stats is None
            a2a.checkpoint_prepare()
            with pytest.raises(RuntimeError, match="MNNVL handles are unmapped"):
                a2a.dispatch(ids, [x], 2)
            a2a.checkpoint_restore(flashinfer.CommunicatorBackend(comm))

    spawn_threads(2, one)


def test_exchanges_that_are_given_up_are_closed() -> None:
    """By all ranks together, so that nobody takes a peer for one that died."""

    def one(comm: fanfold.Communicator) -> None:
        a2a = exchange(comm, 4, 1, 2, workspace_size_per_rank=32768)
        ids = torch.tensor([[0], [1]], dtype=torch.int32)

        def known() -> list[Any]:
            slots = a2a._kept.exchanges._slots.values()
            return [slot.exchange for each in slots for slot in each]

        def round_of(hidden: int) -> None:
            x = noise(comm.rank, (2, hidden), BF16)
            assert same_bits(a2a.combine(a2a.dispatch(ids, [x], 4)[0], 4), x)

        round_of(8)
        small = known()
        round_of(700)  # it grows
        assert [each.is_closed for each in small] == [True]
        large = known()
        assert [each.is_closed for each in large] == [False]
        a2a.checkpoint_prepare()
        assert [each.is_closed for each in large] == [True]

    spawn_threads(2, one)
