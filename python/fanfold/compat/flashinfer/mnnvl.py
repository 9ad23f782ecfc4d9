# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's MnnvlMemory: one symmetric allocation, every rank's part in one strided tensor."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

from fanfold import _core
from fanfold.compat.flashinfer import groups
from fanfold.compat.flashinfer.errors import CalledTooEarly
from fanfold.compat.flashinfer.mapping import Mapping
from fanfold.compat.flashinfer.sizes import at_least
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.errors import InvalidArgument, SystemFailure


class MnnvlMemory:
    """Memory of every rank, visible to all ranks of the mapping's expert group.

    On the CPU it is shared memory without a name, which vanishes with its last user; on a GPU,
    memory of a ``FabricMemory``. Creation is collective. Unlike FlashInfer's, allocations are
    independent: each keeps its own communicator and device, fresh memory is zero, ranks that are
    threads can allocate too, and ``as_torch_strided_tensor`` keeps the memory mapped and gives the
    dtype that was asked for, bfloat16 and FP8 included.

    Args:
        mapping: who this rank is.
        size: bytes per rank, equal on all ranks.
        device: "cpu" or a CUDA device; None: torch's current CUDA device, else "cpu".
        communicator: the group's; None: that of ``get_comm``.

    Raises:
        InvalidArgument: the sizes of the ranks differ (on every rank), or size < 1.
        SystemFailure: shared memory could not be made or opened (on every rank).

    Attributes:
        ptr: address of rank 0's part here.
        rank_stride: bytes from one rank's part to the next.
        segment_size: bytes per rank that were asked for.
        mapped: false after ``close``.
    """

    def __init__(
        self,
        mapping: Mapping,
        size: int,
        *,
        device: Any = None,
        communicator: _core.Communicator | None = None,
    ) -> None:
        at_least("size", size, 1)
        self.mapping = mapping
        self.segment_size = size
        self.comm = MnnvlMemory.get_comm(mapping) if communicator is None else communicator
        self.device = default_device(device)
        self._segment: _HostSegment | _GpuSegment
        if self.device == "cpu":
            self._segment = _HostSegment(self.comm, size)
        else:
            self._segment = _GpuSegment(self.comm, size, self.device)
        self.ptr = self._segment.address
        self.rank_stride = self._segment.stride
        self.mapped = True

    def as_torch_strided_tensor(self, dtype: Any) -> Any:
        """``[ranks, elements]`` of ``dtype``: row r is rank r's part. Zero copy.

        Rows are ``rank_stride`` bytes apart and hold ``segment_size`` bytes, rounded down to
        whole elements. The tensor keeps the memory mapped while it lives.

        Raises:
            CalledTooEarly: after ``close``.
        """
        if not self.mapped:
            raise CalledTooEarly("as_torch_strided_tensor: the memory is closed")
        rows = self._segment.tensor()
        count = self.segment_size // dtype.itemsize
        tensor = rows.view(dtype)[:, :count]
        Owners.add(tensor, self.comm)
        return tensor

    def close(self) -> None:
        """Let go of the memory; tensors over it keep it mapped. Not collective."""
        self.mapped = False
        self._segment.close()

    _comms: dict[tuple[int, ...], _core.Communicator] = {}  # noqa: RUF012
    _lock = threading.Lock()

    @staticmethod
    def initialize() -> None:
        """Does nothing: there is no state of the process to set up."""

    @staticmethod
    def set_comm_from_config(mapping: Mapping, config: Any = None) -> None:
        """Say through which backend the ranks of this mapping find each other. Collective.

        What was allocated before keeps its communicator.
        """
        MnnvlMemory.set_comm(mapping, groups.communicator_of(mapping, config))

    @staticmethod
    def set_comm(mapping: Mapping, communicator: _core.Communicator) -> None:
        """As ``set_comm_from_config``, where the communicator is there already."""
        with MnnvlMemory._lock:
            MnnvlMemory._comms[_key(mapping)] = communicator

    @staticmethod
    def get_comm(mapping: Mapping) -> _core.Communicator:
        """The communicator of this mapping's group; made by the default backend if need be.

        Where nobody has set one, each thread has its own of a world of one rank.
        """
        with MnnvlMemory._lock:
            communicator = MnnvlMemory._comms.get(_key(mapping))
        if communicator is None or communicator.is_closed:
            if mapping.world_size == 1:
                return groups.communicator_of(mapping)
            MnnvlMemory.set_comm_from_config(mapping)
            with MnnvlMemory._lock:
                communicator = MnnvlMemory._comms[_key(mapping)]
        return communicator

    @staticmethod
    def supports_mnnvl() -> bool:
        """Whether this machine can allocate: always, at least in host memory."""
        return True


class Owners:
    """Whose memory a workspace tensor lies in: address of its storage -> communicator."""

    _lock = threading.Lock()
    _communicators: dict[int, _core.Communicator] = {}  # noqa: RUF012

    @classmethod
    def add(cls, tensor: Any, communicator: _core.Communicator) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        with cls._lock:
            if address not in cls._communicators:
                weakref.finalize(storage, cls._communicators.pop, address, None).atexit = False
            cls._communicators[address] = communicator

    @classmethod
    def find(cls, tensor: Any) -> _core.Communicator | None:
        with cls._lock:
            return cls._communicators.get(tensor.untyped_storage().data_ptr())


def _key(mapping: Mapping) -> tuple[int, ...]:
    return (mapping.world_size, mapping.rank, *groups.expert_group(mapping))


def default_device(given: Any = None) -> str:
    """The device asked for, else torch's current GPU where this build can use it, else "cpu"."""
    if given is not None:
        return str(given)
    if not _core.build_info()["cuda"] or not torch().cuda.is_available():
        return "cpu"
    return f"cuda:{torch().cuda.current_device()}"


class _HostSegment:
    """Shared memory of all ranks in one mapping: rank r's part begins at r * stride."""

    def __init__(self, communicator: _core.Communicator, size: int) -> None:
        self.stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        total = self.stride * communicator.num_ranks
        made = os.memfd_create("fanfold", os.MFD_CLOEXEC) if communicator.rank == 0 else -1
        try:
            if made >= 0:
                os.ftruncate(made, total)
            # Rank 0's descriptor, which the kernel opens to processes of the same user only.
            told = _gather(communicator, f"{os.getpid()}/{made}/{size}")
            sizes = sorted({int(each.split("/")[2]) for each in told})
            if len(sizes) > 1:
                raise _differ(told)
            pid, number, _ = told[0].split("/")
            mapped, problem = _map(f"/proc/{pid}/fd/{number}", total)
            problems = _gather(communicator, problem)  # also: rank 0 may close its descriptor now
        finally:
            if made >= 0:
                os.close(made)
        failed = [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each]
        if mapped is None or failed:
            raise SystemFailure(f"MnnvlMemory: shared memory could not be mapped: {failed}")
        self._bytes = torch().frombuffer(mapped, dtype=torch().uint8)
        self.address = int(self._bytes.data_ptr())
        self._rows: Any = self._bytes.view(communicator.num_ranks, self.stride)

    def tensor(self) -> Any:
        return self._rows

    def close(self) -> None:
        self._rows = self._bytes = None


def _map(path: str, total: int) -> tuple[mmap.mmap | None, str]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return None, f"{path}: {error}"
    try:
        return mmap.mmap(descriptor, total), ""
    except OSError as error:
        return None, f"mmap of {total} bytes: {error}"
    finally:
        os.close(descriptor)


class _GpuSegment:
    """Windows of a FabricMemory, which lie one after the other in this rank's address space."""

    def __init__(self, communicator: _core.Communicator, size: int, device: str) -> None:
        self._memory = _core.FabricMemory(communicator, size, device=device)
        self._device = device
        windows = [
            self._memory.tensor(rank, torch().uint8, [size])
            for rank in range(communicator.num_ranks)
        ]
        self.address = int(windows[0].data_ptr())
        self.stride = int(self._memory.num_bytes)
        if len(windows) > 1:
            self.stride = int(windows[1].data_ptr()) - self.address
        self._windows: Any = windows

    def tensor(self) -> Any:
        return torch().as_tensor(
            _Rows(self._windows, self.address, self.stride), device=self._device
        )

    def close(self) -> None:
        self._windows = None
        self._memory.close()


class _Rows:
    """Tells torch of the rows of all windows, and keeps them mapped."""

    def __init__(self, windows: list[Any], address: int, stride: int) -> None:
        self._windows = windows
        self.__cuda_array_interface__ = {
            "shape": (len(windows), stride),
            "strides": (stride, 1),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _gather(communicator: _core.Communicator, text: str) -> list[str]:
    return [part.decode() for part in communicator.all_gather_bytes(text.encode())]


def _differ(told: list[str]) -> Exception:
    sizes = ", ".join(f"rank {rank}: {each.split('/')[2]}" for rank, each in enumerate(told))
    return InvalidArgument(f"size: expected equal bytes on all ranks, got {sizes}")
