# SPDX-License-Identifier: Apache-2.0
"""Faults that one-sided exchanges on GPUs have had, each by what is right.

The numbers in comments are those of the project's list of such faults.
"""

from __future__ import annotations

import random
import time
from typing import Any

import ml_dtypes
import numpy
import pytest
from support.gpu import Rank, run_ranks
from support.rounds import ids, random_ids, tokens, weights

import fanfold

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from fanfold import _core
from fanfold.testing import Case, Harness, PayloadKind, Setup, SimulatedTensors, spawn_threads

RANK_MAJOR = Case("one_sided", "rank_major", "applied")


def run_harness(num_ranks: int, fn: Any, **how: Any) -> None:
    """Run `fn(harness)` on ranks with a device each."""
    how = {"resident_blocks": 2, **how}
    _core.simulator.configure(devices=num_ranks, host_threads=num_ranks, **how)

    def body(comm: fanfold.Communicator) -> None:
        fn(Harness(comm, RANK_MAJOR, SimulatedTensors(num_ranks)))

    spawn_threads(num_ranks, body)


# 1: what goes home lies where no later round writes, whatever its m and payloads.
@pytest.mark.parametrize("seed", [1, 2])
def test_a_larger_round_leaves_the_rows_of_the_one_before(seed: int) -> None:
    setup = Setup(max_tokens=6, extra_bytes=64)
    hidden = PayloadKind("float32", (setup.hidden,))

    def fn(harness: Harness) -> None:
        trials = [
            harness.trial(
                setup,
                step,
                round_max_tokens=limit,
                num_tokens=[limit] * harness.num_ranks,
                kinds=[hidden, PayloadKind("uint8", (limit * 10,))],
            )
            for step, limit in enumerate((1, 6, 1, 5, 2, 6))
        ]
        results = []
        with harness.create(setup) as a2a:
            for trial in trials:  # nothing waits in between
                recv = a2a.dispatch(**harness.arguments(trial))
                y = harness.experts(a2a, recv.handle, trial, zero_copy=False)
                results.append(a2a.combine(y, recv.handle, out=harness.out(trial, "float32")))
                harness.jitter(random.Random(harness.rank), 0.01)
            for trial, out in zip(trials, results, strict=True):
                harness.check_result(out, trial)

    run_harness(2, fn, seed=seed, shuffle_blocks=True)


# 2: rows of any size beside each other; every access is aligned.
def test_small_rows_do_not_misalign_those_behind_them() -> None:
    setup = Setup(max_tokens=3, hidden=8, dtype="bfloat16", extra_bytes=256)
    sets = (
        [PayloadKind("int32", (1,)), PayloadKind("bfloat16", (8,))],
        [PayloadKind("uint8", (180,)), PayloadKind("int32", (4,)), PayloadKind("bfloat16", (8,))],
        [PayloadKind("uint8", (3,)), PayloadKind("int64", (1,)), PayloadKind("bfloat16", (8,))],
    )

    def fn(harness: Harness) -> None:
        with harness.create(setup) as a2a:
            for seed, kinds in enumerate(sets):
                for limit in (1, 3):
                    harness.exchange(
                        a2a, harness.trial(setup, seed, kinds=kinds, round_max_tokens=limit)
                    )

    run_harness(2, fn)


# 3: a result has its own dtype, and as many bytes as are written.
def test_fp8_rows_give_a_result_of_the_combine_dtype() -> None:
    def fn(rank: Rank) -> None:
        with pytest.raises(fanfold.InvalidArgument, match="combine_dtype"):
            rank.make(dtype="float8_e4m3fn", hidden=16)
        a2a = rank.make(dtype="float8_e4m3fn", combine_dtype="bfloat16", hidden=16)
        x = numpy.ones((3, 16), ml_dtypes.float8_e4m3fn)
        given = rank.empty(3, 16, dtype="uint8")
        rank.tensors.write(given, x.view(numpy.uint8))
        rows = given.view(ml_dtypes.float8_e4m3fn)
        topk_ids = rank.put(ids([0, 3], [2, -1], [1, 2]))
        recv = a2a.dispatch(topk_ids, [rows], stream=rank.stream)
        y = rank.put(numpy.ones((rank.num_ranks, 4, 16), ml_dtypes.bfloat16))
        guarded = rank.put(numpy.full((4, 16), 7, ml_dtypes.bfloat16))
        with pytest.raises(fanfold.InvalidArgument, match="out"):
            recv.combine(y, out=rows)
        recv.combine(y, out=guarded[:3])
        result = rank.get(guarded).astype(numpy.float32)
        assert result[:, 0].tolist() == [2, 1, 2, 7]

    run_ranks(2, fn)


# 4: a negative id is no expert, and so is one past the last.
@pytest.mark.parametrize("num_experts", [4, 2])
def test_ids_of_no_expert_go_nowhere(num_experts: int) -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(num_experts=num_experts)
        last = num_experts - 1
        given = ids([last, -1], [-1, last], [-5, num_experts], [2**31 - 1, -(2**31)])
        recv = rank.dispatch(a2a, given, tokens(4))
        counts = recv.host_counts()
        assert counts.rank_counts == ([0, 0] if rank.rank == 0 else [2, 2])
        assert sum(counts.expert_counts) == (0 if rank.rank == 0 else 4)
        out = rank.get(rank.finish(a2a, recv, tokens(4)))
        numpy.testing.assert_array_equal(out, tokens(4) * numpy.float32([[1], [1], [0], [0]]))

    run_ranks(2, fn)


# 6: what is announced has been written, however the device orders its threads and stores.
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_announced_rows_are_there_under_any_schedule(seed: int) -> None:
    setup = Setup(max_tokens=5, hidden=9)

    def fn(harness: Harness) -> None:
        with harness.create(setup) as a2a:
            for step in range(3):
                harness.exchange(a2a, harness.trial(setup, step), zero_copy=bool(step % 2))

    run_harness(2, fn, seed=seed, shuffle_blocks=True, preempt=0.02, stale=0.3, resident_blocks=3)


# 7: offsets have 64 bits. The two rows are more than 2 GiB apart; nothing between is touched.
def test_rows_may_lie_far_apart() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        stride = ((1 << 31) + 4096) // 4
        space = _core.simulator.empty(stride * 4 + 32).view("float32")
        far = numpy.lib.stride_tricks.as_strided(space, (2, 8), (stride * 4, 4))
        for row, values in zip(far, tokens(2), strict=True):
            _core.simulator.write(row, values)
        recv = a2a.dispatch(rank.put(ids([0, 1], [3, -1])), [far], stream=rank.stream)
        rank.wait()
        numpy.testing.assert_array_equal(numpy.array(recv.payloads[0])[0, :2], tokens(2))
        recv.release()
        rank.wait()

    run_ranks(1, fn)


# 8: nobody uses a window before its owner has zeroed it.
def test_a_rank_may_begin_as_soon_as_it_has_been_created() -> None:
    def fn(rank: Rank) -> None:
        for late in range(2):
            if rank.rank == late:
                time.sleep(0.05)
            a2a = rank.make()
            if rank.rank == late:
                time.sleep(0.05)
            rank.works(a2a)
            a2a.close()

    run_ranks(2, fn)


# 9: nothing of a rank that is masked out shows in later rounds.
def test_a_masked_rank_leaves_no_rows_behind() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        rank.works(a2a)
        rank.comm.barrier()
        if rank.rank == 1:
            return
        a2a.set_active_mask([True, False])
        recv = rank.dispatch(a2a, ids([0, 3], [2, 3], [1, -1]), tokens(3))
        counts = recv.host_counts()
        assert counts.rank_counts == [2, 0]
        assert (numpy.array(recv.topk_ids)[1] == -1).all()
        out = rank.get(rank.finish(a2a, recv, tokens(3)))
        numpy.testing.assert_array_equal(out, tokens(3) * numpy.float32([[1], [0], [1]]))

    run_ranks(2, fn)


# 10: exchanges of equal configuration share nothing.
def test_rounds_of_two_exchanges_may_interleave() -> None:
    def fn(rank: Rank) -> None:
        both = [rank.make(), rank.make()]
        for step in range(3):
            given = [(random_ids(step + i, 3), tokens(3, rank=rank.rank + 5 * i)) for i in range(2)]
            received = [rank.dispatch(a2a, *each) for a2a, each in zip(both, given, strict=True)]
            for a2a, recv, (_, x) in zip(both, received, given, strict=True):
                numpy.testing.assert_array_equal(rank.get(rank.finish(a2a, recv, x)), x * 2)

    run_ranks(2, fn)


# 11: any top_k works, and a call that is refused has advanced nothing.
@pytest.mark.parametrize("top_k", [3, 5, 21])
def test_a_refused_call_does_not_begin_a_round(top_k: int) -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(top_k=top_k, num_experts=24)
        for _ in range(3):
            with pytest.raises(fanfold.InvalidArgument, match="topk_ids"):
                rank.dispatch(a2a, random_ids(1, 3, top_k + 1, 24), tokens(3))
        rank.works(a2a)

    run_ranks(2, fn)


# 12: more tokens than the round has room for.
def test_more_tokens_than_the_rounds_maximum_are_refused() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        with pytest.raises(fanfold.InvalidArgument, match="round_max_tokens"):
            rank.dispatch(a2a, ids([0, 1], [2, 3]), tokens(2), round_max_tokens=1)
        with pytest.raises(fanfold.InvalidArgument, match="round_max_tokens"):
            rank.dispatch(a2a, ids([0, 1]), tokens(1), round_max_tokens=5)
        rank.works(a2a)

    run_ranks(2, fn)


# 13: sums of many experts need no more registers than those of few; they are right, to the bit.
@pytest.mark.parametrize("top_k", [22, 100])
def test_a_token_may_have_many_experts(top_k: int) -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(top_k=top_k, num_experts=top_k, layout="expert_major", weighting="origin")
        x = tokens(2, rank=rank.rank)
        w = weights(*[[1.0 / (k + 1) for k in range(top_k)]] * 2, top_k=top_k)
        recv = rank.dispatch(a2a, random_ids(1, 2, top_k, top_k), x, w)
        rank.wait()
        y = rank.put(numpy.array(recv.payloads[0]))
        out = rank.empty(2, 8)
        recv.combine(y, out=out)
        expected = numpy.zeros_like(x)
        for k in range(top_k):
            expected += w[:, k : k + 1] * x
        numpy.testing.assert_array_equal(rank.get(out), expected)

    run_ranks(2, fn)
