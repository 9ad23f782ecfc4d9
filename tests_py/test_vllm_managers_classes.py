# SPDX-License-Identifier: Apache-2.0
"""What single prepare/finalize classes promise."""

from __future__ import annotations

import sys
import threading
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_managers import (
    ALL,
    DELEGATE,
    FP8_BLOCKS,
    UNQUANTISED,
    Batch,
    TopKWeightAndReduceNoOP,
    batched,
    each_rank,
    high_throughput,
    layer_output,
    left_to_do,
    local_experts,
    low_latency,
    manager,
    manager_of,
    one_sided,
    prepare,
    two_sided,
)

import fanfold
from fanfold.compat import vllm
from fanfold.testing import spawn_threads

UBATCHING = "vllm.v1.worker.ubatching"


@pytest.mark.parametrize(
    ("name", "form", "dtype", "max_tokens", "is_async", "is_reduced"),
    [
        ("batched", "BatchedExperts", None, 1, False, True),
        ("low_latency", "BatchedExperts", torch.int64, 1, True, True),
        ("high_throughput", "Standard", torch.int64, None, True, True),
        ("one_sided", "Standard", torch.int32, None, False, True),
        ("two_sided", "Standard", None, None, False, True),
        ("gather_scatter", "Standard", None, None, False, False),
        ("naive", "Standard", None, None, False, False),
    ],
)
def test_what_kernels_ask_first(
    name: str, form: str, dtype: Any, max_tokens: int | None, is_async: bool, is_reduced: bool
) -> None:
    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        assert layer.activation_format.name == form
        assert layer.topk_indices_dtype() is dtype
        assert layer.max_num_tokens_per_rank() == max_tokens
        assert layer.output_is_reduced() is is_reduced
        assert layer.num_dispatchers() == 1
        assert layer.supports_async() is is_async
        assert layer.supports_dbo() is is_async
        assert layer.supports_deferred_moe_finalize() is False
        layer.post_init_setup(object())

    each_rank(1, Batch([1]), ALL[name], body)


def test_capacities_of_the_batched_class() -> None:
    batch = Batch([3, 2], num_experts=6, top_k=5)

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        assert layer.capacities(5) == (3, 3, 6)
        assert layer.capacities(2) == (3, 2, 6)
        rows, scales, tokens, ids, weights = prepare(layer, batch, comm.rank)
        assert rows.shape == (3, 6, 16)
        assert (scales, ids, weights) == (None, None, None)
        assert tokens.expert_num_tokens.shape == (3,)
        assert tokens.expert_num_tokens_cpu is None

    each_rank(2, batch, batched, body)


def test_batched_formats_check_who_they_are() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.BatchedAll2AllManager, comm, Batch([2, 2]))
        cls = vllm.AllToAllBatchedPrepareAndFinalize
        with pytest.raises(fanfold.InvalidArgument, match="num_dispatchers: expected the 2"):
            cls(2, 3, 4, comm.rank, manager=own)
        with pytest.raises(fanfold.InvalidArgument, match=f"rank: expected {comm.rank}"):
            cls(2, 3, 2, 1 - comm.rank, manager=own)
        layer = cls(2, 4, 2, comm.rank, manager=own)
        with pytest.raises(fanfold.InvalidArgument, match="num_local_experts: expected 3 of 6"):
            prepare(layer, Batch([2, 2]), comm.rank)
        own.destroy()

    spawn_threads(2, rank)


def test_high_throughput_gives_ids_that_kernels_may_count() -> None:
    batch = Batch([3, 2], top_k=3)
    batch.ids[0, 0] = -1

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        local = local_experts(6, comm.rank, 2)
        rows, _, tokens, ids, weights = prepare(layer, batch, comm.rank)
        counts = [0] * 3
        for row in batch.ids.tolist():
            for expert in row:
                if expert in local:
                    counts[expert - local[0]] += 1
        assert tokens.expert_num_tokens.tolist() == counts
        assert tokens.expert_num_tokens_cpu.tolist() == counts
        assert ids.dtype is torch.int64
        assert len(ids) == len(rows)
        other = 5 if comm.rank == 0 else 0
        is_local = torch.isin(ids, torch.tensor(local))
        assert (is_local | (ids == other)).all()
        assert (weights[~is_local] == 0).all()
        assert int(is_local.sum()) == sum(counts)
        assert layer.maybe_roundup_layer_hidden_size(2880, torch.bfloat16) == 2880

    each_rank(2, batch, high_throughput, body)


def test_high_throughput_checks_its_first_expert() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        batch = Batch([2, 2])
        own = manager(vllm.DeepEPHTAll2AllManager, comm, batch)
        layer = vllm.DeepEPHTPrepareAndFinalize(own.get_handle({}), 2, 2, 5)
        with pytest.raises(fanfold.InvalidArgument, match="rank_expert_offset: expected"):
            prepare(layer, batch, comm.rank)
        own.destroy()

    spawn_threads(2, rank)


def test_rank_major_rows_have_one_place_per_token_of_the_fullest_rank() -> None:
    batch = Batch([1, 3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        rows, scales, tokens, ids, weights = prepare(layer, batch, comm.rank)
        assert rows.shape == (2 * 3, 16)
        assert ids.shape == weights.shape == (6, 2)
        assert (scales, tokens) == (None, None)
        assert (ids[1:3] == -1).all()
        # Without metadata every rank has as many tokens as this one.
        manager_of(layer)._forward_context = lambda: None
        same = Batch([2, 2])
        assert prepare(layer, same, comm.rank)[0].shape == (4, 16)

    for make in (one_sided, two_sided):
        each_rank(2, batch, make, body)


def test_low_latency_delegates_and_weighs_with_the_weights_of_finalize() -> None:
    batch = Batch([2, 3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        rows, _, tokens, _, _ = prepare(layer, batch, comm.rank)
        y = batch.by_expert(rows, tokens.expert_num_tokens, local_experts(6, comm.rank, 2))
        output = torch.empty(x.shape)
        with pytest.raises(
            NotImplementedError, match=r"expected TopKWeightAndReduceDelegate.*NoOP"
        ):
            layer.finalize(output, y, weights, ids, False, TopKWeightAndReduceNoOP())
        layer.finalize(output, y, weights * 2, ids, False, DELEGATE)
        assert torch.equal(output, 2 * batch.dense(comm.rank))
        assert layer.maybe_roundup_layer_hidden_size(2880) == 2880

    each_rank(2, batch, low_latency, body)


def test_low_latency_maps_ids_to_physical_ones() -> None:
    batch = Batch([2, 3])
    batch.ids[0] = torch.tensor([-1, 4])
    table = torch.tensor([5, 3, 1, 4, 2, 0])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        rows, _, tokens, _, _ = prepare(layer, batch, comm.rank)
        physical = local_experts(6, comm.rank, 2)
        y = batch.by_expert(
            rows, tokens.expert_num_tokens, [table.tolist().index(each) for each in physical]
        )
        output = torch.empty(x.shape)
        layer.finalize(output, y, weights, ids, False, DELEGATE)
        assert torch.equal(output, batch.dense(comm.rank))

    each_rank(2, batch, low_latency, body, global_to_physical=table)


@pytest.mark.parametrize("hidden", [128, 200])
def test_low_latency_sends_fp8_blocks(hidden: int) -> None:
    batch = Batch([2, 3], hidden=hidden, dtype=torch.bfloat16)

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        local = local_experts(6, comm.rank, 2)
        rows, scales, tokens, _, _ = prepare(layer, batch, comm.rank, FP8_BLOCKS)
        assert rows.dtype is torch.float8_e4m3fn
        assert scales.shape == (3, 6, -(-hidden // 128))
        assert scales.dtype is torch.float32
        wide = rows.float() * scales.repeat_interleave(128, 2)[..., :hidden]
        outputs = []
        for step in range(2):
            if step:  # experts without quantisation get the tokens' type again
                wide, no_scales, tokens, _, _ = prepare(layer, batch, comm.rank)
                assert no_scales is None
                assert wide.dtype is torch.bfloat16
            y = batch.by_expert(wide, tokens.expert_num_tokens, local)
            output = torch.empty(x.shape, dtype=torch.bfloat16)
            layer.finalize(output, y, weights, ids, False, DELEGATE)
            outputs.append(output.float())
        expected = batch.dense(comm.rank)
        for output in outputs:
            torch.testing.assert_close(output, expected, rtol=0.1, atol=0.05 * hidden**0.5 * 4)

    each_rank(2, batch, low_latency, body, use_fp8_dispatch=True)


def test_low_latency_refuses_what_it_cannot_quantise() -> None:
    batch = Batch([2])
    other = [
        SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=None),
        SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 64]),
        SimpleNamespace(quant_dtype="nvfp4", block_shape=[128, 128]),
    ]
    packed = SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: True)

    def with_wire(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        for config in other:
            with pytest.raises(NotImplementedError, match="float8_e4m3fn in blocks of 128"):
                prepare(layer, batch, 0, config)
        with pytest.raises(NotImplementedError, match="packed UE8M0"):
            layer.post_init_setup(packed)

    def without_wire(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        with pytest.raises(NotImplementedError, match="use_fp8_dispatch False"):
            prepare(layer, batch, 0, FP8_BLOCKS)
        layer.post_init_setup(packed)

    each_rank(1, batch, low_latency, with_wire, use_fp8_dispatch=True)
    each_rank(1, batch, low_latency, without_wire)


def test_low_latency_checks_what_its_handle_was_told() -> None:
    batch = Batch([2], num_experts=5)

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        x, weights, ids = batch.of(0)
        with pytest.raises(fanfold.InvalidArgument, match=r"num_experts: expected 5.* got 6"):
            layer.prepare(x, weights, ids, 6, None, False, UNQUANTISED)

    each_rank(1, batch, low_latency, body)


@pytest.mark.parametrize("name", ["low_latency", "high_throughput"])
def test_two_micro_batches_are_open_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType(UBATCHING)
    batches = [Batch([2, 3]), Batch([1, 2], seed=1)]
    current = threading.local()
    module.dbo_current_ubatch_id = lambda: current.number
    monkeypatch.setitem(sys.modules, UBATCHING, module)

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        local = local_experts(6, comm.rank, 2)
        received, hooks = [], []
        for number, batch in enumerate(batches):
            current.number = number
            x, weights, ids = batch.of(comm.rank)
            sent = layer.prepare_async(x, weights, ids, 6, None, False, UNQUANTISED)
            received.append(sent)
        outputs = []
        for number, batch in enumerate(batches):
            current.number = number
            x, weights, ids = batch.of(comm.rank)
            if name == "low_latency":
                hook, receiver = received[number]
                hook()
                hook()  # a second time it does nothing
                rows, _, tokens, _, _ = receiver()
                y = batch.by_expert(rows, tokens.expert_num_tokens, local)
            else:
                rows, _, _, ids, weights = received[number]()
                y = batch.by_row(rows, ids, weights, local)
            output = torch.empty(x.shape)
            more = (weights, ids, False, left_to_do(layer))
            hooks.append(layer.finalize_async(output, y, *more))
            outputs.append(output)
        for hook in hooks:
            if name == "low_latency":
                hook[0]()
                hook[1]()
            else:
                hook()
        for batch, output in zip(batches, outputs, strict=True):
            assert torch.equal(output, batch.dense(comm.rank))

    each_rank(2, batches[0], ALL[name], body)


def test_a_round_that_was_only_sent_ends_with_the_next() -> None:
    batch = Batch([2, 3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        layer.prepare_async(x, weights, ids, 6, None, False, UNQUANTISED)
        with pytest.raises(fanfold.InvalidState, match="received first"):
            layer.finalize(x.clone(), x, weights, ids, False, DELEGATE)
        assert torch.equal(layer_output(layer, batch, comm.rank, 2), batch.dense(comm.rank))

    each_rank(2, batch, low_latency, body, max_in_flight=1)
