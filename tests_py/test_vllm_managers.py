# SPDX-License-Identifier: Apache-2.0
"""Managers: handles, masks, groups, memory."""

from __future__ import annotations

import logging
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_managers import (
    Batch,
    group,
    layer_output,
    low_latency,
    manager,
    manager_of,
    one_sided,
    prepare,
)

import fanfold
from fanfold.compat import vllm
from fanfold.testing import spawn_threads

LL_ARGUMENTS = {
    "max_num_tokens_per_dp_rank": 4,
    "token_hidden_size": 16,
    "num_ep_ranks": 2,
    "num_global_experts": 6,
    "num_local_experts": 3,
}


def test_equal_arguments_give_one_exchange() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.DeepEPLLAll2AllManager, comm, Batch([1, 1]))
        full = {**LL_ARGUMENTS, "top_k": 2, "layout": "expert_major", "weighting": "origin"}
        exchange = own.get_handle(full)
        assert isinstance(exchange, fanfold.AllToAll)
        assert own.get_handle(dict(reversed(full.items()))) is exchange
        assert own.get_handle({**full, "token_hidden_size": 32}) is not exchange
        assert exchange.config["strategy"] == "low_latency"
        assert exchange.config["max_tokens_per_rank"] == 4
        handle = own.get_handle(LL_ARGUMENTS)
        assert own.get_handle(dict(LL_ARGUMENTS)) is handle
        assert handle.exchange(top_k=2, layout="expert_major", weighting="origin") is exchange
        own.destroy()
        assert exchange.is_closed
        for arguments in (full, LL_ARGUMENTS):
            with pytest.raises(fanfold.InvalidState, match="was destroyed"):
                own.get_handle(arguments)
        own.destroy()

    spawn_threads(2, rank)


def test_tables_are_arguments_by_value() -> None:
    """Also those that are printed in part, and types by any of their names."""

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.BatchedAll2AllManager, comm, Batch([1, 1]))
        config = {"num_experts": 2048, "top_k": 2, "max_tokens_per_rank": 4, "hidden": 8}
        table = torch.arange(2048) % 2
        other = table.clone()
        other[1000:1002] = torch.tensor([1, 0])
        forms = (table, table.numpy(), table.tolist(), tuple(table.tolist()))
        exchange = own.get_handle({**config, "placement": table.tolist(), "dtype": "float32"})
        for form in forms:
            same = {**config, "placement": form, "dtype": torch.float32}
            assert own.get_handle(same) is exchange
        made = own.get_handle({**config, "placement": other.numpy(), "dtype": "float32"})
        assert made is not exchange
        assert made.local_experts != exchange.local_experts
        own.destroy()

    spawn_threads(2, rank)


def test_arguments_that_contradict_the_group() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.DeepEPLLAll2AllManager, comm, Batch([1, 1]))
        with pytest.raises(fanfold.InvalidArgument, match="num_ep_ranks: expected the 2 ranks"):
            own.get_handle({**LL_ARGUMENTS, "num_ep_ranks": 4})
        with pytest.raises(fanfold.InvalidArgument, match=r"num_local_experts: .* got 5 here"):
            own.get_handle({**LL_ARGUMENTS, "num_local_experts": 5})
        own.destroy()

    spawn_threads(2, rank)


def test_flashinfer_managers_are_their_own_handles() -> None:
    comm = fanfold.Communicator.threads(1)[0]
    config = {"num_experts": 2, "top_k": 1, "max_tokens_per_rank": 2, "hidden": 4}
    for cls in (vllm.FlashInferNVLinkOneSidedManager, vllm.FlashInferNVLinkTwoSidedManager):
        own = manager(cls, comm, Batch([1]))
        assert own.get_handle({}) is own
        assert own.get_handle(config) is own.get_handle(config)
        assert own.get_handle(config).config["strategy"] == own.strategy
        own.destroy()


def test_managers_that_move_nothing_say_so() -> None:
    own = manager(vllm.DeepEPHTAll2AllManager, fanfold.Communicator.threads(1)[0], Batch([1]))
    x = torch.zeros((1, 1))
    for call in (
        lambda: own.dispatch(x, x, x),
        lambda: own.dispatch_router_logits(x, x),
        lambda: own.combine(x),
        lambda: own.combine_into_output(x, x),
    ):
        with pytest.raises(NotImplementedError, match="prepare/finalize class"):
            call()
    assert own.allocate_combine_input((1, 1), torch.float32, "cpu") is None
    with pytest.raises(NotImplementedError, match="high_throughput has no rank mask"):
        own.query_active_mask()
    own.destroy()


def test_masks_have_the_polarity_of_vllm() -> None:
    batch = Batch([2, 2, 2])
    batch.ids[:, 0] = torch.tensor([0, 1, 2, 3, 0, 1])  # of ranks 0 and 1

    def rank(comm: fanfold.Communicator) -> Any:
        layer = low_latency(comm, batch)
        own = manager_of(layer)
        assert own.query_active_mask().tolist() == [0, 0, 0]
        assert own.query_active_mask().dtype is torch.int32
        assert not own.query_fault()
        layer_output(layer, batch, comm.rank, 3)
        comm.barrier()
        if comm.rank == 2:
            return None
        with pytest.raises(fanfold.InvalidArgument, match="with True for this rank"):
            own.set_active_mask([comm.rank != 0, comm.rank != 1, True])
        own.set_active_mask([True, True, False])
        assert own.query_active_mask().tolist() == [0, 0, 1]
        assert bool(own.query_fault())
        own.clean_buffers()
        assert not own.query_fault()
        with own.mask_remote_ranks():
            return layer_output(layer, batch, comm.rank, 3)

    outputs = spawn_threads(3, rank)
    batch.ids[batch.ids >= 4] = -1
    for source in range(2):
        assert torch.equal(outputs[source], batch.dense(source))


def test_masks_hold_for_exchanges_to_come() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.FlashInferNVLinkOneSidedManager, comm, Batch([1, 1]))
        config = {"num_experts": 2, "top_k": 1, "max_tokens_per_rank": 2, "hidden": 4}
        before = own.get_handle(config)
        comm.barrier()
        if comm.rank == 0:
            own.set_active_mask([True, False])
        assert before.active_mask == [True, comm.rank == 1]
        after = own.get_handle({**config, "hidden": 8})
        assert after.active_mask == before.active_mask

    spawn_threads(2, rank)


def test_workers_are_set_on_all_exchanges() -> None:
    own = manager(vllm.DeepEPHTAll2AllManager, fanfold.Communicator.threads(1)[0], Batch([1]))
    config = {"num_experts": 2, "top_k": 1, "max_tokens_per_rank": 2, "hidden": 4, "layout": "flat"}
    first = own.get_handle(config)
    own.set_num_sms(3)
    assert first.num_workers == 3
    assert own.get_handle({**config, "hidden": 8}).num_workers == 3
    own.set_num_sms(0)
    assert first.num_workers == 1
    assert own.max_sms_used() is None
    own.destroy()


def test_low_latency_takes_no_multiprocessors() -> None:
    own = manager(vllm.DeepEPLLAll2AllManager, fanfold.Communicator.threads(1)[0], Batch([1]))
    assert own.max_sms_used() == 0
    own.destroy()


def test_a_checkpoint_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    own = manager(vllm.AgRsAll2AllManager, fanfold.Communicator.threads(1)[0], Batch([1]))
    with caplog.at_level(logging.WARNING):
        own.checkpoint_prepare()
        own.checkpoint_restore()
    assert len(caplog.records) == 1
    assert "AgRsAll2AllManager keeps" in caplog.text
    own.stage_ep_size(4)
    own.commit_ep_size()
    own.destroy()


def test_the_one_sided_manager_grows_to_the_union_of_its_layers() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        small, large = Batch([1, 2]), Batch([9, 3], hidden=32, seed=1)
        own = manager(vllm.FlashInferNVLinkOneSidedManager, comm, small)
        layers = [
            vllm.FlashInferNVLinkOneSidedPrepareAndFinalize(
                max(batch.num_tokens), 2, 6, batch.hidden, num_dispatchers=2, manager=own
            )
            for batch in (small, large)
        ]
        own.initialize(1, 2, 6, 8)  # a smaller one takes nothing away
        for batch, layer in [(small, layers[0]), (large, layers[1])] * 2:
            own._forward_context = batch.context
            output = layer_output(layer, batch, comm.rank, 2)
            assert torch.equal(output, batch.dense(comm.rank))
        assert len(own._exchanges.all) == 1
        assert own._exchanges.all[0].config["max_tokens_per_rank"] == 9
        for top_k, num_experts in ((3, 6), (2, 8)):
            with pytest.raises(fanfold.InvalidArgument, match="expected 2 and 6, as the layers"):
                own.initialize(4, top_k, num_experts, 16)
        own.cleanup()
        own.initialize(4, 3, 8, 16)
        own.destroy()

    spawn_threads(2, rank)


def test_each_size_grows_by_itself() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        wide, many = Batch([1, 2], hidden=64), Batch([30, 3], seed=1)
        own = manager(vllm.FlashInferNVLinkTwoSidedManager, comm, wide)
        layer = vllm.FlashInferNVLinkTwoSidedPrepareAndFinalize(2, manager=own)
        made = []
        for batch in (wide, many, wide, many):
            own._forward_context = batch.context
            output = layer_output(layer, batch, comm.rank, 2)
            assert torch.equal(output, batch.dense(comm.rank))
            made += own._exchanges.all
        first, *others = made
        assert first.is_closed
        assert all(exchange is others[0] for exchange in others)
        assert others[0].config["max_tokens_per_rank"] == 32
        assert others[0].config["combine_row_bytes"] == 4 * 64
        own.destroy()

    spawn_threads(2, rank)


def test_the_two_sided_manager_is_told_who_it_is() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.FlashInferNVLinkTwoSidedManager, comm, Batch([1, 1]))
        with pytest.raises(fanfold.InvalidArgument, match="expected 2 and"):
            own.initialize(4, comm.rank, 8)
        assert not own.initialized
        assert own.ensure_alltoall_workspace_initialized()
        own.cleanup()
        own.initialize(2, comm.rank, gpus_per_node=len)  # vLLM gives a function
        assert own.initialized
        own.destroy()

    spawn_threads(2, rank)
    alone = manager(
        vllm.FlashInferNVLinkTwoSidedManager, fanfold.Communicator.threads(1)[0], Batch([1])
    )
    assert not alone.ensure_alltoall_workspace_initialized()
    alone.destroy()


def test_a_stateless_group_bootstraps_a_manager() -> None:
    """vLLM's elastic groups know broadcast and barrier only."""

    class Stateless:
        def __init__(self, comm: fanfold.Communicator) -> None:
            self.comm, self.rank, self.world_size = comm, comm.rank, comm.num_ranks

        def broadcast_obj(self, data: Any, src: int) -> Any:
            return self.comm.all_gather_bytes(data or b"")[src]

        def barrier(self) -> None:
            self.comm.barrier()

    batch = Batch([2, 1])

    def rank(comm: fanfold.Communicator) -> None:
        own = vllm.AgRsAll2AllManager(Stateless(comm), forward_context=batch.context)
        assert own.world_size == 2
        rows, _, _ = own.dispatch(*batch.of(comm.rank))
        assert torch.equal(rows, batch.x)
        own.destroy()

    spawn_threads(2, rank)


def test_groups_of_vllm_are_found_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("vllm.distributed.parallel_state")
    comm = fanfold.Communicator.threads(1)[0]
    own = manager(vllm.FlashInferNVLinkOneSidedManager, comm, Batch([1]))

    def none_yet() -> None:
        raise AssertionError("not initialized")

    module.get_dp_group = lambda: group([3], 3)
    module.get_tp_group = none_yet
    ep_group = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager=own))
    module.get_ep_group = lambda: ep_group
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", module)
    made = vllm.DeepEPHTAll2AllManager(comm)
    assert made.dp_group.ranks == [3]
    assert made.tp_group.world_size == 1
    layer = vllm.FlashInferNVLinkOneSidedPrepareAndFinalize(2, 2, 6, 16)
    assert layer.all2all_manager is own
    assert vllm.MoEPrepareAndFinalizeNaiveDPEPModular()._manager is ep_group
    module.get_ep_group = lambda: SimpleNamespace(device_communicator=None)
    with pytest.raises(fanfold.InvalidState, match="expected one of Fanfold's"):
        vllm.FlashInferNVLinkTwoSidedPrepareAndFinalize()
    own.destroy()


def test_the_config_of_vllm_is_heard_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("vllm.config")
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=96),
        parallel_config=SimpleNamespace(enable_fault_tolerance=False),
    )
    module.get_current_vllm_config_or_none = lambda: config
    comm = fanfold.Communicator.threads(1)[0]
    assert vllm.DeepEPLLAll2AllManager(comm).max_tokens_per_rank == 8192
    monkeypatch.setitem(sys.modules, "vllm.config", module)
    own = vllm.DeepEPLLAll2AllManager(comm)
    assert own.max_tokens_per_rank == 96
    assert own.support_fault_tolerance is False
    assert own.query_active_mask().tolist() == [0]
    assert vllm.DeepEPHTAll2AllManager(comm, max_tokens_per_rank=7).max_tokens_per_rank == 7


def test_the_forward_context_of_vllm_is_heard_where_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = types.ModuleType("vllm.forward_context")
    own = vllm.AgRsAll2AllManager(fanfold.Communicator.threads(1)[0])
    assert own.local_sizes() is None
    is_running = [False]
    module.is_forward_context_available = lambda: is_running[0]
    module.get_forward_context = Batch([5]).context
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    assert own.local_sizes() is None
    is_running[0] = True
    assert own.local_sizes() == [5]
    own.destroy()


def test_without_vllm_a_manager_must_be_given() -> None:
    with pytest.raises(fanfold.InvalidState, match="manager: expected"):
        vllm.FlashInferNVLinkTwoSidedPrepareAndFinalize()
    with pytest.raises(fanfold.InvalidState, match="got neither"):
        vllm.MoEPrepareAndFinalizeNaiveDPEPMonolithic()
    own = manager(vllm.AgRsAll2AllManager, fanfold.Communicator.threads(1)[0], Batch([1]))
    for cls, more in (
        (vllm.FlashInferNVLinkTwoSidedPrepareAndFinalize, ()),
        (vllm.FlashInferNVLinkOneSidedPrepareAndFinalize, (1, 1, 1, 1)),
    ):
        with pytest.raises(fanfold.InvalidState, match="got AgRsAll2AllManager"):
            cls(*more, manager=own)
    with pytest.raises(fanfold.InvalidArgument, match="get_handle"):
        vllm.DeepEPHTPrepareAndFinalize(own, 1, 1, 0)
    own.destroy()


def test_after_a_late_rank_cleanup_begins_anew() -> None:
    batch = Batch([2, 2])

    def rank(comm: fanfold.Communicator) -> None:
        layer = one_sided(comm, batch)
        own = layer.all2all_manager
        own.timeout_s = 1.0
        if comm.rank == 0:
            with pytest.raises(fanfold.PeerTimeout) as late:
                prepare(layer, batch, 0)
                prepare(layer, batch, 0)
            assert late.value.rank == 1
        else:
            prepare(layer, batch, 1)
        comm.barrier()
        own.cleanup()
        own.timeout_s = 20.0
        assert torch.equal(layer_output(layer, batch, comm.rank, 2), batch.dense(comm.rank))
        own.destroy()

    spawn_threads(2, rank)
