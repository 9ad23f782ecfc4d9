# SPDX-License-Identifier: Apache-2.0
"""Calls that differ between ranks: every rank says so, and reset brings the group back."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from support.rounds import (
    ALL_STRATEGIES,
    MASKING_STRATEGIES,
    echo,
    ids,
    make,
    random_ids,
    tokens,
    weights,
    works,
)

import fanfold
from fanfold.testing import spawn_threads

F32 = numpy.float32
X = tokens(2)
GOOD: dict[str, Any] = {"topk_ids": ids([0, 3], [2, 1]), "payloads": [X]}


def rows_for(recv: fanfold.Received, hidden: int) -> numpy.ndarray:
    """Zeros in the shape of the combine rows, with another hidden."""
    return numpy.zeros((*numpy.shape(recv.combine_buffer())[:-1], hidden), F32)


@pytest.fixture(params=ALL_STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


DIFFERENCES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "payload count",
        {},
        {"payloads": [X, X[:, :1].copy()]},
        "number of payloads: rank . has [12]",
    ),
    ("payload bytes", {}, {"payloads": [tokens(2, 9)]}, "digest of the payload set"),
    ("payload dtype", {}, {"payloads": [X.view("i4")]}, "digest of the payload set"),
    ("weights", {}, {"topk_weights": weights([1, 2], [3, 4])}, "digest of the payload set"),
    ("m", {"round_max_tokens": 3}, {"round_max_tokens": 2}, "round_max_tokens: rank . has [23]"),
]


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "text"), [pytest.param(*row[1:], id=row[0]) for row in DIFFERENCES]
)
def test_calls_that_differ_between_ranks(
    strategy: str, of_rank_0: dict[str, Any], of_rank_1: dict[str, Any], text: str
) -> None:
    """Both ranks say so, and reset brings them back."""

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        mine = of_rank_1 if comm.rank == 1 else of_rank_0
        with pytest.raises(fanfold.InvalidArgument, match=text):
            a2a.dispatch(**{**GOOD, **mine})
        assert a2a.is_failed
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


@pytest.mark.parametrize("what", ["round_max_tokens", "payloads", "hidden"])
@pytest.mark.parametrize("large", [0, 1])
def test_calls_of_very_different_size(strategy: str, what: str, large: int) -> None:
    """What fits into one message of one rank takes many of the other."""
    hidden, m = 4096, 256

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, hidden=hidden, max_tokens_per_rank=m)
        is_large = comm.rank == large
        num_tokens = 2 if what == "round_max_tokens" and not is_large else m
        few = not is_large and what == "payloads"
        call: dict[str, Any] = {
            "topk_ids": random_ids(comm.rank, num_tokens),
            "payloads": [tokens(num_tokens, 1 if few else hidden)],
            "round_max_tokens": num_tokens,
        }
        if what == "hidden":
            recv = a2a.dispatch(**call)
            with pytest.raises(fanfold.InvalidArgument, match=r"hidden of the combine: rank . has"):
                recv.combine(rows_for(recv, hidden if is_large else 1))
        else:
            text = "digest of the payload set" if what == "payloads" else f"{what}: rank . has"
            with pytest.raises(fanfold.InvalidArgument, match=text):
                a2a.dispatch(**call)
        comm.barrier()
        a2a.reset()
        x = tokens(2, hidden, rank=comm.rank)
        numpy.testing.assert_array_equal(echo(a2a, ids([0, 3], [2, 1]), x), 2 * x)

    spawn_threads(2, fn)


def test_a_wrong_count_of_a_peer_is_found(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        counts = [2, 3] if comm.rank == 0 else [1, 2]
        with pytest.raises(fanfold.InvalidArgument, match=r"num_tokens_per_rank: expected 2.*got"):
            a2a.dispatch(**GOOD, num_tokens_per_rank=counts)
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_combines_that_differ_between_ranks(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(**GOOD)
        hidden = 8 - comm.rank
        text = "hidden of the combine: rank . has [78], rank . has [78]"
        with pytest.raises(fanfold.InvalidArgument, match=text):
            recv.combine(rows_for(recv, hidden))
        comm.barrier()
        a2a.reset()
        recv = a2a.dispatch(**GOOD)
        text = r"call: rank . has combine.*, rank . has combine.*"
        with pytest.raises(fanfold.InvalidArgument, match=text) as caught:
            recv.combine(recv.combine_buffer(), release=comm.rank == 0)
        assert "combine(release=False)" in str(caught.value)
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


# A release of these is local: what differs is the call after it.
RELEASING_SILENTLY = ("broadcast", "gather_scatter", "batched")


def test_release_on_one_rank_and_combine_on_another(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(**GOOD)
        kind = "dispatch" if strategy in RELEASING_SILENTLY else "release"
        either = (
            rf"call: rank . has ({kind}|combine), rank . has ({kind}|combine)",
            r"call of round [01]: expected the same on every rank, "
            rf"got {kind} on rank 0 and combine on rank 1",
        )
        if comm.rank == 0:
            recv.release()
            with pytest.raises(fanfold.InvalidArgument, match="|".join(either)):
                a2a.dispatch(**GOOD)
        else:
            with pytest.raises(fanfold.InvalidArgument, match="|".join(either)):
                recv.combine(recv.combine_buffer())
        assert a2a.is_failed
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_one_rank_reuses_a_routing_and_another_does_not(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(**GOOD)
        routing = recv.routing
        recv.release()
        text = r"call: rank . has dispatch.*, rank . has dispatch"
        with pytest.raises(fanfold.InvalidArgument, match=text):
            if comm.rank == 0:
                a2a.dispatch(None, [X], routing=routing)
            else:
                a2a.dispatch(**GOOD)
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_routings_of_different_rounds(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        routings = []
        for _ in range(2):
            recv = a2a.dispatch(**GOOD)
            routings.append(recv.routing)
            recv.release()
        with pytest.raises(fanfold.InvalidArgument, match="routing that is re-used: rank"):
            a2a.dispatch(None, [X], routing=routings[comm.rank])
        comm.barrier()
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


@pytest.mark.parametrize("masking", MASKING_STRATEGIES)
def test_active_masks_that_differ(masking: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=masking)
        a2a.set_active_mask([True, True, comm.rank != 1])
        if comm.rank == 2:  # which rank 1 leaves out
            with pytest.raises(fanfold.PeerTimeout, match="rank 1"):
                a2a.dispatch(**GOOD, timeout_s=0.5)
        else:
            with pytest.raises(fanfold.InvalidArgument, match=r"active mask: rank . has"):
                a2a.dispatch(**GOOD)
        comm.barrier()

    spawn_threads(3, fn)
