# SPDX-License-Identifier: Apache-2.0
"""Known faults of routing capture and replay (C), each with its smallest input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import fanfold
from fanfold import CaptureLayout, RoutingRows, replay
from fanfold.compat.vllm import RoutedExpertsCapturer


def capture_of(**more: Any) -> fanfold.RoutingCapture:
    values: dict[str, Any] = {"num_layers": 2, "num_experts": 8, "top_k": 2, "max_tokens": 8}
    made = fanfold.RoutingCapture(**{**values, **more})
    made.begin_step(1)
    return made


def ids(*rows: list[int]) -> numpy.ndarray:
    return numpy.array(rows, "int32")


def rows_of(tokens: int, layers: int = 1, first: int = 0) -> RoutingRows:
    """Distinct experts in each row, other ones in each token."""
    every = numpy.arange(tokens * layers * 2).reshape(tokens, layers, 2) + 2 * first
    return RoutingRows((every % 64).astype("int8"), num_experts=64, first_position=first)


def test_a_layer_that_never_records_is_reported_and_holds_no_expert() -> None:  # C1
    capture = capture_of()
    capture.record(0, ids([1, 2]))
    with capture.snapshot(1) as snapshot:
        assert snapshot.missing_layers == [1]
        assert snapshot.array[0].tolist() == [[1, 2], [-1, -1]]


def test_what_an_earlier_step_recorded_is_missing_in_the_next() -> None:  # C2
    capture = capture_of(num_layers=1)
    capture.record(0, ids([1, 2]))
    capture.begin_step(2)
    with capture.snapshot(1) as snapshot:
        assert snapshot.missing_layers == [0]
        assert snapshot.array.tolist() == [[[-1, -1]]]


def test_a_draft_model_cannot_write_into_layers_of_the_target() -> None:  # C3
    capture = capture_of()
    with pytest.raises(fanfold.InvalidArgument, match=r'source: expected "target" .* got "draft"'):
        capture.record(0, ids([3, 4]), source="draft")
    assert capture.snapshot(1).missing_layers == [0, 1]


def test_replicas_come_back_as_the_logical_expert() -> None:  # C4
    capture = capture_of(num_layers=1, num_experts=2, logical_of_expert=[0, 1, 0])
    capture.record(0, ids([2, 1]))
    assert capture.snapshot(1).array.tolist() == [[[0, 1]]]


@pytest.mark.parametrize(
    ("kind", "values", "kept"),
    [
        ("concatenated", ([0, 8], 1), [*range(8)]),
        ("concatenated", ([4, 4], 1), [4, 5, 6, 7]),
        ("padded", ([0, 4], 1, 4), [4, 5, 6, 7]),
        ("local", (), [*range(8)]),
    ],
)
def test_eight_rows_are_what_the_layout_says(kind: str, values: Any, kept: list[int]) -> None:  # C6
    capture = capture_of(num_layers=1)
    layout = getattr(CaptureLayout, kind)(*values)
    capture.record(0, ids(*([row, (row + 1) % 8] for row in range(8))), layout)
    assert capture.snapshot(len(kept)).array[:, 0, 0].tolist() == kept


@pytest.mark.parametrize("num_experts", [129, 256, 257, 512, 32768, 65536])
def test_no_width_of_ids_takes_one_for_another(num_experts: int) -> None:  # C8
    capture = capture_of(num_layers=1, num_experts=num_experts)
    capture.record(0, ids([num_experts - 1, -1]))
    rows = capture.snapshot(1).rows(0, 1)
    assert rows.array.tolist() == [[[num_experts - 1, -1]]]
    again = RoutingRows.from_bytes(rows.to_bytes())
    assert (again.dtype, again.sentinel) == (rows.dtype, -1)
    assert again.array.tolist() == rows.array.tolist()


def test_rows_with_a_fused_shared_expert_have_a_stride_of_their_own() -> None:  # C10
    capture = capture_of(num_layers=1, num_shared_experts=1)
    capture.record(0, ids([1, 2, 99], [3, 4, 99]))
    assert capture.snapshot(2).array.tolist() == [[[1, 2]], [[3, 4]]]
    sink = capture.sink(0, numpy.int16)
    assert sink.shape == (8, 3)
    assert set(sink.ravel().tolist()) == {-32768}, "no expert before a kernel writes"


def test_a_prompt_without_new_tokens_has_a_row_for_each() -> None:  # C11
    assert fanfold.num_tokens_fed(5, 0) == 5
    rows_of(5).check_num_tokens(5, 0)


@pytest.mark.parametrize(("rows", "text"), [(5, "one too many"), (3, "one too few")])
def test_a_length_that_is_off_by_one_is_said(rows: int, text: str) -> None:  # C14
    replay.validate(rows_of(4), 64, num_tokens=5)
    with pytest.raises(fanfold.InvalidArgument, match=text):
        replay.validate(rows_of(rows), 64, num_tokens=5)


def test_a_router_that_is_bound_twice_is_one_layer() -> None:  # C14
    with pytest.raises(fanfold.InvalidArgument, match="layers: expected different numbers"):
        capture_of(layers=[3, 3])


def test_a_known_prefix_is_not_sent_again() -> None:  # C15
    rows = rows_of(4100).astype("int16")
    rest = RoutingRows.from_vllm(
        rows.slice_tokens(4000, 4100).to_vllm(), num_experts=64, first_position=4000
    )
    assert len(rest.to_bytes()) == 64 + 100 * 2 * 2  # a header, and ids as vLLM has them
    whole = RoutingRows.concat_tokens([rows.slice_tokens(0, 4000), rest])
    assert whole.array.tolist() == rows.array.tolist()


def test_a_snapshot_keeps_what_is_recorded_over_later() -> None:  # C16
    capture = capture_of(num_layers=1, max_in_flight=1)
    capture.record(0, ids([1, 2]))
    snapshot = capture.snapshot(1)
    capture.begin_step(2)
    capture.record(0, ids([5, 6]))
    assert snapshot.array.tolist() == [[[1, 2]]]
    with pytest.raises(fanfold.CapacityExceeded, match="back-pressure"):
        capture.snapshot(1)


@pytest.mark.parametrize("field", ["num_layers", "top_k"])
def test_a_model_without_experts_is_refused_up_front(field: str) -> None:  # C18
    with pytest.raises(fanfold.InvalidArgument, match=f"{field}: expected 1 or more, got 0"):
        capture_of(**{field: 0})


def test_dense_layers_before_the_first_router_take_no_slot() -> None:  # C19
    capture = capture_of(num_layers=3, layers=[1, 2, 3])
    with pytest.raises(fanfold.InvalidArgument, match=r"layer: expected one of .* 1, 2, 3, got 0"):
        capture.record(0, ids([1, 2]))
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 4,
        get_num_experts=lambda: 8,
        get_num_experts_per_tok=lambda: 2,
        hf_text_config=SimpleNamespace(first_k_dense_replace=1),
    )
    parallel = SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1)
    capturer = RoutedExpertsCapturer(
        4,
        SimpleNamespace(model_config=model, parallel_config=parallel),
        forward_context=lambda: None,
        token_offset=lambda _: 0,
        library="numpy",
    )
    for layer in (1, 2, 3):
        capturer.capture(layer, ids([layer, 0]))
    assert capturer.snapshot_routing_data(1)[0, :, 0].tolist() == [0, 1, 2, 3]


def test_stages_and_parts_of_a_request_join_again() -> None:  # C21
    rows = rows_of(3, layers=4)
    stages = [rows.slice_layers(0, 2), rows.slice_layers(2, 4)]
    assert RoutingRows.concat_layers(stages).array.tolist() == rows.array.tolist()
    prefill, decode = rows.slice_tokens(0, 2), rows.slice_tokens(2, 3)
    assert RoutingRows.concat_tokens([prefill, decode]).array.tolist() == rows.array.tolist()
    with pytest.raises(fanfold.InvalidArgument, match="to begin at position 2"):
        RoutingRows.concat_tokens([prefill, prefill])
