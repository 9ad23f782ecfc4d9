# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for vLLM on the simulated device, a thread and a stream per rank."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import torch_cuda
from support import vllm_managers as layers
from support.vllm_managers import UNQUANTISED, Batch, expert_map, local_experts, manager_of

import fanfold
from fanfold.compat import vllm

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from fanfold import _core


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch, nothing_is_reported: None) -> Iterator[None]:
    _core.simulator.configure(devices=2, resident_blocks=6, host_threads=2)
    with torch_cuda.torch_with_cuda(monkeypatch, num_devices=2):
        yield


def cuda(tensor: Any) -> Any:
    return tensor.to("cuda")


def inputs(layer: Any, batch: Batch, rank: int) -> tuple[Any, ...]:
    """What vLLM's driver gives ``prepare``."""
    x, weights, ids = batch.of(rank)
    local = expert_map(batch.num_experts, local_experts(batch.num_experts, rank, 2))
    dtype = layer.topk_indices_dtype() or torch.int64
    return cuda(x), cuda(weights), cuda(ids.to(dtype)), batch.num_experts, cuda(local)


def step(layer: Any, batch: Batch, rank: int, *, phases: bool = False, direct: bool = False) -> Any:
    """Prepare, experts and finalize; returns the output.

    Args:
        phases: by the hooks of ``prepare_async`` and ``finalize_async``.
        direct: experts write to what ``allocate_fused_expert_output`` gives.
    """
    given = inputs(layer, batch, rank)
    if phases:
        hook, receiver = layer.prepare_async(*given, False, UNQUANTISED)
        hook()
        rows, _, tokens, new_ids, new_weights = receiver()
    else:
        rows, _, tokens, new_ids, new_weights = layer.prepare(*given, False, UNQUANTISED)
    assert rows.is_cuda
    local = local_experts(batch.num_experts, rank, 2)
    if layer.activation_format.name == "BatchedExperts":
        counts = tokens.expert_num_tokens.cpu()
        results = batch.by_expert(rows.cpu(), counts, local)
        ids, weights = given[2], given[1]
    else:
        ids, weights = new_ids, new_weights
        results = batch.by_row(rows.cpu(), ids.cpu(), weights.cpu(), local)
    y = cuda(results)
    if direct:
        place = layer.allocate_fused_expert_output(y.shape, y.dtype, y.device, None)
        assert place is not None
        y = place.copy_(y)
    output = torch.full((batch.num_tokens[rank], batch.hidden), 7.0, device="cuda").to(batch.dtype)
    arguments = (output, y, weights, ids, False, layers.left_to_do(layer))
    if phases:
        hook, receiver = layer.finalize_async(*arguments)
        hook()
        receiver()
    else:
        layer.finalize(*arguments)
    return output.cpu()


@pytest.mark.parametrize("phases", [False, True])
def test_low_latency_layers_take_gpu_tensors(phases: bool) -> None:
    batches = [Batch([3, 2]), Batch([0, 3], seed=1)]

    def one(comm: fanfold.Communicator) -> None:
        layer = layers.low_latency(comm, batches[0])
        for batch in batches:
            output = step(layer, batch, comm.rank, phases=phases, direct=not phases)
            assert torch.equal(output, batch.dense(comm.rank))
        torch.cuda.synchronize(comm.rank)
        comm.barrier()
        manager_of(layer).destroy()

    torch_cuda.on_threads(2, one, num_devices=2)


def test_one_sided_layers_take_gpu_tensors_and_grow() -> None:
    """Ranks share a device: what is freed when the exchange grows must not wait for a peer."""
    batches = [Batch([2, 1], hidden=8), Batch([1, 3], seed=1, hidden=8), Batch([4, 0], hidden=32)]

    def one(comm: fanfold.Communicator) -> None:
        for batch in batches:  # one manager, layers that need more and more of it
            if batch is batches[0]:
                own = layers.manager(vllm.FlashInferNVLinkOneSidedManager, comm, batch)
            own._forward_context = batch.context
            layer = vllm.FlashInferNVLinkOneSidedPrepareAndFinalize(
                max(batch.num_tokens), batch.top_k, batch.num_experts, batch.hidden,
                num_dispatchers=2, manager=own,
            )  # fmt: skip
            for direct in (False, True):
                output = step(layer, batch, comm.rank, direct=direct)
                assert torch.equal(output, batch.dense(comm.rank))
        assert own.query_active_mask().tolist() == [0, 0]
        assert own.query_active_mask().is_cuda
        assert not own.query_fault().item()
        torch.cuda.synchronize()
        comm.barrier()
        own.destroy()

    torch_cuda.on_threads(2, one)


def test_rows_by_expert_of_physical_ids_can_be_replayed() -> None:
    """A captured layer: one batch of shapes, other tokens and ids in each replay."""
    table = torch.tensor([5, 4, 3, 2, 1, 0])
    batches = [Batch([2, 2], seed=seed) for seed in range(3)]

    def one(comm: fanfold.Communicator) -> None:
        me, stream = comm.rank, torch.cuda.current_stream()
        layer = layers.low_latency(comm, batches[0], global_to_physical=table)
        given = inputs(layer, batches[0], me)
        output = torch.empty((2, layers.HIDDEN), device="cuda")

        def run() -> None:
            rows, *_ = layer.prepare(*given[:4], None, False, UNQUANTISED)
            y = rows * 2  # experts that double
            layer.finalize(output, y, given[1], given[2], False, layers.DELEGATE)

        run()
        stream.synchronize()
        comm.barrier()
        _core.simulator.begin_capture(stream.simulated)
        run()
        graph = _core.simulator.end_capture(stream.simulated)
        for batch in batches[1:]:
            for tensor, value in zip(given, batch.of(me), strict=False):
                tensor.copy_(value)
            graph.launch(stream.simulated)
            x, weights, _ = batch.of(me)
            assert torch.equal(output.cpu(), 2 * x * weights.sum(1, keepdim=True))
        stream.synchronize()
        comm.barrier()
        del graph
        manager_of(layer).destroy()

    torch_cuda.on_threads(2, one, num_devices=2)


def test_strategies_without_a_gpu_form_say_so() -> None:
    batch = Batch([1, 1])

    def one(comm: fanfold.Communicator) -> None:
        for make in (layers.two_sided, layers.high_throughput):
            layer = make(comm, batch)
            with pytest.raises(fanfold.Unsupported, match="has no GPU form"):
                layer.prepare(*inputs(layer, batch, comm.rank), False, UNQUANTISED)
            manager_of(layer).destroy()

    torch_cuda.on_threads(2, one)


# --- The capturer ---------------------------------------------------------------------------------


def test_the_capturer_takes_ids_of_a_gpu() -> None:
    with torch_cuda.CudaFunctions():
        context = SimpleNamespace(dp_metadata=None, batch_descriptor=SimpleNamespace(num_tokens=2))
        capturer = vllm.RoutedExpertsCapturer(
            4, num_layers=2, num_experts=256, top_k=2, library="torch", device="cuda",
            forward_context=lambda: context, token_offset=lambda _: 0,
        )  # fmt: skip
        for step_ids in ([[1, 255], [3, 4]], [[9, 8], [7, 6]]):
            ids = torch.tensor(step_ids, dtype=torch.int32).to("cuda")
            capturer.capture(0, ids)
            capturer.capture(1, ids + 0)
            assert capturer.device_buffer.is_cuda
            assert capturer.device_buffer[:2, 1].tolist() == step_ids
            data = capturer.snapshot_routing_data(2)
            assert data.dtype == torch.uint8
            assert data.tolist() == [[row, row] for row in step_ids]
        capturer.capture(0, ids)
        with pytest.raises(fanfold.InvalidState, match=r"lack some \(how many\): 1 \(2\)"):
            capturer.snapshot_routing_data(2)
        capturer.capture(0, torch.tensor([[1, 256], [0, 0]], device="cuda"))
        capturer.capture(1, ids)
        with pytest.raises(fanfold.InvalidArgument, match="got 256 at row 0, column 1 of layer 0"):
            capturer.snapshot_routing_data(2)
        with pytest.raises(fanfold.InvalidArgument, match="a tensor on cuda:0"):
            capturer.capture(0, torch.tensor(step_ids))


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_wrong_id_ends_its_step_and_no_other(when: str) -> None:
    """Whether the kernels that find it are done before the call that looks, after, or neither."""
    with torch_cuda.CudaFunctions():
        capturer = vllm.RoutedExpertsCapturer(
            4, num_layers=1, num_experts=256, top_k=2, library="torch", device="cuda",
            forward_context=lambda: None, token_offset=lambda _: 0,
        )  # fmt: skip
        good = torch.tensor([[1, 255], [3, 4]], dtype=torch.int32).to("cuda")
        wrong = torch.tensor([[1, 256], [0, 0]], dtype=torch.int32).to("cuda")
        for _ in range(3):
            capturer.capture(0, wrong)
            if when == "before":
                torch.cuda.synchronize()
            for num_tokens in (-1, 5):
                with pytest.raises(fanfold.InvalidArgument, match=f"0 to 4 .*, got {num_tokens}"):
                    capturer.snapshot_routing_data(num_tokens)
            with pytest.raises(fanfold.InvalidArgument, match="got 256 at row 0, column 1"):
                capturer.snapshot_routing_data(2)
            capturer.capture(0, good[:1])
            with pytest.raises(fanfold.InvalidState, match=r"lack some \(how many\): 0 \(1\)"):
                capturer.snapshot_routing_data(2)
            # A step that nobody asked for.
            capturer.capture(0, wrong)
            if when == "before":
                torch.cuda.synchronize()
            capturer.begin_step()
            capturer.capture(0, good)
            if when == "after":
                torch.cuda.synchronize()
            assert capturer.snapshot_routing_data(2).tolist() == [[[1, 255]], [[3, 4]]]
