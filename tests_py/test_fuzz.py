# SPDX-License-Identifier: Apache-2.0
"""Whole configurations drawn at random: every strategy against the oracle, bit for bit, and so
against the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fanfold
from fanfold.testing import Case, Harness, PayloadKind, Setup, spawn_threads
from fanfold.testing.oracle import WEIGHTINGS
from fanfold.testing.trials import FLOATS

KINDS = (
    PayloadKind("uint8"),
    PayloadKind("uint8", (3,)),
    PayloadKind("int16", (5,)),
    PayloadKind("float32", (2, 3)),
    PayloadKind("int64", (1,)),
)
EXTRA_BYTES = 3 * 24


@dataclass(frozen=True)
class Round:
    """What differs from round to round; equal on all ranks."""

    num_tokens: tuple[int, ...]
    round_max_tokens: int
    kinds: tuple[PayloadKind, ...]
    id_mode: str
    id_dtype: str
    has_weights: bool
    hidden: int
    y_dtype: str
    out_dtype: str
    end: str  # "zero_copy", "staged", "split", "release"


@dataclass(frozen=True)
class Program:
    """A configuration and a sequence of rounds."""

    num_ranks: int
    layout: str
    weighting: str
    setup: Setup
    rounds: tuple[Round, ...]
    seed: int


def draw_ids(mode: str) -> Any:
    def ids(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> numpy.ndarray:
        shape = (num_tokens, setup.top_k)
        if mode == "one":
            return numpy.full(shape, rng.integers(0, setup.num_experts))
        if mode == "none":
            return rng.integers(-3, 0, shape)
        low = 0 if mode == "valid" else -1
        high = setup.num_experts + (3 if mode == "too large" else 0)
        return rng.integers(low, high, shape)

    return ids


@st.composite
def rounds(draw: st.DrawFn, num_ranks: int, setup: Setup, needs_weights: bool) -> Round:
    m = draw(st.integers(1, setup.max_tokens))
    modes = ["valid", "some", "one", "none"] + (["too large"] if setup.check_ids == "drop" else [])
    id_mode = draw(st.sampled_from(modes))
    unsigned = ["uint32"] if id_mode in ("valid", "one") else []
    return Round(
        num_tokens=tuple(draw(st.integers(0, m)) for _ in range(num_ranks)),
        round_max_tokens=m,
        kinds=tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))),
        id_mode=id_mode,
        id_dtype=draw(st.sampled_from(["int16", "int32", "int64", *unsigned])),
        has_weights=needs_weights or draw(st.booleans()),
        hidden=draw(st.integers(1, setup.hidden)),
        y_dtype=draw(st.sampled_from(FLOATS)),
        out_dtype=draw(st.sampled_from(FLOATS)),
        end=draw(st.sampled_from(["zero_copy", "staged", "split", "release"])),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    layout = draw(st.sampled_from(sorted(WEIGHTINGS)))
    weighting = draw(st.sampled_from(WEIGHTINGS[layout]))
    num_ranks = draw(st.integers(1, 5))
    num_experts = draw(st.integers(1, 12))
    hidden = draw(st.integers(1, 40))
    table = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    setup = Setup(
        num_experts=num_experts,
        top_k=draw(st.integers(1, 6)),
        max_tokens=draw(st.integers(1, 6)),
        hidden=hidden,
        dtype=draw(st.sampled_from(FLOATS)),
        combine_dtype=draw(st.sampled_from((None, *FLOATS))),
        placement=draw(st.one_of(st.just("linear"), st.just("round_robin"), table)),
        extra_bytes=EXTRA_BYTES,
        combine_row_bytes=4 * hidden,
        check_ids=draw(st.sampled_from(["raise", "drop"])),
        max_in_flight=draw(st.integers(1, 3)),
        knobs={
            "delay_seed": draw(st.integers(0, 3)),
            "streaming_stores": draw(st.booleans()),
            "isa": draw(st.sampled_from(["auto", "portable"])),
            "row_guard_bytes": draw(st.sampled_from([0, 16])),
        },
    )
    needs_weights = weighting in ("carried", "origin")
    sequence = draw(st.lists(rounds(num_ranks, setup, needs_weights), min_size=1, max_size=5))
    return Program(
        num_ranks, layout, weighting, setup, tuple(sequence), draw(st.integers(0, 2**16))
    )


def run_round(
    harness: Harness, a2a: fanfold.AllToAll, setup: Setup, step: int, what: Round
) -> bytes:
    trial = harness.trial(
        setup,
        step,
        num_tokens=what.num_tokens,
        round_max_tokens=what.round_max_tokens,
        kinds=what.kinds,
        ids=draw_ids(what.id_mode),
        has_weights=what.has_weights,
    )
    split = what.end == "split" and a2a.capabilities.two_phase
    if split:
        handle = a2a.dispatch_send(**harness.arguments(trial, id_dtype=what.id_dtype))
        harness.check_received(a2a.dispatch_recv(handle), trial)
    else:
        handle = harness.dispatch(a2a, trial, id_dtype=what.id_dtype).handle
    if what.end == "release":
        a2a.release(handle)
        return b""
    shape: dict[str, Any] = {"hidden": what.hidden, "y_dtype": what.y_dtype}
    y = harness.experts(a2a, handle, trial, zero_copy=what.end != "staged", **shape)
    out = harness.out(trial, what.out_dtype, what.hidden)
    if split:
        a2a.combine_send(y, handle)
        a2a.combine_recv(handle, out=out)
    else:
        a2a.combine(y, handle, out=out)
    harness.check_result(out, trial, out_dtype=what.out_dtype, **shape)
    return bytes(harness.tensors.to_array(out).tobytes())


def run_program(comm: fanfold.Communicator, strategy: str, program: Program) -> list[bytes]:
    harness = Harness(comm, Case(strategy, program.layout, program.weighting), seed=program.seed)
    with harness.create(program.setup) as a2a:
        return [
            run_round(harness, a2a, program.setup, step, what)
            for step, what in enumerate(program.rounds)
        ]


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
def test_strategies_equal_the_oracle_and_each_other(program: Program) -> None:
    names = ["broadcast"] if program.layout == "gathered" else ["broadcast", "one_sided"]
    results = [spawn_threads(program.num_ranks, run_program, name, program) for name in names]
    assert all(result == results[0] for result in results)
