# SPDX-License-Identifier: Apache-2.0
"""Rounds on the simulated device: what they can do, how they fail, how long their memory lives."""

from __future__ import annotations

import gc
import threading
import time

import numpy
import pytest
from support.gpu import Rank, run_ranks
from support.rounds import ids, random_ids, tokens

import fanfold

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

InvalidArgument = fanfold.InvalidArgument
IDS = ids([0, 3], [2, -1], [1, 2])


# -- what a round can do -------------------------------------------------------------------------


def test_ids_past_the_last_expert_are_dropped_and_counted() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3)
        out = rank.echo(a2a, ids([0, 4], [99, 2**31 - 1], [1, -1]), x)
        assert a2a.num_dropped_ids == 3
        numpy.testing.assert_array_equal(out, x * numpy.float32([[1], [0], [1]]))

    run_ranks(2, fn)


def test_the_number_of_tokens_is_read_when_the_work_runs() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3, rank=rank.rank)
        for num_tokens in (2, 0, 3, 1):
            count = rank.put(numpy.int32([num_tokens]))
            recv = rank.dispatch(a2a, IDS, x, num_tokens=count)
            assert recv.num_tokens == 3
            out = rank.get(rank.finish(a2a, recv, x))
            keep = numpy.arange(3)[:, None] < num_tokens
            numpy.testing.assert_array_equal(out, x * numpy.float32([[2], [1], [2]]) * keep)

    run_ranks(2, fn)


def test_counts_on_the_host() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        recv = rank.dispatch(a2a, IDS, tokens(3))
        counts = recv.host_counts()  # waits by itself
        assert counts.rank_counts == ([2, 2] if rank.rank == 0 else [3, 3])
        assert counts.expert_counts == ([2, 2] if rank.rank == 0 else [4, 2])
        assert counts.num_rows == sum(counts.rank_counts)
        assert numpy.array(recv.rank_counts).tolist() == counts.rank_counts
        recv.release()
        with pytest.raises(fanfold.InvalidState):
            recv.host_counts()
        rank.works(a2a)

    run_ranks(2, fn)


def test_a_routing_serves_later_rows() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(max_in_flight=2)
        x = tokens(3, rank=rank.rank)
        recv = rank.dispatch(a2a, IDS, x)
        routing = recv.routing
        assert routing.num_tokens == 3
        assert routing.rank_counts == ([2, 2] if rank.rank == 0 else [3, 3])
        recv.release()
        rank.works(a2a)
        for factor in (2, 3):
            recv = a2a.dispatch(None, [rank.put(x * factor)], routing=routing, stream=rank.stream)
            rank.wait()
            out = recv.combine(rank.put(numpy.array(recv.payloads[0])), out=rank.empty(3, 8))
            expected = x * factor * numpy.float32([[2], [1], [2]])
            numpy.testing.assert_array_equal(rank.get(out), expected)
        with pytest.raises(InvalidArgument, match=r"payloads\[0\]: expected \[3, ...\]"):
            a2a.dispatch(None, [rank.put(x[:2])], routing=routing, stream=rank.stream)
        a2a.close()
        assert routing.rank_counts == ([2, 2] if rank.rank == 0 else [3, 3])

    run_ranks(2, fn)


def test_sanitize() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        given = numpy.int32([[0, 1], [2, 3], [1, 3]])
        counts = rank.put(numpy.int32([2]))
        mine = list(a2a.local_experts)
        for policy, expected in (
            ("padding", [[0, 1], [2, 3], [-9, -9]]),
            (
                "padding_and_non_local",
                [[i if i in mine else -9 for i in row] for row in ([0, 1], [2, 3])] + [[-9, -9]],
            ),
            (
                "to_local",
                [[mine.index(i) if i in mine else -9 for i in row] for row in ([0, 1], [2, 3])]
                + [[-9, -9]],
            ),
        ):
            topk_ids = rank.put(given)
            out = rank.empty(3, 2, dtype="int32")
            made = a2a.sanitize(topk_ids, counts, -9, policy, out=out, stream=rank.stream)
            assert made is out
            assert rank.get(out).tolist() == expected
            a2a.sanitize(topk_ids, counts, -9, policy, out=topk_ids, stream=rank.stream)
            assert rank.get(topk_ids).tolist() == expected

    run_ranks(2, fn)


def test_masked_ranks_are_left_out() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(num_experts=6)
        rank.echo(a2a, random_ids(rank.rank, 3, num_experts=6), tokens(3))
        rank.comm.barrier()
        if rank.rank == 1:
            return
        a2a.set_active_mask([True, False, True])
        x = tokens(3)
        out = rank.echo(a2a, ids([0, 2], [2, 3], [4, 1]), x)
        numpy.testing.assert_array_equal(out, x * numpy.float32([[1], [0], [2]]))

    run_ranks(3, fn)


# -- failures ------------------------------------------------------------------------------------


def test_a_late_rank_is_named() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(name="moe")
        rank.works(a2a)
        if rank.rank == 0:
            recv = rank.dispatch(a2a, IDS, tokens(3), timeout_s=0.2)
            with pytest.raises(
                fanfold.PeerTimeout, match=r"moe.*dispatch of round 2: rank 1 did not"
            ) as caught:
                recv.host_counts()
            assert caught.value.rank == 1
            for call in (a2a.check, lambda: rank.dispatch(a2a, IDS, tokens(3))):
                with pytest.raises((fanfold.PeerTimeout, fanfold.InvalidState)):
                    call()
            assert a2a.is_failed
        rank.comm.barrier()
        a2a.reset()
        assert not a2a.is_failed
        rank.works(a2a)

    run_ranks(2, fn)


def test_an_abort_reaches_kernels_that_wait() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        rank.works(a2a)
        rank.comm.barrier()
        if rank.rank == 1:
            time.sleep(0.1)
            a2a.abort("out of tokens")
        else:
            recv = rank.dispatch(a2a, IDS, tokens(3))
            began = time.monotonic()
            with pytest.raises(fanfold.PeerAborted, match="out of tokens") as caught:
                recv.host_counts()
            assert time.monotonic() - began < 5
            assert (caught.value.rank, caught.value.reason) == (1, "out of tokens")
        rank.comm.barrier()
        a2a.reset()
        rank.works(a2a)

    run_ranks(2, fn)


def test_an_abort_of_ones_own() -> None:
    """From another thread, while this one waits for a peer that does not come."""

    def fn(rank: Rank) -> None:
        a2a = rank.make()
        if rank.rank == 0:
            recv = rank.dispatch(a2a, IDS, tokens(3))
            timer = threading.Timer(0.1, a2a.abort, ("enough",))
            timer.start()
            with pytest.raises(fanfold.PeerAborted, match="enough"):
                recv.host_counts()
            timer.join()
        rank.comm.barrier()
        a2a.reset()
        rank.works(a2a)

    run_ranks(2, fn)


def test_a_rank_that_leaves_is_lost() -> None:
    def fn(rank: Rank) -> str:
        a2a = rank.make()
        rank.works(a2a)
        if rank.rank == 1:
            return "left"
        recv = rank.dispatch(a2a, IDS, tokens(3), timeout_s=5)
        began = time.monotonic()
        with pytest.raises(fanfold.PeerLost) as caught:
            while True:
                a2a.check()
                time.sleep(0.01)
        assert caught.value.rank == 1
        with pytest.raises(fanfold.PeerLost):
            recv.host_counts()
        assert time.monotonic() - began < 3
        return "lost"

    assert run_ranks(2, fn) == ["lost", "left"]


def test_calls_that_differ_are_named_on_both_sides() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        recv = rank.dispatch(a2a, IDS, tokens(3), round_max_tokens=3 + rank.rank)
        with pytest.raises(InvalidArgument, match=r"round_max_tokens.*rank [01]") as caught:
            recv.host_counts()
        assert "3" in str(caught.value)
        assert "4" in str(caught.value)
        rank.comm.barrier()
        a2a.reset()
        rank.works(a2a)

    run_ranks(2, fn)


def test_reset_ends_open_rounds() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(max_in_flight=2)
        received = [rank.dispatch(a2a, IDS, tokens(3)) for _ in range(2)]
        a2a.reset()
        assert not any(recv.is_open for recv in received)
        with pytest.raises(fanfold.InvalidState):
            received[0].combine(rank.empty(2, 4, 8), out=rank.empty(3, 8))
        rank.works(a2a)

    run_ranks(2, fn)


def test_an_exception_in_a_with_block_aborts_the_round() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        with pytest.raises(ZeroDivisionError), rank.dispatch(a2a, IDS, tokens(3)):
            raise ZeroDivisionError
        rank.comm.barrier()
        with pytest.raises(fanfold.PeerAborted, match="with block"):
            a2a.check()
        rank.comm.barrier()
        a2a.reset()
        with rank.dispatch(a2a, IDS, tokens(3)) as recv:
            assert recv.is_open
        assert not recv.is_open
        rank.wait()
        rank.works(a2a)

    run_ranks(2, fn)


# -- lifetimes -----------------------------------------------------------------------------------


def test_tensors_keep_their_memory_past_close() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3, rank=rank.rank)
        recv = rank.dispatch(a2a, IDS, x)
        rank.wait()
        payload = recv.payloads[0]
        before = numpy.array(payload)
        recv.release()
        with pytest.raises(fanfold.InvalidState):
            _ = recv.payloads
        rank.wait()
        a2a.close()
        del a2a, recv
        gc.collect()
        numpy.testing.assert_array_equal(numpy.array(payload), before)

    run_ranks(2, fn)


def test_an_exchange_gives_its_memory_back() -> None:
    def fn(rank: Rank) -> None:
        allocator = fanfold.Allocator(rank.comm, device=rank.device)
        for _ in range(3):
            a2a = rank.make(allocator=allocator)
            rank.works(a2a)
            a2a.close()
            del a2a
            gc.collect()
            assert allocator.stats.in_use == 0
        assert allocator.stats.num_reused >= 2

    run_ranks(2, fn)


def test_an_exchange_may_be_dropped_with_a_round_open() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        recv = rank.dispatch(a2a, IDS, tokens(3))
        rank.wait()
        rank.comm.barrier()
        del a2a, recv
        gc.collect()
        rank.works(rank.make())

    run_ranks(2, fn)


def test_a_workspace_is_not_shared() -> None:
    def fn(rank: Rank) -> None:
        owner = rank.make()
        with pytest.raises(fanfold.Unsupported, match="workspace_of"):
            rank.make(workspace_of=owner)
        rank.works(owner)

    run_ranks(2, fn)
