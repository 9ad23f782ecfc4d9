# SPDX-License-Identifier: Apache-2.0
"""Which ranks exchange: from FlashInfer's mapping and communication backend to a Communicator.

The group is the expert-parallel one (the tensor-parallel one where the mapping names no
expert-parallel size), and its size is checked; FlashInfer takes the tensor-parallel ranks always.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fanfold import _core
from fanfold.compat.flashinfer.errors import CalledTooEarly
from fanfold.compat.flashinfer.mapping import Mapping
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.errors import InvalidArgument


@runtime_checkable
class CommBackend(Protocol):
    """What a group of ranks must offer so that Fanfold can join them; FlashInfer's names.

    It is used when a communicator is made, and not again. ``Split`` may return the backend itself
    where that already is the group asked for.
    """

    def Get_rank(self) -> int: ...  # noqa: N802

    def Get_size(self) -> int: ...  # noqa: N802

    def allgather(self, data: Any) -> Any: ...

    def bcast(self, data: Any, root: int) -> Any: ...

    def barrier(self) -> None: ...

    def Split(self, color: int, key: int) -> Any: ...  # noqa: N802


class CommunicatorBackend:
    """A Fanfold communicator as a FlashInfer backend; the drop-ins then use it as it is.

    This is how ranks that are threads of one process come to a ``MoeAlltoAll``.
    """

    def __init__(self, communicator: _core.Communicator) -> None:
        self.communicator = communicator

    def Get_rank(self) -> int:  # noqa: N802
        """This rank."""
        return self.communicator.rank

    def Get_size(self) -> int:  # noqa: N802
        """How many ranks there are."""
        return self.communicator.num_ranks

    def allgather(self, data: Any) -> list[Any]:
        """Every rank's object, by rank."""
        return [
            pickle.loads(part) for part in self.communicator.all_gather_bytes(pickle.dumps(data))
        ]

    def bcast(self, data: Any, root: int) -> Any:
        """The object of rank ``root``."""
        return self.allgather(data)[root]

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.communicator.barrier()

    def Split(self, color: int, key: int) -> CommunicatorBackend:  # noqa: N802
        """The ranks of one color, ordered by key."""
        part = self.communicator.split(color, key)
        if part is None:
            raise InvalidArgument(f"color: expected 0 or more, got {color}")
        return CommunicatorBackend(part)


class TorchDistBackend:
    """A group of torch.distributed, the default one where none is given, as a backend.

    Ranks are those of the group, also of a group within another one.
    """

    def __init__(self, group: Any = None) -> None:
        dist = torch().distributed
        self._dist: Any = dist
        self._group = group

    @property
    def group(self) -> Any:
        """The group itself."""
        return self._dist.group.WORLD if self._group is None else self._group

    def Get_rank(self) -> int:  # noqa: N802
        """This rank in the group."""
        return int(self._dist.get_rank(self._group))

    def Get_size(self) -> int:  # noqa: N802
        """How many ranks the group has."""
        return int(self._dist.get_world_size(self._group))

    def allgather(self, data: Any) -> list[Any]:
        """Every rank's object, by rank."""
        gathered: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(gathered, data, group=self._group)
        return gathered

    def bcast(self, data: Any, root: int) -> Any:
        """The object of rank ``root`` of the group."""
        return self.allgather(data)[root]

    def barrier(self) -> None:
        """Return when every rank has called it; picks no device."""
        self.allgather(None)

    def Split(self, color: int, key: int) -> TorchDistBackend | _Part:  # noqa: N802
        """The ranks of one color, ordered by key. Makes no group of torch.distributed.

        Such a group could only be made by all ranks of the world; the part gathers over this
        backend's ranks instead, so every color must use it at the same time.
        """
        members = _members(self.allgather((color, key, self.Get_rank())), color)
        if members == list(range(self.Get_size())):
            return self
        return _Part(self, members)


class _Part:
    """Some ranks of a backend, whose other ranks do the same things with a part of theirs."""

    def __init__(self, whole: TorchDistBackend | _Part, members: list[int]) -> None:
        self._whole = whole
        self._members = members

    def Get_rank(self) -> int:  # noqa: N802
        return self._members.index(self._whole.Get_rank())

    def Get_size(self) -> int:  # noqa: N802
        return len(self._members)

    def allgather(self, data: Any) -> list[Any]:
        everything = self._whole.allgather(data)
        return [everything[member] for member in self._members]

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self._whole.allgather(None)

    def Split(self, color: int, key: int) -> _Part:  # noqa: N802
        parts = self.allgather((color, key, self.Get_rank()))
        return _Part(self, _members(parts, color))


def _members(parts: list[tuple[int, int, int]], color: int) -> list[int]:
    return [rank for _, rank in sorted((key, rank) for each, key, rank in parts if each == color)]


@dataclass
class MnnvlConfig:
    """How ranks find each other; FlashInfer's name and fields.

    Attributes:
        comm_backend: any ``CommBackend``; required.
        allocation_granularity, fabric_page_size: accepted and not used, as in FlashInfer.
    """

    comm_backend: Any
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


def expert_group(mapping: Mapping) -> tuple[int, int, int]:
    """(rank in the group, its size, a number that tells it from the other groups of the job)."""
    if mapping.moe_ep_size == 1:
        return mapping.tp_rank, mapping.tp_size, mapping.rank // mapping.tp_size
    return mapping.moe_ep_rank, mapping.moe_ep_size, mapping.rank // mapping.moe_ep_size


class _Groups:
    """Communicators that were made from backends, so that one backend makes one communicator.

    A backend that cannot be a weak key makes a new one each time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_backend: weakref.WeakKeyDictionary[Any, dict[Any, _core.Communicator]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, backend: Any, part: Any) -> _core.Communicator | None:
        with self._lock, contextlib.suppress(TypeError):
            return self._of_backend.get(_identity(backend), {}).get(part)
        return None

    def keep(self, backend: Any, part: Any, communicator: _core.Communicator) -> None:
        with self._lock, contextlib.suppress(TypeError):
            self._of_backend.setdefault(_identity(backend), {})[part] = communicator


def _identity(backend: Any) -> Any:
    """What says that two backends are the same: itself, or a group of torch.distributed."""
    return backend.group if isinstance(backend, TorchDistBackend) else backend


_groups = _Groups()


def communicator_of(mapping: Mapping, config: Any = None) -> _core.Communicator:
    """The communicator of the mapping's expert group. Collective where it is made.

    Args:
        mapping: who this rank is.
        config: has ``comm_backend``; None: a world of one rank needs no backend, any other takes
            the default group of torch.distributed.

    Raises:
        TypeError: the backend lacks a method.
        CalledTooEarly: there is no backend and no default group.
        InvalidArgument: the backend's ranks are not those of the mapping's group.
    """
    rank, size, color = expert_group(mapping)
    backend = None if config is None else config.comm_backend
    if backend is None:
        backend = _default_backend(mapping)
    _check_backend(backend)
    made = _groups.find(backend, (mapping.rank, rank, size, color))
    if made is not None and not made.is_closed:
        return made
    part = backend
    if (backend.Get_size(), backend.Get_rank()) != (size, rank):
        part = backend.Split(color, rank)
    if (part.Get_size(), part.Get_rank()) != (size, rank):
        raise InvalidArgument(
            f"comm_backend: expected rank {rank} of {size}, the mapping's expert-parallel group, "
            f"got rank {part.Get_rank()} of {part.Get_size()}; give a backend of these ranks, or "
            "one whose Split(color, key) divides the world"
        )
    communicator = communicator_from(part)
    _groups.keep(backend, (mapping.rank, rank, size, color), communicator)
    return communicator


def communicator_from(backend: Any) -> _core.Communicator:
    """A communicator of all ranks of a backend. Collective, unless the backend is one itself."""
    if isinstance(backend, CommunicatorBackend):
        return backend.communicator
    return _core.Communicator.from_callbacks(
        rank=backend.Get_rank(),
        num_ranks=backend.Get_size(),
        all_gather=lambda data: list(backend.allgather(data)),
        barrier=backend.barrier,
    )


def _check_backend(backend: Any) -> None:
    if not isinstance(backend, CommBackend):
        missing = [
            name
            for name in ("Get_rank", "Get_size", "allgather", "bcast", "barrier", "Split")
            if not hasattr(backend, name)
        ]
        raise TypeError(
            f"comm_backend: expected the methods of CommBackend, got {type(backend).__name__} "
            f"without {', '.join(missing)}"
        )


_here = threading.local()


def _one_rank() -> CommunicatorBackend:
    """The backend of a world of one rank, which needs nobody to be found; one for each thread."""
    if not hasattr(_here, "one_rank"):
        _here.one_rank = CommunicatorBackend(_core.Communicator.threads(1)[0])
    backend: CommunicatorBackend = _here.one_rank
    return backend


def _default_backend(mapping: Mapping) -> Any:
    if mapping.world_size == 1:
        return _one_rank()
    dist = torch().distributed
    if not dist.is_available() or not dist.is_initialized():
        raise CalledTooEarly(
            f"comm_backend: expected MnnvlConfig(comm_backend=...) for a world of "
            f"{mapping.world_size} ranks, or torch.distributed to be initialised, got neither"
        )
    return TorchDistBackend()
