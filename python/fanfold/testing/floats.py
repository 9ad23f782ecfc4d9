# SPDX-License-Identifier: Apache-2.0
"""float32, float16 and bfloat16 in NumPy, rounded by integer arithmetic where NumPy lacks the type.

Arrays here are *stored* values: float32, float16, and uint16 bit patterns for bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy

Array = Any  # numpy.ndarray; NumPy is imported where it is needed and its types are not

STORED = {
    "float32": numpy.dtype(numpy.float32),
    "float16": numpy.dtype(numpy.float16),
    "bfloat16": numpy.dtype(numpy.uint16),
}


def widen(stored: Array, dtype: str) -> Array:
    """Return the float32 values of stored ones; exact."""
    if dtype == "bfloat16":
        return (stored.astype(numpy.uint32) << 16).view(numpy.float32)
    return stored.astype(numpy.float32)


def round_to(values: Array, dtype: str) -> Array:
    """Round float32 values to `dtype`, to nearest, ties to even; NaN stays NaN."""
    values = numpy.ascontiguousarray(values, dtype=numpy.float32)
    if dtype == "float32":
        return values.copy()
    if dtype == "float16":
        with numpy.errstate(all="ignore"):
            return values.astype(numpy.float16)
    bits = values.view(numpy.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    with numpy.errstate(over="ignore"):
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(is_nan, (bits >> 16) | 0x0040, nearest).astype(numpy.uint16)


def same_bits(left: Array, right: Array, dtype: str) -> bool:
    """Say whether two stored arrays are equal bit for bit, every NaN counting as equal."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    word = numpy.uint32 if dtype == "float32" else numpy.uint16
    differ = numpy.ascontiguousarray(left).view(word) != numpy.ascontiguousarray(right).view(word)
    if not differ.any():
        return True
    both_nan = numpy.isnan(widen(left, dtype)) & numpy.isnan(widen(right, dtype))
    return bool((~differ | both_nan).all())
