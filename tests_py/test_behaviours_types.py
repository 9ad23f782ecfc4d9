# SPDX-License-Identifier: Apache-2.0
"""Faults of other systems: types, shapes, alignment. Table: see `test_behaviours.py`."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from support.rounds import (
    ALL_STRATEGIES,
    PADDED_STRATEGIES,
    STRATEGIES,
    echo,
    ids,
    make,
    random_ids,
    tokens,
    works,
)

import fanfold
from fanfold.testing import Case, PayloadKind, Setup, run_check, spawn_threads
from fanfold.testing.harness import Harness


@pytest.fixture(params=ALL_STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PADDED_STRATEGIES)
def padded_strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def off_by(array: numpy.ndarray, num_bytes: int) -> numpy.ndarray:
    """Return a copy whose memory begins `num_bytes` past a multiple of 64."""
    room = numpy.zeros(array.nbytes + 128, numpy.uint8)
    first = -room.ctypes.data % 64 + num_bytes
    moved = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def test_every_id_type_gives_the_same_result(strategy: str) -> None:  # T1
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        topk_ids = random_ids(comm.rank, 4)
        results = [
            echo(a2a, topk_ids.astype(dtype), tokens(4, rank=comm.rank)).tobytes()
            for dtype in ("int16", "int32", "int64", "uint32")
        ]
        assert len(set(results)) == 1
        for dtype in ("int8", "uint8", "uint64", "float32"):
            with pytest.raises(fanfold.InvalidArgument, match="topk_ids: expected int16, int32"):
                a2a.dispatch(topk_ids.astype(dtype), [tokens(4)])
        works(a2a, comm.rank)

    spawn_threads(2, fn)


@pytest.mark.parametrize("hidden", [1, 7, 2880, 3584])
def test_any_hidden_size(strategy: str, hidden: int) -> None:  # T4
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, hidden=hidden)
        x = tokens(3, hidden, comm.rank)
        numpy.testing.assert_array_equal(echo(a2a, random_ids(comm.rank, 3), x), 2 * x)

    spawn_threads(2, fn)


def test_misaligned_bases_and_rows(padded_strategy: str) -> None:  # T5
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(
            comm, strategy=padded_strategy, hidden=7, dtype="float16", extra_bytes_per_token=16
        )
        for shift in (2, 6, 14, 34):
            x = off_by(tokens(4, 7, dtype="float16") / 64, shift)
            extra = off_by(numpy.arange(12, dtype=numpy.uint8).reshape(4, 3), shift + 1)
            topk_ids = random_ids(shift + comm.rank, 4)
            recv = a2a.dispatch(off_by(topk_ids, 4), [x, extra])
            for source in range(2):
                for row in range(int(recv.rank_counts[source])):
                    token = recv.source_token[source, row]
                    numpy.testing.assert_array_equal(recv.payloads[0][source, row], x[token])
                    numpy.testing.assert_array_equal(recv.payloads[1][source, row], extra[token])
            y = off_by(numpy.ones((2, 4, 7), numpy.float16), shift)
            out = off_by(numpy.zeros((4, 7), numpy.float16), shift)
            recv.combine(y, out=out)
            hosts = numpy.array([len(set((row // 2).tolist())) for row in topk_ids])
            numpy.testing.assert_array_equal(out, numpy.tile(hosts[:, None], (1, 7)))

    spawn_threads(2, fn)


def test_rows_of_24_bytes_take_any_path_with_the_same_bits(padded_strategy: str) -> None:  # T6
    rng = numpy.random.default_rng(6)
    x = rng.integers(0, 256, (2, 4, 24), numpy.uint8)
    y = rng.standard_normal((2, 2, 4, 6), numpy.float32)

    def fn(comm: fanfold.Communicator, knobs: dict[str, Any]) -> bytes:
        a2a = make(comm, strategy=padded_strategy, hidden=6, test_knobs=knobs)
        recv = a2a.dispatch(random_ids(comm.rank, 4), [x[comm.rank]])
        got = [
            numpy.asarray(recv.payloads[0])[source, : recv.rank_counts[source]].tobytes()
            for source in range(2)
        ]
        out = recv.combine(y[comm.rank])
        return b"".join([*got, numpy.asarray(out).tobytes()])

    variants: list[dict[str, Any]] = [
        {}, {"streaming_stores": False}, {"isa": "portable"}, {"row_guard_bytes": 16},
    ]  # fmt: skip
    results = [spawn_threads(2, fn, knobs) for knobs in variants]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("top_k", [6, 10, 16, 22, 33])
def test_any_top_k_up_to_the_limit(strategy: str, top_k: int) -> None:  # T7
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, top_k=top_k, num_experts=40)
        works(a2a, comm.rank)
        limit = a2a.capabilities.max_top_k
        with pytest.raises(fanfold.InvalidArgument, match=rf"top_k.*{limit}.*got {limit + 1}"):
            make(comm, strategy=strategy, top_k=limit + 1)

    spawn_threads(2, fn)


def test_linear_placement_gives_the_first_ranks_one_more(strategy: str) -> None:  # T8
    def fn(comm: fanfold.Communicator) -> int:
        a2a = make(comm, strategy=strategy, num_experts=30, top_k=4)
        works(a2a, comm.rank)
        return len(a2a.local_experts)

    assert spawn_threads(8, fn) == [4, 4, 4, 4, 4, 4, 3, 3]


def test_tensors_without_elements(strategy: str) -> None:  # T10
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.InvalidArgument, match=r"hidden: .*got 0"):
            make(comm, strategy=strategy, hidden=0)
        a2a = make(comm, strategy=strategy)
        assert echo(a2a, ids(), tokens(0)).shape == (0, 8)
        with pytest.raises(fanfold.InvalidArgument, match=r"payloads\[0\].*at least one byte"):
            a2a.dispatch(ids([0, 1]), [numpy.zeros((1, 0), numpy.float32)])
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_offsets_are_64_bit() -> None:  # T11
    config: dict[str, Any] = {
        "num_ranks": 64, "num_experts": 256, "top_k": 8, "max_tokens_per_rank": 65536,
        "hidden": 7168, "dtype": "bfloat16", "strategy": "one_sided",
    }  # fmt: skip
    rows = 64 * 65536
    assert rows * 7168 > 2**31
    total = fanfold.AllToAll.required_bytes(**config)
    assert 2 * rows * 7168 * 2 < total < 2.05 * rows * 7168 * 2
    wider = fanfold.AllToAll.required_bytes(**{**config, "hidden": 7168 + 64})
    assert wider - total == 2 * rows * 2 * 64
    with pytest.raises(fanfold.InvalidArgument, match="max_tokens_per_rank"):
        fanfold.AllToAll.required_bytes(**{**config, "max_tokens_per_rank": 2**40})


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [(name, 129) for name in ALL_STRATEGIES] + [(name, 257) for name in STRATEGIES],
)
def test_more_than_128_ranks(strategy: str, num_ranks: int) -> None:  # T12
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(
            comm, strategy=strategy, num_experts=num_ranks, max_tokens_per_rank=1,
            extra_bytes_per_token=0, channel_bytes=4096, timeout_s=60,
        )  # fmt: skip
        topk_ids = ids([(comm.rank + 1) % num_ranks, num_ranks - 1 - comm.rank])
        x = tokens(1, rank=comm.rank)
        numpy.testing.assert_array_equal(echo(a2a, topk_ids, x), 2 * x)

    spawn_threads(num_ranks, fn, timeout_s=90)


def test_payloads_of_any_bytes_and_a_scalar_for_all_tokens(padded_strategy: str) -> None:  # T13
    def fn(comm: fanfold.Communicator) -> None:
        harness = Harness(comm, Case(padded_strategy, "rank_major", "applied"))
        setup = Setup()
        a2a = fanfold.AllToAll(comm, **setup.keywords(harness.case))
        kinds = [PayloadKind("uint8"), PayloadKind("uint8", (3,)), PayloadKind("uint8", (5,))]
        harness.dispatch(a2a, harness.trial(setup, kinds=kinds)).release()
        one_for_all = numpy.broadcast_to(numpy.float32([[0.125 + comm.rank]]), (4, 1))
        assert one_for_all.strides[0] == 0
        recv = a2a.dispatch(random_ids(comm.rank, 4, 3, 8), [one_for_all])
        for source in range(comm.num_ranks):
            got = recv.payloads[0][source, : recv.rank_counts[source]]
            assert (numpy.asarray(got) == 0.125 + source).all()
        recv.release()

    spawn_threads(2, fn)
    for name in ("payload_rows_may_have_any_size", "several_payloads_travel_together"):
        spawn_threads(3, run_check, name, Case(padded_strategy, "expert_major", "carried"))
