# SPDX-License-Identifier: Apache-2.0
"""What stays true of tensors and rounds that outlive or share something."""

from __future__ import annotations

import os

import numpy
import pytest
from support.rounds import STRATEGIES, ids, make, tokens

import fanfold
from fanfold.testing import spawn_processes, spawn_threads


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_editing_the_ids_of_a_routed_round_leaves_the_routing_alone(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(ids([0, 3]), [tokens(1)])
        routing, sent = recv.routing, numpy.array(recv.topk_ids)
        recv.combine(recv.combine_buffer())
        for _ in range(2):
            again = a2a.dispatch(None, [tokens(1)], routing=routing)
            held = again.topk_ids
            numpy.testing.assert_array_equal(held, sent)
            held[...] = 77
            again.combine(again.combine_buffer())
        del routing, recv, again
        assert held.shape == sent.shape
        held[...] = 5  # still mapped
        a2a.close()
        held[...] = 6

    spawn_threads(2, fn)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counts_are_those_of_the_dispatch_after_ids_became_local(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(ids([2, 3], [3, -1]), [tokens(2)])
        a2a.sanitize(recv.topk_ids, recv.rank_counts, policy="to_local", out=recv.topk_ids)
        expected = [0, 0] if comm.rank == 0 else [2, 4]
        assert list(recv.expert_counts) == expected
        routing = recv.routing
        recv.combine(recv.combine_buffer())
        again = a2a.dispatch(None, [tokens(2)], routing=routing)
        assert list(again.expert_counts) == expected
        again.combine(again.combine_buffer())
        a2a.close()

    spawn_threads(2, fn)


def test_a_routing_of_another_exchange_is_told_from_ours() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        first, second = make(comm), make(comm)
        made = []
        for a2a in (first, second):
            recv = a2a.dispatch(ids([0, 3]), [tokens(1)])
            made.append(recv.routing)
            recv.combine(recv.combine_buffer())
        with pytest.raises(fanfold.InvalidArgument, match="routing that is re-used: rank"):
            first.dispatch(None, [tokens(1)], routing=made[comm.rank])
        first.reset()
        first.close()
        second.close()

    spawn_threads(2, fn)


def test_closing_ends_open_rounds_and_keeps_what_is_held() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        allocator = fanfold.Allocator(comm)
        first = make(comm, allocator=allocator)
        recv = first.dispatch(ids([0, 3]), [tokens(1)])
        held = recv.payloads[0]
        first.close()
        assert not recv.is_open
        with pytest.raises(fanfold.InvalidState, match="has ended"):
            _ = recv.payloads
        second = make(comm, allocator=allocator)  # not in the memory that is still held
        assert allocator.stats.num_reused == 0
        again = second.dispatch(ids([0, 3]), [tokens(1)])
        held[...] = 9
        assert not (numpy.array(again.payloads[0][:, :1]) == 9).any()
        again.combine(again.combine_buffer())
        second.close()
        del held, recv, again
        third = make(comm, allocator=allocator)
        assert allocator.stats.num_reused <= 1
        third.close()

    spawn_threads(2, fn)


def _use_in_a_child(comm: fanfold.Communicator) -> int:
    a2a = make(comm)
    recv = a2a.dispatch(ids([0, 3]), [tokens(1)])
    child = os.fork()
    if child == 0:
        try:
            _ = recv.num_rows
        except fanfold.InvalidState:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    recv.combine(recv.combine_buffer())
    a2a.close()
    return os.waitstatus_to_exitcode(status)


def test_received_rows_in_a_forked_child_are_an_error_not_a_fault() -> None:
    assert spawn_processes(2, _use_in_a_child) == [0, 0]
