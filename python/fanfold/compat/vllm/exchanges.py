# SPDX-License-Identifier: Apache-2.0
"""The exchanges of a manager, made when they are first needed and found again by value."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fanfold._core import Communicator
from fanfold.all_to_all import AllToAll
from fanfold.errors import Error, InvalidState


class Exchanges:
    """All AllToAlls of one manager.

    They stay until ``close``: which rank's last user goes first must not decide when the others
    stop being served. Every rank asks for the same ones in the same order; making is collective.
    """

    def __init__(self) -> None:
        self._by_value: dict[Any, AllToAll] = {}
        self._grown: dict[Any, tuple[dict[str, int], AllToAll]] = {}
        self._num_workers: int | None = None
        self._active: list[bool] | None = None
        self._is_closed = False

    def get(self, communicator: Communicator, config: Mapping[str, Any]) -> AllToAll:
        """The exchange of this configuration; equal ones are one object."""
        key = (id(communicator), value_of(config))
        if key not in self._by_value:
            self._by_value[key] = self._make(communicator, config)
        return self._by_value[key]

    def grow(
        self, communicator: Communicator, config: Mapping[str, Any], room: Mapping[str, int]
    ) -> AllToAll:
        """The exchange of this configuration with at least this room, which all ranks ask for.

        One that is too small is closed, with its open round, and made anew with the larger of each
        size.
        """
        key = (id(communicator), value_of(config))
        sizes = dict(room)
        if key in self._grown:
            had, exchange = self._grown[key]
            if all(had[name] >= size for name, size in sizes.items()):
                return exchange
            sizes = {name: max(had[name], size) for name, size in sizes.items()}
            del self._grown[key]
            exchange.close()
            del exchange  # on a GPU what frees memory may wait for what a peer enqueues next
        made = self._make(communicator, {**config, **sizes})
        self._grown[key] = (sizes, made)
        return made

    @property
    def all(self) -> list[AllToAll]:
        """Those that are there now."""
        return [*self._by_value.values(), *(exchange for _, exchange in self._grown.values())]

    @property
    def active_mask(self) -> list[bool] | None:
        """By rank whether it takes part; None: nobody was ever masked."""
        return self._active

    def set_active_mask(self, active: Sequence[bool]) -> None:
        """Leave ranks out of all exchanges of all ranks, those to come included."""
        for exchange in self.all:
            exchange.set_active_mask(active)
        self._active = list(active)

    def set_num_workers(self, num_workers: int) -> None:
        """Threads that move rows in large rounds, on all exchanges and those to come."""
        for exchange in self.all:
            exchange.set_num_workers(num_workers)
        self._num_workers = num_workers

    def drop(self) -> None:
        """Close all exchanges; the next round makes its own. Collective.

        Ranks that are gone are not waited for.
        """
        for exchange in self.all:
            with contextlib.suppress(Error):
                exchange.close()
        self._by_value.clear()
        self._grown.clear()

    def close(self) -> None:
        """``drop``, for good. Idempotent."""
        self.drop()
        self._is_closed = True

    def check_open(self) -> None:
        """Raise ``InvalidState`` after ``close``."""
        if self._is_closed:
            raise InvalidState("all2all manager: was destroyed; make a new one")

    def _make(self, communicator: Communicator, config: Mapping[str, Any]) -> AllToAll:
        self.check_open()
        made = AllToAll(communicator, **config)
        if self._num_workers is not None:
            made.set_num_workers(self._num_workers)
        if self._active is not None:
            made.set_active_mask(self._active)
        return made


def value_of(config: Mapping[str, Any]) -> Any:
    """Something hashable that is equal for equal arguments."""
    return tuple((name, _hashable(config[name])) for name in sorted(config))


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(each) for each in value)
    if hasattr(value, "tolist"):  # arrays and tensors, whose str() may leave numbers out
        return _hashable(value.tolist())
    return value if isinstance(value, (int, float)) else name_of(value)


def row_bytes(tensor: Any) -> int:
    """Bytes of one token's row of a tensor."""
    return int(math.prod(tensor.shape[1:]) * tensor.element_size())


def overlaps(one: Any, other: Any) -> bool:
    """Whether two contiguous tensors share memory."""
    begin, start = one.data_ptr(), other.data_ptr()
    return bool(
        begin < start + other.numel() * other.element_size()
        and start < begin + one.numel() * one.element_size()
    )


def stream_of(tensor: Any) -> dict[str, Any]:
    """The stream argument of a call: torch's current one where the tensor lies on a GPU."""
    if tensor.device.type == "cpu":
        return {}
    from fanfold.interop_torch import torch_module

    return {"stream": torch_module().cuda.current_stream(tensor.device).cuda_stream}


def name_of(dtype: Any) -> str:
    """The name of a torch dtype."""
    return str(dtype).removeprefix("torch.")
