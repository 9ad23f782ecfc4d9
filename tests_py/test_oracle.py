# SPDX-License-Identifier: Apache-2.0
"""The oracle against cases that are worked out by hand."""

from __future__ import annotations

import numpy
import pytest

from fanfold import Placement
from fanfold.testing import oracle
from fanfold.testing.floats import round_to, same_bits, widen
from fanfold.testing.fp8 import pack, unpack
from fanfold.testing.placements import physical_ids, rank_of_experts


def f32(*values: float) -> numpy.ndarray:
    return numpy.array(values, numpy.float32)


def one_column(*values: float) -> numpy.ndarray:
    return f32(*values).reshape(-1, 1)


def two_ranks(**more: object) -> object:
    """Rank 0 hosts experts 0 and 1, rank 1 hosts 2 and 3.

    Tokens: 0:0 -> {0, 3}, 0:1 -> {1, 0}, 0:2 -> none; 1:0 -> {2} twice, 1:1 -> {0} and a bad id.
    """
    configuration = {
        "num_experts": 4,
        "topk_ids": [
            numpy.array([[0, 3], [1, 0], [-1, -2]], numpy.int64),
            numpy.array([[2, 2], [9, 0]], numpy.int64),
        ],
        "payloads": [[numpy.uint8([10, 11, 12])], [numpy.uint8([20, 21])]],
        "topk_weights": [
            numpy.float32([[0.5, 0.25], [2, 3], [7, 7]]),
            numpy.float32([[0.25, 0.75], [5, 4]]),
        ],
        "round_max_tokens": 3,
    }
    return oracle(**{**configuration, **more})


def test_bfloat16_rounds_to_nearest_even() -> None:
    # 1 + 2^-8 is halfway between 1 and 1 + 2^-7: to even, so down; 1 + 3 * 2^-8 goes up.
    values = f32(1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, 3.4e38, numpy.inf)
    bits = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F80, 0x7F80]
    assert round_to(values, "bfloat16").tolist() == bits


def test_bfloat16_keeps_subnormals_and_nan() -> None:
    subnormal = numpy.uint32([0x00018000]).view(numpy.float32)  # ties to even: up
    assert round_to(subnormal, "bfloat16").tolist() == [0x0002]
    nan = numpy.uint32([0x7F800001, 0xFFFFFFFF]).view(numpy.float32)
    assert numpy.isnan(widen(round_to(nan, "bfloat16"), "bfloat16")).all()


def test_float16_overflows_to_infinity_and_keeps_subnormals() -> None:
    values = round_to(f32(65520, 65519, 6e-8), "float16")
    assert values.view(numpy.uint16).tolist() == [0x7C00, 0x7BFF, 0x0001]


def test_nan_equals_nan_and_zero_differs_from_minus_zero() -> None:
    assert same_bits(
        f32(numpy.nan, 1), numpy.uint32([0x7FC00007, 0x3F800000]).view("f4"), "float32"
    )
    assert not same_bits(f32(0.0), f32(-0.0), "float32")


def test_linear_placement_gives_the_first_ranks_one_more() -> None:
    assert rank_of_experts("linear", 5, 2) == [0, 0, 0, 1, 1]
    assert rank_of_experts("linear", 2, 3) == [0, 1]
    sizes = numpy.bincount(rank_of_experts("linear", 30, 8)).tolist()
    assert sizes == [4, 4, 4, 4, 4, 4, 3, 3]
    assert rank_of_experts("round_robin", 5, 2) == [0, 1, 0, 1, 0]


def test_rank_major_rows() -> None:
    first = two_ranks().received(0)
    assert first.payloads[0].tolist() == [[10, 11, 0], [21, 0, 0]]
    assert first.rank_counts.tolist() == [2, 1]
    assert first.expert_counts.tolist() == [3, 1]
    assert first.offsets.tolist() == [0, 3, 4]
    assert first.num_rows == 3
    assert first.topk_ids.tolist() == [[[0, 3], [1, 0], [-1, -1]], [[-1, 0], [-1, -1], [-1, -1]]]
    assert first.topk_weights[1, 0].tolist() == [5, 4]
    assert first.source_rank.tolist() == [[0, 0, -1], [1, -1, -1]]
    assert first.source_token.tolist() == [[0, 1, -1], [1, -1, -1]]
    second = two_ranks().received(1)
    assert second.payloads[0].tolist() == [[10, 0, 0], [20, 0, 0]]
    assert second.expert_counts.tolist() == [1, 1]
    assert second.topk_ids[1, 0].tolist() == [2, 2]  # as sent
    assert second.topk_weights[1, 0].tolist() == [0.25, 0.75]


def test_gathered_rows() -> None:
    for rank in (0, 1):
        got = two_ranks(layout="gathered").received(rank)
        assert got.payloads[0].tolist() == [10, 11, 12, 20, 21]
        assert got.rank_counts.tolist() == [3, 2]
        assert got.num_rows == 5
        assert got.topk_ids.tolist() == [[0, 3], [1, 0], [-1, -2], [2, 2], [-1, 0]]
        assert got.source_token.tolist() == [0, 1, 2, 0, 1]
    assert got.expert_counts.tolist() == [1, 1]


def test_expert_major_rows() -> None:
    first = two_ranks(layout="expert_major").received(0)
    assert first.payloads[0].tolist() == [[10, 11, 21, 0, 0, 0], [11, 0, 0, 0, 0, 0]]
    assert first.topk_weights[0, :3].tolist() == [0.5, 3, 4]
    assert first.source_rank[0].tolist() == [0, 0, 1, -1, -1, -1]
    assert first.topk_ids is None
    second = two_ranks(layout="expert_major").received(1)
    assert second.payloads[0].tolist() == [[20, 0, 0, 0, 0, 0], [10, 0, 0, 0, 0, 0]]
    assert second.topk_weights[0, 0] == 1  # 0.25 + 0.75
    assert second.expert_counts.tolist() == [1, 1]
    assert second.rank_counts.tolist() == [1, 1]


def test_flat_rows() -> None:
    first = two_ranks(layout="flat").received(0)
    assert first.payloads[0].tolist() == [10, 11, 21]
    assert first.source_rank.tolist() == [0, 0, 1]
    assert first.source_token.tolist() == [0, 1, 1]
    assert first.topk_ids.tolist() == [[0, 3], [1, 0], [-1, 0]]
    assert first.topk_weights.tolist() == [[0.5, 0.25], [2, 3], [5, 4]]
    assert (first.num_rows, first.num_dropped) == (3, 0)
    assert first.expert_counts.tolist() == [3, 1]
    second = two_ranks(layout="flat").received(1)
    assert second.payloads[0].tolist() == [10, 20]
    assert second.rank_counts.tolist() == [1, 1]


def test_flat_rows_past_the_limit_are_dropped() -> None:
    got = two_ranks(layout="flat", max_recv_rows=2).received(0)
    assert got.payloads[0].tolist() == [10, 11]
    assert (got.num_rows, got.num_dropped) == (3, 1)
    assert got.rank_counts.tolist() == [2, 1]
    assert got.expert_counts.tolist() == [2, 1]  # of the rows that are there
    roomy = two_ranks(layout="flat", max_recv_rows=5, invalid_expert_id=7).received(1)
    assert roomy.payloads[0].tolist() == [10, 20, 0, 0, 0]
    assert roomy.topk_ids[2:].tolist() == [[7, 7]] * 3
    assert roomy.source_rank.tolist() == [0, 1, -1, -1, -1]


def test_results_of_dropped_rows_are_missing() -> None:
    trial = two_ranks(layout="flat", max_recv_rows=1)
    ys = [one_column(1), one_column(8)]  # of token 0:0, which both ranks keep
    out = trial.combine(0, ys, y_dtype="float32", out_dtype="float32")
    assert out.ravel().tolist() == [1 + 8, 0, 0]
    out = trial.combine(1, ys, y_dtype="float32", out_dtype="float32")
    assert out.ravel().tolist() == [0, 0]


def test_groups_of_experts_are_filled_up() -> None:
    first = two_ranks(layout="flat_by_expert", expert_alignment=2).received(0)
    assert first.payloads[0].tolist() == [10, 11, 21, 0, 11, 0]
    assert first.is_zero.tolist() == [False, False, False, True, False, True]
    assert first.source_token.tolist() == [0, 1, 1, -1, 1, -1]
    assert first.topk_weights.tolist() == [0.5, 3, 4, 0, 2, 0]
    assert first.offsets.tolist() == [0, 4, 6]
    assert first.expert_counts.tolist() == [3, 1]
    assert first.num_rows == 6
    dense = two_ranks(layout="flat_by_expert").received(0)
    assert dense.payloads[0].tolist() == [10, 11, 21, 11]
    assert dense.offsets.tolist() == [0, 3, 4]


def test_rows_of_groups_past_the_limit_are_dropped() -> None:
    got = two_ranks(layout="flat_by_expert", expert_alignment=2, max_recv_rows=3).received(0)
    assert got.payloads[0].tolist() == [10, 11, 21]
    assert (got.num_rows, got.num_dropped) == (6, 3)
    assert got.expert_counts.tolist() == [3, 0]
    assert got.offsets.tolist() == [0, 3, 3]
    roomy = two_ranks(layout="flat_by_expert", expert_alignment=2, max_recv_rows=8).received(0)
    assert roomy.is_zero.tolist() == [False] * 3 + [True, False, True, False, False]
    assert roomy.offsets.tolist() == [0, 4, 6]


@pytest.mark.parametrize(
    ("weighting", "first", "second"),
    [
        ("applied", [1 + 1000, 2, 0], [100, 3]),
        ("carried", [0.5 * 1 + 0.25 * 1000, 3 * 2, 0], [100, 4 * 3]),
        ("origin", [0.5 * 1 + 0.25 * 1000, 3 * 2, 0], [100, 4 * 3]),
    ],
)
def test_sums_without_the_dropped_rows_of_groups(
    weighting: str, first: list[float], second: list[float]
) -> None:
    # Rank 0 has no room for the row of token 0:1 at expert 1.
    trial = two_ranks(layout="flat_by_expert", weighting=weighting, max_recv_rows=3)
    ys = [one_column(1, 2, 3), one_column(100, 1000, 7)]
    for rank, wanted in ((0, first), (1, second)):
        out = trial.combine(rank, ys, y_dtype="float32", out_dtype="float32")
        assert out.ravel().tolist() == wanted


def test_copies_are_taken_in_turn_by_rank_and_token() -> None:
    logical = [0, 1, 0, 2, 0]  # expert 0 has the copies 0, 2 and 4
    given = numpy.array([[0, 1], [0, 0], [2, 0], [3, -5]])
    assert physical_ids(given, 0, logical).tolist() == [[0, 1], [2, 2], [3, 4], [-1, -5]]
    assert physical_ids(given, 1, logical).tolist() == [[2, 1], [4, 4], [3, 0], [-1, -5]]


def test_rows_of_copies() -> None:
    # Logical 0 has copies 0 (rank 0) and 2 (rank 1); logical 1 is expert 1, logical 2 expert 3.
    placement = Placement([0, 0, 1, 1], [0, 1, 0, 2])
    trial = oracle(
        num_experts=4,
        topk_ids=[numpy.array([[0, 1], [0, 2], [0, 0]]), numpy.array([[0, 3]])],
        payloads=[[numpy.uint8([10, 11, 12])], [numpy.uint8([20])]],
        placement=placement,
        layout="flat",
    )
    assert trial.received(0).payloads[0].tolist() == [10, 12]
    assert trial.received(0).topk_ids.tolist() == [[0, 1], [0, 0]]
    assert trial.received(1).payloads[0].tolist() == [11, 20]
    assert trial.received(1).topk_ids.tolist() == [[2, 3], [2, -1]]


def test_a_row_of_fp8_has_a_scale_per_128_elements() -> None:
    row = numpy.zeros((1, 130), numpy.float32)
    row[0, :4] = (896, -448, 3, numpy.nan)  # scale 2
    row[0, 128:] = (0, numpy.inf)  # no finite number: scale 1
    packed, scales = pack(row, "float32")
    assert scales.tolist() == [[2, 1]]
    values = unpack(packed, scales)
    assert values[0, :3].tolist() == [896, -448, 3]
    assert numpy.isnan(values[0, 3])
    assert values[0, 128] == 0
    assert numpy.isnan(values[0, 129])


def test_ue8m0_scales_are_the_next_powers_of_two() -> None:
    row = numpy.zeros((3, 1), numpy.float32)
    row[:, 0] = (448, 449, 2.0**-140)
    packed, scales = pack(row, "ue8m0")
    assert scales.ravel().tolist() == [127, 128, 1]  # 1, 2, 2^-126
    assert unpack(packed, scales)[:2].ravel().tolist() == [448, 448]  # 224.5 is between 224 and 240


def test_the_error_of_fp8_is_bounded() -> None:
    """Half a step of 2^-3 in each binade, and half of 2^-9 below the smallest normal number."""
    rng = numpy.random.default_rng(8)
    row = rng.standard_normal((64, 1000), numpy.float32)
    row *= numpy.exp2(rng.integers(-20, 21, row.shape)).astype(numpy.float32)
    for kind in ("float32", "ue8m0"):
        packed, scales = pack(row, kind)
        as_float = scales if kind == "float32" else numpy.exp2(scales.astype(numpy.float64) - 127)
        of_element = numpy.repeat(as_float, 128, axis=1)[:, :1000]
        bound = numpy.maximum(numpy.abs(row) * 2.0**-4, of_element * 2.0**-10) * (1 + 2.0**-20)
        assert (numpy.abs(unpack(packed, scales) - row) <= bound).all()


def test_invalid_ids_are_chosen_by_the_caller() -> None:
    got = two_ranks(invalid_expert_id=4).received(1)
    assert got.topk_ids[0].tolist() == [[0, 3], [4, 4], [4, 4]]


def test_ids_below_32_bits_stay_negative() -> None:
    got = oracle(
        num_experts=2,
        topk_ids=[numpy.array([[0, -(2**40)]])],
        payloads=[[numpy.uint8([1])]],
    ).received(0)
    assert got.topk_ids[0, 0].tolist() == [0, -(2**31)]


def test_applied_rows_are_added_over_ranks() -> None:
    ys = [f32(1, 2, 9, 4, 9, 9).reshape(2, 3, 1), f32(8, 9, 9, 16, 9, 9).reshape(2, 3, 1)]
    trial = two_ranks()
    out = trial.combine(0, ys, y_dtype="float32", out_dtype="float32")
    assert out.ravel().tolist() == [1 + 8, 2, 0]
    out = trial.combine(1, ys, y_dtype="float32", out_dtype="float32")
    assert out.ravel().tolist() == [16, 4]


def _rows_of_expert_major() -> list[numpy.ndarray]:
    first = numpy.zeros((2, 6, 1), numpy.float32)
    first[0, :3, 0] = (1, 2, 3)  # tokens 0:0, 0:1, 1:1
    first[1, 0, 0] = 10  # token 0:1
    second = numpy.zeros((2, 6, 1), numpy.float32)
    second[0, 0, 0] = 100  # token 1:0
    second[1, 0, 0] = 1000  # token 0:0
    return [first, second]


@pytest.mark.parametrize(
    ("weighting", "first", "second"),
    [
        ("applied", [1 + 1000, 2 + 10, 0], [100, 3]),
        ("carried", [0.5 * 1 + 0.25 * 1000, 2 * 10 + 3 * 2, 0], [100, 4 * 3]),
        ("origin", [0.5 * 1 + 0.25 * 1000, 2 * 10 + 3 * 2, 0], [100, 4 * 3]),
    ],
)
def test_expert_major_sums(weighting: str, first: list[float], second: list[float]) -> None:
    trial = two_ranks(layout="expert_major", weighting=weighting)
    for rank, wanted in ((0, first), (1, second)):
        out = trial.combine(rank, _rows_of_expert_major(), y_dtype="float32", out_dtype="float32")
        assert out.ravel().tolist() == wanted


def test_weights_given_to_combine_replace_those_of_dispatch() -> None:
    trial = two_ranks(layout="expert_major", weighting="origin")
    out = trial.combine(
        1,
        _rows_of_expert_major(),
        y_dtype="float32",
        out_dtype="float32",
        topk_weights=numpy.float32([[1, 1], [5, 2]]),
    )
    assert out.ravel().tolist() == [200, 6]


def test_partials_are_rounded_before_they_are_added() -> None:
    # Two experts on rank 0 give 1 + 2^-8, which bfloat16 rounds to 1; rank 1 gives 2^-8.
    ids = [numpy.array([[0, 1, 2]]), numpy.zeros((0, 3), numpy.int64)]
    payloads = [[numpy.uint8([0])], [numpy.zeros(0, numpy.uint8)]]
    ys = [numpy.zeros((2, 2, 1), numpy.float32), numpy.zeros((2, 2, 1), numpy.float32)]
    ys[0][0, 0], ys[0][1, 0], ys[1][0, 0] = 1, 2**-8, 2**-8
    rounded = {"bfloat16": 1 + 2**-8, "float32": 1 + 2**-7}
    for combine_dtype, wanted in rounded.items():
        trial = oracle(
            num_experts=4,
            topk_ids=ids,
            payloads=payloads,
            layout="expert_major",
            round_max_tokens=1,
            combine_dtype=combine_dtype,
        )
        out = trial.combine(0, ys, y_dtype="float32", out_dtype="float32")
        assert out.item() == wanted


def test_the_sum_is_nested_by_rank_and_not_flat() -> None:
    # Flat, k ascending: (big + 1) - big = 0; nested: rank 0 holds big and -big, rank 1 holds 1.
    big = 2.0**30
    ids = [numpy.array([[0, 2, 1]]), numpy.zeros((0, 3), numpy.int64)]
    payloads = [[numpy.uint8([0])], [numpy.zeros(0, numpy.uint8)]]
    ys = [numpy.zeros((2, 2, 1), numpy.float32), numpy.zeros((2, 2, 1), numpy.float32)]
    ys[0][0, 0], ys[0][1, 0], ys[1][0, 0] = big, -big, 1
    weights = [numpy.ones((1, 3), numpy.float32), numpy.zeros((0, 3), numpy.float32)]
    wanted = {"carried": 1.0, "origin": 0.0}
    for weighting, result in wanted.items():
        trial = oracle(
            num_experts=4,
            topk_ids=ids,
            payloads=payloads,
            topk_weights=weights,
            layout="expert_major",
            weighting=weighting,
            round_max_tokens=1,
        )
        assert trial.combine(0, ys, y_dtype="float32", out_dtype="float32").item() == result


def test_a_product_is_rounded_before_it_is_added() -> None:
    # w * y = (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; fused with -1 it would not.
    w = 1 + 2.0**-12
    trial = oracle(
        num_experts=2,
        topk_ids=[numpy.array([[0, 1]])],
        payloads=[[numpy.uint8([0])]],
        topk_weights=[numpy.float32([[1, w]])],
        layout="expert_major",
        weighting="carried",
    )
    out = trial.combine(0, [f32(-1, w).reshape(2, 1, 1)], y_dtype="float32", out_dtype="float32")
    assert out.item() == 2.0**-11


def test_inactive_ranks_neither_send_nor_receive() -> None:
    trial = two_ranks(active=[True, False])
    assert trial.received(0).payloads[0].tolist() == [[10, 11, 0], [0, 0, 0]]
    ys = [f32(1, 2, 9, 9, 9, 9).reshape(2, 3, 1), f32(*[9] * 6).reshape(2, 3, 1)]
    assert trial.combine(0, ys, y_dtype="float32", out_dtype="float32").ravel().tolist() == [
        1,
        2,
        0,
    ]


def test_layouts_and_weightings_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="rank_major has no weighting origin"):
        two_ranks(weighting="origin")
