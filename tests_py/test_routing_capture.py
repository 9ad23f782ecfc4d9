# SPDX-License-Identifier: Apache-2.0
"""RoutingCapture: recording, layouts, sinks and snapshots as Python sees them."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy
import pytest
import torch

import fanfold
from fanfold import CaptureLayout, _core
from fanfold.testing import spawn_threads


def make_capture(**more: Any) -> Any:
    values: dict[str, Any] = {"num_layers": 2, "num_experts": 8, "top_k": 2, "max_tokens": 8}
    return fanfold.RoutingCapture(**{**values, **more})


def ids_of(*rows: tuple[int, ...], dtype: str = "int32") -> numpy.ndarray:
    return numpy.array(rows, dtype)


def test_a_snapshot_says_what_it_holds_and_what_is_missing() -> None:
    capture = make_capture(layers=[3, 5])
    capture.begin_step(7)
    capture.record(5, ids_of((1, 2), (-1, 7)))
    snapshot = capture.snapshot(3)
    assert snapshot.array.shape == (3, 2, 2)
    assert snapshot.array.dtype == numpy.int8
    assert snapshot.array[:, 0].tolist() == [[-1, -1]] * 3
    assert snapshot.array[:, 1].tolist() == [[1, 2], [-1, 7], [-1, -1]]
    assert (snapshot.dtype, snapshot.sentinel, snapshot.step_id) == ("int8", -1, 7)
    assert (snapshot.num_layers, snapshot.num_experts, snapshot.top_k) == (2, 8, 2)
    assert snapshot.missing_layers == [3, 5]
    assert snapshot.missing_rows == [3, 1]
    assert snapshot.expert_histogram().tolist() == [[0] * 8, [0, 1, 1, 0, 0, 0, 0, 1]]
    with pytest.raises(fanfold.InvalidState, match=r"rows: expected every layer .* layers 3"):
        snapshot.rows(0, 1)


@pytest.mark.parametrize("num_experts", [129, 256, 257, 512, 32768, 65536])
def test_no_id_is_cut_off(num_experts: int) -> None:
    capture = make_capture(num_layers=1, num_experts=num_experts)
    capture.begin_step(0)
    capture.record(0, ids_of((num_experts - 1, -1)))
    snapshot = capture.snapshot(1)
    assert snapshot.array.tolist() == [[[num_experts - 1, -1]]]
    assert snapshot.array.dtype == (numpy.int16 if num_experts <= 32768 else numpy.int32)
    capture.begin_step(1)
    with pytest.raises(fanfold.InvalidArgument, match=f"got {num_experts} at row 0, column 1"):
        capture.record(0, ids_of((0, num_experts)))
    assert capture.snapshot(1).missing_layers == [0]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_type_of_ids_is_taken(dtype: str, library: str) -> None:
    capture = make_capture(num_layers=1)
    capture.begin_step(0)
    wide = ids_of((1, 2, 99), (3, 4, 99), dtype=dtype)
    rows = wide[:, :2] if library == "numpy" else torch.from_numpy(wide)[:, :2]
    capture.record(0, rows)
    assert capture.snapshot(2).array.tolist() == [[[1, 2]], [[3, 4]]]


def test_unsigned_types_on_request() -> None:
    capture = make_capture(num_layers=1, num_experts=255, dtype=numpy.uint8)
    assert (capture.dtype, capture.sentinel) == ("uint8", 255)
    capture.begin_step(0)
    capture.record(0, ids_of((254, -1)))
    assert capture.snapshot(1).array.tolist() == [[[254, 255]]]
    with pytest.raises(fanfold.InvalidArgument, match="uint8, which holds ids up to 254"):
        make_capture(num_experts=256, dtype="uint8")


def test_layouts_say_whose_rows_are_whose() -> None:
    rows = numpy.arange(16, dtype=numpy.int64).reshape(8, 2) % 8
    layouts = {
        "local": (CaptureLayout.local(token_offset=0), rows),
        "concatenated": (CaptureLayout.concatenated([3, 5], 1), rows[3:]),
        "padded": (CaptureLayout.padded([4, 2], 1, 4), rows[4:6]),
        "row_map": (CaptureLayout.row_map([-1, 0, -1, 1, -1, 2, -1, 3]), rows[1::2]),
    }
    for name, (layout, expected) in layouts.items():
        capture = make_capture(num_layers=1)
        capture.begin_step(0)
        capture.record(0, rows, layout)
        snapshot = capture.snapshot(len(expected))
        assert (snapshot.array[:, 0] == expected).all(), name
        assert snapshot.missing_layers == [], name
    capture = make_capture(num_layers=1)
    capture.begin_step(0)
    with pytest.raises(fanfold.InvalidArgument, match=r"expected 9 rows \(the sum of layout"):
        capture.record(0, rows, CaptureLayout.concatenated([4, 5], 0))
    with pytest.raises(fanfold.InvalidArgument, match="rows: expected 0 to 8"):
        capture.record(0, rows, rows=9)


def test_shards_come_together_through_the_communicator() -> None:
    def fn(comm: fanfold.Communicator) -> list[Any]:
        capture = make_capture(num_layers=1, comm=comm)
        capture.begin_step(0)
        mine = torch.tensor([[comm.rank, 7], [comm.rank, 5]], dtype=torch.int64)
        capture.record(0, mine, CaptureLayout.sharded([2, 2], comm.rank, 3))
        snapshot = capture.snapshot(3)
        assert snapshot.missing_layers == []
        return snapshot.array[:, 0].tolist()

    assert spawn_threads(2, fn) == [[[0, 7], [0, 5], [1, 7]]] * 2

    def wrong(comm: fanfold.Communicator) -> None:
        capture = make_capture(num_layers=1, comm=comm)
        capture.begin_step(0)
        with pytest.raises(fanfold.InvalidArgument, match=r"counts: expected 2 numbers.*got 4"):
            capture.record(0, ids_of((1, 2)), CaptureLayout.sharded([1] * 4, comm.rank, 4))
        with pytest.raises(fanfold.InvalidArgument, match=f"rank: expected {comm.rank}, this rank"):
            capture.record(0, ids_of((1, 2)), CaptureLayout.sharded([1, 1], 1 - comm.rank, 2))
        counts = [2 - comm.rank, 1]  # ranks that disagree
        rows = [(1, 2)] * counts[comm.rank]
        with pytest.raises(fanfold.InvalidArgument, match="counts"):
            capture.record(0, ids_of(*rows), CaptureLayout.sharded(counts, comm.rank, sum(counts)))

    spawn_threads(2, wrong)
    with pytest.raises(fanfold.InvalidState, match="gather callback"):
        capture = make_capture()
        capture.begin_step(0)
        capture.record(0, ids_of((1, 2)), CaptureLayout.sharded([1], 0, 1))


def test_a_place_is_held_while_a_snapshot_or_its_array_lives() -> None:
    capture = make_capture(max_in_flight=1)
    capture.begin_step(0)
    capture.record(0, ids_of((1, 2)))
    array = capture.snapshot(1).array
    gc.collect()
    assert capture.num_in_flight == 1
    with pytest.raises(fanfold.CapacityExceeded, match="back-pressure"):
        capture.snapshot(1)
    capture.begin_step(1)
    capture.record(0, ids_of((3, 4)))
    assert array[0, 0].tolist() == [1, 2]
    del array
    gc.collect()
    with capture.snapshot(1) as snapshot:
        assert snapshot.array[0, 0].tolist() == [3, 4]
    assert capture.num_in_flight == 0
    with pytest.raises(fanfold.InvalidState, match="released"):
        _ = snapshot.array


def test_snapshots_outlive_the_capture() -> None:
    capture = make_capture(num_layers=1)
    capture.begin_step(0)
    capture.record(0, ids_of((1, 2)))
    snapshot = capture.snapshot(1)
    sink = capture.sink(0, numpy.int16)
    del capture
    gc.collect()
    assert snapshot.array.tolist() == [[[1, 2]]]
    assert (sink == numpy.iinfo(numpy.int16).min).all()


def test_a_fused_kernel_writes_to_a_sink() -> None:
    capture = make_capture(num_layers=1, num_shared_experts=1, max_sink_rows=4)
    sink = capture.sink(0, torch.int16)
    assert sink.shape == (4, 3)
    capture.begin_step(0)
    sink[0] = torch.tensor([1, 2, 7], dtype=torch.int16)
    sink[2] = torch.tensor([3, -1, 7], dtype=torch.int16)
    capture.import_sink(0, 3)
    snapshot = capture.snapshot(3)
    assert snapshot.array[:, 0].tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert snapshot.missing_rows == [1]
    assert (sink == torch.iinfo(torch.int16).min).all(), "cleared for the next step"
    assert torch.from_dlpack(capture.sink(0, "int16")).data_ptr() == sink.data_ptr()


def test_what_is_written_to_a_sink_between_steps_does_not_reach_the_next() -> None:
    capture = make_capture(num_layers=1)
    sink = capture.sink(0, numpy.int32)
    for step in range(2):  # before the first step; after the import
        sink[0] = [1, 2]
        capture.begin_step(step)
        capture.import_sink(0, 1)
        assert capture.snapshot(1).missing_rows == [1]
    sink[0] = [1, 2]
    with pytest.raises(fanfold.InvalidArgument, match="sink of layer 0; use import_sink"):
        capture.record(0, sink[:1])
    capture.import_sink(0, 1)
    assert capture.snapshot(1).missing_rows == [0]


def test_a_snapshot_may_be_released_while_another_thread_reads_it() -> None:
    tokens = 1_000_000  # so that a read takes milliseconds
    capture = make_capture(num_layers=8, max_tokens=tokens, max_in_flight=1)

    def record(step: int) -> None:
        capture.begin_step(step)
        for layer in range(8):
            capture.record(layer, numpy.full((tokens, 2), step, numpy.int32))

    def take_place() -> Any:
        while True:
            try:
                return capture.snapshot(tokens)
            except fanfold.CapacityExceeded:
                time.sleep(0)

    def read(snapshot: Any, results: list[Any], started: threading.Event) -> None:
        started.set()
        try:
            while True:
                results.append(snapshot.rows(0, tokens))
                results.append(snapshot.expert_histogram())
        except fanfold.InvalidState as error:
            results.append(str(error))

    record(0)
    snapshot = capture.snapshot(tokens)
    for step in range(4):
        record(step + 1)
        results: list[Any] = []
        started = threading.Event()
        reader = threading.Thread(target=read, args=(snapshot, results, started))
        reader.start()
        started.wait()
        snapshot.release()
        snapshot = take_place()
        reader.join()
        assert "released" in results.pop()
        for result in results:
            if isinstance(result, numpy.ndarray):
                assert (result[:, step] == 2 * tokens).all()
            else:
                assert (result.array == step).all()


def test_arrays_are_read_only_and_still_go_to_the_store() -> None:
    capture = make_capture(num_layers=1)
    capture.begin_step(0)
    capture.record(0, ids_of((1, 2)))
    snapshot = capture.snapshot(1)
    store = fanfold.RoutingStore(num_layers=1, num_experts=8, top_k=2)
    store.begin("a")
    store.append("a", 0, snapshot.array)
    assembled = store.assemble("a", 0, 1).rows
    for array in (snapshot.array, snapshot.rows(0, 1).array, assembled.array):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 5
    assert fanfold.RoutingRows(snapshot.array, num_experts=8).array.tolist() == [[[1, 2]]]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shards_are_cut_and_joined(library: str) -> None:
    rows: Any = numpy.arange(10, dtype=numpy.int32).reshape(5, 2)
    if library == "torch":
        rows = torch.from_numpy(rows)
    counts = _core.shard_counts(5, 4)
    shards = [_core.shard_of(rows, 4, shard) for shard in range(4)]
    assert [len(shard) for shard in shards] == counts == [2, 2, 1, 0]
    out = rows * 0
    _core.join_shards(shards, out)
    assert (out == rows).all()
    with pytest.raises(fanfold.InvalidArgument, match="fewer than 4 rows of padding"):
        _core.join_shards(shards, out[:1])
    with pytest.raises(fanfold.InvalidArgument, match="shard: expected 0 to 3, got 4"):
        _core.shard_of(rows, 4, 4)


def test_recomputed_layers_and_other_models() -> None:
    capture = make_capture(num_layers=1)
    capture.begin_step(0)
    capture.record(0, ids_of((1, 2)), source="target")
    capture.record(0, ids_of((1, 2)))
    with pytest.raises(fanfold.InvalidState, match="token 0 of layer 0"):
        capture.record(0, ids_of((1, 3)))
    capture.record(0, ids_of((1, 3)), overwrite=True)
    with pytest.raises(fanfold.InvalidArgument, match='source: expected "target"'):
        capture.record(0, ids_of((1, 2)), source="draft")
    assert capture.snapshot(1).array.tolist() == [[[1, 3]]]


def test_physical_ids_come_back_logical() -> None:
    capture = make_capture(num_layers=1, num_experts=3, logical_of_expert=[0, 1, 2, 1])
    capture.begin_step(0)
    capture.record(0, ids_of((3, 0)))
    assert capture.snapshot(1).array.tolist() == [[[1, 0]]]
    with pytest.raises(fanfold.InvalidState, match="between steps"):
        capture.set_logical_of_expert([])
    capture.begin_step(1)
    capture.set_logical_of_expert([2, 1, 0])
    capture.record(0, ids_of((0, 2)))
    assert capture.snapshot(1).array.tolist() == [[[2, 0]]]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_layers": 0}, "num_layers: expected 1 or more, got 0"),
        ({"top_k": 0}, "top_k: expected 1 or more, got 0"),
        ({"dtype": "float32"}, "dtype: expected int8, int16, int32, uint8 or uint16"),
        ({"layers": [1]}, "layers: expected 2 numbers"),
        ({"max_in_flight": 0}, "max_in_flight"),
    ],
)
def test_a_wrong_configuration_is_refused_at_creation(values: dict[str, Any], text: str) -> None:
    with pytest.raises(fanfold.InvalidArgument, match=text):
        make_capture(**values)


def test_wrong_tensors_are_refused_in_words() -> None:
    capture = make_capture()
    with pytest.raises(fanfold.InvalidState, match="expected begin_step"):
        capture.record(0, ids_of((1, 2)))
    capture.begin_step(0)
    with pytest.raises(fanfold.InvalidArgument, match=r"got float32 \[1, 2\]"):
        capture.record(0, ids_of((1, 2), dtype="float32"))
    with pytest.raises(
        fanfold.InvalidArgument, match=r"expected a DLPack tensor, got builtins\.list"
    ):
        capture.record(0, [[1, 2]])
    with pytest.raises(fanfold.InvalidArgument, match="one of the recorded layers 0, 1, got 2"):
        capture.record(2, ids_of((1, 2)))
