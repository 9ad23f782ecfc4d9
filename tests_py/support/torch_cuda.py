# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch's CUDA: tensors in memory of the simulated device, on its streams.

``torch.Tensor`` subclass, factories and ``torch.cuda`` functions behave as those of a build with
CUDA as far as code that runs on a GPU can tell: operations are enqueued on the current stream and
run when somebody waits for it, what reads values waits, tensors of other devices are refused, and
so is in a graph capture what torch refuses there. Arithmetic is that of torch on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.utils.dlpack
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

import fanfold
from fanfold import _core
from fanfold.testing import spawn_threads
from support.cuda_tensor import CUDA, DLTensor, ExchangeApi, StreamOf, TensorOf, new_capsule

aten = torch.ops.aten

# DLPack's code of each type that is not one of NumPy's.
_CODES = {torch.bfloat16: 4, torch.bool: 6, torch.float8_e4m3fn: 10, torch.float8_e5m2: 12}

# What gives values to the host, so that it waits.
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}

_FACTORIES = (
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.as_tensor,
    torch.rand, torch.randn, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like,
)  # fmt: skip


class CudaTensor(torch.Tensor):
    """A tensor on a GPU; ``raw`` is the same memory as the host sees it."""

    raw: Any
    index: int

    @staticmethod
    def __new__(cls, raw: Any, index: int) -> CudaTensor:
        # Told the CPU, torch does not look for a CUDA of its own.
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device="cpu"
        )
        made.raw, made.index = raw, index
        made.shape_words = (ctypes.c_int64 * raw.dim())(*raw.shape)
        made.stride_words = (ctypes.c_int64 * raw.dim())(*raw.stride())
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> Any:
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return int(self.raw.data_ptr())

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def cpu(self) -> Any:
        current_stream(self.index).synchronize()
        return self.raw.clone()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def new_tensor(self, values: Any, dtype: Any = None) -> Any:
        return upload(torch.tensor(values, dtype=dtype or self.dtype), self.index)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        targets = [*args, *kwargs.values()]
        if any(isinstance(each, str | torch.device) and str(each) == "cpu" for each in targets):
            return self.cpu()
        return super().to(*args, **kwargs)

    def __repr__(self) -> str:
        return f"CudaTensor({list(self.shape)}, {self.dtype}, {self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self.index)

    def fill(self, tensor: DLTensor) -> None:
        """Describe it as DLPack does."""
        kind = self.raw.dtype
        tensor.data = self.raw.data_ptr()
        tensor.device_type, tensor.device = CUDA, self.index
        tensor.ndim = self.raw.dim()
        tensor.code, tensor.lanes = _code_of(kind), 1
        tensor.bits = 8 * kind.itemsize
        tensor.shape = ctypes.cast(self.shape_words, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(self.stride_words, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = 0


CudaTensor.__module__ = "torch.standin"  # frameworks are told apart by it


def _code_of(dtype: Any) -> int:
    if dtype in _CODES:
        return _CODES[dtype]
    if dtype.is_floating_point:
        return 2
    return 0 if dtype.is_signed else 1


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: Any = None) -> None:
        self.index = _index_of(device)
        self._stream: Any = _core.simulator.stream(self.index)
        self.cuda_stream = int(self._stream.cuda_stream)
        _state.streams.append(self)

    @property
    def device(self) -> Any:
        return torch.device("cuda", self.index)

    @property
    def is_capturing(self) -> bool:
        return bool(self._stream.is_capturing)

    @property
    def simulated(self) -> Any:
        """The stream of ``_core.simulator``."""
        return self._stream

    def synchronize(self) -> None:
        if self.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._stream.synchronize()
        _state.raise_error()

    def run(self, body: Callable[[], Any], written: list[Any]) -> None:
        """Enqueue an operation that writes to these tensors of the host's."""

        def guarded() -> None:
            try:
                body()
            except Exception as error:  # told to whoever waits
                _state.errors.append(error)

        _state.kept.append((guarded, written))
        self._stream.call(guarded)
        for raw in written:
            for part in _runs(raw):
                self._stream.touch(part.view(-1).view(torch.uint8))


class _State(threading.local):
    """The current device and its streams, by thread."""

    # Of all threads.
    streams: list[Stream] = []  # noqa: RUF012
    errors: list[Exception] = []  # noqa: RUF012
    kept: list[Any] = []  # noqa: RUF012
    arenas: dict[int, list[Any]] = {}  # noqa: RUF012
    is_on = False

    def __init__(self) -> None:
        self.index = 0
        self.current: dict[int, Stream] = {}

    def raise_error(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


_state = _State()


def _index_of(device: Any) -> int:
    if device is None:
        return _state.index
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _state.index if index is None else int(index)


def current_stream(device: Any = None) -> Stream:
    index = _index_of(device)
    if index not in _state.current:
        _state.current[index] = Stream(index)
    return _state.current[index]


def synchronize(device: Any = None) -> None:
    """Wait for all streams of a device, or of all."""
    for stream in list(_state.streams):
        if device is None or stream.index == _index_of(device):
            stream.synchronize()


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """``torch.cuda.stream``."""
    index, before = _state.index, _state.current.get(stream.index)
    _state.index, _state.current[stream.index] = stream.index, stream
    try:
        yield
    finally:
        _state.index = index
        if before is None:
            del _state.current[stream.index]
        else:
            _state.current[stream.index] = before


def _runs(raw: Any) -> Iterator[Any]:
    """Its contiguous parts."""
    if raw.numel() == 0:
        return
    if raw.is_contiguous():
        yield raw
        return
    for part in raw.unbind(0):
        yield from _runs(part)


# --- Memory ------------------------------------------------------------------------------------


_ARENA_BYTES = 1 << 20


def allocate(shape: Any, stride: Any, dtype: Any, index: int) -> CudaTensor:
    """Memory of the device, which nobody has written; in a capture of a block set aside for it."""
    sizes = [(size - 1) * step for size, step in zip(shape, stride, strict=True)]
    num_bytes = (1 + sum(sizes) if all(shape) else 1) * dtype.itemsize
    arena = _State.arenas.setdefault(index, [])
    if not arena:
        arena.append(_core.simulator.empty(_ARENA_BYTES, index))
    if current_stream(index).is_capturing:
        array, arena[0] = arena[0][:num_bytes], arena[0][-(-num_bytes // 512) * 512 :]
        assert len(array) == num_bytes, "the arena is used up"
    else:
        array = _core.simulator.empty(num_bytes, index)
    raw = torch.from_numpy(array).view(dtype).as_strided(list(shape), list(stride))
    _state.kept.append(array)
    return CudaTensor(raw, index)


def _like(cpu: Any, index: int) -> CudaTensor:
    return allocate(cpu.shape, cpu.contiguous().stride(), cpu.dtype, index)


def _check_copy_from_host(stream: Stream) -> None:
    if stream.is_capturing:
        raise RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
            "tensor is pinned"
        )


def upload(cpu: Any, device: Any = None) -> CudaTensor:
    """``.cuda()``: a copy on a device, by its current stream."""
    index = _index_of(device)
    stream = current_stream(index)
    _check_copy_from_host(stream)
    made, copy = _like(cpu, index), cpu.clone()
    stream.run(lambda: made.raw.copy_(copy), [made.raw])
    return made


def _of_interface(rows: Any, index: int) -> CudaTensor:
    """What ``torch.as_tensor`` makes of ``__cuda_array_interface__``."""
    array: Any = numpy.asarray(_HostRows(rows))
    return CudaTensor(torch.from_numpy(array), index)


class _HostRows:
    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.__array_interface__ = rows.__cuda_array_interface__


# --- Operations --------------------------------------------------------------------------------


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default and not isinstance(args[0], CudaTensor):
        current_stream(args[1].index).synchronize()
        return args[0].copy_(args[1].raw)
    # Where the tensor is, as torch knows it.
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    leaves, _ = tree_flatten((args, kwargs))
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    index = next(each.index for each in tensors if isinstance(each, CudaTensor))
    stream = current_stream(index)
    if func is aten.copy_.default and not isinstance(args[1], CudaTensor):
        _check_copy_from_host(stream)
        args = (args[0], CudaTensor(args[1].clone(), index), *args[2:])
        tensors = [*args[:2]]
    for each in tensors:
        where = "cpu" if not isinstance(each, CudaTensor) else f"cuda:{each.index}"
        if where != f"cuda:{index}" and (where != "cpu" or each.dim() > 0):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:{index} and {where}"
            )
    raw_args, raw_kwargs = tree_map(_raw_of, (args, kwargs))
    if func in _READS:
        stream.synchronize()
        return func(*raw_args, **raw_kwargs)
    if func.is_view:
        return tree_map(lambda raw: _wrapped(raw, index), func(*raw_args, **raw_kwargs))
    if func._schema.is_mutable:
        written = [
            given
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        stream.run(lambda: func(*raw_args, **raw_kwargs), [each.raw for each in written])
        return written[0]
    shapes = func(*tree_map(_meta_of, raw_args), **tree_map(_meta_of, raw_kwargs))
    made = tree_map(
        lambda meta: (
            allocate(meta.shape, meta.stride(), meta.dtype, index)
            if isinstance(meta, torch.Tensor)
            else meta
        ),
        shapes,
    )
    outputs = [each for each in tree_flatten(made)[0] if isinstance(each, CudaTensor)]

    def body() -> None:
        results, _ = tree_flatten(func(*raw_args, **raw_kwargs))
        for output, result in zip(outputs, results, strict=True):
            output.raw.copy_(result)

    if not func.__name__.startswith(("new_empty", "empty")):
        stream.run(body, [each.raw for each in outputs])
    return made


def _raw_of(value: Any) -> Any:
    return value.raw if isinstance(value, CudaTensor) else value


def _wrapped(value: Any, index: int) -> Any:
    return CudaTensor(value, index) if isinstance(value, torch.Tensor) else value


def _meta_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class CudaFunctions(TorchFunctionMode):
    """Factories with ``device="cuda"``, and ``.to`` of tensors of the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        is_cuda = device is not None and torch.device(device).type == "cuda"
        if func in (torch.Tensor.to, torch.Tensor.cuda) and not isinstance(args[0], CudaTensor):
            targets = [each for each in args[1:] if isinstance(each, str | torch.device)]
            if func is torch.Tensor.cuda or is_cuda or "cuda" in str(targets):
                return upload(args[0], device or (targets[0] if targets else None))
        if not is_cuda or func not in _FACTORIES:
            return func(*args, **kwargs)
        index = _index_of(device)
        if func is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            return _of_interface(args[0], index)
        cpu = func(*tree_map(_raw_of, args), **{**kwargs, "device": "cpu"})
        if func in (torch.tensor, torch.as_tensor):
            return upload(cpu, index)
        made = _like(cpu, index)
        if func not in (torch.empty, torch.empty_like):
            current_stream(index).run(lambda: made.raw.copy_(cpu), [made.raw])
        return made


# --- DLPack ------------------------------------------------------------------------------------


def _fill(tensor: CudaTensor, out: Any) -> int:
    tensor.fill(out[0])
    return 0


def _stream_of(kind: int, device: int, out: Any) -> int:
    assert kind == CUDA
    out[0] = current_stream(device).cuda_stream
    return 0


_api = ExchangeApi(1, 3, None, None, None, None, TensorOf(_fill), StreamOf(_stream_of))
_api_name = b"dlpack_exchange_api"  # which the capsule borrows
CudaTensor.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(_api), _api_name, None)

_from_dlpack = torch.utils.dlpack.from_dlpack


def from_dlpack(producer: Any, *args: Any, **kwargs: Any) -> Any:
    """What the module of the library makes its tensors with."""
    made = _from_dlpack(producer, *args, **kwargs)
    if not _State.is_on:
        return made
    whole = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    index = _core.simulator.device_of(whole)
    return made if index is None else CudaTensor(made, index)


# nanobind looks it up once in a process.
torch.utils.dlpack.from_dlpack = from_dlpack


@contextlib.contextmanager
def torch_with_cuda(monkeypatch: Any, num_devices: int = 1) -> Iterator[None]:
    """Let torch have CUDA on all threads; factories only within ``CudaFunctions``."""
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: _state.index,
        "current_stream": current_stream,
        "is_current_stream_capturing": lambda: current_stream().is_capturing,
        "stream": use_stream,
        "synchronize": synchronize,
        "Stream": Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    _State.is_on = True
    try:
        yield
        synchronize()
    finally:
        _State.is_on = False
        _state.current.clear()
        _State.arenas.clear()
        for kept in (_State.streams, _State.errors, _State.kept):
            kept.clear()


def on_threads(num_ranks: int, fn: Callable[..., Any], *, num_devices: int = 1) -> list[Any]:
    """Call ``fn(comm)`` on a thread per rank, each with a current device and stream of its own."""

    def body(comm: fanfold.Communicator) -> Any:
        with CudaFunctions(), use_stream(Stream(comm.rank % num_devices)):
            return fn(comm)

    return spawn_threads(num_ranks, body)
