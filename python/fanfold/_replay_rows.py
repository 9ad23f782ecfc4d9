# SPDX-License-Identifier: Apache-2.0
"""How `fanfold.replay` reads what it is given, and the checks that its parts share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy

from fanfold._core import RoutingRows
from fanfold.errors import InvalidArgument

Array: TypeAlias = "numpy.ndarray[Any, Any]"


@dataclass(frozen=True)
class Ids:
    """Rows whose ids are in range, and how to read them."""

    ids: Array  # [tokens, layers, top_k], as given
    num_experts: int
    sentinel: int | None  # None: every value of the type is an expert's
    first_position: int = 0

    def routed(self) -> Array:
        """Say which ids are experts."""
        if self.sentinel is None:
            return numpy.ones(self.ids.shape, bool)
        return self.ids != self.sentinel


def as_array(name: str, value: Any) -> Array:
    """Any array on the CPU, without a copy."""
    if isinstance(value, numpy.ndarray):
        return value
    try:
        return numpy.from_dlpack(value)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        kind = type(value).__name__
        raise InvalidArgument(f"{name}: expected an array on the CPU, got {kind}") from error


def tokens_of(name: str, rows: Any) -> Array:
    """Routing with logical ids, or anything else with a row per token."""
    if isinstance(rows, RoutingRows):
        check_logical(name, rows)
    array = rows.array if isinstance(rows, RoutingRows) else as_array(name, rows)
    if array.ndim == 0:
        raise InvalidArgument(f"{name}: expected an array [tokens, ...], got one number")
    return array


def check_logical(name: str, rows: RoutingRows) -> None:
    """Raise unless ids are those of logical experts, which alone can be replayed."""
    if rows.id_space != "logical":
        raise InvalidArgument(f"{name}: expected logical ids, got {rows.id_space} ones")


def read_rows(name: str, rows: Any, num_experts: int | None) -> Ids:
    """Rows, or an array with its number of experts; every id is an expert's or the sentinel."""
    if num_experts is not None:
        check_count("num_experts", num_experts, 1)
    if isinstance(rows, RoutingRows):
        if num_experts not in (None, rows.num_experts):
            raise InvalidArgument(
                f"{name}: expected rows of {num_experts} experts, got rows of {rows.num_experts}"
            )
        check_logical(name, rows)
        return Ids(rows.array, rows.num_experts, rows.sentinel, rows.first_position)
    ids = as_array(name, rows)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name}: expected integers [tokens, layers, top_k], got {ids.dtype} {list(ids.shape)}"
        )
    if num_experts is None:
        raise InvalidArgument("num_experts: expected a number beside an array, got None")
    largest = int(numpy.iinfo(ids.dtype).max)
    sentinel = -1 if ids.dtype.kind == "i" else largest if largest >= num_experts else None
    read = Ids(ids, num_experts, sentinel)
    wrong = ((ids < 0) | (ids >= num_experts)) & read.routed()
    if wrong.any():
        place = first_of(wrong)
        raise InvalidArgument(
            f"{name}: expected ids 0 to {num_experts - 1}"
            f"{'' if sentinel is None else f' or {sentinel}'}, "
            f"got {ids[place]} at {place_of(place)}"
        )
    return read


def first_of(where: Array) -> tuple[int, ...]:
    """Where the first True is."""
    return tuple(int(i) for i in numpy.unravel_index(where.argmax(), where.shape))


def place_of(place: tuple[int, ...]) -> str:
    """Token, layer and column in words, as many as there are."""
    words = ("token", "layer", "column")
    return ", ".join(f"{word} {i}" for word, i in zip(words, place, strict=False))


def check_count(name: str, value: int, lowest: int, highest: int | None = None) -> None:
    """Raise unless a number is in its range."""
    if value < lowest or (highest is not None and value > highest):
        limit = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise InvalidArgument(f"{name}: expected {limit}, got {value}")


def names_of(numbers: Iterable[int]) -> str:
    """Numbers as words: "0 to 3, 5", or "none"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs) or "none"


def check_num_tokens(read: Ids, num_tokens: int) -> None:
    """Raise unless there is a row for each token of a sequence but the last."""
    check_count("num_tokens", num_tokens, 1)
    if read.first_position != 0:
        raise InvalidArgument(
            f"rows: expected rows from position 0 on, got rows from {read.first_position} on: "
            "join the known prefix first"
        )
    more = len(read.ids) - (num_tokens - 1)
    if more != 0:
        amount = f"{'one' if abs(more) == 1 else abs(more)} too {'many' if more > 0 else 'few'}"
        raise InvalidArgument(
            f"rows: expected {num_tokens - 1}, one for each of {num_tokens} tokens but the last, "
            f"which was never fed, got {len(read.ids)}: {amount}"
        )


def check_type(name: str, dtype: numpy.dtype[Any], num_experts: int, sentinel: bool) -> None:
    """Raise unless the type holds every id, and a sentinel where one is wanted."""
    limit = int(numpy.iinfo(dtype).max) - int(sentinel and dtype.kind == "u")
    if num_experts - 1 > limit:
        raise InvalidArgument(
            f"{name}: expected a type for ids 0 to {num_experts - 1}"
            f"{' and a sentinel' if sentinel else ''}, got {dtype}, which holds ids up to {limit}"
        )
