# SPDX-License-Identifier: Apache-2.0
"""Calls of an exchange on the simulated device: their streams, devices and tensors."""

from __future__ import annotations

import gc
from typing import Any

import numpy
import pytest
import torch
from support.cuda_tensor import Framework, Producer
from support.gpu import Rank, run_ranks
from support.rounds import DEFAULTS, ids, random_ids, tokens, weights

import fanfold

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from fanfold import _core

InvalidArgument = fanfold.InvalidArgument
IDS = ids([0, 3], [2, -1], [1, 2])


class WithProtocol:
    """A stream as the ``__cuda_stream__`` protocol has it."""

    def __init__(self, stream: Any) -> None:
        self.address = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.address)


# -- streams -------------------------------------------------------------------------------------


def test_a_stream_may_be_an_address_or_an_object() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3, rank=rank.rank)
        kinds = [rank.stream, int(rank.stream.cuda_stream), WithProtocol(rank.stream)]
        for stream in kinds:
            recv = rank.dispatch(a2a, IDS, x, stream=stream)
            rank.wait()
            out = rank.empty(3, 8)
            y = rank.put(numpy.array(recv.payloads[0]))
            assert recv.combine(y, out=out, stream=stream) is out
            hosts = numpy.float32([[2], [1], [2]]) if rank.num_ranks == 2 else numpy.float32([1])
            numpy.testing.assert_array_equal(rank.get(out), x * hosts)
        a2a.close()

    run_ranks(2, fn)


def test_zero_is_the_legacy_default_stream() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3)
        recv = rank.dispatch(a2a, IDS, x, stream=0)
        _core.simulator.synchronize()
        y = rank.put(numpy.array(recv.payloads[0]))
        out = recv.combine(y, out=rank.empty(3, 8))
        _core.simulator.synchronize()
        numpy.testing.assert_array_equal(numpy.array(out), x)

    run_ranks(1, fn)


@pytest.mark.parametrize("stream", ["0", 1.5, True, object(), -1, 2**70])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3)
        expected = "stream: expected the address of a cudaStream_t, or an object with cuda_stream"
        with pytest.raises(InvalidArgument, match=expected):
            rank.dispatch(a2a, IDS, x, stream=stream)
        recv = rank.dispatch(a2a, IDS, x)
        y, out = rank.put(numpy.zeros((1, 4, 8), "float32")), rank.empty(3, 8)
        for call in (recv.release, lambda stream: recv.combine(y, out=out, stream=stream)):
            with pytest.raises(InvalidArgument, match=expected):
                call(stream=stream)
        recv.release()

    run_ranks(1, fn)


def test_arrays_of_numpy_need_a_stream_for_what_begins_a_round() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3, rank=rank.rank)
        for call in (a2a.dispatch, a2a.dispatch_send):
            with pytest.raises(InvalidArgument, match="stream: expected one, since rows move on a"):
                call(rank.put(IDS), [rank.put(x)])
        counts = rank.put(numpy.int32([1]))
        with pytest.raises(InvalidArgument, match="stream: expected one"):
            a2a.sanitize(rank.put(IDS), counts, out=rank.empty(3, 2, dtype="int32"))
        rank.works(a2a)  # the round goes on; combine takes the stream of dispatch

    run_ranks(2, fn)


def test_the_cpu_takes_no_stream() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(device="cpu")
        with pytest.raises(InvalidArgument, match="stream: expected None for CPU tensors"):
            a2a.dispatch(IDS, [tokens(3)], stream=rank.stream)

    run_ranks(1, fn)


def test_a_framework_that_tells_its_stream_need_not_be_asked() -> None:
    """As torch does: one interface gives views of tensors and the current stream."""

    def fn(rank: Rank) -> None:
        a2a = rank.make()
        framework = Framework()
        framework.current = rank.stream.cuda_stream
        x = tokens(3, rank=rank.rank)
        index = int(rank.device.partition(":")[2])
        topk_ids, rows = rank.put(IDS), rank.put(x)
        recv = a2a.dispatch(framework.tensor(topk_ids, index), [framework.tensor(rows, index)])
        rank.wait()
        y = rank.put(numpy.array(numpy.from_dlpack(recv.payloads[0])))
        out = rank.empty(3, 8)
        other = _core.simulator.stream(index)
        framework.current = other.cuda_stream
        recv.combine(framework.tensor(y, index), out=framework.tensor(out, index))
        rank.wait()
        other.synchronize()
        numpy.testing.assert_array_equal(numpy.array(out), x * numpy.float32([[2], [1], [2]]))
        assert set(framework.devices) == {index}

    run_ranks(2, fn)


def test_producers_are_told_that_no_stream_needs_to_wait() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3)
        given = [Producer(rank.put(IDS)), Producer(rank.put(x))]
        recv = a2a.dispatch(given[0], given[1:], stream=rank.stream)
        rank.wait()
        y = Producer(rank.put(numpy.array(numpy.from_dlpack(recv.payloads[0]))))
        out = rank.empty(3, 8)
        recv.combine(y, out=out)
        numpy.testing.assert_array_equal(rank.get(out), x)
        for producer in (*given, y):
            assert producer.requests == [{"stream": -1}]

    run_ranks(1, fn)


def test_the_halves_of_a_round_may_be_on_different_streams() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        x = tokens(3, rank=rank.rank)
        streams = [_core.simulator.stream(rank.rank) for _ in range(3)]
        topk_ids, rows = rank.put(IDS), rank.put(x)
        handle = a2a.dispatch_send(topk_ids, [rows], stream=rank.stream)
        rank.stream.synchronize()
        recv = a2a.dispatch_recv(handle, stream=streams[0])
        streams[0].synchronize()
        y = rank.put(numpy.array(recv.payloads[0]))
        a2a.combine_send(y, handle, stream=streams[1])
        streams[1].synchronize()
        out = rank.empty(3, 8)
        a2a.combine_recv(handle, out, stream=streams[2])
        streams[2].synchronize()
        numpy.testing.assert_array_equal(numpy.array(out), x * numpy.float32([[2], [1], [2]]))
        recv = rank.dispatch(a2a, IDS, x)
        rank.wait()
        recv.release(stream=streams[0])
        streams[0].synchronize()
        rank.works(a2a)

    run_ranks(2, fn)


# -- devices -------------------------------------------------------------------------------------


def test_the_device_is_part_of_the_configuration() -> None:
    def fn(rank: Rank) -> None:
        for device in ("cuda", f"cuda:{rank.rank}", torch.device("cuda", rank.rank)):
            a2a = rank.make(device=device)
            wanted = "cuda:0" if device == "cuda" else f"cuda:{rank.rank}"
            assert a2a.config["device"] == wanted
            config = {**DEFAULTS, "device": device}
            needed = fanfold.AllToAll.required_bytes(num_ranks=rank.num_ranks, **config)
            assert needed == a2a.workspace_bytes
            assert a2a.capabilities.graph_safe
            a2a.close()

    run_ranks(2, fn)


def test_auto_takes_what_a_gpu_has() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make(strategy="auto")
        assert a2a.choice().startswith("one_sided")
        assert a2a.config["check_ids"] == "drop"
        rank.works(a2a)

    run_ranks(2, fn)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"strategy": "broadcast"}, fanfold.Unsupported),
        ({"strategy": "two_sided"}, fanfold.Unsupported),
        ({"layout": "flat"}, fanfold.Unsupported),
        ({"layout": "flat_by_expert"}, fanfold.Unsupported),
        ({"top_k": 129}, InvalidArgument),
        ({"check_ids": "raise"}, InvalidArgument),
        ({"device": "cuda:5"}, fanfold.Unsupported),
        ({"device": "cudaq"}, InvalidArgument),
        ({"device": "cuda:"}, InvalidArgument),
        ({"device": "cuda:-1"}, InvalidArgument),
        ({"device": "xpu"}, InvalidArgument),
    ],
)
def test_what_a_gpu_has_not_is_refused_at_creation(
    config: dict[str, Any], error: type[Exception]
) -> None:
    def fn(rank: Rank) -> None:
        (field,) = config
        with pytest.raises(error, match=field) as caught:
            rank.make(**config)
        assert str(config[field]).removeprefix("cuda:") in str(caught.value)
        rank.works(rank.make())

    run_ranks(2, fn)


def test_ranks_on_a_gpu_and_on_the_cpu_do_not_mix() -> None:
    def fn(rank: Rank) -> None:
        with pytest.raises(InvalidArgument, match="device"):
            rank.make(device="cpu" if rank.rank else "cuda")

    run_ranks(2, fn)


def test_an_allocator_of_the_device_gives_the_memory() -> None:
    def fn(rank: Rank) -> None:
        allocator = fanfold.Allocator(rank.comm, device=rank.device)
        a2a = rank.make(allocator=allocator)
        assert allocator.stats.in_use > 0
        rank.works(a2a)
        a2a.close()
        del a2a
        gc.collect()
        rank.works(rank.make(allocator=allocator))
        with pytest.raises(InvalidArgument, match="allocator"):
            rank.make(allocator=fanfold.Allocator(rank.comm))

    run_ranks(2, fn)


# -- tensors -------------------------------------------------------------------------------------


def test_tensors_that_lie_elsewhere_are_refused_by_name() -> None:
    """Host memory, and another device's; the round goes on with the right ones."""

    def fn(rank: Rank) -> None:
        a2a = rank.make(weighting="origin", layout="expert_major")
        x, w = tokens(3), weights([1, 1], [1, 1], [1, 1])
        good = {"topk_ids": rank.put(IDS), "payloads": [rank.put(x)], "topk_weights": rank.put(w)}

        def other(array: numpy.ndarray) -> Any:
            foreign = _core.simulator.empty(array.nbytes, 1).view(array.dtype)
            return foreign.reshape(array.shape)

        for elsewhere in (numpy.array, other):
            bad: list[dict[str, Any]] = [
                {"topk_ids": elsewhere(IDS)},
                {"payloads": [elsewhere(x)]},
                {"topk_weights": elsewhere(w)},
                {"num_tokens": elsewhere(numpy.int32([2]))},
            ]
            for change in bad:
                (name,) = change
                with pytest.raises(InvalidArgument, match=rf"{name}.*cuda:0"):
                    a2a.dispatch(**{**good, **change}, stream=rank.stream)
            recv = a2a.dispatch(**good, stream=rank.stream)
            y = rank.put(numpy.zeros((4, 4, 8), "float32"))
            out = rank.empty(3, 8)
            with pytest.raises(InvalidArgument, match=r"y.*cuda:0"):
                recv.combine(elsewhere(numpy.zeros((4, 4, 8), "float32")), out=out)
            with pytest.raises(InvalidArgument, match=r"out.*cuda:0"):
                recv.combine(y, out=elsewhere(x))
            with pytest.raises(InvalidArgument, match=r"topk_weights.*cuda:0"):
                recv.combine(y, out=out, topk_weights=elsewhere(w))
            recv.combine(y, out=out)
            rank.wait()

    _core.simulator.configure(devices=2)
    run_ranks(1, fn, num_devices=2)


def test_a_stream_of_another_device_is_refused() -> None:
    def fn(rank: Rank) -> None:
        a2a = rank.make()
        with pytest.raises(InvalidArgument, match="stream"):
            rank.dispatch(a2a, IDS, tokens(3), stream=_core.simulator.stream(1))
        rank.works(a2a)

    run_ranks(1, fn, num_devices=2)


def test_a_result_is_made_for_torch_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def fn(rank: Rank) -> None:
        def empty(sizes: Any, *, dtype: Any, device: Any) -> Any:
            asked.append((list(sizes), dtype, device))
            return torch.from_numpy(rank.empty(*sizes))

        monkeypatch.setattr(torch, "empty", empty)
        a2a = rank.make()
        x = tokens(3)
        recv = rank.dispatch(a2a, IDS, x)
        with pytest.raises(InvalidArgument, match="out: expected a tensor on the GPU, got None"):
            recv.combine(recv.combine_buffer())
        recv.release()
        given = torch.from_numpy(rank.put(IDS)), torch.from_numpy(rank.put(x))
        recv = a2a.dispatch(given[0], [given[1]], stream=rank.stream)
        rank.wait()
        assert isinstance(recv.payloads[0], torch.Tensor)
        recv.combine_buffer().copy_(recv.payloads[0])
        out = recv.combine(recv.combine_buffer())
        rank.wait()
        numpy.testing.assert_array_equal(out.numpy(), x)
        counts = torch.from_numpy(rank.put(numpy.int32([2])))
        cleaned = a2a.sanitize(given[0], counts, -1, stream=rank.stream)
        rank.wait()
        assert cleaned.tolist() == [[0, 3], [2, -1], [-1, -1]]
        assert asked == [([3, 8], torch.float32, "cuda:0"), ([3, 2], torch.int32, "cuda:0")]

    # Ids of int32 come out of an array of float32's bytes: they are 4 bytes, too.
    def keep_dtype(rank: Rank) -> None:
        make = rank.empty
        rank.empty = lambda *shape, dtype="float32": make(  # type: ignore[method-assign]
            *shape, dtype="int32" if shape == (3, 2) else dtype
        )
        fn(rank)

    run_ranks(1, keep_dtype)


def test_rows_without_tokens_may_be_anywhere() -> None:
    """An empty array has no memory on any device."""

    def fn(rank: Rank) -> None:
        a2a = rank.make()
        num_tokens = 2 * rank.rank
        topk_ids, x = random_ids(1, num_tokens), tokens(num_tokens)
        given: Any = (topk_ids, x) if num_tokens == 0 else (rank.put(topk_ids), rank.put(x))
        recv = a2a.dispatch(given[0], [given[1]], stream=rank.stream)
        out = rank.finish(a2a, recv, x)
        numpy.testing.assert_array_equal(rank.get(out), x * 2)

    run_ranks(2, fn)
