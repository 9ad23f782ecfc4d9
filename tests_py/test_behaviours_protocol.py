# SPDX-License-Identifier: Apache-2.0
"""Faults of other systems: state, lifetimes, teardown. Table: see
`test_behaviours.py`."""

from __future__ import annotations

import ast
import inspect
import random
import subprocess
import sys
import time
from typing import Any

import numpy
import pytest
from support.rounds import (
    ALL_STRATEGIES,
    MASKING_STRATEGIES,
    PADDED_STRATEGIES,
    echo,
    ids,
    layout_per_expert,
    make,
    random_ids,
    tokens,
    weights,
    works,
)

import fanfold
from fanfold.testing import spawn_threads


@pytest.fixture(params=ALL_STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PADDED_STRATEGIES)
def padded_strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_round_that_was_given_up_is_cleared_by_reset(strategy: str) -> None:  # S1
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(ids([0, 1]), [tokens(1)])
        with pytest.raises(fanfold.InvalidState, match=r"round 0.*max_in_flight is 1"):
            a2a.dispatch(ids([0, 1]), [tokens(1)])
        a2a.reset()
        assert not recv.is_open
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_a_different_round_max_tokens_is_an_error_on_both_sides(strategy: str) -> None:  # S2
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        text = "round_max_tokens.*rank . has [23], rank . has [23]"
        with pytest.raises(fanfold.InvalidArgument, match=text):
            a2a.dispatch(ids([0, 1]), [tokens(1)], round_max_tokens=2 + comm.rank)
        assert a2a.is_failed
        a2a.reset()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_wrong_orders_have_their_own_errors(strategy: str) -> None:  # S9
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(ids([0, 1]), [tokens(1)])
        with pytest.raises(fanfold.InvalidState, match="max_in_flight"):
            a2a.dispatch(ids([0, 1]), [tokens(1)])
        if a2a.capabilities.two_phase:
            with pytest.raises(fanfold.InvalidState, match=r"combine_recv.*received"):
                a2a.combine_recv(recv.handle)
        else:
            with pytest.raises(fanfold.Unsupported, match="combine_recv"):
                a2a.combine_recv(recv.handle)
        shape = tuple(recv.payloads[0].shape)
        out = recv.combine(recv.combine_buffer())
        assert out.shape == (1, 8)
        with pytest.raises(fanfold.InvalidState, match=r"combine.*has ended|combine.*is ended"):
            a2a.combine(numpy.zeros(shape, numpy.float32), recv.handle)
        with pytest.raises(fanfold.InvalidState, match="ended"):
            _ = recv.payloads
        a2a.close()
        with pytest.raises(fanfold.InvalidState, match="closed"):
            a2a.dispatch(ids([0, 1]), [tokens(1)])

    spawn_threads(2, fn)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_may_close_in_any_order_and_twice(strategy: str, seed: int) -> None:  # S10
    order = random.Random(seed)
    delays = [order.random() * 0.05 for _ in range(4)]

    def fn(comm: fanfold.Communicator) -> None:
        a2a, other = make(comm, strategy=strategy), make(comm, strategy=strategy, hidden=16)
        works(a2a, comm.rank)
        time.sleep(delays[comm.rank])
        for each in (a2a, other):
            each.close()
            each.close()
        comm.close()
        comm.close()

    spawn_threads(4, fn)


def test_dropping_everything_without_close_is_harmless(padded_strategy: str) -> None:  # S10
    def fn(comm: fanfold.Communicator) -> None:
        for _ in range(3):
            a2a = make(comm, strategy=padded_strategy)
            recv = a2a.dispatch(random_ids(comm.rank, 2), [tokens(2)])
            rows = recv.payloads[0]
            comm.barrier()
            del a2a, recv
            assert numpy.asarray(rows).shape == (2, 4, 8)  # still mapped
            comm.barrier()

    spawn_threads(2, fn)


@pytest.mark.parametrize("what", ["a2a", "recv", "closed"])
def test_an_interpreter_may_exit_with_everything_open(
    padded_strategy: str, what: str
) -> None:  # S10
    program = f"""
import numpy, threading
import fanfold
comms = fanfold.Communicator.threads(2)
kept = []
def run(comm):
    a2a = fanfold.AllToAll(
        comm, num_experts=4, top_k=2, max_tokens_per_rank=4, hidden=8, dtype="float32",
        strategy="{padded_strategy}")
    recv = a2a.dispatch(numpy.int32([[0, 3]]), [numpy.ones((1, 8), numpy.float32)])
    kept.append({{"a2a": a2a, "recv": recv, "closed": recv.payloads[0]}}["{what}"])
    if "{what}" == "closed":
        recv.release()
        a2a.close()
threads = [threading.Thread(target=run, args=(comm,)) for comm in comms]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(kept))
"""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_collective_against_another_one_ends_in_an_error(strategy: str) -> None:  # S11
    def fn(comm: fanfold.Communicator) -> str:
        try:
            if comm.rank == 0:
                comm.barrier(timeout_s=2)
            else:
                make(comm, strategy=strategy, timeout_s=2)
        except (fanfold.InvalidArgument, fanfold.PeerTimeout, fanfold.PeerLost) as error:
            return type(error).__name__
        return "returned"

    start = time.monotonic()
    kinds = spawn_threads(2, fn)
    assert "returned" not in kinds
    assert time.monotonic() - start < 10


def test_mismatched_splits_are_an_error_on_both_sides() -> None:  # S13
    def fn(comm: fanfold.Communicator) -> None:
        send = numpy.zeros((4, 2), numpy.float32)
        recv = numpy.zeros((5, 2), numpy.float32)
        # Rank 0 sends 2 rows to rank 1, which expects 3.
        send_counts, recv_counts = ([2, 2], [2, 2]) if comm.rank == 0 else ([2, 2], [3, 2])
        with pytest.raises(fanfold.InvalidArgument, match=r"(?s)rank 0.*2.*rank 1.*3"):
            comm.all_to_all_v(send, recv[: sum(recv_counts)], send_counts, recv_counts)

    spawn_threads(2, fn)


DIFFERENT: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("max_tokens_per_rank", 4, 8, {}),
    ("num_experts", 4, 5, {}),
    ("top_k", 2, 3, {}),
    ("hidden", 8, 16, {}),
    ("dtype", "float32", "float16", {}),
    ("strategy", "one_sided", "broadcast", {}),
    ("strategy", "gather_scatter", "batched", {}),
    ("layout", "rank_major", "expert_major", {}),
    ("layout", "flat", "flat_by_expert", {}),
    ("weighting", "carried", "origin", {"layout": "expert_major"}),
    ("placement", "linear", "round_robin", {}),
    ("max_recv_rows", 5, 6, {"layout": "flat"}),
    ("expert_alignment", 2, 4, {"layout": "flat_by_expert"}),
    ("max_local_experts", 3, 4, {}),
    ("channel_bytes", 4096, 8192, {"strategy": "two_sided"}),
    ("wire_scale", "float32", "ue8m0", {"strategy": "low_latency", "dispatch_row_bytes": 64}),
    ("max_in_flight", 1, 2, {}),
    ("check_ids", "raise", "drop", {}),
    ("combine_dtype", "float32", "bfloat16", {}),
]


@pytest.mark.parametrize(("field", "of_rank_0", "of_rank_1", "more"), DIFFERENT)
def test_different_configurations_are_an_error_on_every_rank(
    field: str, of_rank_0: Any, of_rank_1: Any, more: dict[str, Any]
) -> None:  # S14
    def fn(comm: fanfold.Communicator) -> None:
        value = of_rank_1 if comm.rank == 1 else of_rank_0
        text = rf"{field} differs.*rank 0 has {of_rank_0}.*rank 1 has {of_rank_1}"
        with pytest.raises(fanfold.InvalidArgument, match=text):
            make(comm, combine_row_bytes=32, **{**more, field: value})
        works(make(comm), comm.rank)  # the group is intact

    spawn_threads(3, fn)


def test_a_closed_object_raises(strategy: str) -> None:  # S16
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        a2a.close()
        assert a2a.is_closed
        x = [tokens(1)]
        for call in (
            lambda: a2a.dispatch(ids([0, 1]), x),
            lambda: a2a.reset(),
            lambda: a2a.check(),
            lambda: a2a.set_active_mask([True, True]),
            lambda: a2a.abort("reason"),
        ):
            with pytest.raises(fanfold.InvalidState, match="closed"):
                call()
        comm.close()
        for call in (
            lambda: comm.barrier(),
            lambda: comm.all_gather_bytes(b"x"),
            lambda: comm.split(0, 0),
            lambda: make(comm, strategy=strategy),
        ):
            with pytest.raises(fanfold.InvalidState, match="closed"):
                call()

    spawn_threads(2, fn)


def test_many_layers_without_synchronisation(strategy: str) -> None:  # S17
    num_layers, num_steps = 64, 20

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        topk_ids = random_ids(comm.rank, 4)
        x = tokens(4, rank=comm.rank) / 2.0**40
        state = x.astype(numpy.float32)
        for step in range(num_layers * num_steps):
            state = echo(a2a, topk_ids, state if step % 64 else x.astype(numpy.float32))
        numpy.testing.assert_array_equal(state, x.astype(numpy.float32) * 2.0**64)

    spawn_threads(2, fn)


METHODS = (
    "abort", "check", "close", "combine", "combine_buffer", "combine_recv", "combine_send",
    "dispatch", "dispatch_recv", "dispatch_send", "feasible", "release", "reset", "sanitize",
    "set_active_mask", "set_num_workers", "set_placement", "choice",
)  # fmt: skip


def test_every_strategy_has_the_same_methods(strategy: str) -> None:  # S18
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        assert all(callable(getattr(a2a, name)) for name in METHODS)
        assert a2a.choice().startswith(strategy)
        record = a2a.capabilities
        assert set(record.native_layouts) <= set(record.layouts)
        assert {"flat", "flat_by_expert"} <= set(record.layouts)
        assert record.deterministic == (not record.error_bound)
        layout = "flat" if strategy == "high_throughput" else "rank_major"
        fits, reason = a2a.feasible(4, 32, layout)
        assert fits, reason
        for case in ((5, 32, layout), (4, 10**6, layout), (4, 32, "expert_major")):
            fits, reason = a2a.feasible(*case)
            assert not fits
            assert "expected" in reason or "gives" in reason

    spawn_threads(2, fn)


def test_signatures_are_stable() -> None:  # S19
    def parameters(function: Any) -> list[str]:
        tree = ast.parse(function.__nb_signature__[0][0] + ": ...").body[0]  # of nanobind
        assert isinstance(tree, ast.FunctionDef)
        return [
            argument.arg
            for argument in tree.args.args + tree.args.kwonlyargs
            if argument.arg != "self"
        ]

    assert parameters(fanfold.AllToAll.dispatch) == [
        "topk_ids", "payloads", "topk_weights", "round_max_tokens", "routing",
        "num_tokens_per_rank", "num_tokens", "invalid_expert_id", "timeout_s", "stream",
    ]  # fmt: skip
    assert parameters(fanfold.AllToAll.combine) == [
        "y", "handle", "out", "topk_weights", "release", "timeout_s", "stream",
    ]  # fmt: skip
    assert parameters(fanfold.AllToAll.sanitize) == [
        "ids", "counts", "invalid_expert_id", "policy", "out", "stream",
    ]  # fmt: skip
    creation = inspect.signature(fanfold.AllToAll).parameters
    assert all(
        parameter.kind is inspect.Parameter.KEYWORD_ONLY
        for name, parameter in creation.items()
        if name not in ("self", "comm", "communicator")
    )


@pytest.mark.parametrize("masking", MASKING_STRATEGIES)
def test_a_masked_rank_leaves_the_sum_of_the_others(masking: str) -> None:  # S20
    def fn(comm: fanfold.Communicator) -> None:
        layout = layout_per_expert(masking)
        a2a = make(comm, strategy=masking, layout=layout, weighting="carried", num_experts=2)
        if comm.rank == 1:
            return  # leaves; the others go on without it
        a2a.set_active_mask([True, False, True])
        recv = a2a.dispatch(ids([0, 1]), [tokens(1)], topk_weights=weights([0.25, 0.75]))
        out = recv.combine(numpy.array(recv.payloads[0]))
        numpy.testing.assert_array_equal(out, 0.25 * tokens(1))

    spawn_threads(3, fn)


@pytest.mark.parametrize("other", sorted(set(ALL_STRATEGIES) - set(MASKING_STRATEGIES)))
def test_a_mask_that_cannot_be_is_refused_and_the_group_goes_on(other: str) -> None:  # S20
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=other)
        assert not a2a.capabilities.rank_mask
        with pytest.raises(fanfold.Unsupported, match=other):
            a2a.set_active_mask([True, False])
        works(a2a, comm.rank)

    spawn_threads(2, fn)
