# SPDX-License-Identifier: Apache-2.0
"""Cases, configurations and random rounds of the conformance checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from fanfold.testing.floats import STORED, Array, round_to
from fanfold.testing.oracle import WEIGHTINGS, OracleRound, Row, is_flat, is_per_expert
from fanfold.testing.placements import num_logical_experts

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    """What the whole suite is run for."""

    strategy: str
    layout: str
    weighting: str

    def __str__(self) -> str:
        return f"{self.strategy}-{self.layout}-{self.weighting}"


_ROUTED = ("rank_major", "expert_major", "flat", "flat_by_expert")
# Every layout of every strategy; the first are those that it lays out itself.
LAYOUTS_OF = {
    "broadcast": ("gathered", *_ROUTED),
    "gather_scatter": ("gathered", *_ROUTED),
    "batched": _ROUTED,
    "one_sided": _ROUTED,
    "two_sided": _ROUTED,
    "high_throughput": ("flat", "flat_by_expert"),
    "low_latency": _ROUTED,
}


GPU_STRATEGIES = ("one_sided", "low_latency")
GPU_LAYOUTS = ("rank_major", "expert_major")


def all_cases(
    strategies: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    device: str = "cpu",
) -> list[Case]:
    """Return every pairing of strategy, layout and weighting that the library has on a device."""
    return [
        Case(strategy, layout, weighting)
        for strategy, its_layouts in LAYOUTS_OF.items()
        for layout in its_layouts
        for weighting in WEIGHTINGS[layout]
        if strategies is None or strategy in strategies
        if layouts is None or layout in layouts
        if device == "cpu" or (strategy in GPU_STRATEGIES and layout in GPU_LAYOUTS)
    ]


@dataclass(frozen=True)
class Setup:
    """Configuration of the AllToAll of a check; the case adds strategy, layout and weighting."""

    num_experts: int = 8
    top_k: int = 3
    max_tokens: int = 6
    hidden: int = 12
    dtype: str = "float32"
    combine_dtype: str | None = None
    placement: Any = "linear"
    extra_bytes: int = 64
    combine_row_bytes: int | None = None
    check_ids: str | None = None
    max_recv_rows: int | None = None  # layouts flat and flat_by_expert
    expert_alignment: int = 1  # layout flat_by_expert
    max_local_experts: int = 0
    dispatch_wire: str | None = None  # strategy low_latency
    combine_wire: str | None = None
    wire_scale: str = "float32"
    channel_bytes: int | None = None  # strategy two_sided
    max_in_flight: int = 1
    timeout_s: float = 30.0
    name: str = "conformance"
    knobs: dict[str, Any] = field(default_factory=dict)

    @property
    def combine_type(self) -> str:
        """The dtype in which partials travel."""
        return self.combine_dtype or self.dtype

    @property
    def num_logical_experts(self) -> int:
        """Ids of tokens are below it."""
        return num_logical_experts(self.placement, self.num_experts)

    def _keywords_of_layout(self, case: Case) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        if is_flat(case.layout) and self.max_recv_rows is not None:
            keywords["max_recv_rows"] = self.max_recv_rows
        if case.layout == "flat_by_expert":
            keywords["expert_alignment"] = self.expert_alignment
        if case.strategy == "low_latency":
            keywords["dispatch_wire"] = self.dispatch_wire
            keywords["wire_scale"] = self.wire_scale
            if is_per_expert(case.layout):
                keywords["combine_wire"] = self.combine_wire
        if self.channel_bytes is not None:
            keywords["channel_bytes"] = self.channel_bytes
        return keywords

    def keywords(self, case: Case) -> dict[str, Any]:
        """Return the arguments of `fanfold.AllToAll`."""
        keywords: dict[str, Any] = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "max_tokens_per_rank": self.max_tokens,
            "hidden": self.hidden,
            "dtype": self.dtype,
            "combine_dtype": self.combine_dtype,
            "extra_bytes_per_token": self.extra_bytes,
            "placement": self.placement,
            "check_ids": self.check_ids,
            "max_in_flight": self.max_in_flight,
            "timeout_s": self.timeout_s,
            "name": self.name,
            "strategy": case.strategy,
            "layout": case.layout,
            "weighting": case.weighting,
            "max_local_experts": self.max_local_experts,
            **self._keywords_of_layout(case),
        }
        if self.combine_row_bytes is not None:
            keywords["combine_row_bytes"] = self.combine_row_bytes
        if self.knobs:
            keywords["test_knobs"] = self.knobs
        return keywords


@dataclass(frozen=True)
class PayloadKind:
    """One payload: its dtype and the shape of a row."""

    dtype: str
    row_shape: tuple[int, ...] = ()


@dataclass
class Trial:
    """The inputs of one round on all ranks, and what the oracle says of them."""

    setup: Setup
    kinds: tuple[PayloadKind, ...]
    oracle: OracleRound
    seed: tuple[int, ...]

    def ys(self, hidden: int, dtype: str, variant: int = 0) -> list[Array]:
        """Return the experts' rows of every rank, stored; rows without a token are NaN."""
        ys = []
        for host in range(self.oracle.num_ranks):
            rng = numpy.random.default_rng([*self.seed, host, variant])
            rows = self.oracle.rows(host)
            values = rng.standard_normal((len(rows), hidden), numpy.float32)
            values *= numpy.exp2(rng.integers(-9, 10, values.shape)).astype(numpy.float32)
            stored = round_to(values, dtype)
            nan = round_to(numpy.float32([numpy.nan]), dtype)[0]
            y = numpy.full((*self.oracle.row_shape(host), hidden), nan, STORED[dtype])
            for row, value in zip(rows, stored, strict=True):
                y[row.position] = value if self._is_routed(host, row) else 0
            ys.append(y)
        return ys

    def _is_routed(self, host: int, row: Row) -> bool:
        if self.oracle.layout != "gathered":
            return True
        return host in self.oracle.goes_to(row.source_rank, row.source_token)


def random_ids(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> Array:
    """Draw ids: mostly valid, some -1, some twice."""
    shape = (num_tokens, setup.top_k)
    ids = rng.integers(0, setup.num_logical_experts, shape)
    ids[rng.random(shape) < 0.12] = -1
    return ids


def _random_rows(rng: numpy.random.Generator, num_tokens: int, kind: PayloadKind) -> Array:
    """Draw rows of random bytes: a payload is opaque, NaN patterns and all."""
    stored = STORED.get(kind.dtype) or numpy.dtype(kind.dtype)
    shape = (num_tokens, *kind.row_shape)
    num_bytes = int(numpy.prod(shape)) * stored.itemsize
    return rng.integers(0, 256, num_bytes, numpy.uint8).view(stored).reshape(shape)


def draw_trial(
    case: Case,
    setup: Setup,
    num_ranks: int,
    seed: Sequence[int],
    *,
    num_tokens: Sequence[int] | None = None,
    round_max_tokens: int | None = None,
    kinds: Sequence[PayloadKind] | None = None,
    ids: Callable[[numpy.random.Generator, int, Setup], Array] = random_ids,
    has_weights: bool = True,
    active: Sequence[bool] | None = None,
    invalid_expert_id: int = -1,
    placement: Any = None,
) -> Trial:
    """Draw the inputs of one round of all ranks; equal for equal arguments.

    Args:
        placement: that of the round, where it is no longer the set-up's.
    """
    rng = numpy.random.default_rng(list(seed))
    limit = round_max_tokens or setup.max_tokens
    if num_tokens is None:
        num_tokens = [int(n) for n in rng.integers(0, limit + 1, num_ranks)]
    if kinds is None:
        kinds = (PayloadKind(setup.dtype, (setup.hidden,)),)
    topk_ids = [ids(rng, n, setup) for n in num_tokens]
    weights = [rng.standard_normal(each.shape, numpy.float32) for each in topk_ids]
    payloads = [[_random_rows(rng, n, kind) for kind in kinds] for n in num_tokens]
    oracle = OracleRound(
        num_experts=setup.num_experts,
        topk_ids=topk_ids,
        payloads=payloads,
        topk_weights=weights if has_weights else None,
        round_max_tokens=limit,
        placement=setup.placement if placement is None else placement,
        layout=case.layout,
        weighting=case.weighting,
        combine_dtype=setup.combine_type,
        active=active,
        invalid_expert_id=invalid_expert_id,
        dtype=kinds[0].dtype,
        expert_alignment=setup.expert_alignment,
        max_recv_rows=setup.max_recv_rows,
        dispatch_wire=setup.dispatch_wire,
        combine_wire=setup.combine_wire,
        wire_scale=setup.wire_scale,
    )
    return Trial(setup, tuple(kinds), oracle, tuple(seed))
