# SPDX-License-Identifier: Apache-2.0
"""Tensors that say of themselves that they lie on a CUDA device, as those of frameworks do."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32
from typing import Any

import numpy

CUDA = 2
CODES = {"i": 0, "u": 1, "f": 2}


class DLTensor(Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", c_int32),
        ("device", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ManagedTensor(Structure):
    _fields_ = (
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


new_capsule: Any = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Producer:
    """An array of device memory behind ``__dlpack__``; remembers what it was asked for."""

    def __init__(self, array: numpy.ndarray, device: int = 0) -> None:
        self.array = array
        self.device = device
        self.requests: list[dict[str, Any]] = []
        self.shape = (c_int64 * array.ndim)(*array.shape)
        steps = [step // array.itemsize for step in array.strides]
        self.strides = (c_int64 * array.ndim)(*steps)
        self.managed = ManagedTensor()
        self.fill(self.managed.tensor)

    def fill(self, tensor: DLTensor) -> None:
        tensor.data = self.array.ctypes.data
        tensor.device_type, tensor.device = CUDA, self.device
        tensor.ndim = self.array.ndim
        tensor.code, tensor.lanes = CODES[self.array.dtype.kind], 1
        tensor.bits = 8 * self.array.itemsize
        tensor.shape = ctypes.cast(self.shape, POINTER(c_int64))
        tensor.strides = ctypes.cast(self.strides, POINTER(c_int64))
        tensor.byte_offset = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self.device)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.requests.append({"stream": stream})
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


TensorOf = ctypes.CFUNCTYPE(c_int, ctypes.py_object, POINTER(DLTensor))
StreamOf = ctypes.CFUNCTYPE(c_int, c_int32, c_int32, POINTER(ctypes.c_void_p))


class ExchangeApi(Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("tensor_of", TensorOf),
        ("stream_of", StreamOf),
    )


class Framework:
    """A framework with DLPack's exchange interface and a current stream."""

    def __init__(self) -> None:
        self.current = 0
        self.devices: list[int] = []  # whose current stream was asked for
        self.api = ExchangeApi(1, 3, None, None, None, None, TensorOf(_fill), StreamOf(self._now))
        capsule = new_capsule(ctypes.addressof(self.api), b"dlpack_exchange_api", None)
        self.type = type("Tensor", (Producer,), {"__dlpack_c_exchange_api__": capsule})

    def _now(self, kind: int, device: int, out: Any) -> int:
        assert kind == CUDA
        self.devices.append(device)
        out[0] = self.current
        return 0

    def tensor(self, array: numpy.ndarray, device: int = 0) -> Producer:
        made: Producer = self.type(array, device)
        return made


def _fill(producer: Producer, out: Any) -> int:
    producer.fill(out[0])
    return 0
