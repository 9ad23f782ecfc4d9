# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 rows with a scale per 128 elements, as strategy low_latency sends them; in NumPy."""

from __future__ import annotations

import numpy

from fanfold.testing.floats import Array

BLOCK = 128
LARGEST = numpy.float32(448)
LEAST_SCALE = numpy.float32(2.0**-126)
NAN = 0x7F


def num_blocks(hidden: int) -> int:
    """Return the number of scales of a row."""
    return -(-hidden // BLOCK)


def _block_scales(values: Array, wire_scale: str) -> Array:
    """Return ``[rows, blocks]`` float32: largest finite magnitude / 448, never below 2^-126."""
    rows, hidden = values.shape
    padded = numpy.zeros((rows, num_blocks(hidden) * BLOCK), numpy.float32)
    padded[:, :hidden] = numpy.where(numpy.isfinite(values), numpy.abs(values), 0)
    largest = padded.reshape(rows, num_blocks(hidden), BLOCK).max(axis=2)
    scales = numpy.maximum(largest / LARGEST, LEAST_SCALE)
    if wire_scale == "ue8m0":  # up to the next power of two
        bits = scales.view(numpy.uint32)
        scales = ((bits + 0x7FFFFF) & 0x7F800000).astype(numpy.uint32).view(numpy.float32)
    return numpy.where(largest == 0, numpy.float32(1), scales)


def _spread(scales: Array, hidden: int) -> Array:
    return numpy.repeat(scales, BLOCK, axis=1)[:, :hidden]


def pack(values: Array, wire_scale: str) -> tuple[Array, Array]:
    """Pack ``[rows, hidden]`` float32 values.

    Returns:
        ``[rows, hidden]`` uint8 bits of E4M3, and ``[rows, blocks]`` scales: float32, or for ue8m0
        uint8 exponents with a bias of 127.
    """
    import ml_dtypes

    values = numpy.ascontiguousarray(values, numpy.float32)
    scales = _block_scales(values, wire_scale)
    with numpy.errstate(all="ignore"):
        quotients = values / _spread(scales, values.shape[1])
        limited = numpy.clip(quotients, -LARGEST, LARGEST)
        limited = numpy.where(numpy.isfinite(values), limited, numpy.float32(numpy.nan))
        packed = limited.astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
    if wire_scale == "ue8m0":
        scales = (scales.view(numpy.uint32) >> 23).astype(numpy.uint8)
    return packed, scales


def unpack(packed: Array, scales: Array) -> Array:
    """Return the float32 values of packed rows, each product rounded once."""
    import ml_dtypes

    if scales.dtype == numpy.uint8:
        scales = (scales.astype(numpy.uint32) << 23).view(numpy.float32)
    with numpy.errstate(all="ignore"):
        numbers = packed.view(ml_dtypes.float8_e4m3fn).astype(numpy.float32)
        return numbers * _spread(scales, packed.shape[1])


def same_nan(packed: Array) -> Array:
    """Return the bits with every NaN written alike."""
    return numpy.where((packed & 0x7F) == NAN, numpy.uint8(NAN), packed)
