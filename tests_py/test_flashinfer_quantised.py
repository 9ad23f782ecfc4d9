# SPDX-License-Identifier: Apache-2.0
"""Combine's results in MXFP8, MXFP4 and NVFP4, against the number types of ml_dtypes."""

from __future__ import annotations

import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.flashinfer_rounds import (
    BF16,
    Rank,
    Ranks,
    combined,
    draw_ids,
    noise,
    run_experts,
    same_bits,
)

from fanfold.compat.flashinfer import exchanges
from fanfold.compat.flashinfer.quantised import Scaling, quantiser

FP8, BYTE = torch.float8_e4m3fn, torch.uint8
# Name: type of the output, of the scales, numbers of a block, the largest of a number.
MODES: dict[str, tuple[Any, Any, int, float]] = {
    "MXFP8": (FP8, BYTE, 32, 448.0),
    "MXFP4": (BYTE, BYTE, 32, 6.0),
    "NVFP4": (BYTE, FP8, 16, 6.0),
}
TILES = {0: (128, 4), 1: (8, 4), 2: (1, 1)}


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "TIMEOUT_S", 20.0)


def place_of(layout: int, row: int, column: int, columns: int) -> int:
    """Where the scale of a block lies."""
    rows, across = TILES[layout]
    tile = (row // rows) * -(-columns // across) + column // across
    inside = row % rows
    if layout == 0:
        return tile * 512 + inside % 32 * 16 + inside // 32 * 4 + column % 4
    return tile * rows * across + inside * across + column % across


def room(layout: int, rows: int, columns: int) -> int:
    """Scales that a caller has to make room for."""
    down, across = TILES[layout]
    return -(-rows // down) * down * -(-columns // across) * across


def oracle(x: Any, mode: str, layout: int, scalar: float) -> tuple[Any, Any]:
    """The bytes of numbers ``[T, ...]`` and of scales that ``x [T, H]`` has, block by block."""
    _, scale_type, block, largest = MODES[mode]
    values = x.float().numpy()
    rows, hidden = values.shape
    columns = -(-hidden // block)
    number = ml_dtypes.float8_e4m3fn if mode == "MXFP8" else ml_dtypes.float4_e2m1fn
    numbers = np.zeros((rows, hidden), np.uint8)
    scales = np.zeros(room(layout, rows, columns), np.uint8)
    for row in range(rows):
        for column in range(columns):
            part = values[row, column * block : (column + 1) * block]
            top = np.float32(np.abs(part).max()) / np.float32(largest)
            if scale_type == FP8:
                scale = np.float32(min(top * np.float32(scalar), 448.0)).astype(
                    ml_dtypes.float8_e4m3fn
                )
                byte = scale.view(np.uint8)
                factor = np.float32(scalar) / np.float32(scale) if scale else np.float32(0)
            else:
                power = 0 if top == 0 else int(np.ceil(np.log2(np.float64(top))))
                byte = 0 if top == 0 else power + 127
                factor = np.float32(0 if top == 0 else 2.0**-power)
            scales[place_of(layout, row, column, columns)] = byte
            divided = np.clip(part * factor, -largest, largest).astype(number)
            numbers[row, column * block : column * block + len(part)] = divided.view(np.uint8)
    if mode != "MXFP8":
        numbers &= 15
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return torch.from_numpy(numbers), torch.from_numpy(scales)


def arguments(mode: str, layout: int, rows: int, hidden: int, scalar: float = 1.0) -> Any:
    """Combine's arguments for quantised results, with room for their scales."""
    output_type, scale_type, block, _ = MODES[mode]
    places = room(layout, rows, -(-hidden // block))
    return {
        "output_dtype": output_type,
        "output_scales": torch.full((places,), 77, dtype=BYTE).view(scale_type),
        "output_scalar_scale": scalar,
        "sf_layout": layout,
    }


# FlashInfer's: (world, tokens, hidden, top_k) with each mode and layout below.
CASES = [
    (4, 16, 4096, 2),
    (4, 16, 2880, 4),
    (8, 16, 5120, 6),
    (8, 16, 7168, 8),
    *((8, 16, 4096, top_k) for top_k in (8, 10, 16, 22)),
]
WANTED = [("MXFP8", 2, 1.0), ("MXFP8", 0, 1.0), ("MXFP8", 1, 1.0)]
WANTED += [("MXFP4", 0, 1.0), ("NVFP4", 0, 2.5)]


@pytest.mark.parametrize("case", CASES)
def test_results_are_sums_that_are_quantised(case: tuple[int, int, int, int]) -> None:
    world, tokens, hidden, top_k = case
    num_experts = world * top_k
    ranks = Ranks(world, 2 * tokens, hidden * 2 + 4 * top_k)

    def one(rank: Rank) -> None:
        ids = draw_ids(rank.rank, tokens, top_k, num_experts)
        x = noise(rank.rank, (tokens, hidden), BF16)
        views, offset, _ = rank.dispatch(ids, [ids, x], tokens, num_experts)
        rank.sanitize(views[0], -1)
        y = rank.buffer(offset, tokens, hidden, BF16)
        y.copy_(run_experts(views[1], views[0], rank.rank, num_experts))
        sums = combined(x, ids, num_experts, world)
        for mode, layout, scalar in WANTED:  # the round stays open for another combine
            more = arguments(mode, layout, tokens, hidden, scalar)
            out = rank.combine(y, tokens, tokens, top_k, offset, True, **more)
            numbers, scales = oracle(sums, mode, layout, scalar)
            assert out.dtype == more["output_dtype"], mode
            assert same_bits(out.view(BYTE), numbers), mode
            assert same_bits(more["output_scales"].view(BYTE), scales), (mode, layout)

    ranks.run(one)


def quantise(x: Any, mode: str, layout: int = 2, scalar: float = 1.0) -> tuple[Any, Any]:
    """The bytes of ``x``'s numbers and scales as ours makes them."""
    more = arguments(mode, layout, *x.shape, scalar)
    scaling = Scaling(more["output_scales"], scalar, layout)
    made = quantiser(x[None], x.shape[0], more["output_dtype"], None, scaling)
    assert made is not None
    output = torch.empty(made.shape, dtype=made.dtype)
    made.write(x, output)
    return output.view(BYTE), more["output_scales"].view(BYTE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", TILES)
def test_every_magnitude_tie_and_shape(mode: str, layout: int) -> None:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    codes = codes[codes.isfinite() & ((codes == 0) | (codes.float().abs() > 2.0**-100))]
    codes = codes[codes.float().abs() < 2.0**100]
    generator = torch.Generator().manual_seed(3)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 0.0, -0.0])
    for rows, hidden in ((1, 2), (3, 24), (130, 70), (9, 160)):
        by_size = codes[torch.randint(0, len(codes), (rows, hidden), generator=generator)]
        near = torch.randn((rows, hidden), generator=generator).half()
        tied = ties[torch.randint(0, len(ties), (rows, hidden), generator=generator)].to(BF16)
        for x in (by_size, near, tied * 64, torch.zeros((rows, hidden), dtype=BF16)):
            numbers, scales = quantise(x, mode, layout, 2.5)
            expected, expected_scales = oracle(x, mode, layout, 2.5)
            assert same_bits(scales, expected_scales), (rows, hidden)
            assert same_bits(numbers, expected), (rows, hidden)
    empty = torch.empty((0, 64), dtype=BF16)
    assert quantise(empty, mode, layout)[0].shape[0] == 0


@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_number_is_told_by_the_scale(mode: str) -> None:
    x = torch.ones((1, 64), dtype=BF16)
    x[0, 3], x[0, 40] = float("nan"), float("inf")
    _, scales = quantise(x, mode)
    block = MODES[mode][2]
    assert scales[0] == (0x7F if mode == "NVFP4" else 255)
    assert scales[40 // block] == (0x7E if mode == "NVFP4" else 254)


def test_what_does_not_fit_is_refused_and_the_round_goes_on() -> None:
    ranks = Ranks(2, 8, 64)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"output_dtype": torch.int8}, "expected float8_e4m3fn with uint8 .MXFP8."),
        ({"output_dtype": None}, "got None with torch.uint8"),
        ({"sf_layout": 3}, r"sf_layout: expected 0 .128x4., 1 .8x4. or 2 .linear., got 3"),
        ({"output_scales": torch.empty(5, dtype=BYTE)}, r"expected 4 contiguous scales .4 rows"),
        ({"output_scales": torch.empty(8, dtype=BYTE)[::2]}, "contiguous scales"),
        ({"output_scales": torch.empty(4, dtype=BYTE, device="meta")}, "a tensor on cpu, got"),
        ({"output": torch.empty((4, 16), dtype=FP8)}, r"output: expected \[4, 32\] torch.float8"),
        ({"use_low_precision": True}, "must produce a bf16 output, got output_scales as well"),
    ]

    def one(rank: Rank) -> None:
        ids = draw_ids(rank.rank, 4, 1, 2)
        x = noise(rank.rank, (4, 32), BF16)
        views, offset, _ = rank.dispatch(ids, [x], 4, 2)
        good = arguments("MXFP8", 2, 4, 32)
        for more, text in cases:
            with pytest.raises(ValueError, match=text):
                rank.combine(views[0], 4, 4, 1, offset, **{**good, **more})
        with pytest.raises(ValueError, match=r"expects float16 or bfloat16, got torch\.float32"):
            rank.combine(views[0].float(), 4, 4, 1, offset, **good)
        with pytest.raises(ValueError, match="expected an even hidden size, got 31"):
            odd = arguments("MXFP4", 2, 4, 31)
            rank.combine(views[0][:, :, :31].contiguous(), 4, 4, 1, offset, **odd)
        assert same_bits(rank.combine(views[0], 4, 4, 1, offset), x)

    ranks.run(one)


def test_a_factor_without_a_use_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones((2, 32), dtype=BF16)
    with caplog.at_level(logging.WARNING):
        quantise(x, "MXFP4", scalar=2.5)
        assert "MXFP4 has none; 2.5 is ignored" in caplog.text
        assert quantiser(x[None], 2, None, None, Scaling(None, 2.5)) is None
    assert "without output_scales 2.5 is ignored" in caplog.text
