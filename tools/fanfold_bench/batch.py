# SPDX-License-Identifier: Apache-2.0
"""The tensors of one rank in one case, and what must come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fanfold_bench.cases import Case
from fanfold_bench.routing import first_expert, route, row_counts, touched

TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOLERANCE = 0.03  # schemes round their partial sums at different places
LOSSY_TOLERANCE = 0.15  # rows packed to FP8 twice: 1/16 each, and less where values are small


@dataclass(frozen=True)
class Batch:
    """Inputs of one rank.

    ``x [tokens, hidden]``, ``ids [tokens, top_k]`` int32, ``weights [tokens, top_k]`` float32, all
    ones; ``rows [ranks, ranks]`` rows from source to destination; ``per_expert [ranks, experts]``
    tokens of each source that chose each expert; ``visits [tokens]`` ranks that a token goes to.
    """

    case: Case
    rank: int
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    rows: npt.NDArray[np.int64]
    per_expert: npt.NDArray[np.int64]
    visits: torch.Tensor

    @property
    def local_experts(self) -> range:
        """Global ids of this rank's experts."""
        first = first_expert(self.case)
        return range(int(first[self.rank]), int(first[self.rank + 1]))

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes of one round over all ranks, one row per (token, rank), by phase and distance."""
        everywhere = int(self.rows.sum())
        remote = everywhere - int(np.trace(self.rows))
        row, payload = self.case.row_bytes, self.case.payload_bytes
        return {
            "dispatch": everywhere * row,
            "dispatch_remote": remote * row,
            "combine": everywhere * payload,
            "combine_remote": remote * payload,
        }

    def expected(self, weighted: bool) -> torch.Tensor:
        """``[tokens, hidden]`` float32: every expert is the identity and every weight is one.

        ``weighted``: the scheme sums one row per expert, else one row per visited rank.
        """
        times = (self.ids >= 0).sum(1) if weighted else self.visits
        return self.x.to(torch.float32) * times.unsqueeze(1)


def make_batch(case: Case, rank: int) -> Batch:
    """The batch of ``rank``; routing is equal on all ranks, payloads differ."""
    ids = route(case)
    hits = touched(ids, case)
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    x = torch.randn((case.tokens, case.hidden), generator=generator)
    per_expert = np.stack(
        [np.bincount(own[own >= 0].reshape(-1), minlength=case.experts) for own in ids]
    )
    return Batch(
        case=case,
        rank=rank,
        x=x.to(TORCH_DTYPE[case.dtype]),
        ids=torch.from_numpy(ids[rank].copy()),
        weights=torch.ones((case.tokens, case.top_k), dtype=torch.float32),
        rows=row_counts(ids, case),
        per_expert=per_expert.astype(np.int64),
        visits=torch.from_numpy(hits[rank].sum(axis=1)),
    )


def relative_error(got: torch.Tensor, want: torch.Tensor, small: float = 1e-3) -> float:
    """Largest deviation in units of the expected magnitude; infinite for a wrong shape.

    ``small`` is added to the magnitude: what counts as nothing.
    """
    if got.shape != want.shape:
        return float("inf")
    error = (got.to(torch.float32) - want).abs() / (want.abs() + small)
    worst = float(error.max()) if error.numel() else 0.0
    return worst if worst == worst else float("inf")
