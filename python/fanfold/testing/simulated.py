# SPDX-License-Identifier: Apache-2.0
"""Tensors of the simulated device, for builds that have it (preset sim)."""

from __future__ import annotations

from typing import Any

import numpy

from fanfold import _core
from fanfold.errors import Unsupported
from fanfold.testing.floats import Array
from fanfold.testing.harness import NumpyTensors


def simulator() -> Any:
    """Return the module that steers the simulated device.

    Raises:
        Unsupported: this build is for no simulated device.
    """
    module = getattr(_core, "simulator", None)
    if module is None:
        raise Unsupported("the simulated device: expected a build of preset sim")
    return module


class SimulatedTensors:
    """NumPy arrays in memory of simulated devices; rank r works on device r mod `num_devices`.

    Arrays stay alive until their stream has been waited for. Before the ranks start, and again
    after a device has failed, call
    ``fanfold._core.simulator.configure(devices=num_devices, host_threads=num_ranks)``.
    """

    name = "simulated"

    def __init__(self, num_devices: int = 1, index: int = 0) -> None:
        self.num_devices = num_devices
        self.index = index
        self.device = f"cuda:{index}"
        self.stream: Any = simulator().stream(index)
        self._numpy = NumpyTensors()
        self._held: list[Any] = []

    def for_rank(self, rank: int) -> SimulatedTensors:
        """Return tensors of the rank's device with a new stream."""
        return SimulatedTensors(self.num_devices, rank % self.num_devices)

    def empty(self, shape: Any, dtype: str) -> Any:
        """Return an array of unspecified bytes; dtype as NumPy or ml_dtypes has it."""
        if dtype == "bfloat16":
            import ml_dtypes

            kind = numpy.dtype(ml_dtypes.bfloat16)
        else:
            kind = numpy.dtype(dtype)
        num_bytes = int(numpy.prod(shape)) * kind.itemsize
        array = simulator().empty(num_bytes, self.index).view(kind).reshape(shape)
        self._held.append(array)
        return array

    def to_tensor(self, stored: Array, dtype: str) -> Any:
        """Return a copy on the device."""
        tensor = self.empty(stored.shape, dtype)
        self._copy(tensor, stored)
        return tensor

    def to_array(self, tensor: Any) -> Array:
        """Return a copy of the stored values, once the stream has ended."""
        self.wait()
        return numpy.array(self._numpy.to_array(tensor))

    def write(self, tensor: Any, stored: Array) -> None:
        """Write the stored values, once the stream has ended."""
        self.wait()
        self._copy(tensor, stored)

    def _copy(self, tensor: Any, stored: Array) -> None:
        if tensor.size:
            simulator().write(self._numpy.to_array(tensor), numpy.ascontiguousarray(stored))

    def wait(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()
        self._held.clear()
