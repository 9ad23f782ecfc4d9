# SPDX-License-Identifier: Apache-2.0
"""RoutingCapture on the simulated device: streams, graphs, sinks and errors that come late."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from support.cuda_tensor import Framework, Producer
from support.gpu import Rank, run_ranks
from support.gpu import capture as graph_of

import fanfold
from fanfold import CaptureLayout, InvalidArgument, InvalidState, RoutingCapture
from fanfold.testing import SimulatedTensors

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from fanfold import _core


class Device:
    """Tensors of the simulated device, kept until their stream has been waited for."""

    def __init__(self) -> None:
        self.tensors = SimulatedTensors()
        self.stream: Any = self.tensors.stream

    def ids(self, *rows: list[int], dtype: str = "int32") -> Any:
        return self.tensors.to_tensor(numpy.array(rows, dtype), dtype)

    def capture(self, **config: Any) -> RoutingCapture:
        small = {"num_layers": 2, "num_experts": 8, "top_k": 2, "max_tokens": 8}
        return RoutingCapture(**{**small, "device": "cuda:0", **config})


@pytest.fixture(name="gpu")
def _gpu() -> Device:
    return Device()


def test_what_was_recorded_comes_to_the_host(gpu: Device) -> None:
    capture = gpu.capture(layers=[3, 5])
    assert capture.device == "cuda:0"
    capture.begin_step(7, stream=gpu.stream)
    ids = gpu.ids([1, 2], [3, -1], dtype="int64")
    capture.record(5, ids, stream=gpu.stream)
    with capture.snapshot(2, stream=gpu.stream) as snapshot:
        assert snapshot.num_tokens == 2
        snapshot.wait()
        assert snapshot.is_ready
        assert snapshot.step_id == 7
        assert snapshot.missing_layers == [3]
        assert snapshot.missing_rows == [2, 0]
        assert snapshot.array.dtype == numpy.int8
        assert snapshot.array.tolist() == [[[-1, -1], [1, 2]], [[-1, -1], [3, -1]]]
        assert snapshot.expert_histogram()[1].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
        with pytest.raises(InvalidState, match="layers 3"):
            snapshot.rows(0, 1)
    assert capture.num_in_flight == 0


def test_every_layout_but_shards_is_taken(gpu: Device) -> None:
    capture = gpu.capture(num_layers=1)
    rows = gpu.ids([0, 7], [1, 7], [2, 7], [3, 7])
    layouts = {
        (0, 1, 2, 3): None,
        (1, 2, 3, -1): CaptureLayout.concatenated([1, 3], 1),
        (2, -1, -1, -1): CaptureLayout.padded([2, 1], 1, 2),
        (3, 2, -1, 1): CaptureLayout.row_map([-1, 3, 1, 0]),
    }
    for step, (first_ids, layout) in enumerate(layouts.items()):
        capture.begin_step(step, stream=gpu.stream)
        capture.record(0, rows, layout, stream=gpu.stream)
        array = capture.snapshot(4, stream=gpu.stream).array
        assert tuple(array[:, 0, 0].tolist()) == first_ids
        del array
    with pytest.raises(InvalidState, match="expected a gather callback"):
        capture.record(0, rows, CaptureLayout.sharded([4], 0, 4), stream=gpu.stream)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_are_gathered_over_the_device(num_ranks: int) -> None:
    """Every rank records all tokens, whatever the shards' sizes, types and strides."""
    steps = [([2, 2, 2], 6, "int64"), ([3, 1, 0], 4, "int16"), ([1, 1, 1], 2, "int32")]

    def body(rank: Rank) -> None:
        capture = RoutingCapture(
            num_layers=2, num_experts=100, top_k=2, max_tokens=8, num_shared_experts=1,
            comm=rank.comm, device=rank.device,
        )  # fmt: skip
        for step, (sizes, num_tokens, dtype) in enumerate(steps):
            counts = sizes[:num_ranks]
            num_tokens = min(num_tokens, sum(counts))
            total = sum(counts)
            whole = numpy.arange(3 * total, dtype=dtype).reshape(total, 3) + step
            first = sum(counts[: rank.rank])
            mine = rank.put(whole[first : first + counts[rank.rank]])
            layout = CaptureLayout.sharded(counts, rank.rank, num_tokens, token_offset=step)
            capture.begin_step(step, stream=rank.stream)
            for layer in range(2):
                capture.record(layer, mine, layout, stream=rank.stream)
            array = capture.snapshot(num_tokens + step, stream=rank.stream).array
            for layer in range(2):
                assert numpy.array_equal(array[step:, layer], whole[:num_tokens, :2])
            del array
        rank.wait()
        rank.comm.barrier()

    run_ranks(num_ranks, body)


def test_gathered_shards_replay_and_wrong_ones_are_told_on_every_rank() -> None:
    def body(rank: Rank) -> None:
        capture = RoutingCapture(
            num_layers=1, num_experts=8, top_k=2, max_tokens=4, comm=rank.comm, device=rank.device
        )
        layout = CaptureLayout.sharded([1, 1], rank.rank, 2)
        ids = rank.put(numpy.array([[0, 0]], "int32"))
        capture.begin_step(0, stream=rank.stream)
        capture.record(0, ids, layout, stream=rank.stream)  # makes the memory
        rank.wait()
        rank.comm.barrier()
        with graph_of(rank.stream) as graphs:
            capture.record(0, ids, layout, stream=rank.stream)
        for step in range(1, 4):
            _core.simulator.write(ids, numpy.array([[step, 4 + rank.rank]], "int32"))
            capture.begin_step(step, stream=rank.stream)
            graphs[0].launch(rank.stream)
            array = capture.snapshot(2, stream=rank.stream).array
            assert array.tolist() == [[[step, 4]], [[step, 5]]]
            del array
        wrong = rank.put(numpy.array([[1, 7 + rank.rank]], "int32"))
        capture.begin_step(4, stream=rank.stream)
        capture.record(0, wrong, layout, stream=rank.stream)
        with pytest.raises(InvalidArgument, match="got 8 at row 1, column 1 of layer 0"):
            capture.snapshot(2, stream=rank.stream).wait()
        with pytest.raises(InvalidArgument, match="expected 2 rows"):
            two = CaptureLayout.sharded([2, 2], rank.rank, 4)
            capture.record(0, ids, two, stream=rank.stream)
        rank.wait()
        rank.comm.barrier()

    run_ranks(2, body)


def test_shards_of_other_ranks_are_refused_before_anything_is_sent() -> None:
    def body(rank: Rank) -> None:
        capture = RoutingCapture(
            num_layers=1, num_experts=8, top_k=2, max_tokens=8, comm=rank.comm, device=rank.device
        )
        ids = rank.put(numpy.array([[1, 2 + rank.rank]], "int32"))
        capture.begin_step(0, stream=rank.stream)
        for _ in range(2):  # also when the memory is there already
            for counts, me, text in (
                ([1, 1, 1, 1], rank.rank, "counts: expected 2 numbers of rows.*got 4"),
                ([1], 0, "counts: expected 2 numbers of rows.*got 1"),
                ([1, 1], 1 - rank.rank, f"rank: expected {rank.rank}, this.*got {1 - rank.rank}"),
            ):
                with pytest.raises(InvalidArgument, match=text):
                    layout = CaptureLayout.sharded(counts, me, len(counts))
                    capture.record(0, ids, layout, stream=rank.stream)
            layout = CaptureLayout.sharded([1, 1], rank.rank, 2)
            capture.record(0, ids, layout, stream=rank.stream)
        array = capture.snapshot(2, stream=rank.stream).array
        assert array.tolist() == [[[1, 2]], [[1, 3]]]
        rank.wait()
        rank.comm.barrier()

    run_ranks(2, body)


@pytest.mark.parametrize("in_graph", [False, True])
def test_ranks_that_disagree_about_shards_are_told(in_graph: bool) -> None:
    """Rank 1 sends more, or fewer rows than rank 0 expects; as many as before it has said."""

    def body(rank: Rank) -> None:
        capture = RoutingCapture(
            num_layers=1, num_experts=8, top_k=2, max_tokens=8, comm=rank.comm, device=rank.device
        )
        rows = rank.put(numpy.array([[1, 2 + rank.rank]] * 2, "int8"))
        agreed = CaptureLayout.sharded([2, 2], rank.rank, 4)
        capture.begin_step(0, stream=rank.stream)
        capture.record(0, rows, agreed, stream=rank.stream)
        rank.wait()
        rank.comm.barrier()
        for step, (expected, sent) in enumerate([(1, 2), (2, 1), (0, 1), (1, 0)], 1):
            mine = [2, expected] if rank.rank == 0 else [2, sent]
            layout = CaptureLayout.sharded(mine, rank.rank, sum(mine))
            own = rows[: mine[rank.rank]]
            capture.begin_step(step, stream=rank.stream)
            if in_graph:
                with graph_of(rank.stream) as graphs:
                    capture.record(0, own, layout, stream=rank.stream)
                graphs[0].launch(rank.stream)
            else:
                capture.record(0, own, layout, stream=rank.stream)
            if rank.rank == 0:
                text = f"counts: expected {expected} rows of rank 1, .*got {sent} rows .* layer 0"
                # Whichever call looks first after the kernel has written tells of it.
                with pytest.raises(InvalidArgument, match=text):
                    capture.snapshot(sum(mine), stream=rank.stream).wait()
            else:
                assert len(capture.snapshot(sum(mine), stream=rank.stream).array) == sum(mine)
            capture.begin_step(100 + step, stream=rank.stream)
            capture.record(0, rows, agreed, stream=rank.stream)
            assert capture.snapshot(4, stream=rank.stream).missing_rows == [0]
        rank.wait()
        rank.comm.barrier()

    run_ranks(2, body)


def test_the_first_shards_make_memory_and_so_no_graph_holds_them() -> None:
    """Also where shards without rows came before."""

    def body(rank: Rank) -> None:
        capture = RoutingCapture(
            num_layers=1, num_experts=8, top_k=2, max_tokens=4, comm=rank.comm, device=rank.device
        )
        ids = rank.put(numpy.array([[1, 2 + rank.rank]], "int32"))
        nothing = rank.put(numpy.empty((0, 2), "int32"))
        layout = CaptureLayout.sharded([1, 1], rank.rank, 2)
        capture.begin_step(0, stream=rank.stream)
        for _ in range(2):
            with (
                graph_of(rank.stream),
                pytest.raises(
                    InvalidState, match=r"first record of shards, .* outside of a graph capture"
                ),
            ):
                capture.record(0, ids, layout, stream=rank.stream)
            empty = CaptureLayout.sharded([0, 0], rank.rank, 0)
            capture.record(0, nothing, empty, stream=rank.stream)
        capture.record(0, ids, layout, stream=rank.stream)
        assert capture.snapshot(2, stream=rank.stream).array.tolist() == [[[1, 2]], [[1, 3]]]
        rank.wait()
        rank.comm.barrier()

    run_ranks(2, body)


def test_a_wrong_id_is_told_by_the_next_look(gpu: Device) -> None:
    capture = gpu.capture()
    capture.begin_step(1, stream=gpu.stream)
    capture.record(1, gpu.ids([1, 2], [3, 8]), stream=gpu.stream)
    capture.check()  # nobody has run it yet
    lost = capture.snapshot(1, stream=gpu.stream)
    expected = "ids below 8 .num_experts. or negative, got 8 at row 1, column 1 of layer 1"
    for read in (lost.wait, lambda: lost.array, lambda: lost.missing_rows, lambda: lost.step_id):
        with pytest.raises(InvalidArgument, match=expected):
            read()
    capture.check()
    capture.begin_step(2, stream=gpu.stream)
    capture.record(1, gpu.ids([1, 2]), stream=gpu.stream)
    capture.record(1, gpu.ids([1, 3]), stream=gpu.stream)
    gpu.stream.synchronize()
    with pytest.raises(InvalidState, match="token 0 of layer 1 with the ids that step 2 recorded"):
        capture.snapshot(1, stream=gpu.stream)
    capture.begin_step(3, stream=gpu.stream)
    assert capture.snapshot(1, stream=gpu.stream).missing_rows == [1, 1]


def test_a_full_ring_is_back_pressure(gpu: Device) -> None:
    capture = gpu.capture(max_in_flight=1)
    capture.begin_step(1, stream=gpu.stream)
    array = capture.snapshot(1, stream=gpu.stream).array  # holds the place
    with pytest.raises(fanfold.CapacityExceeded, match="back-pressure"):
        capture.snapshot(1, stream=gpu.stream)
    del array
    capture.snapshot(1, stream=gpu.stream).release()


def test_a_captured_record_replays_with_other_ids(gpu: Device) -> None:
    capture = gpu.capture(num_layers=1)
    ids = gpu.ids([0, 0])
    capture.begin_step(0, stream=gpu.stream)
    with graph_of(gpu.stream) as graphs:
        capture.record(0, ids, stream=gpu.stream)
        with pytest.raises(InvalidState, match="outside of a graph capture"):
            capture.snapshot(1, stream=gpu.stream)
    for step in range(1, 4):
        _core.simulator.write(ids, numpy.array([[step, 7]], "int32"))
        capture.begin_step(step, stream=gpu.stream)
        graphs[0].launch(gpu.stream)
        snapshot = capture.snapshot(1, stream=gpu.stream)
        assert (snapshot.step_id, snapshot.array.tolist()) == (step, [[[step, 7]]])
        snapshot.release()


def test_kernels_write_to_a_sink_of_the_device(gpu: Device) -> None:
    capture = gpu.capture(num_shared_experts=1)
    sink = capture.sink(1, numpy.int16)
    assert (sink.shape, sink.dtype) == ((8, 3), numpy.dtype("int16"))
    assert set(numpy.array(sink).ravel()) == {-32768}
    capture.begin_step(1, stream=gpu.stream)
    gpu.stream.synchronize()
    _core.simulator.write(sink[:1], numpy.array([[4, 5, 99]], "int16"))
    capture.import_sink(1, 2, stream=gpu.stream)
    snapshot = capture.snapshot(2, stream=gpu.stream)
    assert snapshot.missing_rows == [2, 1]
    assert snapshot.array[0, 1].tolist() == [4, 5]
    assert set(numpy.array(sink).ravel()) == {-32768}, "cleared"
    with pytest.raises(InvalidArgument, match="the sink of layer 1"):
        capture.record(0, sink, stream=gpu.stream)


def test_the_current_stream_of_a_framework_is_taken(gpu: Device) -> None:
    framework = Framework()
    framework.current = gpu.stream.cuda_stream
    capture = gpu.capture(num_layers=1)
    capture.begin_step(1, stream=int(gpu.stream.cuda_stream))
    capture.record(0, framework.tensor(gpu.ids([1, 2])))
    assert framework.devices == [0]
    assert capture.snapshot(1, stream=gpu.stream).array.tolist() == [[[1, 2]]]
    expected = "stream: expected a CUDA stream for device 'cuda', got none"
    with pytest.raises(InvalidArgument, match=expected):
        capture.record(0, Producer(gpu.ids([1, 2])))
    for call in (capture.begin_step, capture.snapshot):
        with pytest.raises(InvalidArgument, match=expected):
            call(1)


def test_devices_and_streams_that_do_not_fit_are_refused(gpu: Device) -> None:
    capture = gpu.capture()
    capture.begin_step(1, stream=gpu.stream)
    with pytest.raises(InvalidArgument, match=r"a tensor on cuda:0, got int32 \[1, 2\] on cpu"):
        capture.record(0, numpy.array([[1, 2]], "int32"), stream=gpu.stream)
    with pytest.raises(InvalidArgument, match="device: expected cpu, cuda or cuda:N"):
        gpu.capture(device="gpu")
    with pytest.raises(fanfold.Unsupported, match="device"):
        gpu.capture(device="cuda:9")
    on_cpu = gpu.capture(device="cpu")
    assert on_cpu.device == "cpu"
    with pytest.raises(InvalidArgument, match="stream: expected None for CPU tensors"):
        on_cpu.begin_step(1, stream=gpu.stream)
    on_cpu.check()


def test_the_map_to_logical_ids_may_change(gpu: Device) -> None:
    capture = gpu.capture(num_layers=1, logical_of_expert=[3, 4])
    for logical, expected in (([], [0, 1]), ([7, 6, 5], [7, 6])):
        capture.begin_step(1, stream=gpu.stream)
        capture.set_logical_of_expert(logical)
        capture.record(0, gpu.ids([0, 1]), stream=gpu.stream)
        assert capture.snapshot(1, stream=gpu.stream).array.tolist() == [[expected]]
