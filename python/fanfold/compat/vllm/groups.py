# SPDX-License-Identifier: Apache-2.0
"""The groups of a manager: all ranks with experts, and those whose tokens it gathers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from fanfold._core import Communicator
from fanfold.compat.vllm import vllm_values
from fanfold.errors import Error, InvalidArgument


@dataclass(frozen=True)
class Members:
    """A group by what it says of itself; stands in for a vLLM group where there is none."""

    world_size: int
    rank_in_group: int
    ranks: tuple[int, ...]

    @staticmethod
    def of(group: Any) -> Members:
        """Read ``world_size``, ``rank_in_group`` and ``ranks`` of a vLLM group."""
        return Members(
            int(group.world_size), int(group.rank_in_group), tuple(int(r) for r in group.ranks)
        )


def communicator_of(group: Any) -> tuple[Communicator, bool]:
    """A communicator of the ranks of a group, and whether it was made here. Then collective.

    Args:
        group: a Communicator; a ``torch.distributed`` group; or a stateless group of vLLM, an
            object with ``rank``, ``world_size``, ``broadcast_obj(object, src)`` and ``barrier()``.

    Raises:
        InvalidState: torch.distributed is not initialised.
        Unsupported: the ranks are on different machines, and the group is a stateless one.
    """
    if isinstance(group, Communicator):
        return group, False
    if hasattr(group, "broadcast_obj"):
        return _of_stateless(group), True
    return Communicator.from_torch(group), True


def _of_stateless(group: Any) -> Communicator:
    def all_gather(data: bytes) -> list[bytes]:
        return [
            group.broadcast_obj(data if source == group.rank else None, source)
            for source in range(group.world_size)
        ]

    return Communicator.from_callbacks(
        rank=group.rank, num_ranks=group.world_size, all_gather=all_gather, barrier=group.barrier
    )


class Groups:
    """The communicators of one manager.

    All ranks that hold experts are one group (EP). Where ranks of one tensor-parallel group have
    the same tokens, only one of each takes part in a gather: the data-parallel group, or with one
    data-parallel rank the one of context parallelism.

    Args:
        cpu_group: see ``communicator_of``.
        dp_group, tp_group: see ``Members.of``; None: vLLM's, and where vLLM has none every rank of
            the group is a data-parallel one.
        splits: whether tokens will be gathered, so that the second communicator is needed. Making
            it is collective over the first.
    """

    def __init__(self, cpu_group: Any, dp_group: Any, tp_group: Any, *, splits: bool) -> None:
        self.ep, self._made_ep = communicator_of(cpu_group)
        everyone = tuple(range(self.ep.num_ranks))
        self.dp = dp_group if dp_group is not None else vllm_values.group_of("dp")
        if self.dp is None:
            self.dp = Members(self.ep.num_ranks, self.ep.rank, everyone)
        self.tp = tp_group if tp_group is not None else vllm_values.group_of("tp")
        if self.tp is None:
            self.tp = Members(1, 0, (self.ep.rank,))
        self._made_gather: Communicator | None = None
        self.gather = self._split() if splits else self.ep

    def _split(self) -> Communicator:
        members = self.dp
        if members.world_size == 1:
            members = vllm_values.group_of("pcp") or members
        group = Members.of(members)
        if group.world_size == self.ep.num_ranks:
            return self.ep
        # Every rank of the split names its group by the rank that is first in it.
        made = self.ep.split(min(group.ranks), group.rank_in_group)
        if made is None or (made.num_ranks, made.rank) != (group.world_size, group.rank_in_group):
            found = "none" if made is None else f"rank {made.rank} of {made.num_ranks}"
            raise InvalidArgument(
                f"dp_group: expected rank {group.rank_in_group} of {group.world_size}, as the "
                f"group says, among the ranks of cpu_group, got {found}"
            )
        self._made_gather = made
        return made

    def close(self) -> None:
        """Close what was made here. Collective; ranks that are gone are not waited for."""
        for made in (self._made_gather, self.ep if self._made_ep else None):
            if made is not None and not made.is_closed:
                with contextlib.suppress(Error):
                    made.close()
