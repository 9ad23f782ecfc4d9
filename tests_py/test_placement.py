# SPDX-License-Identifier: Apache-2.0
"""Which rank hosts which expert: tables, replicas, experts that move."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from support.rounds import ids, make, tokens, works

import fanfold
from fanfold.testing import spawn_threads


def test_a_placement_is_a_value() -> None:
    table = [0, 1, 0, 1]
    placement = fanfold.Placement(table, numpy.array([0, 0, 1, 1]))
    table[0] = 1
    assert placement == fanfold.Placement((0, 1, 0, 1), [0, 0, 1, 1])
    assert hash(placement) == hash(fanfold.Placement([0, 1, 0, 1], [0, 0, 1, 1]))
    assert placement != fanfold.Placement([0, 1, 0, 1])
    assert fanfold.Placement([0]).logical_of_expert is None
    with pytest.raises(AttributeError):
        placement.rank_of_expert = (0,)  # type: ignore[misc]


@pytest.mark.parametrize(
    "table",
    [[1, 0, 1, 0], (1, 0, 1, 0), numpy.array([1, 0, 1, 0]), fanfold.Placement([1, 0, 1, 0])],
)
def test_a_table_may_be_any_sequence(table: Any) -> None:
    def fn(comm: fanfold.Communicator) -> list[int]:
        a2a = make(comm, placement=table)
        works(a2a, comm.rank)
        return list(a2a.local_experts)

    assert spawn_threads(2, fn) == [[1, 3], [0, 2]]


def test_logical_ids_go_in_and_physical_ids_come_out() -> None:
    placement = fanfold.Placement([0, 1, 0, 1], logical_of_expert=[0, 0, 1, 1])

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, placement=placement, top_k=1)
        assert list(a2a.local_experts) == [[0, 2], [1, 3]][comm.rank]
        x = tokens(4, rank=comm.rank)
        recv = a2a.dispatch(ids([0], [0], [1], [1], top_k=1), [x])
        # Copy (source rank + token) mod 2: of rank 0 tokens 0 and 2, of rank 1 1 and 3 to copy 0.
        for source in (0, 1):
            first = (source + comm.rank) % 2
            assert recv.source_token[source].tolist() == [first, first + 2, -1, -1]
            expected = [[comm.rank], [2 + comm.rank], [-1], [-1]]
            assert recv.topk_ids[source].tolist() == expected
        rows = numpy.array(recv.payloads[0])
        numpy.testing.assert_array_equal(recv.combine(rows), x)
        with pytest.raises(fanfold.InvalidArgument, match="topk_ids"):
            a2a.dispatch(ids([2], top_k=1), [tokens(1)])

    spawn_threads(2, fn)


def test_experts_move() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, max_local_experts=3)
        works(a2a, comm.rank)
        routing = a2a.dispatch(ids([0, 1]), [tokens(1)])
        with pytest.raises(fanfold.InvalidState, match="set_placement"):
            a2a.set_placement("round_robin")
        kept = routing.routing
        routing.release()
        for placement, local in (
            ("round_robin", [[0, 2], [1, 3]]),
            ([0, 1, 1, 1], [[0], [1, 2, 3]]),
            (fanfold.Placement([1, 0, 1, 0]), [[1, 3], [0, 2]]),
        ):
            a2a.set_placement(placement, timeout_s=10)  # type: ignore[arg-type]
            assert list(a2a.local_experts) == local[comm.rank]
            expected = fanfold.Placement(placement) if isinstance(placement, list) else placement
            assert a2a.config["placement"] == expected
            works(a2a, comm.rank)
        with pytest.raises(fanfold.InvalidArgument, match="placement: expected at most 3 experts"):
            a2a.set_placement([0, 0, 0, 0])
        with pytest.raises(
            fanfold.InvalidArgument, match="placement: expected linear, round_robin"
        ):
            a2a.set_placement(None)  # type: ignore[arg-type]
        with pytest.raises(fanfold.InvalidArgument, match="routing: expected a routing"):
            a2a.dispatch(None, [tokens(1)], routing=kept)
        works(a2a, comm.rank)

    spawn_threads(2, fn)
