# SPDX-License-Identifier: Apache-2.0
"""Quantiles of rounds, with rounds left out during which others used the cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Nanoseconds: TypeAlias = npt.NDArray[np.int64]

QUIET_LIMIT = 0.25  # cores' worth of foreign work above which a block of rounds is left out
NEAR_NS = 60.0  # one-way flag latency below which two cores count as sharing a cache


@dataclass(frozen=True)
class Quantiles:
    """Tenth, fiftieth and ninetieth percentile in microseconds."""

    p10: float
    p50: float
    p90: float

    def to_json(self) -> dict[str, float]:
        """Rounded to nanoseconds."""
        return {"p10": round(self.p10, 3), "p50": round(self.p50, 3), "p90": round(self.p90, 3)}


def quantiles(nanoseconds: npt.ArrayLike) -> Quantiles:
    """Percentiles of samples given in nanoseconds.

    Raises:
        ValueError: there are no samples.
    """
    values = np.asarray(nanoseconds, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    p10, p50, p90 = np.percentile(values, [10, 50, 90]) / 1e3
    return Quantiles(float(p10), float(p50), float(p90))


@dataclass(frozen=True)
class Block:
    """Consecutive rounds and the foreign load during them (in cores).

    Each sample is the time until the last rank was done.
    """

    dispatch: Nanoseconds
    combine: Nanoseconds
    foreign: float
    seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """How many rounds."""
        return int(self.dispatch.size)


@dataclass(frozen=True)
class Timing:
    """Both phases and their sum over the rounds that count."""

    dispatch: Quantiles
    combine: Quantiles
    round: Quantiles
    rounds: int
    rounds_all: int
    foreign: float
    noisy: bool


@dataclass
class Record:
    """Blocks of one contender and the judgement whether they suffice."""

    min_rounds: int
    limit: float = QUIET_LIMIT
    blocks: list[Block] = field(default_factory=list)

    def quiet(self) -> list[Block]:
        """Blocks during which others left the cores alone."""
        return [block for block in self.blocks if block.foreign < self.limit]

    def enough(self, rounds: int, seconds: float, patience: float) -> bool:
        """Stop when quiet rounds or quiet seconds suffice, or when patience is over."""
        quiet = self.quiet()
        have = sum(block.rounds for block in quiet)
        if have >= rounds:
            return True
        if have >= self.min_rounds and sum(block.seconds for block in quiet) >= seconds:
            return True
        total = sum(block.rounds for block in self.blocks)
        return total >= self.min_rounds and sum(b.seconds for b in self.blocks) >= patience

    def timing(self) -> Timing:
        """Quantiles over quiet rounds; over all rounds, marked noisy, when too few were quiet."""
        quiet = self.quiet()
        noisy = sum(block.rounds for block in quiet) < self.min_rounds
        used = self.blocks if noisy else quiet
        dispatch = np.concatenate([block.dispatch for block in used])
        combine = np.concatenate([block.combine for block in used])
        weight = np.array([max(block.seconds, 1e-9) for block in used])
        foreign = np.average([block.foreign for block in used], weights=weight)
        return Timing(
            dispatch=quantiles(dispatch),
            combine=quantiles(combine),
            round=quantiles(dispatch + combine),
            rounds=int(dispatch.size),
            rounds_all=sum(block.rounds for block in self.blocks),
            foreign=float(foreign),
            noisy=noisy,
        )


def regime(flags: Sequence[float]) -> str:
    """NEAR, FAR or, when the cores were moved during the run, MIXED; unknown without flags."""
    near = [flag < NEAR_NS for flag in flags]
    if not near:
        return "unknown"
    if all(near):
        return "NEAR"
    return "MIXED" if any(near) else "FAR"
