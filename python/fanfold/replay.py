# SPDX-License-Identifier: Apache-2.0
"""Recorded routing as a trainer replays it: types, checks, padding, slices. Needs NumPy.

"Rows" are `fanfold.RoutingRows`, or an integer array ``[tokens, layers, top_k]`` on the CPU of any
library that speaks DLPack. -1, or the maximum of an unsigned type where that is no expert's id,
says "no expert". What is returned is NumPy memory of its own; inputs are only read.
"""

from __future__ import annotations

from typing import Any

import numpy

from fanfold._core import RoutingRows
from fanfold._replay_book import ReplayBook
from fanfold._replay_rows import (
    Array,
    check_count,
    check_num_tokens,
    check_type,
    first_of,
    names_of,
    place_of,
    read_rows,
)
from fanfold._replay_slices import (
    concat,
    join_context,
    join_pipeline,
    join_sequence,
    slice_context,
    slice_pipeline,
    slice_sequence,
)
from fanfold.errors import InvalidArgument

__all__ = [
    "TRAINERS",
    "ReplayBook",
    "concat",
    "join_context",
    "join_pipeline",
    "join_sequence",
    "overlap",
    "pad",
    "pad_rows",
    "slice_context",
    "slice_pipeline",
    "slice_sequence",
    "unpack",
    "validate",
]

TRAINERS = {"megatron": "int64", "verl": "int16", "slime": "int32"}
"""Targets of `unpack` and the dtype of each."""


def unpack(
    rows: RoutingRows | Any,
    target: Any,
    *,
    num_experts: int | None = None,
    num_tokens: int | None = None,
    unrouted: str = "raise",
    placeholder: bool = False,
) -> Array:
    """Turn rows into the type and shape that a trainer takes.

    No id is cut off: a type that cannot hold every expert is refused, whatever the ids are.

    Args:
        rows: with logical ids.
        target: "megatron", "verl", "slime", or an integer dtype.
        num_experts: of an array; None for RoutingRows.
        num_tokens: of the sequence, if given: rows must be one fewer.
        unrouted: what becomes of "no expert". "raise": is refused. "keep": -1, or the maximum of an
            unsigned type. "pad": a token without any expert in a layer gets ids as of `pad_rows`
            there; a token that has only some experts is refused.
        placeholder: append a row of valid ids for the last token, which has none. Not for "slime".

    Returns:
        "megatron": int64 ``[layers, tokens, top_k]``, one dense matrix for each layer. "verl":
        int16 ``[tokens, layers, top_k]``. "slime": int32, the same. A dtype: likewise in that.

    Raises:
        InvalidArgument: the rows do not fit the above; names token, layer and column.
    """
    if unrouted not in ("raise", "keep", "pad"):
        raise InvalidArgument(f'unrouted: expected "raise", "keep" or "pad", got {unrouted!r}')
    if placeholder and isinstance(target, str) and target == "slime":
        raise InvalidArgument("placeholder: expected False for slime, got True")
    dtype = _dtype_of(target)
    read = read_rows("rows", rows, num_experts)
    if num_tokens is not None:
        check_num_tokens(read, num_tokens)
    check_type("target", dtype, read.num_experts, sentinel=unrouted == "keep")
    count, num_layers, top_k = read.ids.shape
    missing = ~read.routed()
    if unrouted == "raise" and missing.any():
        place = first_of(missing)
        raise InvalidArgument(f"rows: expected an expert everywhere, got none at {place_of(place)}")
    shape = (count + int(placeholder), num_layers, top_k)
    by_layer = isinstance(target, str) and target == "megatron"
    result = numpy.empty((shape[1], shape[0], top_k) if by_layer else shape, dtype)
    out = result.swapaxes(0, 1) if by_layer else result
    out[:count] = read.ids
    start = 0
    if unrouted == "keep":
        out[:count][missing] = -1 if dtype.kind == "i" else numpy.iinfo(dtype).max
    elif unrouted == "pad":
        start = _fill(out[:count], missing, read.num_experts)
    if placeholder:
        out[count:] = pad_rows(1, num_layers, top_k, read.num_experts, start)
    return result


def _dtype_of(target: Any) -> numpy.dtype[Any]:
    named = isinstance(target, str) and target in TRAINERS
    try:
        dtype = numpy.dtype(TRAINERS[target] if named else target)
    except TypeError as error:
        known = ", ".join(TRAINERS)
        raise InvalidArgument(f"target: expected {known} or a dtype, got {target!r}") from error
    if dtype.kind not in "iu":
        raise InvalidArgument(f"target: expected an integer dtype, got {dtype}")
    return dtype


def _fill(out: Array, missing: Array, num_experts: int) -> int:
    """Give tokens without experts the ids of pad rows; returns the next pad row."""
    empty = missing.all(axis=2)
    partial = missing.any(axis=2) & ~empty
    if partial.any():
        place = place_of(first_of(partial))
        raise InvalidArgument(f"rows: expected all experts or none, got only some at {place}")
    if not empty.any():
        return 0
    nth = numpy.cumsum(empty, axis=0) - 1  # of the layer's tokens without experts
    num_rows = int(nth.max()) + 1
    token, layer = numpy.nonzero(empty)
    pads = pad_rows(num_rows, out.shape[1], out.shape[2], num_experts)
    out[token, layer] = pads[nth[token, layer], layer]
    return num_rows


def validate(
    rows: RoutingRows | Any,
    num_experts: int,
    num_tokens: int | None = None,
    unique: bool = True,
    allow_unrouted: bool = False,
    *,
    allow_zero_layers: bool = False,
) -> None:
    """Check that rows can be replayed, before anything is computed with them.

    Args:
        rows: with logical ids.
        num_experts: every id is below.
        num_tokens: of the sequence, if given: rows must be one fewer, as the last token was not
            fed.
        unique: refuse a token that has an expert twice in a layer.
        allow_unrouted: take "no expert". A layer without any expert is still refused, unless no
            layer has one, as in a batch of padding.
        allow_zero_layers: take layers all of whose ids are 0, with unique too. That is what a layer
            looks like that nobody recorded, or a dense one. With top_k 1 its tokens may have chosen
            expert 0: there such layers are refused only if all are.

    Raises:
        InvalidArgument: names the layers, or the first token, layer and column.
    """
    read = read_rows("rows", rows, num_experts)
    if num_tokens is not None:
        check_num_tokens(read, num_tokens)
    count, num_layers, top_k = read.ids.shape
    if count == 0 or num_layers == 0 or top_k == 0:
        return
    routed = read.routed()
    unseen = numpy.nonzero(~routed.any(axis=(0, 2)))[0].tolist()
    if unseen and not (allow_unrouted and len(unseen) == num_layers):
        raise InvalidArgument(
            f"rows: expected experts in every layer, got none at all in layers {names_of(unseen)}"
        )
    nothing = ((read.ids == 0) | ~routed).all(axis=(0, 2)) & routed.any(axis=(0, 2))
    zero = numpy.nonzero(nothing)[0].tolist()
    suspect = len(zero) == num_layers if top_k == 1 else bool(zero)
    if suspect and num_experts > 1 and not allow_zero_layers:
        raise InvalidArgument(
            "rows: expected recorded ids in every layer, "
            f"got nothing but 0 in layers {names_of(zero)}"
        )
    if not allow_unrouted and not routed.all():
        place = place_of(first_of(~routed))
        raise InvalidArgument(f"rows: expected an expert everywhere, got none at {place}")
    for layer in range(num_layers if unique else 0):
        if layer in zero and allow_zero_layers:
            continue
        again = routed[:, layer] & ~_distinct(read.ids[:, layer])
        if again.any():
            token, column = first_of(again)
            raise InvalidArgument(
                "rows: expected distinct ids in a token, "
                f"got {read.ids[token, layer, column]} again at {place_of((token, layer, column))}"
            )


def _distinct(ids: Array) -> Array:
    """Say of ids [tokens, top_k] which are the first of their value in the token."""
    first = numpy.ones(ids.shape, bool)
    for column in range(1, ids.shape[1]):
        first[:, column] = (ids[:, :column] != ids[:, column : column + 1]).all(axis=1)
    return first


def pad_rows(num_rows: int, num_layers: int, top_k: int, num_experts: int, start: int = 0) -> Array:
    """Make rows for tokens without routing: valid, distinct within a token, the same every time.

    In each layer, and in any window of rows, the loads of two experts differ by at most one; they
    are equal where the window's ids divide among the experts.

    Args:
        num_rows: how many.
        num_layers: of each row.
        top_k: ids per token and layer; at most num_experts.
        num_experts: ids are below.
        start: rows that came before, as of the last call.

    Returns:
        ``[num_rows, num_layers, top_k]`` int32.

    Raises:
        InvalidArgument: a number is out of range.
    """
    check_count("num_rows", num_rows, 0)
    check_count("num_layers", num_layers, 0)
    check_count("num_experts", num_experts, 1)
    check_count("top_k", top_k, 0, num_experts)
    check_count("start", start, 0)
    row = start % num_experts + numpy.arange(num_rows, dtype=numpy.int64)[:, None, None]
    layer = numpy.arange(num_layers, dtype=numpy.int64)[:, None]  # layers begin at other experts
    ids = ((row + layer) * top_k + numpy.arange(top_k, dtype=numpy.int64)) % num_experts
    return ids.astype(numpy.int32)


def pad(
    rows: RoutingRows | Any, num_tokens: int, *, num_experts: int | None = None, start: int = 0
) -> tuple[Array, Array]:
    """Append pad rows.

    Args:
        rows: with logical ids.
        num_tokens: rows that there shall be.
        num_experts: of an array; None for RoutingRows.
        start: as of `pad_rows`.

    Returns:
        ``[num_tokens, layers, top_k]`` of the same dtype, and a mask ``[num_tokens]``, True where
        the row was given.

    Raises:
        InvalidArgument: there are more rows already, or rows do not fit the above.
    """
    read = read_rows("rows", rows, num_experts)
    count, num_layers, top_k = read.ids.shape
    check_count("num_tokens", num_tokens, count)
    check_type("rows", read.ids.dtype, read.num_experts, sentinel=False)
    more = pad_rows(num_tokens - count, num_layers, top_k, read.num_experts, start)
    padded = numpy.concatenate([read.ids, more.astype(read.ids.dtype)])
    return padded, numpy.arange(num_tokens) < count


def overlap(
    recorded: RoutingRows | Any, live: RoutingRows | Any, *, num_experts: int | None = None
) -> Array:
    """Say how much of a layer's recorded routing a live router would choose again.

    A token counts by the experts that are in both, divided by top_k; where ids are missing, by the
    larger number of experts of the two. Tokens without any expert on either side do not count.

    Args:
        recorded: ``[tokens, layers, top_k]``.
        live: what the router chooses now, the same shape; types may differ.
        num_experts: if neither is RoutingRows.

    Returns:
        ``[layers]`` float64, 0 to 1; NaN for a layer where no token counts.

    Raises:
        InvalidArgument: shapes differ, or ids are out of range.
    """
    for rows in (recorded, live):
        if num_experts is None and isinstance(rows, RoutingRows):
            num_experts = rows.num_experts
    first = read_rows("recorded", recorded, num_experts)
    second = read_rows("live", live, num_experts)
    if first.ids.shape != second.ids.shape:
        raise InvalidArgument(
            f"live: expected the shape of recorded, {list(first.ids.shape)}, "
            f"got {list(second.ids.shape)}"
        )
    routed, live_routed = first.routed(), second.routed()
    ratios = numpy.full(first.ids.shape[1], numpy.nan)
    for layer in range(len(ratios)):
        a = first.ids[:, layer].astype(numpy.int64)
        b = second.ids[:, layer].astype(numpy.int64)
        in_a = routed[:, layer] & _distinct(a)
        in_b = live_routed[:, layer] & _distinct(b)
        same = (a[:, :, None] == b[:, None, :]) & in_a[:, :, None] & in_b[:, None, :]
        size_a, size_b = in_a.sum(axis=1), in_b.sum(axis=1)
        counts = (size_a > 0) & (size_b > 0)
        if counts.any():
            both = same.sum(axis=(1, 2))[counts]
            ratios[layer] = (both / numpy.maximum(size_a, size_b)[counts]).mean()
    return ratios
