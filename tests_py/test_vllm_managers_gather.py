# SPDX-License-Identifier: Apache-2.0
"""The managers that gather: two groups, what is gathered, and sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_managers import (
    NO_OP,
    UNQUANTISED,
    Batch,
    group,
    local_experts,
    manager,
)

import fanfold
from fanfold.compat import vllm
from fanfold.testing import spawn_threads

MANAGERS = [vllm.AgRsAll2AllManager, vllm.NaiveAll2AllManager]
DP, TP = 2, 2


def in_groups(cls: type, comm: fanfold.Communicator, batch: Batch) -> Any:
    """A manager of two data-parallel ranks, each of two tensor-parallel ones."""
    dp_rank, tp_rank = divmod(comm.rank, TP)
    columns = [dp * TP + tp_rank for dp in range(DP)]
    rows = [dp_rank * TP + tp for tp in range(TP)]
    return manager(
        cls, comm, batch, dp_group=group(columns, comm.rank), tp_group=group(rows, comm.rank)
    )


@pytest.mark.parametrize("cls", MANAGERS)
def test_tokens_of_the_data_parallel_group_reach_all_its_ranks(cls: type) -> None:
    batch = Batch([3, 1])

    def rank(comm: fanfold.Communicator) -> None:
        own = in_groups(cls, comm, batch)
        assert (own.dp_rank, own.dp_world_size) == (comm.rank // TP, DP)
        assert (own.rank, own.world_size) == (comm.rank, DP * TP)
        x, weights, ids = batch.of(own.dp_rank)
        extra = [x[:, 0].to(torch.int32), ids.to(torch.int16)[:, :1]]
        hidden, all_weights, all_ids = own.dispatch(x, weights, ids)
        assert torch.equal(hidden, batch.x)
        assert torch.equal(all_weights, batch.weights)
        assert torch.equal(all_ids, batch.ids)
        *_, gathered = own.dispatch(x, weights, ids, extra_tensors=extra)
        assert [each.dtype for each in gathered] == [torch.int32, torch.int16]
        assert torch.equal(gathered[0], batch.x[:, 0].to(torch.int32))
        # Each column of ranks adds for itself what its two ranks made.
        out = own.combine(torch.full((4, 5), float(comm.rank + 1)))
        assert torch.equal(out, torch.full((len(x), 5), float(2 * (comm.rank % TP) + 1 + 3)))
        own.destroy()

    spawn_threads(DP * TP, rank)


@pytest.mark.parametrize("cls", MANAGERS)
def test_shards_of_sequence_parallelism_are_gathered_over_all_ranks(cls: type) -> None:
    steps = Batch([4, 2])  # of the data-parallel ranks
    shards = Batch([2, 2, 1, 1])

    def rank(comm: fanfold.Communicator) -> None:
        own = in_groups(cls, comm, steps)
        context = steps.context()
        own._forward_context = lambda: context
        with context.dp_metadata.sp_local_sizes(TP):
            x, weights, ids = shards.of(comm.rank)
            hidden, logits = own.dispatch_router_logits(x, weights, True)
            assert torch.equal(hidden, shards.x)
            assert torch.equal(logits, shards.weights)
            y = torch.arange(6 * 16.0).view(6, 16) * (comm.rank + 1)
            out = own.combine(y, is_sequence_parallel=True)
            first = sum(shards.num_tokens[: comm.rank])
            assert torch.equal(out, 10 * torch.arange(6 * 16.0).view(6, 16)[first : first + len(x)])
            both = own.dispatch_router_logits(x, weights, True, [ids])
            assert torch.equal(both[2][0], shards.ids)
        own.destroy()

    spawn_threads(DP * TP, rank)


def test_outputs_of_tensor_parallel_ranks_add_up_to_the_layer() -> None:
    """output_is_reduced is False: without shards each column of ranks has half of the experts."""
    batch = Batch([3, 2])

    def rank(comm: fanfold.Communicator) -> Any:
        own = in_groups(vllm.AgRsAll2AllManager, comm, batch)
        layer = vllm.MoEPrepareAndFinalizeNaiveDPEPModular(False, DP * TP, manager=own)
        assert layer.output_is_reduced() is False
        assert layer.num_dispatchers() == DP * TP
        local = local_experts(batch.num_experts, comm.rank, DP * TP)
        x, weights, ids = batch.of(own.dp_rank)
        rows, _, _, ids, weights = layer.prepare(x, weights, ids, 6, None, False, UNQUANTISED)
        output = torch.empty(x.shape)
        y = batch.by_row(rows, ids, weights, local, poisons=False)
        layer.finalize(output, y, weights, ids, False, NO_OP)
        own.destroy()
        return output

    outputs = spawn_threads(DP * TP, rank)
    for dp_rank in range(DP):
        total = outputs[dp_rank * TP] + outputs[dp_rank * TP + 1]
        assert torch.equal(total, batch.dense(dp_rank))


@pytest.mark.parametrize("cls", MANAGERS)
def test_experts_that_route_by_themselves(cls: type) -> None:
    batch = Batch([2, 3])

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(cls, comm, batch)
        layer = vllm.MoEPrepareAndFinalizeNaiveDPEPMonolithic(manager=own)
        x, weights, ids = batch.of(comm.rank)
        rows, scale, logits = layer.prepare(x, torch.cat([weights, ids], 1), UNQUANTISED)
        assert scale is None
        all_weights, all_ids = logits[:, :2], logits[:, 2:].long()
        local = local_experts(6, comm.rank, 2)
        y = batch.by_row(rows, all_ids, all_weights, local, poisons=False)
        assert torch.equal(layer.finalize(y), batch.dense(comm.rank))
        own.destroy()

    spawn_threads(2, rank)


def test_one_data_parallel_rank_needs_no_metadata() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        own = vllm.AgRsAll2AllManager(
            comm,
            dp_group=group([comm.rank], comm.rank),
            tp_group=group([0, 1], comm.rank),
            forward_context=lambda: None,
        )
        x = torch.full((2, 3), float(comm.rank))
        hidden, _, _ = own.dispatch(x, x, x, is_sequence_parallel=True)
        assert hidden[:, 0].tolist() == [0, 0, 1, 1]
        assert own.combine(hidden, True).tolist() == [[2 * comm.rank] * 3] * 2
        # Its own tokens are all of the data-parallel group of one.
        assert torch.equal(own.dispatch(x, x, x)[0], x)
        own.destroy()

    spawn_threads(2, rank)


def test_several_data_parallel_ranks_need_metadata_that_fits() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.AgRsAll2AllManager, comm, Batch([2, 2]))
        x = torch.zeros((3, 4))
        with pytest.raises(fanfold.InvalidArgument, match=r"expected 2 rows.*\[2, 2\].*got 3"):
            own.dispatch(x, x, x)
        with pytest.raises(fanfold.InvalidArgument, match="expected 4 rows"):
            own.combine(x)
        own._forward_context = Batch([2]).context
        with pytest.raises(fanfold.InvalidArgument, match="sizes of 2 ranks, those of data"):
            own.dispatch(x, x, x)
        own._forward_context = lambda: SimpleNamespace(dp_metadata=None)
        with pytest.raises(fanfold.InvalidState, match="expected DP metadata"):
            own.dispatch(x, x, x)
        own.destroy()

    spawn_threads(2, rank)


def test_groups_that_contradict_each_other_are_refused() -> None:
    def rank(comm: fanfold.Communicator) -> None:
        wrong = SimpleNamespace(world_size=2, rank_in_group=0, ranks=[comm.rank, 7])
        with pytest.raises(fanfold.InvalidArgument, match="dp_group: expected rank 0 of 2"):
            vllm.AgRsAll2AllManager(comm, dp_group=wrong)

    spawn_threads(3, rank)


@pytest.mark.parametrize("cls", MANAGERS)
def test_what_combine_takes_may_lie_where_nothing_is_copied(cls: type) -> None:
    batch = Batch([2, 1])

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(cls, comm, batch)
        shape = (3, 16)
        assert own.allocate_combine_input(shape, torch.float32, "cpu") is None
        own.dispatch(*batch.of(comm.rank))
        assert own.allocate_combine_input((4, 16), torch.float32, "cpu") is None
        assert own.allocate_combine_input((3, 4000), torch.float32, "cpu") is None
        assert own.allocate_combine_input(shape, torch.float16, "cpu") is None
        y = own.allocate_combine_input(torch.Size(shape), torch.float32, torch.device("cpu"))
        assert y.shape == shape
        y.fill_(comm.rank + 1)
        output = torch.empty((batch.num_tokens[comm.rank], 16))
        own.combine_into_output(y, output)
        assert output.unique().tolist() == [3]
        own.destroy()

    spawn_threads(2, rank)


def test_results_of_another_type_or_size_than_the_tokens() -> None:
    """The first such step adds by the communicator, later ones by the exchange: equal bits."""
    batch = Batch([2, 3])

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.AgRsAll2AllManager, comm, batch)
        x, weights, ids = batch.of(comm.rank)
        draw = torch.Generator().manual_seed(comm.rank)
        for dtype, hidden in ((torch.bfloat16, 16), (torch.float32, 40), (torch.bfloat16, 700)):
            y = torch.randn((5, hidden), generator=draw).to(dtype)
            outputs = []
            for _ in range(2):
                rows, _, _ = own.dispatch(x.to(torch.float8_e4m3fn), weights, ids)
                assert torch.equal(rows.float(), batch.x)
                wide = torch.empty((len(x), hidden))
                own.combine_into_output(y, wide)
                outputs.append(wide)
            assert torch.equal(outputs[0], outputs[1])
            # Without a dispatch before it, too.
            assert torch.equal(own.combine(y), outputs[0].to(dtype))
        own.destroy()

    spawn_threads(2, rank)


def test_results_that_were_written_over_the_gathered_tokens() -> None:
    batch = Batch([2, 3])

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.NaiveAll2AllManager, comm, batch)
        x, weights, ids = batch.of(comm.rank)
        for _ in range(3):
            rows, _, _ = own.dispatch(x, weights, ids)
            assert torch.equal(own.combine(rows.mul_(2)), 4 * x)
        own.destroy()

    spawn_threads(2, rank)


def test_a_dispatch_that_nobody_combines_ends_with_the_next() -> None:
    batch = Batch([2, 3])

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.AgRsAll2AllManager, comm, batch)
        for _ in range(3):
            rows, _, _ = own.dispatch(*batch.of(comm.rank))
            assert torch.equal(rows, batch.x)
        own.cleanup()
        rows, _, _ = own.dispatch(*batch.of(comm.rank))
        assert torch.equal(own.combine(rows.clone()), 2 * batch.of(comm.rank)[0])
        own.destroy()

    spawn_threads(2, rank)


def test_steps_that_grow() -> None:
    sizes = [[1, 0], [5, 9], [200, 3], [0, 0], [4, 4]]

    def rank(comm: fanfold.Communicator) -> None:
        batches = [Batch(size, top_k=1 + step) for step, size in enumerate(sizes)]
        own = manager(vllm.AgRsAll2AllManager, comm, batches[0])
        for batch in batches:
            own._forward_context = batch.context
            rows, weights, ids = own.dispatch(*batch.of(comm.rank))
            assert torch.equal(rows, batch.x)
            assert torch.equal(weights, batch.weights)
            assert torch.equal(ids, batch.ids)
            assert torch.equal(own.combine(rows.clone()), 2 * batch.of(comm.rank)[0])
        assert len(own._exchanges.all) == 1
        own.destroy()

    spawn_threads(2, rank)


def test_multicast() -> None:
    batch = Batch([2, 0, 3])

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.NaiveAll2AllManager, comm, batch)
        x = batch.of(comm.rank)[0]
        sums = torch.tensor([2, 2, 5])
        for is_sequence_parallel in (False, True):
            assert torch.equal(own.naive_multicast(x, sums, is_sequence_parallel), batch.x)
        with pytest.raises(fanfold.InvalidArgument, match=r"by the sums \[1, 2, 3\]"):
            own.naive_multicast(torch.zeros((7, 2)), torch.tensor([1, 2, 3]), False)
        own.destroy()

    spawn_threads(3, rank)


def test_scales_and_lora_ids_travel_along() -> None:
    batch = Batch([2, 3])
    fp8 = SimpleNamespace(quant_dtype=torch.float8_e4m3fn)

    def quantize(x: Any, config: Any) -> tuple[Any, Any]:
        assert config is fp8
        scales = x.abs().amax(1, keepdim=True).clamp(min=1)
        return (x / scales).to(torch.float8_e4m3fn), scales

    def rank(comm: fanfold.Communicator) -> None:
        own = manager(vllm.AgRsAll2AllManager, comm, batch)
        layer = vllm.MoEPrepareAndFinalizeNaiveDPEPModular(manager=own, quantize=quantize)
        mapping = torch.arange(10, dtype=torch.int32) + 100 * comm.rank
        lora = SimpleNamespace(
            punica_wrapper=SimpleNamespace(
                token_mapping_meta=SimpleNamespace(token_lora_mapping=mapping)
            )
        )
        expected = [quantize(batch.of(source)[0], fp8) for source in range(2)]
        for context in (None, lora):
            layer.set_lora_context(context)
            rows, scales, *_ = layer.prepare(*batch.of(comm.rank), 6, None, False, fp8)
            assert torch.equal(rows.float(), torch.cat([each[0] for each in expected]).float())
            assert torch.equal(scales, torch.cat([each[1] for each in expected]))
        assert lora.local_token_lora_mapping.tolist() == [0, 1, 100, 101, 102]
        layer.prepare(*batch.of(comm.rank), 6, None, False, UNQUANTISED)
        assert lora.local_token_lora_mapping.tolist() == [0, 1, 100, 101, 102]
        plain = vllm.MoEPrepareAndFinalizeNaiveDPEPModular(manager=own)
        with pytest.raises(NotImplementedError, match="quantize="):
            plain.prepare(*batch.of(comm.rank), 6, None, False, fp8)
        own.destroy()

    spawn_threads(2, rank)


@pytest.mark.parametrize("cls", MANAGERS)
def test_tensors_of_a_gpu_are_refused(cls: type) -> None:
    own = manager(cls, fanfold.Communicator.threads(1)[0], Batch([2]))
    x = torch.empty((2, 4), device="meta")
    for call in (
        lambda: own.dispatch(x, x, x),
        lambda: own.dispatch_router_logits(x, x),
        lambda: own.combine(x),
    ):
        with pytest.raises(fanfold.Unsupported, match=f"strategy {own.strategy} has no GPU form"):
            call()
    own.destroy()
