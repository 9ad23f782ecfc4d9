# SPDX-License-Identifier: Apache-2.0
"""Rules that all prepare/finalize classes keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_managers import (
    ALL,
    BY_EXPERT,
    BY_ROW,
    DELEGATE,
    FP8_BLOCKS,
    NO_OP,
    UNQUANTISED,
    Batch,
    TopKWeightAndReduceContiguous,
    each_rank,
    expert_map,
    layer_output,
    left_to_do,
    local_experts,
    manager_of,
    one_sided,
    prepare,
)

import fanfold
from fanfold.compat.vllm.exchanges import stream_of


@pytest.mark.parametrize("name", ALL)
def test_weights_on_the_input_need_one_expert_a_token(name: str) -> None:
    batch = Batch([2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        with pytest.raises(NotImplementedError, match=r"expected top_k 1.*got 2"):
            prepare(layer, batch, 0, on_input=True)

    each_rank(1, batch, ALL[name], body)


@pytest.mark.parametrize("name", [*BY_EXPERT, *BY_ROW])
def test_finalize_needs_a_prepare(name: str) -> None:
    batch = Batch([2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        x, weights, ids = batch.of(0)
        with pytest.raises(fanfold.InvalidState, match="expected a prepare"):
            layer.finalize(x, x, weights, ids, False, DELEGATE)
        layer_output(layer, batch, 0, 1)
        with pytest.raises(fanfold.InvalidState, match="expected a prepare"):
            layer.finalize(x, x, weights, ids, False, DELEGATE)

    each_rank(1, batch, ALL[name], body)


@pytest.mark.parametrize("name", ["batched", "low_latency", "one_sided"])
def test_more_tokens_than_there_is_room_for(name: str) -> None:
    batch, too_many = Batch([2]), Batch([3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        manager_of(layer)._forward_context = too_many.context
        with pytest.raises(fanfold.InvalidArgument, match="3"):
            prepare(layer, too_many, 0)
        manager_of(layer)._forward_context = batch.context
        assert torch.equal(layer_output(layer, batch, 0, 1), batch.dense(0))

    each_rank(1, batch, ALL[name], body)


@pytest.mark.parametrize("name", [*BY_EXPERT, *BY_ROW])
def test_a_map_that_is_not_the_placement_is_refused(name: str) -> None:
    batch = Batch([2, 2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        wrong = expert_map(6, [0, 2, 4] if comm.rank == 0 else [1, 3, 5])
        with pytest.raises(fanfold.InvalidArgument, match=r"expert_map: .*placement=, \["):
            layer.prepare(x, weights, ids, 6, wrong, False, UNQUANTISED)
        with pytest.raises(fanfold.InvalidArgument, match="expected 6 entries, got 5"):
            layer.prepare(x, weights, ids, 6, wrong[:5], False, UNQUANTISED)

    each_rank(2, batch, ALL[name], body)


@pytest.mark.parametrize("name", ["batched", "low_latency", "one_sided", "two_sided"])
def test_round_robin_placement(name: str) -> None:
    batch = Batch([2, 3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        local = [comm.rank, comm.rank + 2, comm.rank + 4]
        rows, _, tokens, new_ids, new_weights = layer.prepare(
            x, weights, ids, 6, expert_map(6, local), False, UNQUANTISED
        )
        if tokens is not None:
            y = batch.by_expert(rows, tokens.expert_num_tokens, local)
        else:
            y = batch.by_row(rows, new_ids, new_weights, local)
        output = torch.empty(x.shape)
        layer.finalize(output, y, weights, ids, False, left_to_do(layer))
        assert torch.equal(output, batch.dense(comm.rank))

    each_rank(2, batch, ALL[name], body, placement="round_robin")


@pytest.mark.parametrize("name", ["batched", "high_throughput", "one_sided", "two_sided"])
def test_quantised_rows_that_nobody_makes_are_refused(name: str) -> None:
    batch = Batch([2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        with pytest.raises(NotImplementedError, match="quant"):
            prepare(layer, batch, 0, FP8_BLOCKS)

    each_rank(1, batch, ALL[name], body)


@pytest.mark.parametrize("name", BY_ROW)
def test_quantised_rows_travel_with_their_scales(name: str) -> None:
    batch = Batch([2, 3])
    fp8 = SimpleNamespace(quant_dtype=torch.float8_e4m3fn)

    def quantize(x: Any, config: Any) -> tuple[Any, Any]:
        assert config is fp8
        scales = x.abs().amax(1, keepdim=True).clamp(min=1)
        return (x / scales).to(torch.float8_e4m3fn), scales

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        rows, scales, _, new_ids, new_weights = prepare(layer, batch, comm.rank, fp8)
        assert rows.dtype is torch.float8_e4m3fn
        wide = rows.float() * scales
        local = local_experts(6, comm.rank, 2)
        y = batch.by_row(wide, new_ids, new_weights, local)
        output = torch.empty(x.shape)
        layer.finalize(output, y, new_weights, new_ids, False, left_to_do(layer))
        sent, own_scales = quantize(x, fp8)
        rounded = Batch(batch.num_tokens)
        first = sum(batch.num_tokens[: comm.rank])
        rounded.x[first : first + len(x)] = sent.float() * own_scales
        torch.testing.assert_close(output, rounded.dense(comm.rank))
        del weights, ids

    each_rank(2, batch, ALL[name], body, quantize=quantize)


@pytest.mark.parametrize("name", [*BY_EXPERT, *BY_ROW])
def test_experts_may_write_where_nothing_is_copied(name: str) -> None:
    batch = Batch([2, 3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        arguments = (torch.float32, "cpu", DELEGATE)
        assert layer.allocate_fused_expert_output((4, 16), *arguments) is None
        rows, _, tokens, new_ids, new_weights = prepare(layer, batch, comm.rank)
        shape = tuple(rows.shape)
        assert layer.allocate_fused_expert_output((*shape[:-1], 8), *arguments) is None
        assert layer.allocate_fused_expert_output((99, 16), *arguments) is None
        assert layer.allocate_fused_expert_output(shape, torch.float16, "cpu", None) is None
        assert layer.allocate_fused_expert_output(shape, torch.float32, "meta", None) is None
        buffer = layer.allocate_fused_expert_output(shape, *arguments)
        assert buffer.shape == shape
        assert buffer.is_contiguous()
        again = layer.allocate_fused_expert_output(shape, *arguments)
        assert again.data_ptr() == buffer.data_ptr()
        local = local_experts(6, comm.rank, 2)
        if tokens is not None and new_ids is None:
            batch.by_expert(rows, tokens.expert_num_tokens, local, into=buffer)
        else:
            buffer.copy_(batch.by_row(rows, new_ids, new_weights, local))
            weights, ids = new_weights, new_ids
        output = torch.empty(x.shape)
        layer.finalize(output, buffer, weights, ids, False, left_to_do(layer))
        assert torch.equal(output, batch.dense(comm.rank))

    each_rank(2, batch, ALL[name], body)


@pytest.mark.parametrize("name", BY_ROW)
def test_results_that_were_written_over_the_rows(name: str) -> None:
    batch = Batch([2, 3], top_k=1)

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        for _ in range(3):
            rows, _, _, ids, weights = prepare(layer, batch, comm.rank)
            rows.mul_(weights)
            output = torch.empty(batch.of(comm.rank)[0].shape)
            layer.finalize(output, rows, weights, ids, False, NO_OP)
            x, own_weights, _ = batch.of(comm.rank)
            assert torch.equal(output, x * own_weights)

    each_rank(2, batch, ALL[name], body)


@pytest.mark.parametrize("name", [*BY_EXPERT, *BY_ROW])
def test_a_prepare_that_nobody_finalizes_ends_with_the_next(name: str) -> None:
    batch = Batch([2, 3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        for _ in range(3):
            prepare(layer, batch, comm.rank)
        output = layer_output(layer, batch, comm.rank, 2)
        assert torch.equal(output, batch.dense(comm.rank))

    each_rank(2, batch, ALL[name], body)


@pytest.mark.parametrize("name", [*BY_EXPERT, *BY_ROW])
def test_a_map_that_changes_is_checked_again(name: str) -> None:
    batch = Batch([2, 3])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        local = expert_map(6, local_experts(6, comm.rank, 2))
        x, weights, ids = batch.of(comm.rank)
        ids = ids.to(layer.topk_indices_dtype() or torch.int64)
        for known in (None, local, local):
            layer.prepare(x, weights, ids, 6, known, False, UNQUANTISED)
        local.copy_(expert_map(6, local_experts(6, 1 - comm.rank, 2)))
        with pytest.raises(fanfold.InvalidArgument, match="expert_map: expected the experts of"):
            layer.prepare(x, weights, ids, 6, local, False, UNQUANTISED)
        layer_output(layer, batch, comm.rank, 2)

    each_rank(2, batch, ALL[name], body)


@pytest.mark.parametrize("impl", [TopKWeightAndReduceContiguous(), DELEGATE])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("name", [*BY_ROW, "gather_scatter", "naive"])
def test_what_the_experts_left_to_do_is_done(name: str, top_k: int, impl: Any) -> None:
    """Also where results have two dimensions, and so look like those of experts that did it."""
    batch = Batch([2, 0, 3], top_k=top_k)

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        local = local_experts(6, comm.rank, 3)
        for is_flat in (False, True):
            rows, _, _, ids, weights = prepare(layer, batch, comm.rank)
            ids = batch.of(comm.rank)[2] if ids is None else ids
            y = batch.per_row_and_expert(rows, ids, local)
            output = torch.full(batch.of(comm.rank)[0].shape, torch.nan)
            layer.finalize(output, y.flatten(0, 1) if is_flat else y, weights, ids, False, impl)
            assert torch.equal(output, batch.dense(comm.rank))

    each_rank(3, batch, ALL[name], body)


def test_one_result_per_row_of_several_experts_has_nothing_left_to_do() -> None:
    batch = Batch([2, 2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        rows, _, _, ids, weights = prepare(layer, batch, comm.rank)
        output = torch.empty(batch.of(comm.rank)[0].shape)
        y = batch.by_row(rows, ids, weights, local_experts(6, comm.rank, 2))
        with pytest.raises(fanfold.InvalidArgument, match=r"each of 4 rows and 2 experts.*NoOP"):
            layer.finalize(output, y, weights, ids, False, DELEGATE)
        layer.finalize(output, y, weights, ids, False, NO_OP)
        assert torch.equal(output, batch.dense(comm.rank))

    each_rank(2, batch, one_sided, body)


def test_results_of_another_shape_leave_the_round_open() -> None:
    batch = Batch([2, 2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        x, weights, ids = batch.of(comm.rank)
        rows, _, _, new_ids, new_weights = prepare(layer, batch, comm.rank)
        output = torch.empty(x.shape)
        with pytest.raises(fanfold.InvalidArgument, match="a result for each row"):
            layer.finalize(output, rows[:3].clone(), weights, ids, False, NO_OP)
        y = batch.by_row(rows, new_ids, new_weights, local_experts(6, comm.rank, 2))
        layer.finalize(output, y, new_weights, new_ids, False, left_to_do(layer))
        assert torch.equal(output, batch.dense(comm.rank))

    each_rank(2, batch, one_sided, body)


def test_shapes_that_do_not_belong_together() -> None:
    batch = Batch([2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        x, weights, ids = batch.of(0)
        with pytest.raises(fanfold.InvalidArgument, match=r"expected a1 \[T, H\]"):
            layer.prepare(x, weights[:, :1], ids, 6, None, False, UNQUANTISED)

    each_rank(1, batch, one_sided, body)


@pytest.mark.parametrize("name", ["batched", "high_throughput", "two_sided"])
def test_strategies_without_a_gpu_form_say_so(name: str) -> None:
    batch = Batch([2])

    def body(layer: Any, comm: fanfold.Communicator) -> None:
        del comm
        x, weights, ids = (tensor.to("meta") for tensor in batch.of(0))
        with pytest.raises(fanfold.Unsupported, match="has no GPU form"):
            layer.prepare(x, weights, ids, 6, None, False, UNQUANTISED)

    each_rank(1, batch, ALL[name], body)


def test_the_stream_on_a_gpu_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(type="cuda")
    current = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: current if of is device else None)
    assert stream_of(SimpleNamespace(device=device)) == {"stream": 77}
    assert stream_of(torch.zeros(1)) == {}
