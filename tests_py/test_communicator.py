# SPDX-License-Identifier: Apache-2.0
"""Collectives of a Communicator from Python: results, split, errors on every rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy
import pytest
import torch

import fanfold
from fanfold.testing import spawn_threads

SIZES = (1, 2, 4, 7)
each_size = pytest.mark.parametrize("num_ranks", SIZES)


def block(rank: int, rows: int, dtype: str = "float32") -> numpy.ndarray:
    return (numpy.arange(rows * 3).reshape(rows, 3) + 100 * rank).astype(dtype)


@each_size
def test_all_gather_v(num_ranks: int) -> None:
    counts = [(3 * rank) % 4 for rank in range(num_ranks)]

    def fn(comm: fanfold.Communicator) -> None:
        recv = numpy.zeros((sum(counts), 3), numpy.float32)
        comm.all_gather_v(block(comm.rank, counts[comm.rank]), recv, counts)
        wanted = numpy.concatenate([block(r, counts[r]) for r in range(num_ranks)])
        numpy.testing.assert_array_equal(recv, wanted)

    spawn_threads(num_ranks, fn)


@each_size
def test_reduce_scatter_v(num_ranks: int) -> None:
    counts = [(rank + 1) % 3 for rank in range(num_ranks)]

    def fn(comm: fanfold.Communicator) -> None:
        for dtype in ("float32", "float16", "int32", "int64"):
            recv = numpy.zeros((counts[comm.rank], 3), dtype)
            comm.reduce_scatter_v(block(comm.rank, sum(counts), dtype), recv, counts)
            total = sum(block(r, sum(counts), dtype).astype("float64") for r in range(num_ranks))
            first = sum(counts[: comm.rank])
            numpy.testing.assert_array_equal(recv, total[first : first + len(recv)].astype(dtype))

    spawn_threads(num_ranks, fn)


@each_size
def test_all_to_all(num_ranks: int) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        recv = numpy.zeros((2 * num_ranks, 3), numpy.float32)
        comm.all_to_all(block(comm.rank, 2 * num_ranks), recv)
        mine = slice(2 * comm.rank, 2 * comm.rank + 2)
        wanted = [block(r, 2 * num_ranks)[mine] for r in range(num_ranks)]
        numpy.testing.assert_array_equal(recv, numpy.concatenate(wanted))

    spawn_threads(num_ranks, fn)


@each_size
def test_all_to_all_v(num_ranks: int) -> None:
    def count(source: int, target: int) -> int:
        return (source + 2 * target) % 3

    def fn(comm: fanfold.Communicator) -> None:
        send_counts = [count(comm.rank, r) for r in range(num_ranks)]
        recv_counts = [count(r, comm.rank) for r in range(num_ranks)]
        recv = numpy.zeros((sum(recv_counts), 3), numpy.float32)
        comm.all_to_all_v(block(comm.rank, sum(send_counts)), recv, send_counts, recv_counts)
        wanted = []
        for source in range(num_ranks):
            counts = [count(source, r) for r in range(num_ranks)]
            first = sum(counts[: comm.rank])
            wanted.append(block(source, sum(counts))[first : first + counts[comm.rank]])
        numpy.testing.assert_array_equal(recv, numpy.concatenate(wanted))

    spawn_threads(num_ranks, fn)


@each_size
def test_broadcast_and_all_reduce(num_ranks: int) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        for root in range(num_ranks):
            tensor = torch.from_numpy(block(comm.rank, 2))
            comm.broadcast(tensor, root)
            numpy.testing.assert_array_equal(tensor, block(root, 2))
        total = numpy.zeros((2, 3), numpy.float32)
        comm.all_reduce(block(comm.rank, 2), total)
        wanted = sum(block(r, 2) for r in range(num_ranks))
        numpy.testing.assert_array_equal(total, wanted)
        in_place = torch.ones(5, dtype=torch.bfloat16)
        comm.all_reduce(in_place, in_place)
        assert in_place.tolist() == [num_ranks] * 5

    spawn_threads(num_ranks, fn)


@each_size
def test_bytes_of_any_length_are_gathered(num_ranks: int) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        for step in range(3):
            mine = bytes([comm.rank]) * ((comm.rank * 1000 + step) % 70000)
            wanted = [bytes([r]) * ((r * 1000 + step) % 70000) for r in range(num_ranks)]
            assert comm.all_gather_bytes(mine) == wanted

    spawn_threads(num_ranks, fn)


def test_sums_are_taken_in_rank_order() -> None:
    big = numpy.float32(2**30)
    values = [big, numpy.float32(1), -big, numpy.float32(1)]  # ((big + 1) - big) + 1 = 1

    def fn(comm: fanfold.Communicator) -> float:
        tensor = numpy.full(1, values[comm.rank], numpy.float32)
        comm.all_reduce(tensor, tensor)
        return float(tensor[0])

    assert spawn_threads(4, fn) == [1.0] * 4


def test_split_orders_by_key_and_leaves_out_negative_colors() -> None:
    def fn(comm: fanfold.Communicator) -> Any:
        part = comm.split([0, 1, 0, -1, 0][comm.rank], [5, 0, 2, 0, 9][comm.rank])
        if part is None:
            return None
        ranks = part.all_gather_bytes(bytes([comm.rank]))
        part.barrier()
        part.close()
        comm_is_usable = comm.kind == part.kind
        return (part.rank, part.num_ranks, [each[0] for each in ranks], comm_is_usable)

    assert spawn_threads(5, fn) == [
        (1, 3, [2, 0, 4], True),
        (0, 1, [1], True),
        (0, 3, [2, 0, 4], True),
        None,
        (2, 3, [2, 0, 4], True),
    ]


def test_arguments_that_differ_are_an_error_on_every_rank() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.InvalidArgument, match=r"(?s)rank 0.*rank 1|rank 1.*rank 0"):
            comm.broadcast(numpy.zeros(4, numpy.float32), comm.rank)
        with pytest.raises(fanfold.InvalidArgument, match=r"(?s)rank 0.*rank 1|rank 1.*rank 0"):
            comm.all_reduce(numpy.zeros(4 + comm.rank), numpy.zeros(4 + comm.rank))
        comm.barrier()

    with pytest.raises(fanfold.InvalidArgument, match="float64"):
        spawn_threads(1, lambda comm: comm.all_reduce(numpy.zeros(4), numpy.zeros(4)))

    def typed(comm: fanfold.Communicator) -> None:
        zeros = numpy.zeros(4 + comm.rank, numpy.float32)
        with pytest.raises(fanfold.InvalidArgument, match=r"(?s)rank 0.*rank 1|rank 1.*rank 0"):
            comm.all_reduce(zeros, zeros)
        with pytest.raises(fanfold.InvalidArgument, match=r"(?s)rank 0.*rank 1|rank 1.*rank 0"):
            comm.broadcast(zeros[:4].copy(), comm.rank)
        comm.barrier()

    spawn_threads(2, typed)


def test_local_argument_errors_name_the_argument() -> None:
    zeros = numpy.zeros((2, 3), numpy.float32)

    def fn(comm: fanfold.Communicator) -> None:
        for call, text in (
            (lambda: comm.all_gather_v(zeros, zeros, [2]), "counts: expected 2 numbers"),
            (lambda: comm.all_gather_v(zeros, zeros, [2, -1]), "counts: .*none negative"),
            (lambda: comm.all_gather_v(zeros, zeros[:1], [1, 1]), "send: expected|recv: expected"),
            (lambda: comm.all_to_all(zeros[:1], zeros[:1]), "send"),
            (lambda: comm.broadcast(zeros[:, ::2], 0), "tensor: expected a contiguous"),
            (lambda: comm.broadcast(zeros, 2), "root"),
            (lambda: comm.all_reduce(zeros, zeros.astype("i4")), "recv"),
            (lambda: comm.all_reduce([1], zeros), "send: expected a DLPack tensor, got .*list"),
        ):
            with pytest.raises(fanfold.InvalidArgument, match=text):
                call()
            comm.barrier()

    spawn_threads(2, fn)


def test_a_late_rank_is_named_and_reset_brings_the_group_back() -> None:
    def fn(comm: fanfold.Communicator, go: threading.Barrier) -> None:
        if comm.rank == 0:
            with pytest.raises(fanfold.PeerTimeout, match=r"barrier.*rank 1") as caught:
                comm.barrier(timeout_s=0.2)
            assert caught.value.rank == 1
        go.wait()
        comm.reset()
        comm.barrier()

    spawn_threads(2, fn, threading.Barrier(2))


def test_abort_reaches_the_peers() -> None:
    def fn(comm: fanfold.Communicator, go: threading.Barrier) -> None:
        if comm.rank == 0:
            time.sleep(0.1)
            comm.abort("no more")
        else:
            with pytest.raises(fanfold.PeerAborted, match="no more") as caught:
                comm.barrier()
            assert (caught.value.rank, caught.value.reason) == (0, "no more")
        go.wait()
        comm.reset()
        comm.barrier()

    spawn_threads(3, fn, threading.Barrier(3))


@pytest.mark.parametrize("num_ranks", [0, -1, 1025])
def test_numbers_of_ranks_are_checked(num_ranks: int) -> None:
    with pytest.raises(fanfold.InvalidArgument, match=f"num_ranks.*got {num_ranks}"):
        fanfold.Communicator.threads(num_ranks)


def test_callbacks_bootstrap_a_group() -> None:
    """The callbacks are those of another group; they serve before the constructor returns only."""

    def fn(comm: fanfold.Communicator) -> None:
        calls: list[str] = []

        def all_gather(data: bytes) -> list[bytes]:
            calls.append("all_gather")
            return comm.all_gather_bytes(data)

        def barrier() -> None:
            calls.append("barrier")
            comm.barrier()

        made = fanfold.Communicator.from_callbacks(
            rank=comm.rank, num_ranks=comm.num_ranks, all_gather=all_gather, barrier=barrier
        )
        used = len(calls)
        assert used > 0
        assert made.all_gather_bytes(bytes([made.rank])) == [b"\x00", b"\x01", b"\x02"]
        made.close()
        assert len(calls) == used

    spawn_threads(3, fn)


def test_an_error_in_a_callback_comes_out() -> None:
    def fail(data: bytes) -> list[bytes]:
        raise KeyError("from the callback")

    with pytest.raises(KeyError, match="from the callback"):
        fanfold.Communicator.from_callbacks(
            rank=0, num_ranks=2, all_gather=fail, barrier=lambda: None, timeout_s=2
        )
