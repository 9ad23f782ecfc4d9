# SPDX-License-Identifier: Apache-2.0
"""The collectives the schemes use, over torch.distributed with gloo."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist


class Collectives:
    """A gloo process group. Creating and closing it is collective."""

    def __init__(self, rank: int, num_ranks: int, store: str) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=90),
        )

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """Block ``r`` of the first dimension goes to rank ``r``; equal sizes everywhere."""
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        return received

    def all_to_all_v(
        self, rows: torch.Tensor, give: Sequence[int], take: Sequence[int]
    ) -> torch.Tensor:
        """``give[r]`` consecutive rows go to rank ``r``; ``take[r]`` rows come from it."""
        received = rows.new_empty((sum(take), *rows.shape[1:]))
        dist.all_to_all_single(received, rows, list(take), list(give))
        return received

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks, rank after rank; equal counts everywhere."""
        gathered = rows.new_empty((self.num_ranks * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows)
        return gathered

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of this rank's share of ``rows``."""
        share = rows.new_empty((rows.shape[0] // self.num_ranks, *rows.shape[1:]))
        dist.reduce_scatter_tensor(share, rows)
        return share

    def broadcast(self, rows: torch.Tensor, root: int) -> None:
        """Overwrite ``rows`` with those of ``root``."""
        dist.broadcast(rows, root)

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace ``rows`` by their sum over ranks."""
        dist.all_reduce(rows)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
