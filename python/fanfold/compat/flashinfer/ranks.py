# SPDX-License-Identifier: Apache-2.0
"""Who makes the exchanges of a workspace: each rank its own, or one thread those of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from fanfold import _core
from fanfold.all_to_all import AllToAll
from fanfold.errors import InvalidArgument


class Ranks(Protocol):
    """Makes exchanges for one rank; all ranks ask for the same ones in the same order."""

    rank: int
    num_ranks: int
    has_fixed_masks: bool  # an exchange keeps the mask that it was made with

    def make(
        self, name: Hashable, config: dict[str, Any], active: tuple[bool, ...] | None
    ) -> AllToAll:
        """This rank's part of the exchange ``name``; ``active``: its mask, where it is fixed."""

    def drop(self, name: Hashable, exchange: AllToAll) -> None:
        """Give the exchange up; no round of it is open here."""


class OwnRank:
    """One rank of a communicator. Making and dropping are collective."""

    has_fixed_masks = False

    def __init__(self, communicator: _core.Communicator) -> None:
        self.rank = communicator.rank
        self.num_ranks = communicator.num_ranks
        self._communicator = communicator

    def make(
        self, name: Hashable, config: dict[str, Any], active: tuple[bool, ...] | None
    ) -> AllToAll:
        del name, active
        return AllToAll(self._communicator, **config)

    def drop(self, name: Hashable, exchange: AllToAll) -> None:
        del name
        exchange.close()


class RanksOfProcess:
    """Ranks that all live in this process, so that one thread may run every rank in turn.

    Creation is collective and waits; so the first rank that asks for an exchange makes all ranks'
    parts of it, on threads of its own. It sets their masks as well: on a GPU that waits for the
    work of all ranks, which must not have begun. So may freeing memory: what was given up is kept
    until an exchange is made again, at the start of a later round.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._communicators = _core.Communicator.threads(num_ranks)
        self._lock = threading.Lock()
        self._made: dict[Hashable, tuple[dict[str, Any], list[AllToAll | None]]] = {}
        self._given_up: list[AllToAll | None] = []

    def of_rank(self, rank: int) -> RankOfProcess:
        """What rank ``rank`` is given."""
        return RankOfProcess(self, rank)

    def make(
        self,
        rank: int,
        name: Hashable,
        config: dict[str, Any],
        active: tuple[bool, ...] | None,
    ) -> AllToAll:
        """Rank ``rank``'s part of an exchange.

        Raises:
            InvalidArgument: another rank asked for it with another configuration.
        """
        with self._lock:
            if name not in self._made:
                self._given_up.clear()
                self._made[name] = (config, self._make_all(config, active))
            of_first, parts = self._made[name]
            for field, value in config.items():
                if of_first[field] != value:
                    raise InvalidArgument(
                        f"{field}: expected {of_first[field]}, as another rank has it in this "
                        f"round, got {value} on rank {rank}"
                    )
            part = parts[rank]
        if part is None:
            raise InvalidArgument(f"rank: {rank} has given this exchange up before")
        return part

    def drop(self, rank: int, name: Hashable) -> None:
        """Forget one rank's part. Closing would wait for ranks whose turn is still to come."""
        with self._lock:
            _, parts = self._made[name]
            self._given_up.append(parts[rank])
            parts[rank] = None
            if not any(parts):
                del self._made[name]

    def _make_all(
        self, config: dict[str, Any], active: tuple[bool, ...] | None
    ) -> list[AllToAll | None]:
        def make_one(communicator: _core.Communicator) -> AllToAll:
            made = AllToAll(communicator, **config)
            if active is not None and active[communicator.rank]:
                made.set_active_mask(active)
            return made

        with ThreadPoolExecutor(self.num_ranks) as threads:
            return list(threads.map(make_one, self._communicators))


class RankOfProcess:
    """One rank of ``RanksOfProcess``."""

    has_fixed_masks = True

    def __init__(self, ranks: RanksOfProcess, rank: int) -> None:
        self.rank = rank
        self.num_ranks = ranks.num_ranks
        self._ranks = ranks

    def make(
        self, name: Hashable, config: dict[str, Any], active: tuple[bool, ...] | None
    ) -> AllToAll:
        return self._ranks.make(self.rank, name, config, active)

    def drop(self, name: Hashable, exchange: AllToAll) -> None:
        del exchange
        self._ranks.drop(self.rank, name)
