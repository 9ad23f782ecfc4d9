# SPDX-License-Identifier: Apache-2.0
"""Which rank hosts which expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """A table of experts, with replicas where wanted.

    With ``logical_of_expert`` the ids that a caller gives are logical, 0 to the largest entry, each
    with at least one copy. Of the n copies of an expert, ascending by physical id, the source rank
    picks number (source rank + token) mod n. Received ids, ``num_experts`` and local experts are
    physical.

    Args:
        rank_of_expert: ``[num_experts]`` the rank of each (physical) expert.
        logical_of_expert: ``[num_experts]`` the logical expert that each is a copy of; None: no
            replicas, logical and physical ids are the same.
    """

    rank_of_expert: Sequence[int]
    logical_of_expert: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Copy the tables: nobody changes them later, and placements can be hashed."""
        object.__setattr__(self, "rank_of_expert", tuple(self.rank_of_expert))
        if self.logical_of_expert is not None:
            object.__setattr__(self, "logical_of_expert", tuple(self.logical_of_expert))
