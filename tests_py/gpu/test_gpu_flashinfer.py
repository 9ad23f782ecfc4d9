# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for FlashInfer on the simulated device: ranks of one thread, and of one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import torch_cuda
from support.flashinfer_rounds import (
    BF16,
    Rank,
    check_rows,
    combined,
    draw_ids,
    exchange,
    mapping,
    named_tokens,
    noise,
    run_experts,
    same_bits,
)

import fanfold
from fanfold.compat import flashinfer
from fanfold.compat.flashinfer import exchanges
from fanfold.compat.flashinfer.quantised import Scaling, quantiser

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from fanfold import _core


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch, nothing_is_reported: None) -> Iterator[None]:
    """A torch with CUDA: one device, on which every rank of these tests may have a block."""
    monkeypatch.setattr(exchanges, "TIMEOUT_S", 20.0)
    _core.simulator.configure(devices=2, resident_blocks=6, host_threads=5)
    with torch_cuda.torch_with_cuda(monkeypatch, num_devices=2), torch_cuda.CudaFunctions():
        yield


class Lanes:
    """All ranks of one thread, each on a stream of its own, over one workspace of the device."""

    def __init__(self, world: int, max_tokens: int, num_bytes: int, stats: int = 0) -> None:
        size = flashinfer.moe_a2a_get_workspace_size_per_rank(
            world, max_tokens, num_bytes, num_bytes, stats
        )
        self.world, self.max_tokens, self.stats = world, max_tokens, stats
        self.workspace = torch.zeros((world, size), dtype=torch.uint8, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        torch.cuda.synchronize()
        self.ranks = self.each(lambda rank: Rank(self, rank), range(world))

    def each(self, fn: Callable[[Any], Any], of: Any = None) -> list[Any]:
        """Enqueue a step of every rank, or of some, before anybody waits."""
        made = []
        for number, what in enumerate(self.ranks if of is None else of):
            with torch.cuda.stream(self.streams[getattr(what, "rank", number)]):
                made.append(fn(what))
        torch.cuda.synchronize()
        return made


def cuda(tensor: Any) -> Any:
    return tensor.to("cuda")


def five(rank: int, tokens: int, ids: Any) -> list[Any]:
    """Payloads of all kinds of rows: ids first, odd bytes before wide rows."""
    return [
        ids,
        noise(rank, (tokens, 7), torch.uint8),
        noise(rank, (tokens, 24), BF16),
        named_tokens(rank, tokens),
        noise(rank, (tokens, 5), torch.float16),
    ]


# --- One thread for all ranks, as in FlashInfer's own tests of one GPU ----------------------------


def test_one_thread_runs_every_rank_over_streams() -> None:
    world, num_experts, top_k = 3, 7, 3
    lanes = Lanes(world, 3, 14 + 48 + 4 + 10 + 4 * top_k)

    for step, limit in enumerate((3, 1, 2)):  # shrinks and grows
        counts = [(rank + step) % (limit + 1) for rank in range(world)]

        def ids_of(rank: int, counts: list[int] = counts, step: int = step) -> Any:
            return draw_ids(rank, counts[rank], top_k, num_experts, seed=step)

        def inputs(rank: int, counts: list[int] = counts, ids_of: Any = ids_of) -> list[Any]:
            return five(rank, counts[rank], ids_of(rank))

        def send(rank: Rank, limit: int = limit, ids_of: Any = ids_of, inputs: Any = inputs) -> Any:
            payloads = [cuda(each) for each in inputs(rank.rank)]
            arguments = (
                cuda(ids_of(rank.rank)), payloads, rank.workspace, rank.metainfo, limit,
                rank.rank, world, top_k, num_experts,
            )  # fmt: skip
            if limit == 1:  # either form
                return flashinfer.moe_a2a_dispatch_pair(*arguments)
            views, offset, stats = flashinfer.moe_a2a_dispatch(*arguments)
            assert stats is None
            return views, offset

        found = lanes.each(send)
        for rank, (views, _) in enumerate(found):
            assert all(view.is_cuda for view in views)
            on_host = [view.cpu() for view in views]
            received = check_rows(on_host, rank, ids_of, inputs, num_experts)
            assert lanes.ranks[rank].counter("RECV_COUNTERS", world) == received
            assert lanes.ranks[rank].counter("FLAG_VAL", 1) == [3 * step + 1]
        lanes.each(lambda rank, found=found: rank.sanitize(found[rank.rank][0][0], -3))
        for rank, (views, _) in enumerate(found):
            for source, count in enumerate(lanes.ranks[rank].counter("RECV_COUNTERS", world)):
                assert (views[0][source, count:].cpu() == -3).all(), (rank, source)

        in_workspace = step % 2 == 0

        def results(
            rank: Rank, found: Any = found, limit: int = limit, wants: bool = in_workspace
        ) -> Any:
            views, offset = found[rank.rank]
            y = run_experts(views[2].cpu(), views[0].cpu(), rank.rank, num_experts)
            if wants:
                return rank.buffer(offset, limit, 24).copy_(y)
            return cuda(y)

        ys = lanes.each(results)
        for _ in range(2):  # the round stays open for another combine
            outs = lanes.each(
                lambda rank, ys=ys, counts=counts, limit=limit, found=found, wants=in_workspace: (
                    rank.combine(
                        ys[rank.rank],
                        counts[rank.rank],
                        limit,
                        top_k,
                        found[rank.rank][1],
                        wants,
                    )
                )
            )
            for rank, out in enumerate(outs):
                expected = combined(inputs(rank)[2], ids_of(rank), num_experts, world)
                assert same_bits(out.cpu(), expected), (step, rank)


def test_quantised_results_are_those_of_the_cpu() -> None:
    world, tokens, hidden = 2, 3, 40
    lanes = Lanes(world, tokens, 4 + 2 * hidden)
    fp8, byte = torch.float8_e4m3fn, torch.uint8

    def send(rank: Rank) -> Any:
        x = cuda(noise(rank.rank, (tokens, hidden), BF16))
        return rank.dispatch(cuda(draw_ids(rank.rank, tokens, 1, world)), [x], tokens, world)

    found = lanes.each(send)
    for output_type, scale_type, columns in ((fp8, byte, 2), (byte, byte, 2), (byte, fp8, 3)):

        def add(rank: Rank, types: Any = (output_type, scale_type), columns: int = columns) -> Any:
            views, offset, _ = found[rank.rank]
            scales = torch.zeros(tokens * columns, dtype=byte, device="cuda").view(types[1])
            more = {"output_dtype": types[0], "output_scales": scales}
            return rank.combine(views[0], tokens, tokens, 1, offset, **more), scales

        for rank, (out, scales) in enumerate(lanes.each(add)):
            x = noise(rank, (tokens, hidden), BF16)
            expected = torch.zeros(tokens * columns, dtype=byte).view(scale_type)
            made = quantiser(x[None], tokens, output_type, None, Scaling(expected))
            assert made is not None
            numbers = torch.empty(made.shape, dtype=made.dtype)
            made.write(x, numbers)
            assert same_bits(out.cpu(), numbers)
            assert same_bits(scales.cpu(), expected)


def test_one_thread_runs_ranks_that_are_masked_out_and_gathers_statistics() -> None:
    world, num_experts, dead = 3, 6, 1
    lanes = Lanes(world, 4, 32, stats=num_experts)
    alive = [rank for rank in lanes.ranks if rank.rank != dead]
    mask = flashinfer.moe_a2a_active_rank_mask([rank.rank for rank in alive], world)
    more = {"enable_rank_mask": True, "active_rank_mask": mask}

    def inputs(rank: int) -> list[Any]:
        return [named_tokens(rank, 4), noise(rank, (4, 8), BF16)]

    def send(rank: Rank) -> Any:
        stats = torch.arange(3, dtype=torch.int32, device="cuda") + rank.rank
        payloads = [cuda(each) for each in inputs(rank.rank)]
        ids = cuda(draw_ids(rank.rank, 4, 1, num_experts))
        return rank.dispatch(ids, payloads, 4, num_experts, eplb_local_stats=stats, **more)

    found = dict(zip([rank.rank for rank in alive], lanes.each(send, alive), strict=True))
    for rank, (views, _, stats) in found.items():
        active = [other != dead for other in range(world)]
        counts = check_rows(
            [view.cpu() for view in views],
            rank,
            lambda source: draw_ids(source, 4, 1, num_experts),
            inputs,
            num_experts,
            active,
        )
        assert counts[dead] == 0
        assert stats.tolist() == [[0, 1, 2], [0, 0, 0], [2, 3, 4]]
        assert lanes.ranks[rank].counter("SEND_COUNTERS", world)[dead] == 0
    outs = lanes.each(
        lambda rank: rank.combine(found[rank.rank][0][1], 4, 4, 1, found[rank.rank][1], **more),
        alive,
    )
    for rank, out in zip(found, outs, strict=True):
        expected = inputs(rank)[1].clone()
        owners = draw_ids(rank, 4, 1, num_experts)[:, 0] // 2
        expected[owners == dead] = 0
        assert same_bits(out.cpu(), expected)


def test_the_functions_can_be_captured_and_replayed() -> None:
    """FlashInfer's are graph-safe; so nothing here may copy from the host or wait."""
    world, num_experts = 2, 4
    lanes = Lanes(world, 3, 48)
    ids = [cuda(draw_ids(rank, 3, 2, num_experts)) for rank in range(world)]
    x = [cuda(noise(rank, (3, 24), BF16)) for rank in range(world)]
    outs = [torch.empty((3, 24), dtype=BF16, device="cuda") for _ in range(world)]
    torch.cuda.synchronize()

    def round_of(rank: Rank) -> None:
        views, offset, _ = rank.dispatch(
            ids[rank.rank], [x[rank.rank], ids[rank.rank]], 3, num_experts
        )
        rank.sanitize(views[1], -1)
        y = rank.buffer(offset, 3, 24)
        y.copy_(views[0])
        rank.combine(y, 3, 3, 2, offset, True, output=outs[rank.rank])

    lanes.each(round_of)  # makes the memory
    graphs = []
    for rank in lanes.ranks:
        stream = lanes.streams[rank.rank]
        with torch.cuda.stream(stream):
            _core.simulator.begin_capture(stream.simulated)
            round_of(rank)
            graphs.append(_core.simulator.end_capture(stream.simulated))
    for step in range(3):
        values = [noise(rank, (3, 24), BF16, seed=step) for rank in range(world)]
        routes = [draw_ids(rank, 3, 2, num_experts, seed=step) for rank in range(world)]
        for rank in range(world):
            x[rank].copy_(values[rank])
            ids[rank].copy_(routes[rank])
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, lanes.streams, strict=True):
            graph.launch(stream.simulated)
        torch.cuda.synchronize()
        for rank in range(world):
            hosts = (routes[rank] // 2).sort(1).values
            several = (hosts[:, 0] != hosts[:, 1])[:, None]
            expected = torch.where(several, values[rank].float() * 2, values[rank].float())
            assert same_bits(outs[rank].cpu(), expected.to(BF16)), (step, rank)
            received = [0] * world
            for source in range(world):
                received[source] = int((routes[source] // 2 == rank).any(1).sum())
            assert lanes.ranks[rank].counter("RECV_COUNTERS", world) == received


# --- The class ------------------------------------------------------------------------------------


def test_the_class_takes_gpu_tensors_on_a_thread_per_rank() -> None:
    world, num_experts, top_k, hidden = 2, 5, 2, 24

    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        a2a = exchange(comm, 4, top_k, num_experts, hidden_size=hidden)
        assert a2a.mnnvl_mem.device == f"cuda:{me}"
        assert a2a.workspace.is_cuda
        for tokens in (0, 3, 4):
            mine = min(tokens + me, 4)
            ids, x = draw_ids(me, mine, top_k, num_experts), noise(me, (mine, hidden), BF16)
            views = a2a.dispatch(cuda(ids), [cuda(x), cuda(ids)], 4, -1, 1)
            y = a2a.get_combine_payload_tensor_in_workspace(4, hidden, BF16)
            y.copy_(run_experts(views[0].cpu(), views[1].cpu(), me, num_experts))
            out = torch.empty((mine, hidden), dtype=BF16, device="cuda")
            assert a2a.combine(y, 4, payload_in_workspace=True, output=out) is out
            assert same_bits(out.cpu(), combined(x, ids, num_experts, world))
        row = a2a.workspace[me]
        assert row[:4].view(torch.int32).tolist() == [6]  # the epoch
        with pytest.raises(ValueError, match="output: expected"):
            views = a2a.dispatch(cuda(ids), [cuda(x)], 4)
            a2a.combine(views[0], 4, output=torch.empty((mine, hidden), dtype=BF16))
        torch.cuda.synchronize(me)
        comm.barrier()

    torch_cuda.on_threads(world, one, num_devices=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_results_of_other_types_go_home_on_a_gpu(dtype: Any) -> None:
    world, hidden = 2, 17

    def one(comm: fanfold.Communicator) -> None:
        me = comm.rank
        a2a = exchange(comm, 3, 1, 2, hidden_size=2 * hidden)
        ids = torch.tensor([[0], [1], [1]], dtype=torch.int32)
        x = noise(me, (3, hidden), torch.float32).to(dtype)
        for _ in range(2):
            views = a2a.dispatch(cuda(ids), [cuda(x)], 3)
            assert same_bits(a2a.combine(views[0], 3).cpu(), x)
        torch.cuda.synchronize(me)
        comm.barrier()

    torch_cuda.on_threads(world, one)


def test_one_thread_runs_objects_of_every_rank() -> None:
    """Made on threads, since that is collective; all rounds from one thread over streams."""
    world, hidden = 3, 8
    made = torch_cuda.on_threads(
        world, lambda comm: exchange(comm, 2, 1, world, hidden_size=hidden)
    )
    streams = [torch.cuda.Stream() for _ in range(world)]
    x = [cuda(noise(rank, (2, hidden), BF16)) for rank in range(world)]
    ids = [
        torch.tensor([[rank], [(rank + 1) % world]], dtype=torch.int32, device="cuda")
        for rank in range(world)
    ]
    torch.cuda.synchronize()
    for _ in range(2):
        views, outs = [], []
        for rank, a2a in enumerate(made):
            with torch.cuda.stream(streams[rank]):
                views.append(a2a.dispatch(ids[rank], [x[rank], ids[rank]], 2, -1, 1))
        for rank, a2a in enumerate(made):
            with torch.cuda.stream(streams[rank]):
                y = a2a.get_combine_payload_tensor_in_workspace(2, hidden, BF16)
                outs.append(a2a.combine(y.copy_(views[rank][0]), 2, payload_in_workspace=True))
        torch.cuda.synchronize()
        for rank in range(world):
            assert same_bits(outs[rank].cpu(), x[rank].cpu())


def test_rows_of_memory_on_gpus_are_seen_by_all_ranks() -> None:
    def one(comm: fanfold.Communicator) -> None:
        me, world = comm.rank, comm.num_ranks
        where = mapping(world, me)
        backend = flashinfer.CommunicatorBackend(comm)
        config = flashinfer.MnnvlConfig(comm_backend=backend)
        flashinfer.MnnvlMemory.set_comm_from_config(where, config)
        memory = flashinfer.MnnvlMemory(where, 1000)
        rows = memory.as_torch_strided_tensor(torch.int32)
        assert rows.is_cuda
        assert list(rows.shape) == [world, 250]
        assert rows.data_ptr() == memory.ptr
        assert rows.stride() == (memory.rank_stride // 4, 1)
        rows[(me + 1) % world].fill_(me + 1)
        torch.cuda.synchronize(me)
        comm.barrier()
        assert all((rows[r] == (r - 1) % world + 1).all() for r in range(world))
        torch.cuda.synchronize(me)
        comm.barrier()
        memory.close()

    torch_cuda.on_threads(2, one, num_devices=2)
