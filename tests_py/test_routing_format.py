# SPDX-License-Identifier: Apache-2.0
"""RoutingRows: what is written is what NumPy and the engines write, and reads back the same."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fanfold

DTYPES = ("int8", "int16", "int32", "uint8", "uint16")


def random_rows(dtype: str, tokens: int, num_experts: int = 100, seed: int = 0) -> Any:
    random = numpy.random.default_rng(seed)
    array = random.integers(0, num_experts, (tokens, 3, 2)).astype(dtype)
    array[random.random(array.shape) < 0.1] = numpy.array(-1, "int64").astype(dtype)
    return fanfold.RoutingRows(array, num_experts=num_experts, first_position=40)


def same(a: Any, b: Any) -> bool:
    """Whether two rows agree in every value and in all that says how to read them."""
    names = ("dtype", "sentinel", "num_experts", "id_space", "first_position", "num_tokens")
    return (a.array == b.array).all() and all(getattr(a, n) == getattr(b, n) for n in names)


def saved(array: numpy.ndarray) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(dtype=st.sampled_from(DTYPES), tokens=st.integers(0, 9), seed=st.integers(0, 99))
def test_our_own_format_keeps_everything(dtype: str, tokens: int, seed: int) -> None:
    rows = random_rows(dtype, tokens, seed=seed)
    data = rows.to_bytes()
    assert len(data) == 64 + rows.array.nbytes
    assert data[64:] == rows.array.tobytes()
    again = fanfold.RoutingRows.from_bytes(data)
    assert same(again, rows)
    assert again.to_bytes() == data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 99, 100000])
def test_npy_files_are_those_of_numpy(dtype: str, tokens: int) -> None:
    rows = random_rows(dtype, tokens)
    data = rows.to_npy()
    assert data == saved(rows.array)
    assert (numpy.load(io.BytesIO(data)) == rows.array).all()
    assert same(fanfold.RoutingRows.from_npy(data, num_experts=100, first_position=40), rows)


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint8"])
def test_vllms_field_reads_as_vllms_clients_read_it(dtype: str) -> None:
    rows = random_rows("int16", 5)
    text = rows.to_vllm(dtype)
    array = numpy.load(io.BytesIO(base64.b64decode(text, validate=True)))
    assert (array == rows.astype(dtype).array).all()
    assert array.dtype == dtype
    assert text == base64.b64encode(saved(array)).decode()
    read = fanfold.RoutingRows.from_vllm(text, num_experts=100, first_position=40)
    assert same(read.astype("int16"), rows)


def test_uint8_of_256_experts_uses_every_value() -> None:
    array = numpy.arange(256, dtype=numpy.uint8).reshape(128, 1, 2)
    text = base64.b64encode(saved(array)).decode()
    rows = fanfold.RoutingRows.from_vllm(text, num_experts=256)
    assert (rows.dtype, rows.sentinel) == ("int16", -1)
    assert (rows.array == array).all()
    assert rows.to_vllm("uint8") == text
    with_none = fanfold.RoutingRows(numpy.array([[[0, -1]]], numpy.int16), num_experts=256)
    with pytest.raises(fanfold.InvalidArgument, match='room for "no expert" beside ids up to 255'):
        with_none.to_vllm("uint8")
    with pytest.raises(fanfold.InvalidArgument, match="uint8, which holds ids up to 254"):
        with_none.astype("uint8")


@pytest.mark.parametrize("dtype", ["int32", "uint16", "uint8"])
def test_sglangs_field_is_the_flat_ids(dtype: str) -> None:
    rows = random_rows("int16", 6)
    text = rows.to_sglang(dtype)
    flat = numpy.frombuffer(base64.b64decode(text, validate=True), dtype)
    assert (flat.reshape(6, 3, 2) == rows.astype(dtype).array).all()
    read = fanfold.RoutingRows.from_sglang(
        text, dtype, num_layers=3, num_experts=100, top_k=2, first_position=40
    )
    assert same(read.astype("int16"), rows)
    with pytest.raises(fanfold.InvalidArgument, match="data: expected"):
        fanfold.RoutingRows.from_sglang(text, dtype, num_layers=5, num_experts=100, top_k=2)


def test_a_known_prefix_is_left_out_and_joined_again() -> None:
    rows = random_rows("int16", 9)
    known, rest = rows.slice_tokens(40, 44), rows.slice_tokens(44, 49)
    sent = fanfold.RoutingRows.from_vllm(rest.to_vllm(), num_experts=100, first_position=44)
    assert same(fanfold.RoutingRows.concat_tokens([known, sent]), rows)
    with pytest.raises(fanfold.InvalidArgument, match="part 1 to begin at position 44, got"):
        fanfold.RoutingRows.concat_tokens([known, rows])


def test_stages_of_a_pipeline_are_cut_and_joined() -> None:
    rows = random_rows("int16", 4)
    stages = [rows.slice_layers(0, 1), rows.slice_layers(1, 3)]
    assert [stage.num_layers for stage in stages] == [1, 2]
    assert (stages[1].array == rows.array[:, 1:]).all()
    assert same(fanfold.RoutingRows.concat_layers(stages), rows)


def test_lengths_are_those_of_the_tokens_that_were_fed() -> None:
    rows = fanfold.RoutingRows(numpy.zeros((5, 1, 1), numpy.int8), num_experts=4)
    assert fanfold.num_tokens_fed(5, 0) == fanfold.num_tokens_fed(5, 1) == 5
    rows.check_num_tokens(5, 0)
    for num_generated in (2, 3):
        with pytest.raises(fanfold.InvalidArgument, match=r"rows: expected \d tokens"):
            rows.check_num_tokens(5, num_generated)


def test_arrays_that_are_no_routing_are_refused() -> None:
    for array, text in (
        (numpy.zeros((2, 2), numpy.int16), r"int16 \[tokens, 1, 1\], got int16 \[2, 2\]"),
        (numpy.zeros((2, 2, 2), numpy.int64), "dtype: expected int8, int16"),
        (numpy.full((2, 1, 1), 4, numpy.int8), "got 4 at token 0, layer 0, column 0"),
        (numpy.full((2, 1, 1), -2, numpy.int8), "got -2 at token 0"),
    ):
        with pytest.raises(fanfold.InvalidArgument, match=text):
            fanfold.RoutingRows(array, num_experts=4)
    with pytest.raises(fanfold.InvalidArgument, match="64 bytes or more, got 3"):
        fanfold.RoutingRows.from_bytes(b"abc")
    with pytest.raises(fanfold.InvalidArgument, match="another character at 2"):
        fanfold.RoutingRows.from_vllm("ab*d", num_experts=4)


def test_bytes_that_are_no_npy_file_are_shown_escaped_and_short() -> None:
    for text in (b"{'\xff\xfe'", b"{\xff", b"{'descr': '\xff'", b"{'" + b"k" * 5000 + b"'"):
        header = text + b": 1}\n"
        file = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        with pytest.raises(fanfold.InvalidArgument) as error:
            fanfold.RoutingRows.from_npy(file, num_experts=4)
        assert len(str(error.value)) < 250
        assert str(error.value).isascii()


def test_histograms_leave_out_sentinels() -> None:
    array = numpy.array([[[0, 1], [2, -1]], [[1, 1], [-1, -1]]], numpy.int16)
    rows = fanfold.RoutingRows(array, num_experts=3)
    assert rows.expert_histogram().tolist() == [[1, 3, 0], [0, 0, 1]]
