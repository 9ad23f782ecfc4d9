# SPDX-License-Identifier: Apache-2.0
"""Tensors of NumPy, PyTorch and other DLPack producers; the import; lifetimes of views."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
from support.rounds import STRATEGIES, ids, make, tokens, works

import fanfold
from fanfold.testing import spawn_threads


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_import_loads_neither_torch_nor_numpy_nor_the_test_tools() -> None:
    program = (
        "import sys, fanfold;"
        "print({'torch', 'numpy', 'fanfold.testing', 'subprocess'} & set(sys.modules))"
    )
    assert python(program) == "set()\n"


def test_the_import_leaves_the_environment_and_starts_no_thread() -> None:
    program = (
        "import os, threading; before = dict(os.environ); fds = os.listdir('/proc/self/fd');"
        "import fanfold; import fanfold.interop_torch;"
        "print(before == dict(os.environ), len(os.listdir('/proc/self/task')),"
        " fds == os.listdir('/proc/self/fd'))"
    )
    assert python(program) == "True 1 True\n"


def test_the_test_tools_do_not_load_torch() -> None:
    assert python("import sys, fanfold.testing; print('torch' in sys.modules)") == "False\n"


def test_all_that_is_exported_exists() -> None:
    import fanfold.testing

    for module in (fanfold, fanfold.testing):
        assert all(hasattr(module, name) for name in module.__all__)
        assert sorted(module.__all__) == sorted(set(module.__all__))
    assert callable(fanfold.testing.oracle)
    assert callable(fanfold.testing.conformance)


def test_tensors_come_back_in_the_framework_of_the_payloads(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        x = tokens(1)
        for give, kind in ((torch.from_numpy, torch.Tensor), (numpy.asarray, numpy.ndarray)):
            recv = a2a.dispatch(give(ids([0, 3])), [give(x)])
            views = [*recv.payloads, recv.rank_counts, recv.expert_counts, recv.num_rows,
                     recv.offsets, recv.topk_ids, recv.source_rank, recv.source_token]  # fmt: skip
            assert all(isinstance(view, kind) for view in views)
            buffer = recv.combine_buffer()
            assert isinstance(buffer, kind)
            buffer[...] = 1
            out = recv.combine(buffer)
            assert isinstance(out, kind)
            assert out.tolist() == [[2] * 8]

    spawn_threads(2, fn)


def test_inputs_may_mix_frameworks(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(
            ids([0, 3]),
            [torch.from_numpy(tokens(1)), numpy.uint8([7])],
            topk_weights=torch.tensor([[0.5, 0.25]]),
        )
        assert all(isinstance(payload, torch.Tensor) for payload in recv.payloads)
        out = numpy.zeros((1, 8), numpy.float32)
        assert recv.combine(numpy.ones((2, 4, 8), numpy.float32), out=out) is out
        assert (out == 2).all()

    spawn_threads(2, fn)


TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_payloads_of_every_torch_dtype(strategy: str, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(3 * 5 * size, dtype=torch.uint8).reshape(3, -1)
    if dtype is torch.bool:
        raw = raw % 2
    x = raw.view(dtype)

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, extra_bytes_per_token=128)
        recv = a2a.dispatch(torch.tensor([[0, 1], [2, 3], [0, 3]]), [x])
        assert recv.payloads[0].dtype == dtype
        assert tuple(recv.payloads[0].shape) == (2, 4, 5)
        wanted = raw[[0, 2]] if comm.rank == 0 else raw[[1, 2]]
        for source in (0, 1):
            got = recv.payloads[0][source, :2].contiguous().view(torch.uint8)
            assert torch.equal(got, wanted)
        recv.release()

    spawn_threads(2, fn)


SUMMABLE = [
    (torch.bfloat16, "bfloat16"),
    (torch.float16, numpy.float16),
    (torch.float32, numpy.dtype("float32")),
]


@pytest.mark.parametrize(("torch_dtype", "named"), SUMMABLE, ids=str)
def test_dtypes_may_be_named_in_any_way(torch_dtype: torch.dtype, named: Any) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        x = torch.ones((1, 8), dtype=torch_dtype)
        topk_ids = torch.tensor([[0, 3]])
        for dtype in (torch_dtype, named, str(torch_dtype).removeprefix("torch.")):
            a2a = make(comm, dtype=dtype, combine_dtype=dtype)
            recv = a2a.dispatch(topk_ids, [x])
            buffer = recv.combine_buffer(dtype=dtype)
            assert buffer.dtype == torch_dtype
            buffer.fill_(1)
            out = recv.combine(buffer)
            assert out.dtype == torch_dtype
            assert out.tolist() == [[2] * 8]
            a2a.close()

    spawn_threads(2, fn)


def test_bfloat16_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, dtype=ml_dtypes.bfloat16)
        x = tokens(1).astype(ml_dtypes.bfloat16)
        recv = a2a.dispatch(ids([0, 3]), [x])
        assert recv.payloads[0].dtype == x.dtype
        assert recv.payloads[0][0, 0].tolist() == x[0].tolist()
        out = recv.combine(numpy.ones((2, 4, 8), ml_dtypes.bfloat16))
        assert out.dtype == x.dtype
        assert out.tolist() == [[2] * 8]

    spawn_threads(2, fn)


class Producer:
    """A DLPack producer of no known framework."""

    def __init__(self, array: numpy.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_any_dlpack_producer_may_give_and_any_consumer_take(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        x = tokens(1)
        recv = a2a.dispatch(Producer(ids([0, 3])), [Producer(x)])
        for consumer in (numpy.from_dlpack, torch.from_dlpack):
            rows = consumer(recv.payloads[0])
            assert rows[0, 0].tolist() == x[0].tolist()
        y = numpy.ones((2, 4, 8), numpy.float32)
        out = numpy.zeros((1, 8), numpy.float32)
        recv.combine(Producer(y), out=out)
        assert (out == 2).all()

    spawn_threads(2, fn)


def test_tensors_that_need_gradients_or_are_views_are_accepted(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        x = torch.nn.Parameter(torch.ones((1, 8)))
        recv = a2a.dispatch(torch.tensor([[0, 3]]), [x.detach()])
        rows = torch.ones((4, 2, 8)).transpose(0, 1)  # not contiguous: the caller must say so
        with pytest.raises(fanfold.InvalidArgument, match="y: expected a contiguous tensor"):
            recv.combine(rows)
        assert recv.combine(rows.contiguous()).tolist() == [[2] * 8]

    spawn_threads(2, fn)


def test_views_share_memory_and_are_reused(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        addresses = set()
        for _ in range(5):
            recv = a2a.dispatch(torch.tensor([[0, 3]]), [torch.ones((1, 8))])
            first, again = recv.payloads[0], recv.payloads[0]
            assert first.data_ptr() == again.data_ptr()
            buffer = recv.combine_buffer()
            addresses.add((first.data_ptr(), buffer.data_ptr()))
            assert first.data_ptr() % 128 == 0 or strategy == "broadcast"
            recv.combine(buffer)
        assert len(addresses) == 1

    spawn_threads(2, fn)


def test_a_view_keeps_its_memory_past_close(strategy: str) -> None:
    kept: list[Any] = []

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(torch.tensor([[0, 3]]), [torch.full((1, 8), 7.0 + comm.rank)])
        kept.append((recv.payloads[0], recv.rank_counts, recv.combine_buffer()))
        comm.barrier()
        recv.release()
        a2a.close()
        del recv, a2a

    spawn_threads(2, fn)
    gc.collect()
    for rows, counts, buffer in kept:
        assert counts.tolist() == [1, 1]
        assert rows[:, 0, 0].tolist() == [7, 8]
        buffer.fill_(3)
        assert buffer.sum() == 3 * 2 * 4 * 8


def test_received_may_outlive_its_exchange(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        def dispatched() -> fanfold.Received:
            return make(comm, strategy=strategy).dispatch(ids([0, 3]), [tokens(1)])

        recv = dispatched()
        gc.collect()
        out = recv.combine(numpy.ones((2, 4, 8), numpy.float32))
        assert numpy.asarray(out).tolist() == [[2] * 8]
        comm.barrier()

    spawn_threads(2, fn)


def test_the_gil_is_free_while_a_call_waits(strategy: str) -> None:
    """Ranks as threads only work this way; here a third thread counts meanwhile."""
    import threading
    import time

    def fn(comm: fanfold.Communicator) -> int:
        a2a = make(comm, strategy=strategy)
        count, stop = 0, threading.Event()

        def counter() -> None:
            nonlocal count
            while not stop.is_set():
                count += 1
                time.sleep(0.001)

        if comm.rank == 0:
            thread = threading.Thread(target=counter)
            thread.start()
            a2a.dispatch(ids([0, 3]), [tokens(1)]).release()
            stop.set()
            thread.join()
            return count
        time.sleep(0.2)
        a2a.dispatch(ids([0, 3]), [tokens(1)]).release()
        return 20

    assert min(spawn_threads(2, fn)) >= 20


def test_with_closes_an_exchange_and_a_communicator() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with comm:
            with make(comm) as a2a:
                works(a2a, comm.rank)
            assert a2a.is_closed
        assert comm.is_closed

    spawn_threads(2, fn)


def test_errors_are_picklable_and_have_python_bases() -> None:
    import pickle

    for error, base in (
        (fanfold.InvalidArgument("x: expected 1, got 2"), ValueError),
        (fanfold.InvalidState("closed"), fanfold.Error),
        (fanfold.Unsupported("no"), fanfold.Error),
        (fanfold.SystemFailure("no"), OSError),
        (fanfold.PeerTimeout("late"), TimeoutError),
        (fanfold.PeerAborted("stop"), fanfold.Error),
        (fanfold.PeerLost("gone"), ConnectionError),
        (fanfold.CapacityExceeded("full"), fanfold.Error),
        (fanfold.CudaFailure("failed"), fanfold.Error),
    ):
        assert isinstance(error, base)
        assert isinstance(error, fanfold.Error)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
