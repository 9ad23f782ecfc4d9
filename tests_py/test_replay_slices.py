# SPDX-License-Identifier: Apache-2.0
"""The parts of recorded routing that ranks of a trainer take, and what puts them together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fanfold
from fanfold import replay

QUICK = settings(max_examples=60, deadline=None)


def rows_of(num_tokens: int, num_layers: int = 2, num_experts: int = 40) -> fanfold.RoutingRows:
    ids = replay.pad_rows(num_tokens, num_layers, 2, num_experts, start=1)
    return fanfold.RoutingRows(ids, num_experts=num_experts)


def test_zigzag_pairs_early_chunks_with_late_ones() -> None:
    tokens = numpy.arange(8)
    parts = [replay.slice_context(tokens, rank, 2, zigzag=True).tolist() for rank in range(2)]
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert replay.slice_context(tokens, 1, 2, zigzag=False).tolist() == [4, 5, 6, 7]
    with pytest.raises(fanfold.InvalidArgument, match=r"multiple of 4 tokens, got 6: pad"):
        replay.slice_context(tokens[:6], 0, 2, zigzag=True)
    with pytest.raises(fanfold.InvalidArgument, match="rank: expected 0 to 1, got 2"):
        replay.slice_context(tokens, 2, 2, zigzag=True)
    with pytest.raises(fanfold.InvalidArgument, match="part 1: expected 4 tokens, got 3"):
        replay.join_context([tokens[:4], tokens[:3]], zigzag=False)
    with pytest.raises(fanfold.InvalidArgument, match="part 0: expected an even number"):
        replay.join_context([tokens[:3], tokens[:3]], zigzag=True)


@QUICK
@given(st.integers(1, 5), st.integers(0, 4), st.booleans())
def test_context_slices_join_again(num_ranks: int, size: int, zigzag: bool) -> None:
    count = num_ranks * size * (2 if zigzag else 1)
    rows = rows_of(count)
    ranks = range(num_ranks)
    parts = [replay.slice_context(rows, rank, num_ranks, zigzag=zigzag) for rank in ranks]
    assert {len(part) for part in parts} == {count // num_ranks}
    assert (replay.join_context(parts, zigzag=zigzag) == rows.array).all()
    mask = numpy.arange(count) % 3 == 0
    masks = [replay.slice_context(mask, rank, num_ranks, zigzag=zigzag) for rank in ranks]
    assert (replay.join_context(masks, zigzag=zigzag) == mask).all()


@QUICK
@given(st.integers(0, 30), st.integers(1, 6))
def test_sequence_slices_join_again(count: int, num_ranks: int) -> None:
    rows = rows_of(count)
    parts = [replay.slice_sequence(rows, rank, num_ranks) for rank in range(num_ranks)]
    assert [len(part) for part in parts] == fanfold.shard_counts(count, num_ranks)
    assert all(part.flags.owndata and part.flags.writeable for part in parts)
    assert (replay.join_sequence(parts) == rows.array).all()
    padded = [replay.pad(part, len(parts[0]), num_experts=40)[0] for part in parts]
    assert sum(len(part) for part in padded) - count < num_ranks, "less padding than shards"
    assert (replay.join_sequence(padded, count) == rows.array).all()


def test_sequence_slices_check_their_sizes() -> None:
    parts = [numpy.ones((2, 1, 1), int)] * 2
    with pytest.raises(fanfold.InvalidArgument, match="num_tokens: expected 3 to 4, got 5"):
        replay.join_sequence(parts, 5)
    with pytest.raises(fanfold.InvalidArgument, match="num_ranks: expected 1 or more, got 0"):
        replay.slice_sequence(parts[0], 0, 0)
    with pytest.raises(fanfold.InvalidArgument, match=r"part 1: expected int64 \['n', 1, 1\]"):
        replay.join_sequence([parts[0], numpy.ones((2, 2, 1), int)])
    with pytest.raises(fanfold.InvalidArgument, match="parts: expected one or more"):
        replay.join_sequence([])
    mixed = [rows_of(2, num_experts=8), rows_of(2, num_experts=9)]
    with pytest.raises(fanfold.InvalidArgument, match=r"equally many experts, got \[8, 9\]"):
        replay.join_sequence(mixed)


@QUICK
@given(st.permutations(range(6)), st.integers(1, 6))
def test_pipeline_slices_join_again(order: list[int], num_stages: int) -> None:
    rows = rows_of(5, num_layers=6)
    stages = [order[i::num_stages] for i in range(num_stages)]
    parts = [replay.slice_pipeline(rows, layers) for layers in stages]
    for part, layers in zip(parts, stages, strict=True):
        assert (part == rows.array[:, layers]).all()
    assert (replay.join_pipeline(parts, stages) == rows.array).all()


def test_a_stage_may_have_no_layer() -> None:
    rows = rows_of(5, num_layers=2)
    empty = replay.slice_pipeline(rows, [])
    assert (empty.shape, empty.dtype) == ((5, 0, 2), rows.array.dtype)
    parts = [empty, replay.slice_pipeline(rows, [0, 1])]
    assert (replay.join_pipeline(parts, [[], [0, 1]]) == rows.array).all()


def test_ids_that_are_not_logical_are_refused() -> None:
    ids = replay.pad_rows(4, 2, 2, 8)
    rows = fanfold.RoutingRows(ids, num_experts=8, id_space="physical")
    good = fanfold.RoutingRows(ids, num_experts=8)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("rows", lambda: replay.slice_pipeline(rows, [0])),
        ("rows", lambda: replay.slice_context(rows, 0, 2, zigzag=True)),
        ("rows", lambda: replay.slice_sequence(rows, 0, 2)),
        ("part 1", lambda: replay.join_pipeline([good, rows], [[0, 1], [2, 3]])),
        ("part 1", lambda: replay.join_context([good, rows], zigzag=False)),
        ("part 1", lambda: replay.join_sequence([good, rows])),
        ("part 1", lambda: replay.concat([good, rows], [0, 4])),
    ]
    for name, call in calls:
        text = f"{name}: expected logical ids, got physical ones"
        with pytest.raises(fanfold.InvalidArgument, match=text):
            call()


def test_pipeline_slices_name_the_layers() -> None:
    rows = rows_of(3, num_layers=4)
    for layers, text in (
        ([4], "expected 0 to 3, got 4"),
        ([1, 2, 1], "expected distinct layers, got 1 more than once"),
    ):
        with pytest.raises(fanfold.InvalidArgument, match=f"layers_of_stage: {text}"):
            replay.slice_pipeline(rows, layers)
    parts = [replay.slice_pipeline(rows, [0, 1]), replay.slice_pipeline(rows, [2, 3])]
    with pytest.raises(
        fanfold.InvalidArgument, match="every layer 0 to 3 once, got none of layers 2"
    ):
        replay.join_pipeline(parts, [[0, 1], [3, 1]])
    with pytest.raises(fanfold.InvalidArgument, match=r"part 1: expected int32 \[3, 1, 2\]"):
        replay.join_pipeline(parts, [[0, 1], [2]])
    with pytest.raises(fanfold.InvalidArgument, match="one for each of 1 stages, got 2"):
        replay.join_pipeline(parts, [[0, 1]])


def test_prefill_and_decode_join_where_they_meet() -> None:
    rows = rows_of(6)
    prefill, decode = rows.slice_tokens(0, 4), rows.slice_tokens(4, 6)
    assert (replay.concat([prefill, decode]) == rows.array).all()
    assert (replay.concat([prefill.array, decode.array], [0, 4]) == rows.array).all()
    assert (replay.concat([decode]) == decode.array).all()
    for position, text in (
        (5, "part 1: expected to begin at position 4, got position 5: 1 row missing"),
        (2, "part 1: .* got position 2: 2 rows there twice"),
    ):
        with pytest.raises(fanfold.InvalidArgument, match=text):
            replay.concat([prefill.array, decode.array], [0, position])
    with pytest.raises(fanfold.InvalidArgument, match="4, got position 3: 1 row there twice"):
        replay.concat([prefill, rows.slice_tokens(3, 6)])
    with pytest.raises(fanfold.InvalidArgument, match="positions: expected 4 for part 1, got 5"):
        replay.concat([prefill, decode], [0, 5])
    with pytest.raises(fanfold.InvalidArgument, match="positions: expected one for each part"):
        replay.concat([prefill, decode.array])
    with pytest.raises(fanfold.InvalidArgument, match="positions: expected 2 of them, got 1"):
        replay.concat([prefill, decode], [0])
