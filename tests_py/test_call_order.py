# SPDX-License-Identifier: Apache-2.0
"""Calls in the wrong order are InvalidState, before anything is stored; the round goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from support.rounds import ALL_STRATEGIES, ids, make, tokens, works

import fanfold
from fanfold.testing import spawn_threads


@pytest.fixture(params=ALL_STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def one_round(a2a: fanfold.AllToAll) -> fanfold.Received:
    return a2a.dispatch(ids([0, 3]), [tokens(1)])


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(fanfold.Error):
        call(*args)


def wrong_orders(
    a2a: fanfold.AllToAll, other: fanfold.AllToAll
) -> dict[str, tuple[Callable[[], Any], str]]:
    """Calls that do not fit a round of `a2a` that was received, each with what its error says."""
    recv = one_round(a2a)
    handle = recv.handle
    y = numpy.zeros_like(recv.combine_buffer())
    orders: dict[str, tuple[Callable[[], Any], str]] = {
        "dispatch": (lambda: one_round(a2a), "max_in_flight is 1"),
        "combine of another": (lambda: other.combine(y, handle), "handle of another AllToAll"),
        "release of another": (lambda: other.release(handle), "handle of another AllToAll"),
    }
    if a2a.capabilities.two_phase:
        orders |= {
            "dispatch_send": (
                lambda: a2a.dispatch_send(ids([0, 3]), [tokens(1)]),
                "max_in_flight is 1",
            ),
            "dispatch_recv": (
                lambda: a2a.dispatch_recv(handle),
                "dispatch_recv: round 0.*received",
            ),
            "combine_recv": (lambda: a2a.combine_recv(handle), "combine_recv: round 0.*received"),
        }
    if a2a.capabilities.rank_mask:
        orders["set_active_mask"] = (
            lambda: a2a.set_active_mask([True, True]),
            "set_active_mask.*round 0",
        )
    return orders


def test_a_wrong_order_is_refused_and_the_round_goes_on(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        other = make(comm, strategy=strategy, name="other")
        for call, text in wrong_orders(a2a, other).values():
            with pytest.raises(fanfold.InvalidState, match=text):
                call()
            assert not a2a.is_failed
        a2a.reset()
        works(a2a, comm.rank)
        works(other, comm.rank)

    spawn_threads(2, fn)


def test_phases_of_a_strategy_that_has_none_are_unsupported(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = one_round(a2a)
        y = recv.combine_buffer()
        y[...] = 0
        for call, name in (
            (lambda: a2a.dispatch_send(ids([0, 3]), [tokens(1)]), "dispatch_send"),
            (lambda: a2a.dispatch_recv(recv.handle), "dispatch_recv"),
            (lambda: a2a.combine_send(y, recv.handle), "combine_send"),
            (lambda: a2a.combine_recv(recv.handle), "combine_recv"),
        ):
            if a2a.capabilities.two_phase:
                continue
            with pytest.raises(fanfold.Unsupported, match=rf"{strategy}.*no two phases.*{name}"):
                call()
        assert recv.is_open
        assert not recv.combine(y).any()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_a_handle_is_used_once(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = one_round(a2a)
        y = numpy.zeros_like(recv.combine_buffer())
        recv.combine(y)
        for call in (recv.release, recv.combine_buffer, lambda: recv.combine(y)):
            with pytest.raises(fanfold.InvalidState, match="round 0"):
                call()
        again = one_round(a2a)
        with pytest.raises(fanfold.InvalidState, match=r"round 0.*has ended.*round 1"):
            a2a.combine(y, recv.handle)
        again.release()
        with pytest.raises(fanfold.InvalidState, match=r"round 1.*released"):
            again.release()

    spawn_threads(2, fn)


def test_a_handle_of_before_a_reset_is_refused(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = one_round(a2a)
        y = numpy.zeros_like(recv.combine_buffer())
        a2a.reset()
        for step in range(3):
            with pytest.raises(fanfold.InvalidState, match=r"round 0.*generation 0"):
                a2a.combine(y, recv.handle)
            with pytest.raises(fanfold.InvalidState):
                _ = recv.payloads
            works(a2a, comm.rank, num_rounds=1)
            assert step >= 0

    spawn_threads(2, fn)


def test_a_handle_without_a_round_is_refused() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm)
        kept = one_round(make(comm, name="gone"))
        handle = kept.handle
        with pytest.raises(fanfold.InvalidState, match="another AllToAll"):
            a2a.combine(numpy.zeros((2, 4, 8), numpy.float32), handle)
        works(a2a, comm.rank)

    spawn_threads(2, fn)


@pytest.mark.parametrize("split", ["one_sided", "low_latency"])
def test_split_calls_out_of_order_are_refused(split: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=split, max_in_flight=2)
        y = numpy.zeros((2, 4, 8), numpy.float32)
        handle = a2a.dispatch_send(ids([0, 3]), [tokens(1)])
        for call in (
            lambda: a2a.combine(y, handle),
            lambda: a2a.combine_send(y, handle),
            lambda: a2a.combine_recv(handle),
            lambda: a2a.release(handle),
            lambda: a2a.combine_buffer(handle),
        ):
            with pytest.raises(fanfold.InvalidState, match="sent, not received"):
                call()
        a2a.dispatch_recv(handle)
        a2a.combine_send(y, handle)
        for call in (
            lambda: a2a.combine(y, handle),
            lambda: a2a.combine_send(y, handle),
            lambda: a2a.dispatch_recv(handle),
            lambda: a2a.release(handle),
        ):
            with pytest.raises(fanfold.InvalidState, match="combine sent, not received"):
                call()
        a2a.combine_recv(handle)
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_every_accessor_raises_once_the_round_ended(strategy: str) -> None:
    names = ("payloads", "rank_counts", "expert_counts", "num_rows", "offsets", "topk_ids",
             "topk_weights", "source_rank", "source_token")  # fmt: skip

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        fresh, seen = one_round(a2a), None
        fresh.release()
        seen = one_round(a2a)
        for name in names:
            getattr(seen, name)
        seen.combine(numpy.zeros_like(seen.combine_buffer()))
        for recv in (fresh, seen):
            assert not recv.is_open
            for name in names:
                with pytest.raises(fanfold.InvalidState, match="has ended"):
                    getattr(recv, name)
            with pytest.raises(fanfold.InvalidState, match="has ended"):
                recv.host_counts()

    spawn_threads(2, fn)


def test_two_threads_in_one_object_are_refused() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm)
        if comm.rank == 0:
            waiter = threading.Thread(target=_quietly, args=(one_round, a2a))
            waiter.start()
            time.sleep(0.2)
            with pytest.raises(fanfold.InvalidState, match="another thread"):
                one_round(a2a)
            a2a.abort("done")
            waiter.join()
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)
