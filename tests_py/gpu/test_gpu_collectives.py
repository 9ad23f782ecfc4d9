# SPDX-License-Identifier: Apache-2.0
"""Strategies over collectives on GPUs: NCCL's double on the simulated device."""

from __future__ import annotations

import numpy
import pytest

import fanfold
from fanfold import _core

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from support.gil_waits import assert_scenario_ends
from support.gpu import Rank, over_nccl, run_ranks
from support.rounds import random_ids, tokens

from fanfold.testing import (
    CHECKS,
    Case,
    SimulatedTensors,
    checks_for,
    run_check,
    spawn_threads,
)

STRATEGIES = ("batched", "gather_scatter", "broadcast")
CASES = [
    Case(strategy, layout, weighting)
    for strategy in STRATEGIES
    for layout, weighting in (
        ("rank_major", "applied"),
        ("expert_major", "carried"),
        ("expert_major", "origin"),
    )
]
NAMES = (
    "rows_keep_the_order_of_source_rank_and_token",
    "duplicate_experts_merge",
    "staged_rows_give_the_bits_of_zero_copy",
    "weights_may_be_given_to_combine",
)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, check.name, id=f"{case}-{check.name}")
        for case in CASES
        for check in checks_for(case, NAMES, "cuda")
    ],
)
def test_checks(case: Case, name: str) -> None:
    num_ranks = CHECKS[name].num_ranks
    _core.simulator.configure(devices=num_ranks, host_threads=num_ranks, resident_blocks=2)

    def fn(comm: fanfold.Communicator) -> None:
        with_gpus = over_nccl(comm, f"cuda:{comm.rank}")
        run_check(with_gpus, name, case, SimulatedTensors(num_ranks))
        with_gpus.close()

    spawn_threads(num_ranks, fn)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_share_an_exchange_and_routings_are_used_again(strategy: str) -> None:
    def fn(rank: Rank) -> None:
        rank.comm = over_nccl(rank.comm, rank.device)
        a2a = rank.make(strategy=strategy, max_in_flight=2)
        assert a2a.capabilities.graph_safe
        assert a2a.capabilities.deterministic
        rank.works(a2a)
        top_k, num_experts = int(a2a.metainfo["top_k"]), int(a2a.metainfo["num_experts"])
        ids = random_ids(rank.rank, 3, top_k, num_experts)
        x = tokens(3, rank=rank.rank)
        first = rank.dispatch(a2a, ids, x)
        routing = first.routing
        rank.finish(a2a, first, x)
        second = a2a.dispatch(None, [rank.put(x + 1)], routing=routing, stream=rank.stream)
        out = rank.get(rank.finish(a2a, second, x))
        numpy.testing.assert_array_equal(out, (x + 1) * top_k)
        a2a.close()
        rank.comm.close()

    run_ranks(3, fn)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_missing_is_said(strategy: str) -> None:
    def fn(rank: Rank) -> None:
        with pytest.raises(fanfold.Unsupported, match="from_nccl"):
            rank.make(strategy=strategy)
        comm = rank.comm
        rank.comm = over_nccl(comm, rank.device)
        with pytest.raises(fanfold.Unsupported, match="gives rank_major, expert_major"):
            rank.make(strategy=strategy, layout="flat", max_recv_rows=8)
        with pytest.raises(fanfold.Unsupported, match="sends rows as they are"):
            rank.make(strategy=strategy, layout="expert_major", dispatch_wire="fp8_e4m3")
        rank.comm.close()

    run_ranks(2, fn)


@pytest.mark.parametrize(
    "scenario", ["combine_buffer_beside_another_communicator", "a_monitor_asks_for_failures"]
)
def test_nobody_waits_with_the_lock_of_the_interpreter(scenario: str) -> None:
    """Ranks that meet by a transport written in Python."""
    assert_scenario_ends(scenario)
