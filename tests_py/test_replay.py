# SPDX-License-Identifier: Apache-2.0
"""fanfold.replay: what a trainer does with recorded routing before and while it replays it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fanfold
from fanfold import replay

QUICK = settings(max_examples=60, deadline=None)


def rows_of(
    num_tokens: int, num_layers: int = 2, top_k: int = 2, num_experts: int = 8, **more: Any
) -> fanfold.RoutingRows:
    """Valid rows no two tokens of which are equal, as far as the experts allow it."""
    ids = replay.pad_rows(num_tokens, num_layers, top_k, num_experts, start=1)
    dtype = more.pop("dtype", "int32")
    return fanfold.RoutingRows(ids.astype(dtype), num_experts=num_experts, **more)


def with_hole(*places: tuple[int, ...], dtype: str = "int16") -> numpy.ndarray:
    """Rows of 5 tokens, 2 layers, top-2, 8 experts that lack ids at some places."""
    ids = rows_of(5).array.astype(dtype)
    for place in places:
        ids[place] = -1 if numpy.dtype(dtype).kind == "i" else numpy.iinfo(dtype).max
    return ids


# unpack


def test_each_trainer_gets_its_type_and_shape() -> None:
    rows = rows_of(4, num_layers=3, dtype="int8")
    megatron = replay.unpack(rows, "megatron")
    assert (megatron.dtype, megatron.shape) == (numpy.int64, (3, 4, 2))
    for layer in range(3):
        assert megatron[layer].flags.c_contiguous
        assert (megatron[layer] == rows.array[:, layer]).all()
    for target, dtype in (("verl", "int16"), ("slime", "int32"), (numpy.uint8, "uint8")):
        ids = replay.unpack(rows, target, num_tokens=5)
        assert (ids.dtype, ids.shape) == (numpy.dtype(dtype), (4, 3, 2))
        assert (ids == rows.array).all()
        assert ids.flags.owndata and ids.flags.writeable
    assert (replay.unpack(torch.from_numpy(rows.array.copy()), "verl", num_experts=8) == ids).all()


def test_a_placeholder_row_is_valid() -> None:
    rows = rows_of(4)
    for target in ("verl", "megatron", "int8"):
        ids = replay.unpack(rows, target, num_tokens=5, placeholder=True)
        by_token = ids.swapaxes(0, 1) if target == "megatron" else ids
        assert by_token.shape == (5, 2, 2)
        assert (by_token[:4] == rows.array).all()
        replay.validate(numpy.ascontiguousarray(by_token), 8, num_tokens=6)
    with pytest.raises(fanfold.InvalidArgument, match="placeholder: expected False for slime"):
        replay.unpack(rows, "slime", placeholder=True)


@pytest.mark.parametrize(
    ("num_experts", "target", "keep"),
    [(256, "uint8", False), (255, "uint8", True), (128, "int8", True), (32768, "verl", True)],
)
def test_the_largest_id_that_a_type_holds(num_experts: int, target: str, keep: bool) -> None:
    ids = numpy.array([[[0, num_experts - 1]]], "int32")
    unrouted = "keep" if keep else "raise"
    found = replay.unpack(ids, target, num_experts=num_experts, unrouted=unrouted)
    assert found.tolist() == ids.tolist()
    with pytest.raises(fanfold.InvalidArgument, match=r"target: expected a type for ids 0 to"):
        replay.unpack(ids, target, num_experts=num_experts + 1, unrouted=unrouted)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint16", "uint32"])
def test_no_expert_is_never_carried_along_unnoticed(dtype: str) -> None:
    ids = with_hole((1, 0), (3, 0), (3, 1), dtype=dtype)
    with pytest.raises(fanfold.InvalidArgument, match="got none at token 1, layer 0, column 0"):
        replay.unpack(ids, "slime", num_experts=8)
    kept = replay.unpack(ids, "slime", num_experts=8, unrouted="keep")
    assert (kept[1, 0] == -1).all() and (kept[3] == -1).all()
    assert (kept[2] == rows_of(5).array[2]).all()
    assert (replay.unpack(ids, "uint16", num_experts=8, unrouted="keep")[1, 0] == 65535).all()
    padded = replay.unpack(ids, "megatron", num_experts=8, unrouted="pad", placeholder=True)
    fill = replay.pad_rows(3, 2, 2, 8)
    assert (padded[0, [1, 3, 5]] == fill[:, 0]).all()
    assert (padded[1, [3, 5]] == fill[[0, 2], 1]).all()
    with pytest.raises(fanfold.InvalidArgument, match="only some at token 2, layer 1"):
        replay.unpack(with_hole((2, 1, 0)), "slime", num_experts=8, unrouted="pad")


def test_255_of_256_experts_in_uint8_is_an_expert() -> None:
    ids = numpy.full((1, 1, 1), 255, "uint8")
    assert replay.unpack(ids, "verl", num_experts=256).tolist() == [[[255]]]
    with pytest.raises(fanfold.InvalidArgument, match="got none at token 0"):
        replay.unpack(ids, "verl", num_experts=255)


def test_unpack_names_what_it_refuses() -> None:
    rows = rows_of(3)
    refused: list[tuple[str, Any, str, dict[str, Any]]] = [
        ("rows: expected an array on the CPU, got list", [[[1, 2]]], "slime", {"num_experts": 4}),
        ("an array on the CPU, got Tensor", torch.ones(1, device="meta"), "slime", {}),
        ("rows: expected integers", numpy.zeros((1, 1, 1)), "slime", {"num_experts": 4}),
        ("rows: expected integers", numpy.zeros((1, 1), int), "slime", {"num_experts": 4}),
        ("num_experts: expected a number", rows.array, "slime", {}),
        ("num_experts: expected 1 or more", rows.array, "slime", {"num_experts": 0}),
        ("rows: expected rows of 4 experts, got rows of 8", rows, "slime", {"num_experts": 4}),
        ("got 4 at token 0, layer 1, column 0", rows.array, "slime", {"num_experts": 4}),
        ("0 to 7 or -1, got -2 at", numpy.full((1, 1, 1), -2), "slime", {"num_experts": 8}),
        ("target: expected megatron, verl, slime or a dtype, got 'x'", rows, "x", {}),
        ("target: expected an integer dtype, got float32", rows, "float32", {}),
        ("unrouted: expected", rows, "slime", {"unrouted": "zero"}),
        ("expected logical ids, got physical", rows_of(1, id_space="physical"), "slime", {}),
        ("join the known prefix", rows_of(3, first_position=1), "slime", {"num_tokens": 4}),
    ]
    for text, value, target, more in refused:
        with pytest.raises(fanfold.InvalidArgument, match=text):
            replay.unpack(value, target, **more)


# validate


def test_valid_rows_pass() -> None:
    replay.validate(rows_of(4), 8, num_tokens=5)
    replay.validate(rows_of(0), 8, num_tokens=1)
    replay.validate(with_hole((1, 0), (2, 1, 0)), 8, allow_unrouted=True)
    replay.validate(numpy.full((3, 2, 2), -1), 8, allow_unrouted=True)
    replay.validate(numpy.zeros((3, 2, 1), int), 8, allow_zero_layers=True)
    replay.validate(numpy.zeros((3, 2, 1), int), 1)
    replay.validate(numpy.full((1, 1, 2), 3), 8, unique=False)


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [
        (4, "rows: expected 3, one for each of 4 tokens but the last, .*, got 4: one too many"),
        (6, "rows: expected 5, .* got 4: one too few"),
        (3, "got 4: 2 too many"),
    ],
)
def test_off_by_one_is_said(num_tokens: int, text: str) -> None:
    with pytest.raises(fanfold.InvalidArgument, match=text):
        replay.validate(rows_of(4), 8, num_tokens=num_tokens)


def test_layers_that_nobody_recorded_are_named() -> None:
    ids = rows_of(4, num_layers=6).array.copy()
    ids[:, [1, 2, 3, 5]] = 0
    with pytest.raises(fanfold.InvalidArgument, match="nothing but 0 in layers 1 to 3, 5"):
        replay.validate(ids, 8)
    ids[0, 5] = -1
    with pytest.raises(fanfold.InvalidArgument, match="nothing but 0 in layers 1 to 3, 5"):
        replay.validate(ids, 8, allow_unrouted=True)
    ids[:, [1, 2, 3, 5]] = -1
    for allow in (False, True):
        with pytest.raises(fanfold.InvalidArgument, match="none at all in layers 1 to 3, 5"):
            replay.validate(ids, 8, allow_unrouted=allow)
    with pytest.raises(fanfold.InvalidArgument, match="nothing but 0 in layers 0"):
        replay.validate(numpy.zeros((3, 1, 1), int), 8)


def test_with_top_1_a_layer_of_zeros_may_be_what_its_router_chose() -> None:
    ids = rows_of(4, num_layers=3, top_k=1).array.copy()
    ids[:, 1] = 0
    replay.validate(ids, 8)
    ids[:] = 0
    with pytest.raises(fanfold.InvalidArgument, match="nothing but 0 in layers 0 to 2"):
        replay.validate(ids, 8)
    replay.validate(ids, 8, allow_zero_layers=True)


def test_layers_of_zeros_need_no_distinct_ids_where_they_are_allowed() -> None:
    ids = rows_of(4, num_layers=3).array.copy()
    ids[:, 0] = 0
    with pytest.raises(fanfold.InvalidArgument, match=r"nothing but 0 in layers 0$"):
        replay.validate(ids, 8)
    replay.validate(ids, 8, allow_zero_layers=True)
    ids[2, 1] = 0  # one token of a layer that has others
    with pytest.raises(fanfold.InvalidArgument, match="got 0 again at token 2, layer 1, column 1"):
        replay.validate(ids, 8, allow_zero_layers=True)


def test_the_first_wrong_id_is_named() -> None:
    with pytest.raises(fanfold.InvalidArgument, match="got none at token 2, layer 1, column 0"):
        replay.validate(with_hole((2, 1, 0)), 8)
    twice = rows_of(5, top_k=3).array.copy()
    twice[3, 1] = [5, 6, 5]
    with pytest.raises(fanfold.InvalidArgument, match="got 5 again at token 3, layer 1, column 2"):
        replay.validate(twice, 8)
    twice[3, 1] = [8, 6, 5]
    with pytest.raises(fanfold.InvalidArgument, match="got 8 at token 3, layer 1, column 0"):
        replay.validate(twice, 8)


# padding


@QUICK
@given(st.data())
def test_pad_rows_are_distinct_and_balanced(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, num_experts))
    num_rows = data.draw(st.integers(0, 50))
    start = data.draw(st.integers(0, 1000))
    ids = replay.pad_rows(num_rows, 3, top_k, num_experts, start)
    assert ids.shape == (num_rows, 3, top_k) and ids.dtype == numpy.int32
    assert (ids == replay.pad_rows(num_rows + start, 3, top_k, num_experts)[start:]).all()
    assert all(len(set(token)) == top_k for token in ids.reshape(-1, top_k).tolist())
    first = data.draw(st.integers(0, num_rows))
    window = ids[first : data.draw(st.integers(first, num_rows))]
    for layer in range(3):
        counts = numpy.bincount(window[:, layer].ravel(), minlength=num_experts)
        assert len(counts) == num_experts
        assert counts.max() - counts.min() <= (window[:, layer].size % num_experts != 0)


def test_pad_rows_refuse_what_cannot_be_distinct() -> None:
    with pytest.raises(fanfold.InvalidArgument, match="top_k: expected 0 to 2, got 3"):
        replay.pad_rows(1, 1, 3, 2)
    with pytest.raises(fanfold.InvalidArgument, match="num_rows: expected 0 or more, got -1"):
        replay.pad_rows(-1, 1, 1, 2)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_pad_appends_and_says_what_was_there(dtype: str) -> None:
    rows = rows_of(3, dtype=dtype)
    padded, mask = replay.pad(rows, 5, start=7)
    assert padded.dtype == dtype and mask.tolist() == [True] * 3 + [False] * 2
    assert (padded[:3] == rows.array).all()
    assert (padded[3:] == replay.pad_rows(2, 2, 2, 8, start=7)).all()
    again, mask = replay.pad(padded, 5, num_experts=8)
    assert mask.all() and (again == padded).all() and not numpy.shares_memory(again, padded)
    with pytest.raises(fanfold.InvalidArgument, match="num_tokens: expected 3 or more, got 2"):
        replay.pad(rows, 2)
    with pytest.raises(fanfold.InvalidArgument, match="ids 0 to 299, got uint8"):
        replay.pad(numpy.ones((1, 1, 1), "uint8"), 2, num_experts=300)


# overlap


@QUICK
@given(st.integers(0, 6), st.integers(1, 5), st.randoms(use_true_random=False))
def test_overlap_is_the_mean_over_routed_tokens(count: int, top_k: int, random: Any) -> None:
    def draw() -> numpy.ndarray:
        ids = [[random.sample(range(9), top_k) for _ in range(2)] for _ in range(count)]
        for token in ids:
            for layer in range(2):
                if random.random() < 0.3:
                    token[layer] = [-1] * top_k
        return numpy.array(ids, "int64").reshape(count, 2, top_k)

    a, b = draw(), draw()
    found = replay.overlap(a, b, num_experts=9)
    for layer in range(2):
        shares = [
            len(set(x) & set(y)) / top_k
            for x, y in zip(a[:, layer].tolist(), b[:, layer].tolist(), strict=True)
            if -1 not in x and -1 not in y
        ]
        expected = sum(shares) / len(shares) if shares else numpy.nan
        assert found[layer] == pytest.approx(expected, nan_ok=True)
    assert numpy.array_equal(found, replay.overlap(b, a, num_experts=9), equal_nan=True)


def test_overlap_of_rows_with_a_live_router() -> None:
    rows = fanfold.RoutingRows(with_hole((0, 0), (1, 1, 0), dtype="uint8"), num_experts=8)
    live = torch.from_numpy(with_hole((1, 1, 0), dtype="int64"))
    assert replay.overlap(rows, live).tolist() == [1.0, 1.0]
    live[1, 1, 0] = (live[1, 1, 1] + 1) % 8  # two experts where one was recorded
    assert replay.overlap(rows, live).tolist() == [1.0, pytest.approx(0.9)]
    with pytest.raises(fanfold.InvalidArgument, match=r"shape of recorded, \[5, 2, 2\], got"):
        replay.overlap(rows, live[:4])
    with pytest.raises(fanfold.InvalidArgument, match="num_experts: expected a number"):
        replay.overlap(rows.array, live)
    with pytest.raises(fanfold.InvalidArgument, match="live: expected ids 0 to 7"):
        replay.overlap(rows, live + 1)


# together


def test_a_request_goes_from_capture_to_router() -> None:
    capture = fanfold.RoutingCapture(num_layers=4, num_experts=16, top_k=2, max_tokens=8)
    capture.begin_step(0)
    ids = replay.pad_rows(7, 4, 2, 16, start=3)
    for layer in range(4):
        capture.record(layer, numpy.ascontiguousarray(ids[:, layer]))
    rows = capture.snapshot(7).rows(0, 7)
    replay.validate(rows, 16, num_tokens=8)
    padded, mask = replay.pad(rows, 8)
    book = replay.ReplayBook()
    for rank in range(2):
        mine = replay.slice_context(padded, rank, 2, zigzag=True)
        stage = replay.unpack(replay.slice_pipeline(mine, [2, 3]), "megatron", num_experts=16)
        for layer, layer_ids in zip((2, 3), stage, strict=True):
            book.put(layer, rank, layer_ids)
    joined = replay.join_context([book.get(3, 0), book.get(3, 1)], zigzag=True)
    assert (joined[mask] == ids[:, 3]).all()


def test_the_package_does_not_need_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import fanfold\nassert 'fanfold.replay' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
