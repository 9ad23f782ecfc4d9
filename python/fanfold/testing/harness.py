# SPDX-License-Identifier: Apache-2.0
"""What the conformance checks are written with: random rounds, and comparison with the oracle.

Every rank draws the inputs of *all* ranks from the same seed, so each can ask the oracle what it
must receive, and none needs another channel than the one under test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy

import fanfold
from fanfold.testing.floats import STORED, Array, same_bits
from fanfold.testing.fp8 import same_nan
from fanfold.testing.trials import Case, Setup, Trial, draw_trial


class Tensors(Protocol):
    """Makes tensors of one framework on one device from stored arrays, and the way back.

    Attributes:
        device: where the tensors lie, as `fanfold.AllToAll` is told.
        stream: what its calls are given: a rank's own on a GPU, None on the CPU.
    """

    name: str
    device: str
    stream: Any

    def for_rank(self, rank: int) -> Tensors:
        """Return what one rank uses; called on the rank's thread."""

    def to_tensor(self, stored: Array, dtype: str) -> Any:
        """Return a tensor of the framework; bfloat16 is stored as uint16."""

    def to_array(self, tensor: Any) -> Array:
        """Return the stored values of a tensor, once the work on the stream has ended."""

    def write(self, tensor: Any, stored: Array) -> None:
        """Write stored values into a tensor, once the work on the stream has ended."""

    def wait(self) -> None:
        """Wait for the work on the stream."""


class NumpyTensors:
    """NumPy arrays; bfloat16 as `ml_dtypes` has it."""

    name = "numpy"
    device = "cpu"
    stream = None

    def for_rank(self, rank: int) -> NumpyTensors:
        """Return itself: there is no state."""
        del rank
        return self

    def to_tensor(self, stored: Array, dtype: str) -> Any:
        """Return the array itself, seen as `dtype`."""
        if dtype != "bfloat16":
            return stored
        import ml_dtypes

        return stored.view(ml_dtypes.bfloat16)

    def to_array(self, tensor: Any) -> Array:
        """Return the array itself; bfloat16 as uint16, FP8 as uint8."""
        array = numpy.asarray(tensor)
        if array.dtype.name == "bfloat16":
            return array.view(numpy.uint16)
        return array.view(numpy.uint8) if array.dtype.name.startswith("float8") else array

    def write(self, tensor: Any, stored: Array) -> None:
        """Copy the values."""
        self.to_array(tensor)[...] = stored

    def wait(self) -> None:
        """Return: calls on the CPU have ended when they return."""


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError with `message` unless `condition` holds."""
    if not condition:
        raise AssertionError(message)


def expect_equal(what: str, got: Any, wanted: Any) -> None:
    """Compare two arrays or values, and name the first place where they differ."""
    got, wanted = numpy.asarray(got), numpy.asarray(wanted)
    expect(
        got.shape == wanted.shape and got.dtype == wanted.dtype,
        f"{what}: expected {wanted.dtype} {wanted.shape}, got {got.dtype} {got.shape}",
    )
    if got.tobytes() != wanted.tobytes():
        places = numpy.argwhere(got != wanted)
        place = tuple(int(i) for i in places[0]) if len(places) else ()
        raise AssertionError(f"{what}{list(place)}: expected {wanted[place]}, got {got[place]}")


@dataclass
class Harness:
    """One rank's side of a check."""

    comm: fanfold.Communicator
    case: Case
    tensors: Tensors = field(default_factory=NumpyTensors)
    seed: int = 0
    exchanges: list[fanfold.AllToAll] = field(default_factory=list, repr=False)  # that are open

    def __post_init__(self) -> None:
        self.tensors = self.tensors.for_rank(self.rank)

    @property
    def on_stream(self) -> dict[str, Any]:
        """The argument `stream` of calls that begin a round."""
        return {} if self.tensors.stream is None else {"stream": self.tensors.stream}

    @property
    def rank(self) -> int:
        """This rank."""
        return int(self.comm.rank)

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.comm.num_ranks)

    @contextmanager
    def create(self, setup: Setup) -> Iterator[fanfold.AllToAll]:
        """Make the AllToAll of a set-up; closes it at the end, unless the check failed."""
        keywords = setup.keywords(self.case)
        a2a = fanfold.AllToAll(self.comm, device=self.tensors.device, **keywords)
        self.exchanges.append(a2a)
        yield a2a
        self.exchanges.remove(a2a)
        a2a.close()

    def trial(self, setup: Setup, seed: int = 0, **how: Any) -> Trial:
        """Draw one round, as `draw_trial` says; equal on every rank for an equal seed."""
        return draw_trial(self.case, setup, self.num_ranks, (self.seed, seed), **how)

    def arguments(self, trial: Trial, id_dtype: str = "int32", **extra: Any) -> dict[str, Any]:
        """Return the arguments of this rank's dispatch."""
        oracle = trial.oracle
        ids = oracle.topk_ids[self.rank].astype(id_dtype)
        arguments: dict[str, Any] = {
            "topk_ids": self.tensors.to_tensor(ids, id_dtype),
            "payloads": [
                self.tensors.to_tensor(payload, kind.dtype)
                for payload, kind in zip(oracle.payloads[self.rank], trial.kinds, strict=True)
            ],
            "round_max_tokens": oracle.round_max_tokens,
        }
        if oracle.topk_weights is not None:
            weights = oracle.topk_weights[self.rank]
            arguments["topk_weights"] = self.tensors.to_tensor(weights, "float32")
        if oracle.invalid_expert_id != -1:
            arguments["invalid_expert_id"] = oracle.invalid_expert_id
        return {**arguments, **self.on_stream, **extra}

    def dispatch(self, a2a: fanfold.AllToAll, trial: Trial, **extra: Any) -> fanfold.Received:
        """Dispatch this rank's part of a trial and compare everything with the oracle."""
        recv = a2a.dispatch(**self.arguments(trial, **extra))
        self.check_received(recv, trial)
        return recv

    def check_received(self, recv: fanfold.Received, trial: Trial) -> None:
        """Compare what came with what the oracle says."""
        recv.host_counts()  # raises what went wrong on a GPU
        array = self.tensors.to_array
        wanted = trial.oracle.received(self.rank)
        expect_equal("rank_counts", array(recv.rank_counts), wanted.rank_counts)
        expect_equal("expert_counts", array(recv.expert_counts), wanted.expert_counts)
        expect_equal("offsets", array(recv.offsets), wanted.offsets)
        expect_equal("num_rows", array(recv.num_rows), numpy.int32([wanted.num_rows]))
        expect_equal("source_rank", array(recv.source_rank), wanted.source_rank)
        expect_equal("source_token", array(recv.source_token), wanted.source_token)
        self._check_payloads(recv, trial, wanted)
        if wanted.scales is None:
            expect(recv.scales is None, "scales: expected None without a wire")
        else:
            scales = array(recv.scales)
            expect(scales.shape == wanted.scales.shape, f"scales: {scales.shape}")
            expect_equal("scales", scales[wanted.is_token], wanted.scales[wanted.is_token])
        if wanted.topk_ids is None:
            expect(recv.topk_ids is None, "topk_ids: expected None in this layout")
        else:
            expect_equal("topk_ids", array(recv.topk_ids), wanted.topk_ids)
        if wanted.topk_weights is None:
            expect(recv.topk_weights is None, "topk_weights: expected None")
        else:
            weights = array(recv.topk_weights)
            expect(weights.shape == wanted.topk_weights.shape, f"topk_weights: {weights.shape}")
            here = wanted.is_token | wanted.is_zero
            expect_equal("topk_weights", weights[here], wanted.topk_weights[here])

    def _check_payloads(self, recv: fanfold.Received, trial: Trial, wanted: Any) -> None:
        got = [self.tensors.to_array(payload) for payload in recv.payloads]
        expect(len(got) == len(wanted.payloads), f"{len(got)} payloads came")
        for index, (mine, its) in enumerate(zip(got, wanted.payloads, strict=True)):
            name = f"payloads[{index}]"
            expect(
                mine.shape == its.shape and mine.dtype == its.dtype,
                f"{name}: expected {its.dtype} {its.shape}, got {mine.dtype} {mine.shape}",
            )
            here = wanted.is_token | wanted.is_zero
            rows, wanted_rows = _as_bytes(mine[here]), _as_bytes(its[here])
            if wanted.scales is not None and index == 0:
                rows, wanted_rows = same_nan(rows), same_nan(wanted_rows)
            expect_equal(name, rows, wanted_rows)

    def experts(
        self,
        a2a: fanfold.AllToAll,
        handle: Any,
        trial: Trial,
        *,
        hidden: int | None = None,
        y_dtype: str | None = None,
        zero_copy: bool = True,
        variant: int = 0,
    ) -> Any:
        """Return this rank's rows of the experts, in the combine buffer if `zero_copy`.

        Where rows go home as they lie that buffer holds `combine_dtype` only; others are staged.
        """
        hidden = hidden or trial.setup.hidden
        y_dtype = y_dtype or trial.setup.combine_type
        if self.case.layout in ("rank_major", "flat") and y_dtype != trial.setup.combine_type:
            zero_copy = False
        mine = trial.ys(hidden, y_dtype, variant)[self.rank]
        if not zero_copy:
            return self.tensors.to_tensor(mine, y_dtype)
        buffer = a2a.combine_buffer(handle, hidden=hidden, dtype=y_dtype)
        shape = tuple(buffer.shape)
        expect(shape == mine.shape, f"combine_buffer: {shape} is not {mine.shape}")
        self.tensors.write(buffer, mine)
        return buffer

    def out(self, trial: Trial, dtype: str, hidden: int | None = None) -> Any:
        """Return a result tensor full of ones."""
        shape = (trial.oracle.num_tokens[self.rank], hidden or trial.setup.hidden)
        return self.tensors.to_tensor(numpy.ones(shape, STORED[dtype]), dtype)

    def check_result(
        self,
        out: Any,
        trial: Trial,
        *,
        hidden: int | None = None,
        y_dtype: str | None = None,
        out_dtype: str | None = None,
        topk_weights: Array | None = None,
        variant: int = 0,
    ) -> None:
        """Compare a combine's result with the oracle, bit for bit."""
        y_dtype = y_dtype or trial.setup.combine_type
        out_dtype = out_dtype or trial.setup.dtype
        ys = trial.ys(hidden or trial.setup.hidden, y_dtype, variant)
        wanted = trial.oracle.combine(
            self.rank, ys, y_dtype=y_dtype, out_dtype=out_dtype, topk_weights=topk_weights
        )
        got = self.tensors.to_array(out)
        if not same_bits(got, wanted, out_dtype):
            for a2a in self.exchanges:
                a2a.check()  # on a GPU something may have gone wrong before
            expect_equal(f"out of {y_dtype} rows", got, wanted)
            raise AssertionError("out: differs")

    def exchange(self, a2a: fanfold.AllToAll, trial: Trial, **options: Any) -> None:
        """Run one whole round and compare all of it.

        Args:
            options: `hidden`, `y_dtype`, `out_dtype`, `zero_copy`; others go to dispatch.
        """
        names = ("hidden", "y_dtype", "zero_copy")
        given = {name: options.pop(name) for name in names if name in options}
        out_dtype = options.pop("out_dtype", trial.setup.dtype)
        recv = self.dispatch(a2a, trial, **options)
        y = self.experts(a2a, recv.handle, trial, **given)
        out = self.out(trial, out_dtype, given.get("hidden"))
        result = a2a.combine(y, recv.handle, out=out)
        expect(result is out, "combine: expected the tensor given as out")
        given.pop("zero_copy", None)
        self.check_result(out, trial, out_dtype=out_dtype, **given)

    def jitter(self, chance: random.Random, longest_s: float = 0.0008) -> None:
        """Sleep a random while, to vary who comes first."""
        if chance.random() < 0.5:
            time.sleep(chance.random() * longest_s)


def _as_bytes(rows: Array) -> Array:
    """Return rows as ``[n, row bytes]`` uint8."""
    rows = numpy.ascontiguousarray(rows)
    return rows.reshape(len(rows), -1).view(numpy.uint8) if rows.size else numpy.uint8([])
