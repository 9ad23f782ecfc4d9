# SPDX-License-Identifier: Apache-2.0
"""Ranks that exchange rows on the simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy

import fanfold
from fanfold import _core
from fanfold.testing import SimulatedTensors, spawn_threads
from support.rounds import DEFAULTS, identity_experts, random_ids, tokens


@contextlib.contextmanager
def capture(stream: Any) -> Iterator[list[Any]]:
    """Capture what the block enqueues on a stream; the list then holds the graph.

    A capture that CUDA gave up, or that an exception ends, makes none.
    """
    made: list[Any] = []
    _core.simulator.begin_capture(stream)
    try:
        yield made
    finally:
        with contextlib.suppress(fanfold.CudaFailure):
            made.append(_core.simulator.end_capture(stream))


NCCL_DOUBLE = Path(_core.__file__).parents[2] / "tests_cpp" / "sim" / "libnccl_double.so"


def over_nccl(comm: fanfold.Communicator, device: str) -> fanfold.Communicator:
    """Make the communicator of a rank that has collectives on its device."""
    return fanfold.Communicator.from_nccl(comm, device=device, library=str(NCCL_DOUBLE))


class Rank:
    """One rank: its communicator, and NumPy arrays on its device with a stream."""

    def __init__(self, comm: fanfold.Communicator, num_devices: int) -> None:
        self.comm = comm
        self.rank = int(comm.rank)
        self.num_ranks = int(comm.num_ranks)
        self.tensors = SimulatedTensors(num_devices).for_rank(self.rank)
        self.device = self.tensors.device
        self.stream: Any = self.tensors.stream

    def make(self, **config: Any) -> fanfold.AllToAll:
        """Make an AllToAll as `support.rounds.make` does, on this rank's device."""
        return fanfold.AllToAll(self.comm, **{**DEFAULTS, "device": self.device, **config})

    def put(self, array: numpy.ndarray) -> Any:
        """Return a copy on the device."""
        kind = array.dtype.name
        return self.tensors.to_tensor(
            array.view(numpy.uint16) if kind == "bfloat16" else array, kind
        )

    def get(self, tensor: Any) -> numpy.ndarray:
        """Return a copy of the values once the stream has ended."""
        self.wait()
        return numpy.array(tensor)

    def empty(self, *shape: int, dtype: str = "float32") -> Any:
        return self.tensors.empty(shape, dtype)

    def wait(self) -> None:
        self.tensors.wait()

    def dispatch(
        self,
        a2a: fanfold.AllToAll,
        topk_ids: numpy.ndarray,
        x: numpy.ndarray,
        topk_weights: numpy.ndarray | None = None,
        **more: Any,
    ) -> fanfold.Received:
        """Dispatch copies of arrays on this rank's stream."""
        weights = None if topk_weights is None else self.put(topk_weights)
        more.setdefault("stream", self.stream)
        return a2a.dispatch(self.put(topk_ids), [self.put(x)], topk_weights=weights, **more)

    def finish(self, a2a: fanfold.AllToAll, recv: fanfold.Received, x: numpy.ndarray) -> Any:
        """Combine what experts that change nothing give; returns `out` on the device."""
        self.wait()
        y = self.put(identity_experts(recv, a2a))
        return a2a.combine(y, recv.handle, out=self.empty(*x.shape))

    def echo(
        self,
        a2a: fanfold.AllToAll,
        topk_ids: numpy.ndarray,
        x: numpy.ndarray,
        topk_weights: numpy.ndarray | None = None,
        **more: Any,
    ) -> numpy.ndarray:
        """Run one round of experts that change nothing; returns the result."""
        return self.get(self.finish(a2a, self.dispatch(a2a, topk_ids, x, topk_weights, **more), x))

    def works(self, a2a: fanfold.AllToAll, num_rounds: int = 2) -> None:
        """Run rounds of random distinct ids and check the results; T differs between ranks."""
        top_k, num_experts = int(a2a.metainfo["top_k"]), int(a2a.metainfo["num_experts"])
        limit = int(a2a.metainfo["max_tokens_per_rank"])
        for step in range(num_rounds):
            num_tokens = (self.rank + step) % (limit + 1)
            topk_ids = random_ids(100 * step + self.rank, num_tokens, top_k, num_experts)
            x = tokens(num_tokens, rank=self.rank)
            out = self.echo(a2a, topk_ids, x)
            if not numpy.array_equal(out, x * top_k):
                a2a.check()  # says it better
            numpy.testing.assert_array_equal(out, x * top_k)


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    num_devices: int | None = None,
    **how: Any,
) -> list[Any]:
    """Run `fn(rank, *args)` on one thread per rank, each with a device of its own by default.

    `how` configures the devices. Each holds few blocks: simulated ones are slow. One that ranks
    share holds one per rank and one more: each rank may have a block that waits.
    """
    devices = num_ranks if num_devices is None else num_devices
    blocks = 2 if devices >= num_ranks else num_ranks + 1
    how = {"resident_blocks": blocks, "host_threads": num_ranks, **how}
    _core.simulator.configure(devices=devices, **how)

    def body(comm: fanfold.Communicator) -> Any:
        return fn(Rank(comm, devices), *args)

    return spawn_threads(num_ranks, body)
