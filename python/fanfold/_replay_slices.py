# SPDX-License-Identifier: Apache-2.0
"""Which part of recorded routing a rank of a trainer needs, and parts put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from fanfold._core import RoutingRows, join_shards, shard_of
from fanfold._replay_rows import Array, check_count, names_of, tokens_of
from fanfold.errors import InvalidArgument


def _parts(parts: Sequence[RoutingRows | Any]) -> list[Array]:
    """Arrays that differ in their first axis alone."""
    arrays = [tokens_of(f"part {i}", part) for i, part in enumerate(parts)]
    if not arrays:
        raise InvalidArgument("parts: expected one or more, got none")
    first = arrays[0]
    for i, array in enumerate(arrays):
        if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
            raise InvalidArgument(
                f"part {i}: expected {first.dtype} {['n', *first.shape[1:]]} as part 0, "
                f"got {array.dtype} {list(array.shape)}"
            )
    experts = [part.num_experts for part in parts if isinstance(part, RoutingRows)]
    if len(set(experts)) > 1:
        raise InvalidArgument(f"parts: expected rows of equally many experts, got {experts}")
    return arrays


def _layers(name: str, rows: RoutingRows | Any) -> Array:
    array = tokens_of(name, rows)
    if array.ndim < 2:
        raise InvalidArgument(f"{name}: expected [tokens, layers, ...], got {list(array.shape)}")
    return array


def slice_pipeline(rows: RoutingRows | Any, layers_of_stage: Sequence[int]) -> Array:
    """Take the layers of a pipeline stage, in the order given.

    Args:
        rows: ``[tokens, layers, ...]``.
        layers_of_stage: places within the layers of rows, distinct; with several model chunks
            per stage they need not follow each other. None at all for a stage without such layers.

    Returns:
        ``[tokens, len(layers_of_stage), ...]``.

    Raises:
        InvalidArgument: a layer that rows lack, or one given twice; ids that are not logical.
    """
    array = _layers("rows", rows)
    wanted = list(layers_of_stage)
    for layer in wanted:
        check_count("layers_of_stage", layer, 0, array.shape[1] - 1)
    twice = {layer for layer in wanted if wanted.count(layer) > 1}
    if twice:
        raise InvalidArgument(
            f"layers_of_stage: expected distinct layers, got {names_of(twice)} more than once"
        )
    return array[:, wanted].copy()


def join_pipeline(
    parts: Sequence[RoutingRows | Any], layers_of_stages: Sequence[Sequence[int]]
) -> Array:
    """Put the layers of all stages together; the inverse of `slice_pipeline`.

    Args:
        parts: of each stage, ``[tokens, its layers, ...]``.
        layers_of_stages: as given to `slice_pipeline`; together every layer once.

    Returns:
        ``[tokens, layers, ...]``.

    Raises:
        InvalidArgument: parts do not fit each other or the layers (names layers that nobody has),
            or ids are not logical.
    """
    arrays = [_layers(f"part {i}", part) for i, part in enumerate(parts)]
    if not arrays or len(arrays) != len(layers_of_stages):
        raise InvalidArgument(
            f"parts: expected one for each of {len(layers_of_stages)} stages, got {len(arrays)}"
        )
    for i, (array, layers) in enumerate(zip(arrays, layers_of_stages, strict=True)):
        shape = (len(arrays[0]), len(layers), *arrays[0].shape[2:])
        if array.shape != shape or array.dtype != arrays[0].dtype:
            raise InvalidArgument(
                f"part {i}: expected {arrays[0].dtype} {list(shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )
    order = [layer for layers in layers_of_stages for layer in layers]
    lacking = set(range(len(order))) - set(order)
    if lacking:
        raise InvalidArgument(
            f"layers_of_stages: expected every layer 0 to {len(order) - 1} once, "
            f"got none of layers {names_of(lacking)}"
        )
    return numpy.concatenate(arrays, axis=1)[:, numpy.argsort(order)]


def _check_rank(rank: int, num_ranks: int) -> None:
    check_count("num_ranks", num_ranks, 1)
    check_count("rank", rank, 0, num_ranks - 1)


def slice_context(rows: RoutingRows | Any, rank: int, num_ranks: int, *, zigzag: bool) -> Array:
    """Take the tokens of a rank of a context-parallel group.

    Args:
        rows: ``[tokens, ...]``: routing, or its mask. `pad` them first to a number of tokens that
            divides.
        rank: of the group.
        num_ranks: in the group.
        zigzag: True: of 2 * num_ranks equal chunks the chunks rank and 2 * num_ranks - 1 - rank,
            which evens out causal attention. False: of num_ranks equal chunks the chunk rank.

    Returns:
        ``[tokens / num_ranks, ...]``.

    Raises:
        InvalidArgument: the tokens do not divide, or rank is not one of num_ranks; ids that are
            not logical.
    """
    _check_rank(rank, num_ranks)
    array = tokens_of("rows", rows)
    num_chunks = 2 * num_ranks if zigzag else num_ranks
    if len(array) % num_chunks:
        raise InvalidArgument(
            f"rows: expected a multiple of {num_chunks} tokens, got {len(array)}: pad them first"
        )
    size = len(array) // num_chunks
    chunks = (rank, num_chunks - 1 - rank) if zigzag else (rank,)
    return numpy.concatenate([array[chunk * size : (chunk + 1) * size] for chunk in chunks])


def join_context(parts: Sequence[RoutingRows | Any], *, zigzag: bool) -> Array:
    """Put the tokens of all ranks together; the inverse of `slice_context`.

    Args:
        parts: of each rank, as many tokens each.
        zigzag: as given to `slice_context`.

    Returns:
        ``[tokens, ...]``.

    Raises:
        InvalidArgument: parts do not fit each other, or ids are not logical.
    """
    arrays = _parts(parts)
    count = len(arrays[0])
    for i, array in enumerate(arrays):
        if len(array) != count or (zigzag and count % 2):
            even = "an even number of tokens" if zigzag and count % 2 else f"{count} tokens"
            raise InvalidArgument(f"part {i}: expected {even}, got {len(array)}")
    if not zigzag:
        return numpy.concatenate(arrays)
    half = count // 2
    chunks = [array[:half] for array in arrays] + [array[half:] for array in reversed(arrays)]
    return numpy.concatenate(chunks)


def slice_sequence(rows: RoutingRows | Any, rank: int, num_ranks: int) -> Array:
    """Take the tokens of a rank of a sequence-parallel group.

    They are cut as by `fanfold.shard_of`: shards of ceil(tokens / num_ranks), the last ones have
    fewer, or none.

    Args:
        rows: ``[tokens, ...]``: routing, or its mask.
        rank: of the group.
        num_ranks: in the group.

    Returns:
        ``[tokens of the shard, ...]``.

    Raises:
        InvalidArgument: rank is not one of num_ranks, or ids are not logical.
    """
    _check_rank(rank, num_ranks)
    array = tokens_of("rows", rows)
    return numpy.array(shard_of(array, num_ranks, rank))


def join_sequence(parts: Sequence[RoutingRows | Any], num_tokens: int | None = None) -> Array:
    """Put the shards of all ranks together; the inverse of `slice_sequence`.

    Args:
        parts: of each rank.
        num_tokens: that there are; what is behind them in padded shards, fewer rows than shards, is
            left out. None: all.

    Returns:
        ``[num_tokens, ...]``.

    Raises:
        InvalidArgument: parts do not fit each other or num_tokens, or ids are not logical.
    """
    arrays = _parts(parts)
    count = sum(len(array) for array in arrays)
    if num_tokens is not None:
        check_count("num_tokens", num_tokens, max(count - len(arrays) + 1, 0), count)
        count = num_tokens
    out = numpy.empty((count, *arrays[0].shape[1:]), arrays[0].dtype)
    join_shards(arrays, out)
    return out


def concat(parts: Sequence[RoutingRows | Any], positions: Sequence[int] | None = None) -> Array:
    """Join parts of one sequence that follow each other, as of prefill and decode.

    A part that was shifted by a row would stay in range and replay wrongly, so where each part
    begins is checked.

    Args:
        parts: ``[tokens, ...]`` each.
        positions: of the first token of each part; None: what RoutingRows say. Where both are
            there, they agree.

    Returns:
        ``[tokens, ...]``, from the position of the first part on.

    Raises:
        InvalidArgument: parts leave a gap, overlap, or do not fit each other, or ids are not
            logical.
    """
    arrays = _parts(parts)
    if positions is None:
        if not all(isinstance(part, RoutingRows) for part in parts):
            raise InvalidArgument("positions: expected one for each part beside arrays, got None")
        positions = [part.first_position for part in parts]
    if len(positions) != len(arrays):
        raise InvalidArgument(f"positions: expected {len(arrays)} of them, got {len(positions)}")
    for i, (part, position) in enumerate(zip(parts, positions, strict=True)):
        if isinstance(part, RoutingRows) and part.first_position != position:
            raise InvalidArgument(
                f"positions: expected {part.first_position} for part {i}, got {position}"
            )
    check_count("positions", positions[0], 0)
    expected = positions[0]
    for i, (array, position) in enumerate(zip(arrays, positions, strict=True)):
        if position != expected:
            off = abs(position - expected)
            what = "missing before it" if position > expected else "there twice"
            raise InvalidArgument(
                f"part {i}: expected to begin at position {expected}, got position {position}: "
                f"{off} row{'s' if off > 1 else ''} {what}"
            )
        expected += len(array)
    return numpy.concatenate(arrays)
