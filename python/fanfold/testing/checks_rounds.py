# SPDX-License-Identifier: Apache-2.0
"""Conformance of the sequence of rounds: slots, phases, reuse, and no synchronisation between."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import fanfold
from fanfold.testing.harness import Harness, expect
from fanfold.testing.suite import check, is_two_phase
from fanfold.testing.trials import PayloadKind, Setup, Trial


def _varied_trials(harness: Harness, setup: Setup, count: int) -> list[Trial]:
    """Draw rounds whose m grows and shrinks and whose payload sets differ."""
    hidden = PayloadKind(setup.dtype, (setup.hidden,))
    sets: Sequence[Sequence[PayloadKind]] = (
        [hidden],
        [hidden, PayloadKind("uint8", (5,))],
        [PayloadKind("uint8", (3,)), hidden, PayloadKind("float32", (2,))],
        [PayloadKind("uint8")],
    )
    chance = random.Random(harness.seed)
    return [
        harness.trial(
            setup,
            seed,
            round_max_tokens=chance.randint(1, setup.max_tokens),
            kinds=chance.choice(sets),
        )
        for seed in range(count)
    ]


def _finish(harness: Harness, a2a: fanfold.AllToAll, trial: Trial, handle: Any, step: int) -> None:
    """End a round in one of the ways, the same on every rank."""
    way = step % 4
    if way == 3:
        a2a.release(handle)
        return
    y = harness.experts(a2a, handle, trial, zero_copy=way != 1)
    out = a2a.combine(y, handle, out=harness.out(trial, trial.setup.dtype))
    harness.check_result(out, trial)


@check(core=True)
def rounds_without_synchronisation_never_mix(harness: Harness) -> None:
    """Sixty rounds, random delays on each rank, m and payloads ever different."""
    setup = Setup(knobs={"delay_seed": 1 + harness.rank}, max_tokens=7)
    chance = random.Random(harness.rank)
    with harness.create(setup) as a2a:
        for step, trial in enumerate(_varied_trials(harness, setup, 60)):
            harness.jitter(chance)
            recv = harness.dispatch(a2a, trial)
            harness.jitter(chance)
            _finish(harness, a2a, trial, recv.handle, step)


@check(num_ranks=3)
def layers_and_steps_are_verified_at_the_end(harness: Harness) -> None:
    """Sixty-four layers, five steps: copies are compared when all has run."""
    setup = Setup(dtype="bfloat16", max_tokens=4)
    trials = [harness.trial(setup, seed) for seed in range(8)]
    calls = [harness.arguments(trial) for trial in trials]
    rows = [trial.ys(setup.hidden, "bfloat16")[harness.rank] for trial in trials]
    results = []
    with harness.create(setup) as a2a:
        for step in range(64 * 5):
            which = step % len(trials)
            recv = a2a.dispatch(**calls[which])
            y = harness.tensors.to_tensor(rows[which], "bfloat16")
            out = recv.combine(y, out=harness.out(trials[which], "bfloat16"))
            results.append((which, out))
    for which, out in results:
        harness.check_result(out, trials[which])


@check(num_ranks=3, core=True)
def several_rounds_may_be_in_flight(harness: Harness) -> None:
    """max_in_flight 1 to 3: each round keeps its own rows until its combine."""
    for depth in (1, 2, 3):
        setup = Setup(max_in_flight=depth, knobs={"delay_seed": 5 + harness.rank})
        trials = _varied_trials(harness, setup, 12)
        with harness.create(setup) as a2a:
            for first in range(0, len(trials), depth):
                batch = trials[first : first + depth]
                received = [harness.dispatch(a2a, trial) for trial in batch]
                for recv, trial in zip(received, batch, strict=True):
                    harness.check_received(recv, trial)
                for step, (recv, trial) in enumerate(zip(received, batch, strict=True)):
                    _finish(harness, a2a, trial, recv.handle, first + step)


@check(num_ranks=3)
def a_full_set_of_rounds_is_refused_before_a_store(harness: Harness) -> None:
    """One dispatch more than max_in_flight is InvalidState, and the open rounds are intact."""
    setup = Setup(max_in_flight=2)
    with harness.create(setup) as a2a:
        trials = [harness.trial(setup, seed) for seed in range(2)]
        received = [harness.dispatch(a2a, trial) for trial in trials]
        try:
            a2a.dispatch(**harness.arguments(trials[0]))
        except fanfold.InvalidState:
            pass
        else:
            raise AssertionError("a third round was opened")
        for recv, trial in zip(received, trials, strict=True):
            harness.check_received(recv, trial)
            _finish(harness, a2a, trial, recv.handle, 0)
        harness.exchange(a2a, trials[0])


@check(num_ranks=3, applies=is_two_phase)
def split_calls_give_the_same_round(harness: Harness) -> None:
    """Send and receive apart, with rounds interleaved."""
    setup = Setup(max_in_flight=2, knobs={"delay_seed": 9 + harness.rank})
    trials = _varied_trials(harness, setup, 16)
    chance = random.Random(harness.rank)
    with harness.create(setup) as a2a:
        for first in range(0, len(trials), 2):
            batch = trials[first : first + 2]
            handles = [a2a.dispatch_send(**harness.arguments(trial)) for trial in batch]
            harness.jitter(chance)
            for handle, trial in zip(handles, batch, strict=True):
                harness.check_received(a2a.dispatch_recv(handle), trial)
            for handle, trial in zip(handles, batch, strict=True):
                y = harness.experts(a2a, handle, trial, zero_copy=bool(chance.randint(0, 1)))
                a2a.combine_send(y, handle)
            harness.jitter(chance)
            for handle, trial in zip(handles, batch, strict=True):
                out = a2a.combine_recv(handle, out=harness.out(trial, setup.dtype))
                harness.check_result(out, trial)


@check(num_ranks=2, applies=lambda case: not is_two_phase(case))
def split_calls_without_two_phases_are_unsupported(harness: Harness) -> None:
    """They raise before anything is sent; whole calls go on."""
    setup = Setup()
    with harness.create(setup) as a2a:
        trial = harness.trial(setup)
        expect(not a2a.capabilities.two_phase, "capabilities.two_phase is True")
        try:
            a2a.dispatch_send(**harness.arguments(trial))
        except fanfold.Unsupported:
            pass
        else:
            raise AssertionError("dispatch_send did not raise Unsupported")
        harness.exchange(a2a, trial)


@check()
def a_round_may_end_without_a_combine(harness: Harness) -> None:
    """Dispatch-only rounds, in a row and between others."""
    setup = Setup(knobs={"delay_seed": 3 + harness.rank})
    with harness.create(setup) as a2a:
        for seed in range(12):
            trial = harness.trial(setup, seed)
            if seed % 3:
                recv = harness.dispatch(a2a, trial)
                recv.release()
                expect(not recv.is_open, "is_open after release")
            else:
                harness.exchange(a2a, trial)
        with a2a.dispatch(**harness.arguments(trial)) as recv:
            harness.check_received(recv, trial)
        expect(not recv.is_open, "is_open after the with block")


@check(num_ranks=3, core=True)
def routing_serves_later_payloads(harness: Harness) -> None:
    """dispatch(routing=...) sends new rows along the old ones, at any later time."""
    setup = Setup(max_in_flight=2)
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, 1)
        recv = harness.dispatch(a2a, trial)
        routing = recv.routing
        recv.release()
        harness.exchange(a2a, harness.trial(setup, 2))
        for seed in (3, 4):
            other = harness.trial(setup, seed, num_tokens=trial.oracle.num_tokens)
            for mine, its in zip(trial.oracle.payloads, other.oracle.payloads, strict=True):
                mine[0][:] = its[0]
            given = harness.arguments(trial)
            recv = a2a.dispatch(
                None,
                given["payloads"],
                routing=routing,
                round_max_tokens=given["round_max_tokens"],
                **harness.on_stream,
            )
            array = harness.tensors.to_array
            wanted = trial.oracle.received(harness.rank)
            got = array(recv.payloads[0])[wanted.is_token]
            same = got.tobytes() == wanted.payloads[0][wanted.is_token].tobytes()
            expect(same, "payloads[0]: rows differ")
            _finish(harness, a2a, trial, recv.handle, 0)


@check(num_ranks=2)
def epochs_may_pass_32_bits(harness: Harness) -> None:
    """Flags are compared as 64-bit words."""
    for first in (2**31 - 3, 2**32 - 3, 2**47 - 8):
        setup = Setup(knobs={"first_epoch": first})
        with harness.create(setup) as a2a:
            for seed in range(6):
                harness.exchange(a2a, harness.trial(setup, seed))


@check(num_ranks=2)
def two_exchanges_of_one_group_are_independent(harness: Harness) -> None:
    """Their rounds may be open at the same time, in any order."""
    one, two = Setup(name="one"), Setup(name="two", hidden=5, dtype="bfloat16")
    with harness.create(one) as first, harness.create(two) as second:
        for seed in range(4):
            of_first, of_second = harness.trial(one, seed), harness.trial(two, seed)
            recv_first = harness.dispatch(first, of_first)
            recv_second = harness.dispatch(second, of_second)
            _finish(harness, first, of_first, recv_first.handle, 0)
            _finish(harness, second, of_second, recv_second.handle, 0)


@check(num_ranks=3)
def reset_brings_all_ranks_back(harness: Harness) -> None:
    """After an abort, and with a round open: the next round is right."""
    setup = Setup()
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, 1)
        recv = harness.dispatch(a2a, trial)
        a2a.reset()
        expect(not recv.is_open, "a round is open after reset")
        harness.exchange(a2a, harness.trial(setup, 2))
        harness.comm.barrier()
        if harness.rank == 1:
            a2a.abort("the check says so")
        try:
            while True:  # the word arrives within the next rounds
                harness.exchange(a2a, harness.trial(setup, 3))
        except fanfold.PeerAborted as error:
            expect(error.rank == 1, f"PeerAborted.rank is {error.rank}")
            expect("the check says so" in error.reason, f"reason is {error.reason!r}")
        with contextlib.suppress(fanfold.PeerAborted):
            a2a.check()  # on a GPU `host_counts` may have told first
        expect(a2a.is_failed, "is_failed is False after PeerAborted")
        harness.comm.barrier()
        a2a.reset()
        expect(not a2a.is_failed, "is_failed is True after reset")
        for seed in range(3):
            harness.exchange(a2a, harness.trial(setup, seed))


@check()
def masked_ranks_are_left_out(harness: Harness) -> None:
    """Rows of their experts are missing from the sums; the others go on without them."""
    setup = Setup()
    with harness.create(setup) as a2a:
        if not a2a.capabilities.rank_mask:
            return
        harness.exchange(a2a, harness.trial(setup, 1))
        active = [True, False, True, True]
        if harness.rank != 1:
            a2a.set_active_mask(active)
        harness.comm.barrier()  # rank 1 must not leave while it is waited for
        if harness.rank != 1:
            for seed in range(2, 5):
                harness.exchange(a2a, harness.trial(setup, seed, active=active))
