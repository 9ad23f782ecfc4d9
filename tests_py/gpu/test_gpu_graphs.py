# SPDX-License-Identifier: Apache-2.0
"""Graph capture on the simulated device: whole rounds, replayed with other inputs."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from support.gpu import Rank, capture, over_nccl, run_ranks
from support.rounds import ids, tokens

import fanfold

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from fanfold import _core
from fanfold.testing import Case, Harness, Setup, SimulatedTensors, spawn_threads

IDS = ids([0, 3], [2, -1], [1, 2])


@pytest.mark.parametrize(
    "case",
    [
        Case("one_sided", "rank_major", "applied"),
        Case("low_latency", "expert_major", "carried"),
        Case("batched", "expert_major", "carried"),
        Case("gather_scatter", "rank_major", "applied"),
    ],
    ids=str,
)
def test_a_round_replays_with_other_inputs(case: Case) -> None:
    """Dispatch and combine in one graph; ids, rows, weights and the number of tokens change."""
    setup = Setup(max_tokens=5)

    def fn(comm: fanfold.Communicator) -> None:
        if case.strategy in ("batched", "gather_scatter"):
            comm = over_nccl(comm, f"cuda:{comm.rank}")
        harness = Harness(comm, case, SimulatedTensors(comm.num_ranks))
        tensors: Any = harness.tensors
        limit, top_k, hidden = setup.max_tokens, setup.top_k, setup.hidden
        trials = [harness.trial(setup, seed, round_max_tokens=limit) for seed in range(4)]
        fixed = {
            "topk_ids": tensors.to_tensor(numpy.zeros((limit, top_k), "int32"), "int32"),
            "topk_weights": tensors.to_tensor(numpy.zeros((limit, top_k), "float32"), "float32"),
            "num_tokens": tensors.to_tensor(numpy.zeros(1, "int32"), "int32"),
        }
        x = tensors.to_tensor(numpy.zeros((limit, hidden), "float32"), "float32")
        y = tensors.to_tensor(trials[0].ys(hidden, "float32")[comm.rank], "float32")
        out = tensors.to_tensor(numpy.zeros((limit, hidden), "float32"), "float32")

        def write(tensor: Any, values: Any) -> None:
            whole = numpy.zeros(tensor.shape, tensor.dtype)
            whole[: len(values)] = values
            tensors.write(tensor, whole)

        with harness.create(setup) as a2a:
            # Once for real, so that ranks differ in nothing but the replays.
            harness.exchange(a2a, trials[0])
            with capture(tensors.stream) as graphs:
                recv = a2a.dispatch(payloads=[x], **fixed, stream=tensors.stream)
                a2a.combine(y, recv.handle, out=out)
            for trial in (*trials[1:], trials[0]):
                oracle, rank = trial.oracle, comm.rank
                assert oracle.topk_weights is not None
                write(fixed["topk_ids"], oracle.topk_ids[rank])
                write(fixed["topk_weights"], oracle.topk_weights[rank])
                write(fixed["num_tokens"], [oracle.num_tokens[rank]])
                write(x, oracle.payloads[rank][0])
                write(y, trial.ys(hidden, "float32")[rank])
                graphs[0].launch(tensors.stream)
                harness.check_result(out[: oracle.num_tokens[rank]], trial)
                assert not tensors.to_array(out[oracle.num_tokens[rank] :]).any()
            graphs.clear()
            harness.exchange(a2a, trials[1])

    _core.simulator.configure(devices=2, host_threads=2, resident_blocks=2)
    spawn_threads(2, fn)


def test_creation_is_refused_in_a_capture() -> None:
    def fn(rank: Rank) -> None:
        rank.works(rank.make())
        with capture(rank.stream) as graphs, pytest.raises(fanfold.InvalidState, match="capture"):
            rank.make()
        assert not graphs, "CUDA gives the capture up"
        rank.works(rank.make())

    run_ranks(1, fn)


Given = tuple[Any, Any, Any, Any]


def given_to(rank: Rank) -> Given:
    """Return ids, rows, rows of the experts, and a result tensor."""
    x = tokens(3, rank=rank.rank)
    y = numpy.zeros((rank.num_ranks, 4, 8), "float32")
    return rank.put(IDS), rank.put(x), rank.put(y), rank.empty(3, 8)


def test_what_waits_is_refused_in_a_capture() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        rank.works(a2a)
        topk_ids, x, y, out = given_to(rank)
        with capture(rank.stream) as graphs:
            recv = a2a.dispatch(topk_ids, [x], stream=rank.stream)
            for call in (recv.host_counts, lambda: recv.routing):
                with pytest.raises(fanfold.InvalidState, match=r"graph|capture"):
                    call()
            recv.combine(y, out=out)
        assert graphs[0].num_nodes > 1
        graphs[0].launch(rank.stream)
        rank.wait()
        rank.works(a2a)

    run_ranks(1, fn)


def test_a_round_from_outside_does_not_go_on_in_a_capture() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        recv = rank.dispatch(a2a, IDS, tokens(3))
        rank.wait()
        y, out = rank.put(numpy.array(recv.payloads[0])), rank.empty(3, 8)
        with capture(rank.stream), pytest.raises(fanfold.InvalidState, match="captur"):
            recv.combine(y, out=out)
        recv.combine(y, out=out)
        numpy.testing.assert_array_equal(rank.get(out), tokens(3))

    run_ranks(1, fn)


def test_a_round_of_a_capture_does_not_go_on_outside() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        topk_ids, x, y, out = given_to(rank)
        with capture(rank.stream):
            recv = a2a.dispatch(topk_ids, [x], stream=rank.stream)
        with pytest.raises(fanfold.InvalidState, match=r"captur|graph"):
            recv.combine(y, out=out)
        a2a.reset()
        rank.works(a2a)

    run_ranks(1, fn)


def test_dispatch_alone_may_be_captured_with_its_release() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        topk_ids, x, _, _ = given_to(rank)
        with capture(rank.stream) as graphs:
            recv = a2a.dispatch(topk_ids, [x], stream=rank.stream)
            counts, rows = recv.rank_counts, recv.payloads[0]
            recv.release()
        for _ in range(3):
            graphs[0].launch(rank.stream)
        rank.wait()
        a2a.check()
        assert counts.tolist() == ([2, 2] if rank.rank == 0 else [3, 3])
        if rank.rank:
            numpy.testing.assert_array_equal(rows[0, :3], tokens(3))
        rank.comm.barrier()

    run_ranks(2, fn)
