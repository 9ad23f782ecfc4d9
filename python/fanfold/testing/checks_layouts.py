# SPDX-License-Identifier: Apache-2.0
"""Conformance of flat layouts, replicas, placements that move, and FP8 on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from fanfold.placement import Placement
from fanfold.testing.floats import Array
from fanfold.testing.harness import Harness, expect
from fanfold.testing.oracle import is_flat, is_per_expert
from fanfold.testing.suite import check
from fanfold.testing.trials import Case, PayloadKind, Setup

COPIES = Placement([0, 1, 2, 3, 0, 0, 3, 1], [0, 1, 2, 3, 0, 1, 0, 4])
PLACEMENTS: tuple[str | Sequence[int] | Placement, ...] = (
    "round_robin",
    [0] * 8,
    COPIES,
    "linear",
    [3, 3, 2, 2, 1, 1, 0, 0],
)


def has_flat_rows(case: Case) -> bool:
    """Say whether the layout has as many rows as came."""
    return is_flat(case.layout)


def has_groups(case: Case) -> bool:
    """Say whether rows lie in groups of experts that are filled up."""
    return case.layout == "flat_by_expert"


def can_pack(case: Case) -> bool:
    """Say whether rows may travel as FP8."""
    return case.strategy == "low_latency"


def can_pack_sums(case: Case) -> bool:
    """Say whether results may travel as FP8."""
    return can_pack(case) and is_per_expert(case.layout)


@check(applies=has_flat_rows, core=True)
def flat_rows_are_as_many_as_came(harness: Harness) -> None:
    """The first dimension is the number of rows, zero included."""
    setup = Setup()
    with harness.create(setup) as a2a:
        expect(a2a.capacities.rows == 0, f"capacities.rows is {a2a.capacities.rows}")
        for seed, num_tokens in enumerate(([6, 0, 3, 1], [0, 0, 0, 0], [6, 6, 6, 6], [0, 1, 0, 0])):
            trial = harness.trial(setup, seed, num_tokens=num_tokens)
            recv = harness.dispatch(a2a, trial)
            rows = harness.tensors.to_array(recv.payloads[0])
            wanted = trial.oracle.num_layout_rows(harness.rank)
            expect(rows.shape == (wanted, setup.hidden), f"payloads[0]: {rows.shape}")
            expect(recv.host_counts().num_rows == wanted, "host_counts().num_rows")
            recv.release()


@check(applies=has_flat_rows, core=True)
def rows_past_the_limit_are_dropped_and_counted(harness: Harness) -> None:
    """max_recv_rows: the shape is fixed; what was dropped is missing from the sums."""
    for limit in (1, 7, 16, 64):
        setup = Setup(max_recv_rows=limit, dtype="bfloat16")
        with harness.create(setup) as a2a:
            expect(a2a.capacities.rows == limit, f"capacities.rows is {a2a.capacities.rows}")
            dropped = 0
            for seed in range(4):
                trial = harness.trial(setup, seed)
                harness.exchange(a2a, trial, zero_copy=bool(seed % 2))
                dropped += trial.oracle.received(harness.rank).num_dropped
                expect(a2a.num_dropped_rows == dropped, f"{a2a.num_dropped_rows} were dropped")


@check(applies=has_groups, core=True)
def groups_are_filled_up_with_zero_rows(harness: Harness) -> None:
    """expert_alignment: stale rows of fuller rounds never show."""
    for alignment, limit in ((2, None), (8, None), (128, None), (8, 21)):
        setup = Setup(expert_alignment=alignment, max_recv_rows=limit)
        with harness.create(setup) as a2a:
            for seed, num_tokens in enumerate(([6, 6, 6, 6], [1, 0, 2, 0], [0, 6, 0, 1])):
                harness.exchange(a2a, harness.trial(setup, seed, num_tokens=num_tokens))


@check(core=True)
def copies_of_an_expert_share_its_tokens(harness: Harness) -> None:
    """Ids are logical; the copy is (source rank + token) mod n; received ids are physical."""
    setup = Setup(placement=COPIES)
    with harness.create(setup) as a2a:
        for seed in range(3):
            trial = harness.trial(setup, seed)
            harness.exchange(a2a, trial)
        recv = harness.dispatch(a2a, trial)
        routing = recv.routing
        recv.release()
        given = harness.arguments(trial)
        limit = given["round_max_tokens"]
        recv = a2a.dispatch(
            None, given["payloads"], routing=routing, round_max_tokens=limit, **harness.on_stream
        )
        y = harness.experts(a2a, recv.handle, trial)
        harness.check_result(recv.combine(y, out=harness.out(trial, "float32")), trial)


@check(core=True)
def placements_may_move_between_rounds(harness: Harness) -> None:
    """set_placement: as many experts, elsewhere; the next round follows it."""
    setup = Setup(max_local_experts=8)
    with harness.create(setup) as a2a:
        harness.exchange(a2a, harness.trial(setup, 1))
        for seed, placement in enumerate(PLACEMENTS):
            a2a.set_placement(placement)
            of_placement = Setup(placement=placement)
            trial = harness.trial(of_placement, seed)
            wanted = trial.oracle.local_experts(harness.rank)
            expect(list(a2a.local_experts) == wanted, f"local_experts: {a2a.local_experts}")
            harness.exchange(a2a, trial)


@check(num_ranks=3)
def the_tensors_of_one_round_may_be_larger_than_those_before(harness: Harness) -> None:
    """Rounds that grow and shrink, with guards between the rows."""
    setup = Setup(knobs={"row_guard_bytes": 16}, max_tokens=40, hidden=5, max_in_flight=2)
    with harness.create(setup) as a2a:
        for seed, limit in enumerate((1, 40, 2, 20, 40, 3)):
            tokens = [limit, limit // 2, limit]
            trial = harness.trial(setup, seed, round_max_tokens=limit, num_tokens=tokens)
            harness.exchange(a2a, trial, zero_copy=bool(seed % 2))


def _special_rows(rng: numpy.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw float32 rows of very different size, with zeros, subnormals, infinities and NaN."""
    values = rng.standard_normal(shape, numpy.float32)
    values *= numpy.exp2(rng.integers(-140, 120, shape)).astype(numpy.float32)
    values[rng.random(shape) < 0.1] = 0
    for special in (numpy.inf, -numpy.inf, numpy.nan, -0.0, 1e-45, 3.4e38):
        values[rng.random(shape) < 0.01] = special
    values[: len(values) // 3] = rng.standard_normal(values[: len(values) // 3].shape)
    return values


@check(num_ranks=3, applies=can_pack, core=True)
def rows_may_travel_as_fp8(harness: Harness) -> None:
    """dispatch_wire: the bits of every packed row and scale, short last blocks included."""
    for hidden, scale in ((1, "float32"), (128, "ue8m0"), (300, "float32"), (385, "ue8m0")):
        setup = Setup(hidden=hidden, dispatch_wire="fp8_e4m3", wire_scale=scale)
        with harness.create(setup) as a2a:
            for seed in range(2):
                kinds = [PayloadKind("float32", (hidden,)), PayloadKind("uint8", (5,))]
                trial = harness.trial(setup, seed, kinds=kinds)
                rng = numpy.random.default_rng(seed)
                for payloads in trial.oracle.payloads:
                    payloads[0][:] = _special_rows(rng, payloads[0].shape)
                harness.exchange(a2a, trial)


@check(num_ranks=3, applies=can_pack)
def rows_of_every_type_may_travel_as_fp8(harness: Harness) -> None:
    """float16 and bfloat16 rows of random bits, which hold NaN and infinities."""
    for dtype in ("float16", "bfloat16", "float32"):
        setup = Setup(hidden=200, dtype=dtype, dispatch_wire="fp8_e4m3")
        with harness.create(setup) as a2a:
            harness.exchange(a2a, harness.trial(setup))


@check(num_ranks=3, applies=can_pack_sums, core=True)
def sums_may_travel_as_fp8(harness: Harness) -> None:
    """combine_wire: partials are packed from their float32 sums."""
    for hidden, scale in ((7, "ue8m0"), (256, "float32"), (300, "ue8m0")):
        setup = Setup(hidden=hidden, dtype="bfloat16", combine_wire="fp8_e4m3", wire_scale=scale)
        with harness.create(setup) as a2a:
            for seed, y_dtype in enumerate(("bfloat16", "float32", "float16")):
                trial = harness.trial(setup, seed)
                zero_copy = y_dtype == "bfloat16"
                harness.exchange(
                    a2a, trial, y_dtype=y_dtype, out_dtype="float32", zero_copy=zero_copy
                )
