# SPDX-License-Identifier: Apache-2.0
"""Conformance of combine: sums to the bit, staging, types and shapes."""

from __future__ import annotations

import numpy

from fanfold.testing.harness import Harness, expect, expect_equal
from fanfold.testing.suite import check
from fanfold.testing.trials import FLOATS, Case, Setup


def is_origin(case: Case) -> bool:
    """Say whether the token's own rank weights the rows."""
    return case.weighting == "origin"


def _sums(harness: Harness, combine_dtype: str) -> None:
    setup = Setup(hidden=37, dtype=combine_dtype, combine_row_bytes=37 * 4, top_k=6, num_experts=12)
    with harness.create(setup) as a2a:
        seed = 0
        for y_dtype in FLOATS:
            for out_dtype in FLOATS:
                trial = harness.trial(setup, seed)
                harness.exchange(
                    a2a, trial, y_dtype=y_dtype, out_dtype=out_dtype, zero_copy=bool(seed % 2)
                )
                seed += 1


@check()
def sums_of_float32_partials_equal_the_oracle(harness: Harness) -> None:
    """Rows and results of every type; partials travel as float32."""
    _sums(harness, "float32")


@check()
def sums_of_float16_partials_equal_the_oracle(harness: Harness) -> None:
    """Rows and results of every type; partials travel as float16."""
    _sums(harness, "float16")


@check(core=True)
def sums_of_bfloat16_partials_equal_the_oracle(harness: Harness) -> None:
    """Rows and results of every type; partials travel as bfloat16."""
    _sums(harness, "bfloat16")


@check(num_ranks=2)
def partials_may_be_wider_than_the_hidden_state(harness: Harness) -> None:
    """combine_dtype differs from dtype."""
    for dtype, combine_dtype in (("bfloat16", "float32"), ("float32", "bfloat16")):
        setup = Setup(hidden=9, dtype=dtype, combine_dtype=combine_dtype)
        with harness.create(setup) as a2a:
            harness.exchange(a2a, harness.trial(setup), out_dtype="float32")


@check(num_ranks=2)
def any_hidden_size_works(harness: Harness) -> None:
    """1, 7, 2880 and others that no vector divides."""
    for hidden in (1, 7, 8, 31, 33, 2880, 3584):
        for dtype in ("float32", "bfloat16"):
            setup = Setup(hidden=hidden, dtype=dtype, max_tokens=3)
            with harness.create(setup) as a2a:
                harness.exchange(a2a, harness.trial(setup, hidden))


@check(num_ranks=3, core=True)
def staged_rows_give_the_bits_of_zero_copy(harness: Harness) -> None:
    """`y` in the combine buffer and `y` elsewhere, contiguous or not."""
    setup = Setup(dtype="bfloat16", hidden=21)
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, num_tokens=[6, 2, 5])
        for zero_copy in (True, False, True):
            harness.exchange(a2a, trial, zero_copy=zero_copy)


@check(num_ranks=3)
def the_combine_buffer_never_overlaps_the_received_rows(harness: Harness) -> None:
    """Writing all of it leaves payloads, ids, weights and counts as they were."""
    setup = Setup()
    with harness.create(setup) as a2a:
        trial = harness.trial(setup)
        recv = harness.dispatch(a2a, trial)
        buffer = a2a.combine_buffer(recv.handle)
        harness.tensors.write(buffer, numpy.full(buffer.shape, numpy.nan, numpy.float32))
        harness.check_received(recv, trial)
        recv.release()


@check(num_ranks=2)
def the_hidden_size_of_combine_may_change_between_rounds(harness: Harness) -> None:
    """Only its bytes are bounded, by combine_row_bytes."""
    setup = Setup(combine_row_bytes=80)
    with harness.create(setup) as a2a:
        sizes = (20, 3, 11, 1, 20)
        for seed, hidden in enumerate(sizes):
            trial = harness.trial(setup, seed)
            harness.exchange(a2a, trial, hidden=hidden, zero_copy=bool(seed % 2))
        trial = harness.trial(setup, 9)
        harness.exchange(a2a, trial, hidden=20, y_dtype="bfloat16", out_dtype="float32")


@check(num_ranks=3)
def a_round_that_is_kept_may_be_combined_again(harness: Harness) -> None:
    """release=False; the second combine has other rows."""
    setup = Setup()
    with harness.create(setup) as a2a:
        for seed in range(3):
            trial = harness.trial(setup, seed)
            recv = harness.dispatch(a2a, trial)
            for variant, release in ((0, False), (1, False), (2, True)):
                zero_copy = bool((variant + seed) % 2)
                y = harness.experts(a2a, recv.handle, trial, variant=variant, zero_copy=zero_copy)
                out = harness.out(trial, "float32")
                a2a.combine(y, recv.handle, out=out, release=release)
                harness.check_result(out, trial, variant=variant)
                expect(recv.is_open != release, f"is_open is {recv.is_open}")


@check(num_ranks=2, applies=is_origin, core=True)
def weights_may_be_given_to_combine(harness: Harness) -> None:
    """Weighting origin: in place of those of dispatch, or as the only ones."""
    setup = Setup()
    with harness.create(setup) as a2a:
        for seed, has_weights in ((0, True), (1, False)):
            trial = harness.trial(setup, seed, has_weights=has_weights)
            shape = trial.oracle.topk_ids[harness.rank].shape
            rng = numpy.random.default_rng(seed)
            mine = rng.standard_normal(shape, numpy.float32)
            recv = harness.dispatch(a2a, trial)
            out = a2a.combine(
                harness.experts(a2a, recv.handle, trial),
                recv.handle,
                out=harness.out(trial, "float32"),
                topk_weights=harness.tensors.to_tensor(mine, "float32"),
            )
            harness.check_result(out, trial, topk_weights=mine)


@check(num_ranks=2, on_gpu=False)
def a_result_is_made_when_none_is_given(harness: Harness) -> None:
    """out=None: a new tensor of this rank's tokens."""
    setup = Setup(dtype="float16")
    with harness.create(setup) as a2a:
        trial = harness.trial(setup)
        recv = harness.dispatch(a2a, trial)
        out = recv.combine(harness.experts(a2a, recv.handle, trial))
        harness.check_result(out, trial)


@check(num_ranks=3)
def inputs_are_never_written(harness: Harness) -> None:
    """Ids, weights, payloads and rows of the experts keep their bytes."""
    setup = Setup(dtype="bfloat16")
    with harness.create(setup) as a2a:
        for zero_copy in (False, True):
            trial = harness.trial(setup, int(zero_copy))
            given = harness.arguments(trial)
            tensors = [given["topk_ids"], given["topk_weights"], *given["payloads"]]
            before = [harness.tensors.to_array(tensor).tobytes() for tensor in tensors]
            recv = a2a.dispatch(**given)
            y = harness.experts(a2a, recv.handle, trial, zero_copy=zero_copy)
            y_before = harness.tensors.to_array(y).tobytes()
            y_copy = numpy.frombuffer(y_before, numpy.uint8)
            out = a2a.combine(y, recv.handle, out=harness.out(trial, "bfloat16"))
            harness.check_result(out, trial)
            after = [harness.tensors.to_array(tensor).tobytes() for tensor in tensors]
            expect(before == after, "an input of dispatch was written")
            if not zero_copy:
                now = numpy.frombuffer(harness.tensors.to_array(y).tobytes(), numpy.uint8)
                expect_equal("y", now, y_copy)


@check(num_ranks=3)
def every_run_gives_the_same_bits(harness: Harness) -> None:
    """The same inputs a hundred times."""
    setup = Setup(dtype="bfloat16", top_k=8, num_experts=12, max_tokens=4)
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, num_tokens=[4, 3, 4])
        ys = trial.ys(setup.hidden, "bfloat16")
        results = set()
        for _ in range(100):
            recv = a2a.dispatch(**harness.arguments(trial))
            y = harness.tensors.to_tensor(ys[harness.rank], "bfloat16")
            out = recv.combine(y, out=harness.out(trial, "bfloat16"))
            results.add(harness.tensors.to_array(out).tobytes())
        expect(len(results) == 1, f"{len(results)} different results")
        harness.check_result(out, trial)


@check(num_ranks=4)
def large_and_small_terms_are_added_in_the_stated_order(harness: Harness) -> None:
    """Terms that cancel: another order, or a fused product, gives other bits."""
    setup = Setup(dtype="bfloat16", combine_dtype="float32", top_k=8, num_experts=16, hidden=64)
    with harness.create(setup) as a2a:
        for seed in range(6):
            trial = harness.trial(setup, seed, num_tokens=[6] * harness.num_ranks)
            harness.exchange(a2a, trial, y_dtype="float32", out_dtype="float32")
