# SPDX-License-Identifier: Apache-2.0
"""Order of calls, abort, deadlines, reset and the end of a round, over ranks as threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from support.rounds import ALL_STRATEGIES, identity_experts, ids, make, random_ids, tokens, works

import fanfold
from fanfold.testing import spawn_threads

PROMPT_S = 1.0  # far above the milliseconds that it takes, far below any deadline here


@pytest.fixture(params=ALL_STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def one_round(a2a: fanfold.AllToAll) -> fanfold.Received:
    return a2a.dispatch(ids([0, 3]), [tokens(1)])


# -- abort, deadlines, reset ---------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_abort_reaches_waiting_peers_within_milliseconds(strategy: str, phase: str) -> None:
    def fn(comm: fanfold.Communicator) -> float:
        a2a = make(comm, strategy=strategy)
        recv = one_round(a2a) if phase == "combine" else None
        if comm.rank == 1:
            time.sleep(0.2)  # the peers are asleep in their wait by now
            sent = time.monotonic()
            a2a.abort("the expert ran out of memory")
        else:
            with pytest.raises(fanfold.PeerAborted) as caught:
                if recv is None:
                    one_round(a2a)
                else:
                    recv.combine(recv.combine_buffer())
            sent = time.monotonic()
            assert caught.value.rank == 1
            assert caught.value.reason == "the expert ran out of memory"
            assert "of round 0" in str(caught.value)
            assert a2a.is_failed
        comm.barrier()  # the communicator stays usable
        a2a.reset()
        works(a2a, comm.rank)
        return sent

    start, *ends = sorted(spawn_threads(3, fn))
    assert max(ends) - start < PROMPT_S


def test_a_late_rank_is_named_with_its_round(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, name="moe")
        works(a2a, comm.rank, num_rounds=3)
        if comm.rank != 2:
            start = time.monotonic()
            with pytest.raises(fanfold.PeerTimeout, match=r"moe.*of round 3: rank 2") as caught:
                a2a.dispatch(ids([0, 3]), [tokens(1)], timeout_s=0.2)
            assert 0.15 < time.monotonic() - start < 0.2 + PROMPT_S
            assert caught.value.rank == 2
            assert a2a.is_failed
            with pytest.raises(fanfold.InvalidState, match=r"failed.*reset"):
                one_round(a2a)
        comm.barrier()
        a2a.reset()
        assert not a2a.is_failed
        works(a2a, comm.rank)

    spawn_threads(3, fn)


def test_a_rank_that_is_late_for_combine_is_named(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = one_round(a2a)
        if comm.rank == 0:
            with pytest.raises(fanfold.PeerTimeout, match="of round 0: rank 1") as caught:
                recv.combine(recv.combine_buffer(), timeout_s=0.2)
            assert caught.value.rank == 1
            assert a2a.is_failed
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("of", ALL_STRATEGIES)
def test_a_late_rank_is_named_with_its_phase(of: str, phase: str) -> None:
    def fn(comm: fanfold.Communicator) -> str:
        a2a = make(comm, strategy=of)
        recv = one_round(a2a) if phase == "combine" else None
        text = ""
        if comm.rank == 0:
            with pytest.raises(fanfold.PeerTimeout) as caught:
                if recv is None:
                    a2a.dispatch(ids([0, 3]), [tokens(1)], timeout_s=0.05)
                else:
                    recv.combine(recv.combine_buffer(), timeout_s=0.05)
            text = str(caught.value)
        comm.barrier()
        return text

    assert f"{phase} of round 0: rank 1" in spawn_threads(2, fn)[0]


# -- the end of a round --------------------------------------------------------------------------


def test_released_rounds_leave_nothing_behind(strategy: str) -> None:
    """At times of each rank's own, with another number of tokens in each round."""

    def fn(comm: fanfold.Communicator) -> None:
        chance = random.Random(comm.rank)
        a2a = make(comm, strategy=strategy)
        for step in range(6):
            num_tokens = (step + comm.rank) % 5
            recv = a2a.dispatch(random_ids(step, num_tokens), [tokens(num_tokens)])
            time.sleep(chance.random() * 0.003)
            recv.release()
            assert not recv.is_open
            with pytest.raises(fanfold.InvalidState):
                recv.release()
            if step % 2:
                works(a2a, comm.rank, num_rounds=1)

    spawn_threads(3, fn)


@pytest.mark.parametrize("end", ["combine", "release"])
def test_a_round_that_is_kept_may_be_combined_again(strategy: str, end: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        x = tokens(3, rank=comm.rank)
        for _ in range(2):
            recv = a2a.dispatch(ids([0, 3], [2, 1], [1, 0]), [x])
            y = identity_experts(recv, a2a)
            for factor in (1, 3, 2):
                numpy.testing.assert_array_equal(
                    recv.combine(factor * y, release=False), 2 * factor * x
                )
                assert recv.is_open
            if end == "release":
                recv.release()
            else:
                numpy.testing.assert_array_equal(recv.combine(y), 2 * x)
            assert not recv.is_open
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_a_round_that_is_kept_still_has_its_rows(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, debug_poison=True)
        recv = a2a.dispatch(random_ids(comm.rank, 4), [tokens(4, rank=comm.rank)])
        before, counts = numpy.array(recv.payloads[0]), numpy.array(recv.expert_counts)
        recv.combine(identity_experts(recv, a2a), release=False)
        numpy.testing.assert_array_equal(recv.payloads[0], before)
        numpy.testing.assert_array_equal(recv.expert_counts, counts)
        recv.release()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_closing_with_a_round_open_lets_the_others_close(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = one_round(a2a)
        a2a.close(timeout_s=5)
        assert a2a.is_closed
        assert not recv.is_open
        with pytest.raises(fanfold.InvalidState, match="has ended"):
            _ = recv.payloads
        with pytest.raises(fanfold.InvalidState, match="closed"):
            one_round(a2a)
        comm.barrier()
        works(make(comm, strategy=strategy), comm.rank)

    spawn_threads(2, fn)


# -- ranks that leave ----------------------------------------------------------------------------


def test_a_peer_that_closes_is_lost_within_a_second(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        works(a2a, comm.rank)
        if comm.rank == 1:
            return  # closes its communicator
        start = time.monotonic()
        with pytest.raises(fanfold.PeerLost, match="rank 1 is gone") as caught:
            one_round(a2a)
        assert time.monotonic() - start < PROMPT_S
        assert caught.value.rank == 1
        assert isinstance(caught.value, ConnectionError)
        with pytest.raises(fanfold.PeerLost):
            one_round(a2a)

    spawn_threads(3, fn)


def test_closing_a_communicator_with_an_exchange_open_is_noticed(strategy: str) -> None:
    """close() waits for the peers; they must see that this rank is gone before it returns."""

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, timeout_s=5)
        works(a2a, comm.rank)
        if comm.rank == 1:
            comm.close(timeout_s=5)
        else:
            start = time.monotonic()
            with pytest.raises(fanfold.PeerLost, match="rank 1 is gone"):
                one_round(a2a)
            assert time.monotonic() - start < PROMPT_S
            comm.close(timeout_s=5)
        assert not a2a.is_closed

    spawn_threads(3, fn)


def test_check_tells_of_a_peer_without_waiting(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        a2a.check()
        comm.barrier()
        if comm.rank == 0:
            a2a.abort("stop")
        comm.barrier()
        with pytest.raises(fanfold.PeerAborted, match="stop"):
            a2a.check()
        comm.barrier()
        a2a.reset()
        a2a.check()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_abort_may_come_from_another_thread(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        if comm.rank == 0:
            timer = threading.Timer(0.1, a2a.abort, ("from the watchdog",))
            timer.start()
            with pytest.raises(fanfold.PeerAborted, match="from the watchdog") as caught:
                one_round(a2a)
            assert caught.value.rank == 0
            timer.join()
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_an_exception_in_a_with_block_aborts_the_round(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        if comm.rank == 0:
            with pytest.raises(MemoryError), one_round(a2a):
                raise MemoryError
        else:
            with pytest.raises(fanfold.PeerAborted) as caught, one_round(a2a) as recv:
                recv.combine(recv.combine_buffer())
            assert caught.value.rank == 0
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_reset_waits_for_every_rank_and_may_be_repeated(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        if comm.rank == 0:
            with pytest.raises(fanfold.PeerTimeout, match="reset") as caught:
                a2a.reset(timeout_s=0.2)
            assert caught.value.rank == 1
            assert a2a.is_failed
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)
        for _ in range(3):
            a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_rounds_of_before_a_reset_never_reach_one_after_it(strategy: str) -> None:
    """One rank is a round ahead; its rows of then must not appear now."""

    def fn(comm: fanfold.Communicator) -> None:
        chance = random.Random(comm.rank)
        a2a = make(comm, strategy=strategy, test_knobs={"delay_seed": 7})
        for step in range(20):
            if chance.random() < 0.5 or comm.rank == step % 2:
                a2a_call = threading.Thread(target=_quietly, args=(one_round, a2a))
                a2a_call.start()
                time.sleep(chance.random() * 0.003)
                a2a.abort("again")
                a2a_call.join()
            a2a.reset()
            works(a2a, comm.rank)

    spawn_threads(2, fn)


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(fanfold.Error):
        call(*args)


@pytest.mark.parametrize("seed", range(len(ALL_STRATEGIES)))
def test_objects_may_be_dropped_and_closed_in_random_order(seed: int) -> None:
    """Some close, some are dropped, at random times; survivors get an error or end well."""

    def fn(comm: fanfold.Communicator) -> None:
        chance = random.Random(100 * seed + comm.rank)
        objects = [
            make(comm, strategy=ALL_STRATEGIES[(i + seed) % len(ALL_STRATEGIES)], timeout_s=3)
            for i in range(3)
        ]
        received = [one_round(a2a) for a2a in objects]
        chance.shuffle(objects)
        for a2a in objects:
            time.sleep(chance.random() * 0.01)
            if chance.random() < 0.5:
                with contextlib.suppress(fanfold.PeerTimeout):  # a peer waits for another first
                    a2a.close(timeout_s=0.1)
                assert a2a.is_closed
        if chance.random() < 0.5:
            received.clear()
        del a2a, objects

    spawn_threads(3, fn)


def test_poison_shows_rows_that_are_read_too_late(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, debug_poison=True)
        for _ in range(2):
            recv = a2a.dispatch(random_ids(comm.rank, 4), [tokens(4)])
            rows, y = recv.payloads[0], recv.combine_buffer()
            assert numpy.isnan(y).all()  # nothing of the round before
            y[...] = 1
            recv.combine(y)
            assert (rows.view(numpy.uint8) == 0xCD).all()
            comm.barrier()

    spawn_threads(2, fn)
