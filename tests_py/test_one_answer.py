# SPDX-License-Identifier: Apache-2.0
"""One answer: whole configurations and sequences of rounds are drawn at random, run by every
strategy that gives the layout, and compared bit for bit with the oracle and with each other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fanfold
from fanfold.testing import Case, Harness, PayloadKind, Setup, Trial, spawn_threads
from fanfold.testing.oracle import WEIGHTINGS
from fanfold.testing.trials import FLOATS, LAYOUTS_OF

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
    is_split: bool  # where the strategy has two phases
    end: str  # "zero_copy", "staged", "twice", "release", "reroute"


@dataclass(frozen=True)
class Program:
    """A configuration and a sequence of rounds."""

    num_ranks: int
    layout: str
    weighting: str
    setup: Setup
    num_workers: int
    rounds: tuple[Round, ...]
    seed: int

    def strategies(self) -> list[str]:
        """Return the strategies that give the layout."""
        return [name for name, layouts in LAYOUTS_OF.items() if self.layout in layouts]


def draw_ids(mode: str) -> Any:
    def ids(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> numpy.ndarray:
        shape = (num_tokens, setup.top_k)
        num_experts = setup.num_logical_experts
        if mode == "one":
            return numpy.full(shape, rng.integers(0, num_experts))
        if mode == "none":
            return rng.integers(-3, 0, shape)
        low = 0 if mode == "valid" else -1
        high = num_experts + (3 if mode == "too large" else 0)
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
        is_split=draw(st.booleans()),
        end=draw(st.sampled_from(["zero_copy", "staged", "twice", "release", "reroute"])),
    )


@st.composite
def placements(draw: st.DrawFn, num_experts: int, num_ranks: int) -> Any:
    kind = draw(st.sampled_from(["linear", "round_robin", "table", "copies"]))
    if kind in ("linear", "round_robin"):
        return kind
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    table = tuple(draw(ranks))
    if kind == "table":
        return table
    num_logical = draw(st.integers(1, num_experts))
    more = [draw(st.integers(0, num_logical - 1)) for _ in range(num_experts - num_logical)]
    logical = draw(st.permutations([*range(num_logical), *more]))
    return fanfold.Placement(table, tuple(logical))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    layout = draw(st.sampled_from(sorted(WEIGHTINGS)))
    weighting = draw(st.sampled_from(WEIGHTINGS[layout]))
    is_flat = layout in ("flat", "flat_by_expert")
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 12))
    hidden = draw(st.integers(1, 40))
    setup = Setup(
        num_experts=num_experts,
        top_k=draw(st.integers(1, 6)),
        max_tokens=draw(st.integers(1, 7)),
        hidden=hidden,
        dtype=draw(st.sampled_from(FLOATS)),
        combine_dtype=draw(st.sampled_from((None, *FLOATS))),
        placement=draw(placements(num_experts, num_ranks)),
        extra_bytes=EXTRA_BYTES,
        combine_row_bytes=4 * hidden,
        check_ids=draw(st.sampled_from(["raise", "drop"])),
        expert_alignment=draw(st.sampled_from([1, 2, 5, 16])) if layout == "flat_by_expert" else 1,
        max_recv_rows=draw(st.sampled_from([None, None, 1, 7, 30])) if is_flat else None,
        channel_bytes=draw(st.sampled_from([4096, None])),
        max_in_flight=draw(st.integers(1, 3)),
        knobs={
            "delay_seed": draw(st.integers(0, 3)),
            "streaming_stores": draw(st.booleans()),
            "isa": draw(st.sampled_from(["auto", "portable"])),
            "row_guard_bytes": draw(st.sampled_from([0, 16])),
            "min_worker_bytes": 0,
            "min_pull_bytes": draw(st.sampled_from([0, -1])),
        },
    )
    needs_weights = weighting in ("carried", "origin")
    sequence = draw(st.lists(rounds(num_ranks, setup, needs_weights), min_size=1, max_size=5))
    return Program(
        num_ranks,
        layout,
        weighting,
        setup,
        draw(st.sampled_from([1, 1, 2])),
        tuple(sequence),
        draw(st.integers(0, 2**16)),
    )


@dataclass
class OpenRound:
    """A round between its dispatch and its end."""

    what: Round
    trial: Trial
    handle: Any
    recv: Any
    is_split: bool


class Runner:
    """One rank's side of a program."""

    def __init__(self, harness: Harness, a2a: fanfold.AllToAll, program: Program) -> None:
        self._harness = harness
        self._a2a = a2a
        self._program = program
        self._seen: list[bytes] = []

    def run(self) -> list[bytes]:
        """Open rounds, as many at once as may be, and end them in turn."""
        opened: deque[OpenRound] = deque()
        for step, what in enumerate(self._program.rounds):
            if len(opened) == self._program.setup.max_in_flight:
                self._end(opened.popleft())
            opened.append(self._begin(step, what))
        while opened:
            self._end(opened.popleft())
        return self._seen

    def _begin(self, step: int, what: Round) -> OpenRound:
        harness, a2a = self._harness, self._a2a
        trial = harness.trial(
            self._program.setup,
            step,
            num_tokens=what.num_tokens,
            round_max_tokens=what.round_max_tokens,
            kinds=what.kinds,
            ids=draw_ids(what.id_mode),
            has_weights=what.has_weights,
        )
        is_split = what.is_split and a2a.capabilities.two_phase
        given = harness.arguments(trial, id_dtype=what.id_dtype)
        recv = a2a.dispatch_recv(a2a.dispatch_send(**given)) if is_split else a2a.dispatch(**given)
        self._see_received(recv, trial)
        return OpenRound(what, trial, recv.handle, recv, is_split)

    def _end(self, opened: OpenRound) -> None:
        harness, a2a, what = self._harness, self._a2a, opened.what
        harness.check_received(opened.recv, opened.trial)  # whatever came in between
        if what.end == "release":
            a2a.release(opened.handle)
            return
        if what.end == "twice":
            self._combine(opened, zero_copy=True, variant=1, release=False)
        if what.end != "reroute":
            self._combine(opened, zero_copy=what.end != "staged")
            return
        routing = opened.recv.routing
        self._combine(opened, zero_copy=True)
        if self._program.setup.max_in_flight > 1:
            return  # its slot may be another round's turn
        given = harness.arguments(opened.trial)
        limit = given["round_max_tokens"]
        recv = a2a.dispatch(None, given["payloads"], routing=routing, round_max_tokens=limit)
        self._see_received(recv, opened.trial)
        again = OpenRound(what, opened.trial, recv.handle, recv, False)
        self._combine(again, zero_copy=False, variant=2)

    def _combine(
        self, opened: OpenRound, *, zero_copy: bool, variant: int = 0, release: bool = True
    ) -> None:
        harness, a2a, what = self._harness, self._a2a, opened.what
        shape: dict[str, Any] = {
            "hidden": what.hidden,
            "y_dtype": what.y_dtype,
            "variant": variant,
        }
        y = harness.experts(a2a, opened.handle, opened.trial, zero_copy=zero_copy, **shape)
        out = harness.out(opened.trial, what.out_dtype, what.hidden)
        if opened.is_split:
            a2a.combine_send(y, opened.handle, release=release)
            a2a.combine_recv(opened.handle, out=out)
        else:
            a2a.combine(y, opened.handle, out=out, release=release)
        harness.check_result(out, opened.trial, out_dtype=what.out_dtype, **shape)
        self._seen.append(bytes(harness.tensors.to_array(out).tobytes()))

    def _see_received(self, recv: fanfold.Received, trial: Trial) -> None:
        harness = self._harness
        harness.check_received(recv, trial)
        wanted = trial.oracle.received(harness.rank)
        array = harness.tensors.to_array
        whole = [recv.rank_counts, recv.expert_counts, recv.offsets, recv.num_rows]
        whole += [recv.source_rank, recv.source_token]
        if recv.topk_ids is not None:
            whole.append(recv.topk_ids)
        rows = list(recv.payloads)
        if recv.topk_weights is not None:
            rows.append(recv.topk_weights)
        self._seen += [array(each).tobytes() for each in whole]
        self._seen += [array(each)[wanted.is_token].tobytes() for each in rows]


def run_program(comm: fanfold.Communicator, strategy: str, program: Program) -> list[bytes]:
    harness = Harness(comm, Case(strategy, program.layout, program.weighting), seed=program.seed)
    with harness.create(program.setup) as a2a:
        a2a.set_num_workers(program.num_workers)
        return Runner(harness, a2a, program).run()


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
def test_all_strategies_equal_the_oracle_and_each_other(program: Program) -> None:
    results = {
        name: spawn_threads(program.num_ranks, run_program, name, program)
        for name in program.strategies()
    }
    first = next(iter(results))
    for name, result in results.items():
        assert result == results[first], f"{name} differs from {first}"
