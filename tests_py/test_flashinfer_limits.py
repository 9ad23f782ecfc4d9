# SPDX-License-Identifier: Apache-2.0
"""What lies past FlashInfer's limits, and calls that are refused before anything is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.flashinfer_rounds import BF16, Rank, Ranks, draw_ids, noise, same_bits

import fanfold
from fanfold.compat import flashinfer
from fanfold.testing import spawn_threads

ONE_RANK = flashinfer.Mapping(1, 0)


@pytest.mark.parametrize(("top_k", "tokens"), [(22, 4), (23, 4), (30, 4), (200, 4), (200, 1)])
def test_tables_of_more_columns_than_there_is_room_for_say_nothing(top_k: int, tokens: int) -> None:
    """And write over nothing: what lies behind them are statistics, and then other memory."""
    num_stats = 3
    flashinfer.MoeAlltoAll._init_constants()

    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        mine = tokens * me  # rank 0 has none
        row_bytes = flashinfer.moe_a2a_get_workspace_size_per_rank(2, tokens, 8, 8, num_stats)
        workspace = flashinfer.MnnvlMemory(
            flashinfer.Mapping(2, me, 2, tp_size=2, moe_ep_size=2), row_bytes
        ).as_torch_strided_tensor(torch.uint8)
        metainfo = flashinfer.moe_a2a_initialize(workspace, me, 2, tokens, num_stats)
        ids, x = draw_ids(me, mine, top_k, top_k), noise(me, (mine, 2), torch.float32)
        views, offset, gathered = flashinfer.moe_a2a_dispatch(
            ids, [x], workspace, metainfo, tokens, me, 2, top_k, top_k,
            eplb_local_stats=torch.tensor([me, 7, 7], dtype=torch.int32),
        )  # fmt: skip
        assert gathered.tolist() == [[0, 7, 7], [1, 7, 7]]
        assert same_bits(views[0][1, :tokens], noise(1, (tokens, 2), torch.float32))
        offsets = dict(zip(flashinfer.MoeAlltoAll._METAINFO_INDEX, metainfo.tolist(), strict=False))
        words = workspace[me].view(torch.int32)
        targets = offsets["TOPK_TARGET_RANKS_OFFSET_INDEX"] // 4
        slots = offsets["TOPK_SEND_INDICES_OFFSET_INDEX"] // 4
        stats = offsets["EPLB_GATHERED_STATS_OFFSET_INDEX"] // 4
        assert words[stats : stats + 6].tolist() == [0, 7, 7, 1, 7, 7]
        for table in (targets, slots):
            found = words[table : table + 22 * mine]
            if top_k <= 22:
                assert ((found == -1).sum() == 20 * mine) and (found >= -1).all()
            else:
                assert (found == -1).all()
        out = flashinfer.moe_a2a_combine(
            views[0], mine, workspace, metainfo, tokens, me, 2, top_k, offset
        )
        assert same_bits(out, x + x)  # both ranks have experts of every token

    spawn_ranks_with_memory(one)


def spawn_ranks_with_memory(one: Any) -> None:
    """Two threads whose mappings find each other by a backend."""

    def body(comm: fanfold.Communicator) -> None:
        mapping = flashinfer.Mapping(2, comm.rank, 2, tp_size=2, moe_ep_size=2)
        flashinfer.MnnvlMemory.set_comm(mapping, comm)
        one(comm)

    spawn_threads(2, body)


@pytest.mark.parametrize("top_k", [30, 200])
def test_an_object_of_many_ids_per_token_shows_its_workspace(top_k: int) -> None:
    a2a = flashinfer.MoeAlltoAll(ONE_RANK, 4, top_k, top_k, hidden_size=8)
    ids, x = draw_ids(0, 4, top_k, top_k), noise(0, (4, 8), BF16)
    views = a2a.dispatch(ids, [x], 4)
    begin = int(a2a.metainfo[a2a._METAINFO_INDEX["TOPK_TARGET_RANKS_OFFSET_INDEX"]])
    assert (a2a.workspace[0, begin : begin + 4 * 22 * 4].view(torch.int32) == -1).all()
    assert same_bits(a2a.combine(views[0], 4), x)


def test_offsets_of_a_round_that_fits_stay_within_the_row() -> None:
    """Two payloads of 64 bytes in a workspace for 64 tokens of 16: rounds of one token fit."""
    module = flashinfer.get_moe_alltoall_module()
    world, capacity = 8, 64
    size = flashinfer.moe_a2a_get_workspace_size_per_rank(world, capacity, 16, 16)
    workspace = torch.zeros((world, size), dtype=torch.uint8)

    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        metainfo = flashinfer.moe_a2a_initialize(workspace, me, world, capacity)
        ids = torch.full((1, 1), (me + 1) % world, dtype=torch.int32)
        payloads = [noise(me, (1, 64), torch.uint8, seed=seed) for seed in (1, 2)]
        starts, lengths, offset, _, _ = module.moe_a2a_dispatch(
            ids, payloads, workspace, metainfo, 1, me, world, 1, world
        )
        for seed, start, length in zip((1, 2), starts, lengths, strict=True):
            wrap = flashinfer.moe_a2a_wrap_payload_tensor_in_workspace
            view = wrap(workspace, [world, 1], start, start + length, torch.uint8)
            source = (me - 1) % world
            assert same_bits(view[source], noise(source, (1, 64), torch.uint8, seed=seed))
        assert offset < size
        results = torch.ones((world, 1, 2))
        module.moe_a2a_combine(results, 1, workspace, metainfo, 1, me, world, 1, offset)

    spawn_threads(world, one)


@pytest.mark.parametrize("index", [0, 1])
def test_a_payload_that_cannot_be_ids_is_refused_before_it_is_sent(index: int) -> None:
    a2a = flashinfer.MoeAlltoAll(ONE_RANK, 4, 2, 4, hidden_size=64)
    ids, x = draw_ids(0, 3, 2, 4), noise(0, (3, 64), BF16)
    payloads = [x, torch.cat([ids, ids], 1), ids]
    with pytest.raises(ValueError, match=rf"\[tokens, 2\] int16, .* payload {index}, got"):
        a2a.dispatch(ids, payloads, 4, -1, index)
    views = a2a.dispatch(ids, payloads, 4, -1, 2)
    assert views[2][0].tolist() == [*ids.tolist(), [-1, -1]]
    assert same_bits(a2a.combine(views[0], 4), x)


def test_no_mask_is_the_mask_of_all() -> None:
    a2a = flashinfer.MoeAlltoAll(ONE_RANK, 4, 1, 1, hidden_size=8, enable_rank_mask=True)
    ids, x = torch.zeros((2, 1), dtype=torch.int32), noise(0, (2, 8), BF16)
    everyone = flashinfer.moe_a2a_active_rank_mask([0], 1)
    for sent, taken in ((None, everyone), (everyone, None)):
        views = a2a.dispatch(ids, [x], 4, active_rank_mask=sent)
        assert same_bits(a2a.combine(views[0], 4, active_rank_mask=taken), x)

    def one(rank: Rank) -> None:
        mask = flashinfer.moe_a2a_active_rank_mask([0, 1], 2)
        views, offset, _ = rank.dispatch(ids, [x], 2, 2)
        how = {"enable_rank_mask": True, "active_rank_mask": mask}
        rank.combine(views[0], 2, 2, 1, offset, **how)

    Ranks(2, 4, 64).run(one)


def test_objects_of_one_rank_are_independent_on_any_thread() -> None:
    def body(number: int) -> bool:
        a2a = flashinfer.MoeAlltoAll(ONE_RANK, 4, 1, 1, hidden_size=8 + number % 3)
        ids, x = torch.zeros((2, 1), dtype=torch.int32), noise(number, (2, 8 + number % 3), BF16)
        for _ in range(5):
            views = a2a.dispatch(ids, [x], 4)
            if not same_bits(a2a.combine(views[0], 4), x):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(body, range(24)))
