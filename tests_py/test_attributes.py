# SPDX-License-Identifier: Apache-2.0
"""What an exchange says of itself and of its rows; what can be set on it."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from support.rounds import ids, make, tokens, works

import fanfold
from fanfold.testing import spawn_threads

FP8: dict[str, Any] = {
    "strategy": "low_latency",
    "layout": "expert_major",
    "hidden": 200,  # the second block of 128 is short
    "dispatch_wire": "fp8_e4m3",
}

LAYOUTS = {"rank_major", "expert_major", "flat", "flat_by_expert", "gathered"}


@pytest.mark.parametrize(
    ("strategy", "layout", "layouts"),
    [
        ("one_sided", "rank_major", LAYOUTS - {"gathered"}),
        ("low_latency", "expert_major", LAYOUTS - {"gathered"}),
        ("high_throughput", "flat", {"flat", "flat_by_expert"}),
        ("two_sided", "rank_major", LAYOUTS - {"gathered"}),
        ("batched", "expert_major", LAYOUTS - {"gathered"}),
        ("gather_scatter", "gathered", LAYOUTS),
        ("broadcast", "gathered", LAYOUTS),
    ],
)
def test_capabilities(strategy: str, layout: str, layouts: set[str]) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout=layout)
        can = a2a.capabilities
        assert can.strategy == strategy
        assert set(can.layouts) == layouts
        assert set(can.native_layouts) <= layouts
        assert can.native_layouts
        assert can.deterministic is (can.error_bound == "")
        assert can.wires is (strategy == "low_latency")
        assert can.workers is True
        assert {"int16", "int32", "int64", "uint32"} == set(can.id_dtypes)
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_capacities() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        def of(**config: Any) -> tuple[int, int, int, int]:
            capacities = make(comm, **config).capacities
            return (capacities.tokens_per_rank, capacities.experts_per_token,
                    capacities.rows_per_expert, capacities.rows)  # fmt: skip

        assert of() == (4, 2, 8, 8)
        assert of(placement=[0, 1, 1, 1])[1] == (1 if comm.rank == 0 else 2)
        assert of(layout="expert_major") == (4, 2, 8, 16)
        assert of(layout="flat", max_recv_rows=5) == (4, 2, 8, 5)

    spawn_threads(2, fn)


def test_rows_that_are_dropped_are_counted() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, layout="flat", max_recv_rows=3)
        assert a2a.num_dropped_rows == 0
        recv = a2a.dispatch(ids([0, 3], [0, 3]), [tokens(2, rank=comm.rank)])
        assert recv.num_rows[0] == 4
        assert recv.payloads[0].shape == (3, 8)
        assert recv.source_rank.tolist() == [0, 0, 1]
        recv.release()
        assert a2a.num_dropped_rows == 1

    spawn_threads(2, fn)


def test_the_number_of_workers() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, test_knobs={"min_worker_bytes": 0})
        assert a2a.num_workers == 1
        for num_workers in (3, 1, 2):
            a2a.set_num_workers(num_workers)
            assert a2a.num_workers == num_workers
            works(a2a, comm.rank)
        for wrong in (0, -1, 257):
            with pytest.raises(fanfold.InvalidArgument, match=f"num_workers: .*{wrong}"):
                a2a.set_num_workers(wrong)
        assert a2a.num_workers == 2

    spawn_threads(2, fn)


def test_two_exchanges_in_one_workspace() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        first = make(comm)
        second = make(comm, hidden=4, workspace_of=first)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            make(comm, workspace_of="first")
        for a2a in (first, second, first):
            hidden = a2a.config["hidden"]
            x = tokens(2, hidden, rank=comm.rank)
            recv = a2a.dispatch(ids([0, 3], [1, 2]), [x])
            out = recv.combine(numpy.ones((2, 4, hidden), numpy.float32))
            assert out.tolist() == [[2] * hidden] * 2
        with pytest.raises(fanfold.InvalidArgument, match="workspace_of"):
            make(comm, hidden=4096, workspace_of=first)
        first.close()
        second.close()

    spawn_threads(2, fn)


# -- FP8 on the wire -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_rows_that_travelled_as_fp8(framework: str, scale: str) -> None:
    import torch

    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = (numpy.arange(200, dtype=numpy.float32) - 100)[None]

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, **FP8, wire_scale=scale)
        give = torch.from_numpy if framework == "torch" else numpy.asarray
        recv = a2a.dispatch(ids([0, 3]), [give(x)])
        rows, scales = recv.payloads[0], recv.scales
        assert tuple(rows.shape) == (2, 8, 200)
        assert tuple(scales.shape) == (2, 8, 2)
        if framework == "torch":
            assert rows.dtype is torch.float8_e4m3fn
            assert scales.dtype is (torch.float32 if scale == "float32" else torch.uint8)
            rows, scales = rows.float().numpy(), scales.numpy()
        else:
            assert rows.dtype == ml_dtypes.float8_e4m3fn
            assert scales.dtype == (numpy.float32 if scale == "float32" else numpy.uint8)
            rows = rows.astype(numpy.float32)
        if scale == "ue8m0":
            scales = numpy.exp2(scales.astype(numpy.float32) - 127)
        first = comm.rank  # local expert 0 of rank 0 is 0, local expert 1 of rank 1 is 3
        wide = numpy.repeat(scales[first, :2], 128, axis=-1)[:, :200]
        numpy.testing.assert_allclose(rows[first, :2] * wide, [x[0]] * 2, rtol=1 / 8, atol=0.2)
        out = recv.combine(give(numpy.ones((2, 8, 200), numpy.float32)))
        assert out.dtype is (torch.float32 if framework == "torch" else numpy.dtype("float32"))
        assert out.tolist() == [[2] * 200]

    spawn_threads(2, fn)


def test_rows_that_travelled_as_they_are_have_no_scales() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        recv = make(comm).dispatch(ids([0, 3]), [tokens(1)])
        assert recv.scales is None
        recv.release()
        with pytest.raises(fanfold.InvalidState, match="has ended"):
            _ = recv.scales

    spawn_threads(2, fn)


# -- memory that grows ---------------------------------------------------------------------------


@pytest.mark.parametrize("holders", [{0, 1}, {1}], ids=["both", "one"])
def test_tensors_of_early_rounds_outlive_the_memory_that_grew(holders: set[int]) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy="high_throughput", layout="flat", max_tokens_per_rank=4096)
        held = []
        at_first = a2a.workspace_bytes
        for num_tokens in (1, 2, 64, 1, 4096, 300):
            topk_ids = numpy.tile(ids([0, 3]), (num_tokens, 1))
            recv = a2a.dispatch(topk_ids, [numpy.full((num_tokens, 8), num_tokens, "float32")])
            rows, counts = recv.payloads[0], recv.rank_counts
            assert rows.shape == (2 * num_tokens, 8)
            assert (rows == num_tokens).all()
            assert counts.tolist() == [num_tokens] * 2
            assert recv.payloads[0] is rows
            if comm.rank in holders:
                held.append((rows, counts))
            buffer = recv.combine_buffer()
            buffer[...] = rows
            assert (recv.combine(buffer) == 2 * num_tokens).all()
        assert a2a.workspace_bytes > at_first
        for rows, counts in held:  # stale by contract, but mapped
            assert rows.sum() >= 0
            rows[...] = 0
            assert counts.shape == (2,)
        a2a.close()
        assert all(rows.shape[0] for rows, _ in held)

    spawn_threads(2, fn)


def test_rows_beyond_what_memory_may_grow_to_are_an_error_on_every_rank() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(
            comm,
            strategy="high_throughput",
            layout="flat",
            max_tokens_per_rank=4096,
            test_knobs={"max_store_bytes": 32768} if comm.rank == 1 else None,
        )
        topk_ids = numpy.tile(ids([0, 3]), (4096, 1))
        with pytest.raises(fanfold.CapacityExceeded):
            a2a.dispatch(topk_ids, [numpy.ones((4096, 8), "float32")])
        works(a2a, comm.rank)

    spawn_threads(2, fn)
