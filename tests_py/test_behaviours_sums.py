# SPDX-License-Identifier: Apache-2.0
"""Faults of other systems: duplicates, order, weights, numerics. Table: see
`test_behaviours.py`."""

from __future__ import annotations

import numpy
import pytest
from support.rounds import (
    ALL_STRATEGIES,
    PADDED_STRATEGIES,
    echo,
    identity_experts,
    ids,
    layout_per_expert,
    make,
    of_expert,
    tokens,
    weights,
)

import fanfold
from fanfold.testing import all_cases, oracle, spawn_threads
from fanfold.testing.trials import LAYOUTS_OF

each_weighting = pytest.mark.parametrize(
    ("strategy", "layout", "weighting"),
    [(case.strategy, case.layout, case.weighting) for case in all_cases()],
)


@pytest.fixture(params=ALL_STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PADDED_STRATEGIES)
def padded_strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def weighted_identity(
    recv: fanfold.Received, a2a: fanfold.AllToAll, weighting: str
) -> numpy.ndarray:
    """Return what experts that change nothing give, weighted by them where nobody else does."""
    y = identity_experts(recv, a2a)
    if recv.topk_ids is None and weighting == "applied":
        y = y * numpy.asarray(recv.topk_weights)[..., None]
    return y


@each_weighting
def test_duplicate_experts_add_their_weights(
    strategy: str, layout: str, weighting: str
) -> None:  # D1
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout=layout, weighting=weighting)
        results = []
        for topk_ids, w in ((ids([3, 3]), weights([0.25, 0.75])), (ids([3, -1]), weights([1, 9]))):
            recv = a2a.dispatch(topk_ids, [tokens(1)], topk_weights=w)
            y = weighted_identity(recv, a2a, weighting)
            results.append(numpy.array(recv.combine(y)))
        numpy.testing.assert_array_equal(results[0], tokens(1))
        numpy.testing.assert_array_equal(results[1], tokens(1))

    spawn_threads(2, fn)


@each_weighting
def test_no_probability_mass_is_lost_by_duplicates(
    strategy: str, layout: str, weighting: str
) -> None:  # D2
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout=layout, weighting=weighting, top_k=6)
        topk_ids = ids([3, 0, 3, 0, 1, 3], [2, 2, 2, 2, 2, 2], top_k=6)
        w = weights(
            [0.125, 0.25, 0.125, 0.25, 0.125, 0.125], [0.5, 0, 0.25, 0, 0.125, 0.125], top_k=6
        )
        recv = a2a.dispatch(topk_ids, [tokens(2)], topk_weights=w)
        out = recv.combine(weighted_identity(recv, a2a, weighting))
        numpy.testing.assert_array_equal(out, tokens(2))  # every token's weights add up to 1

    spawn_threads(2, fn)


def test_slots_suffice_with_duplicates(strategy: str) -> None:  # D3
    def fn(comm: fanfold.Communicator) -> None:
        for layout in LAYOUTS_OF[strategy]:
            a2a = make(comm, strategy=strategy, layout=layout, num_experts=2)
            recv = a2a.dispatch(ids(*[[0, 0]] * 4), [tokens(4)])
            here = comm.rank == 0
            assert recv.expert_counts.tolist() == ([8] if here else [0])
            assert recv.num_rows.tolist() == ([8] if here or layout == "gathered" else [0])
            recv.release()
            a2a.close()

    spawn_threads(2, fn)


def test_experts_need_not_divide_evenly(strategy: str) -> None:  # D5
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, num_experts=5)
        assert list(a2a.local_experts) == [[0, 1, 2], [3, 4]][comm.rank]
        out = echo(a2a, ids([2, 3], [4, 4]), tokens(2), weights([0.5, 0.5], [0.25, 0.75]))
        numpy.testing.assert_array_equal(out, tokens(2))

    spawn_threads(2, fn)


@each_weighting
def test_weights_are_applied_exactly_once(strategy: str, layout: str, weighting: str) -> None:  # D6
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout=layout, weighting=weighting, top_k=1)
        x = tokens(3, rank=comm.rank)
        topk_ids, w = ids([0], [3], [2], top_k=1), weights([0.5], [0.5], [0.5], top_k=1)
        recv = a2a.dispatch(topk_ids, [x], topk_weights=w)
        out = recv.combine(weighted_identity(recv, a2a, weighting))
        numpy.testing.assert_array_equal(out, 0.5 * x)
        # An expert that is not linear, with the weight on its input (K = 1): nobody weights again.
        recv = a2a.dispatch(topk_ids, [0.5 * x], topk_weights=numpy.ones_like(w))
        squares = numpy.square(weighted_identity(recv, a2a, weighting))
        numpy.testing.assert_array_equal(recv.combine(squares), numpy.square(0.5 * x))

    spawn_threads(2, fn)


def test_payloads_arrive_unscaled_and_inputs_stay(strategy: str) -> None:  # D7
    def fn(comm: fanfold.Communicator) -> None:
        layout = layout_per_expert(strategy)
        a2a = make(comm, strategy=strategy, layout=layout, weighting="carried")
        x = tokens(2, rank=comm.rank)
        kept = x.copy()
        recv = a2a.dispatch(ids([0, 2], [0, 2]), [x], topk_weights=weights([0.5, 3], [7, 9]))
        everyone = numpy.concatenate([tokens(2, rank=0), tokens(2, rank=1)])
        numpy.testing.assert_array_equal(of_expert(recv, recv.payloads[0], 0), everyone)
        recv.combine(identity_experts(recv, a2a))
        numpy.testing.assert_array_equal(x, kept)

    spawn_threads(2, fn)


def test_the_error_of_a_sum_is_bounded(strategy: str) -> None:  # D9
    """K products and K + R additions are rounded, each to float32."""
    num_ranks, top_k, hidden = 4, 8, 64
    rng = numpy.random.default_rng(9)
    size = (16, num_ranks * 4, hidden)
    values = rng.standard_normal(size) * numpy.exp2(rng.integers(-12, 13, size))
    values = values.astype(numpy.float32)
    topk_ids = [numpy.argsort(rng.random((4, 16)), axis=1)[:, :top_k] for _ in range(num_ranks)]
    w = [rng.random((4, top_k), numpy.float32) for _ in range(num_ranks)]

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(
            comm, strategy=strategy, layout=layout_per_expert(strategy), weighting="carried",
            num_experts=16, top_k=top_k, hidden=hidden, combine_row_bytes=hidden * 4,
            combine_dtype="float32",
        )  # fmt: skip
        mine = topk_ids[comm.rank].astype(numpy.int32)
        recv = a2a.dispatch(mine, [tokens(4, hidden)], topk_weights=w[comm.rank])
        y = numpy.zeros((*numpy.shape(recv.source_rank), hidden), numpy.float32)
        place = numpy.asarray(recv.source_rank) * 4 + numpy.asarray(recv.source_token)
        for expert in range(4):
            mine_of_expert = of_expert(recv, y, expert)  # a view
            mine_of_expert[...] = values[comm.rank * 4 + expert][of_expert(recv, place, expert)]
        out = numpy.asarray(recv.combine(y, out=numpy.zeros((4, hidden), numpy.float32)))
        for token in range(4):
            terms = numpy.float64(w[comm.rank][token])[:, None] * values[
                mine[token], comm.rank * 4 + token
            ].astype(numpy.float64)
            bound = (2 * top_k + num_ranks) * 2.0**-24 * numpy.abs(terms).sum(axis=0)
            assert (numpy.abs(out[token] - terms.sum(axis=0)) <= bound).all()

    spawn_threads(num_ranks, fn)


def test_a_hundred_runs_give_the_same_bits(padded_strategy: str) -> None:  # D10
    rng = numpy.random.default_rng(10)
    y = [rng.standard_normal((3, 4, 33), numpy.float32) for _ in range(3)]

    def fn(comm: fanfold.Communicator) -> set[bytes]:
        results = set()
        a2a = make(
            comm, strategy=padded_strategy, num_experts=6, hidden=33, test_knobs={"delay_seed": 3}
        )
        for _ in range(100):
            recv = a2a.dispatch(ids(*[[0, 4], [2, 1], [3, 5]]), [tokens(3, 33)])
            results.add(numpy.asarray(recv.combine(y[comm.rank])).tobytes())
        return results

    assert [len(results) for results in spawn_threads(3, fn)] == [1, 1, 1]


def test_each_row_tells_its_expert_and_its_token(strategy: str) -> None:  # D12
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout=layout_per_expert(strategy))
        recv = a2a.dispatch(ids([1, 0], [2, 1]), [tokens(2, rank=comm.rank)])
        rows = 0
        for expert, global_id in enumerate(a2a.local_experts):
            of_rows = [recv.source_rank, recv.source_token, recv.payloads[0]]
            origins = [of_expert(recv, each, expert) for each in of_rows]
            for source, token, row in zip(*origins, strict=True):
                assert global_id in [[1, 0], [2, 1]][token]
                numpy.testing.assert_array_equal(row, tokens(2, rank=source)[token])
                rows += 1
        assert rows == recv.offsets[-1] == (6 if comm.rank == 0 else 2)
        recv.release()

    spawn_threads(2, fn)


@each_weighting
def test_one_rank_combines_like_many(strategy: str, layout: str, weighting: str) -> None:  # D14
    topk_ids, w = ids([0, 3], [2, 2], [-1, 1]), weights([0.3, 0.6], [0.7, 0.1], [5, 0.9])
    x = tokens(3).astype(numpy.float32)

    def fn(comm: fanfold.Communicator) -> numpy.ndarray:
        a2a = make(
            comm, strategy=strategy, layout=layout, weighting=weighting, combine_dtype="bfloat16",
            combine_row_bytes=32,
        )  # fmt: skip
        here = comm.rank == 0
        recv = a2a.dispatch(
            topk_ids if here else topk_ids[:0], [x if here else x[:0]],
            topk_weights=w if here else w[:0],
        )  # fmt: skip
        y = weighted_identity(recv, a2a, weighting)
        out = recv.combine(y, out=numpy.zeros((3 if here else 0, 8), numpy.float32))
        return numpy.array(out)

    alone = spawn_threads(1, fn)[0]
    spread = spawn_threads(2, fn)[0]
    # The partial of one rank is rounded too: to what the oracle says, not to the unrounded sum.
    trial = oracle(
        num_experts=4, topk_ids=[topk_ids], payloads=[[x]], topk_weights=[w], layout=layout,
        weighting=weighting, combine_dtype="bfloat16",
    )  # fmt: skip
    y = numpy.zeros((*trial.row_shape(0), 8), numpy.float32)
    for row in trial.rows(0):
        y[row.position] = x[row.source_token]
        if weighting == "applied":
            given = trial.choices(0, row.source_token) if row.choice is None else [row.choice]
            factor = numpy.float32(0)
            for choice in given:
                factor = factor + choice.weight
            y[row.position] *= factor
    wanted = trial.combine(0, [y], y_dtype="float32", out_dtype="float32")
    numpy.testing.assert_array_equal(alone, wanted)
    numpy.testing.assert_allclose(spread, alone, rtol=2**-7)
