# SPDX-License-Identifier: Apache-2.0
"""Which experts the tokens take: generated or recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fanfold_bench.cases import Case

Ids: TypeAlias = npt.NDArray[np.int32]

SKEW = 1.2  # exponent of the popularity law: the busiest of 64 experts gets about 4x the mean
KEYS = ("topk_ids", "routing", "ids")


@dataclass(frozen=True)
class Recording:
    """Routing of a real model.

    ``ids [layers, tokens, top_k]`` holds global expert ids below ``num_experts``, -1 for none.
    """

    ids: Ids
    num_experts: int

    @property
    def top_k(self) -> int:
        """Experts per token as recorded."""
        return int(self.ids.shape[2])


def load_recording(path: str | Path) -> Recording:
    """Read an .npz with one integer array [layers, tokens, top_k] and optionally num_experts.

    Raises:
        ValueError: there is no such file or no such array in it.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {key: np.asarray(data[key]) for key in data.files}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a routing recording from {path}: {error}") from error
    fits = [k for k, a in arrays.items() if a.ndim == 3 and np.issubdtype(a.dtype, np.integer)]
    fits.sort(key=lambda k: KEYS.index(k) if k in KEYS else len(KEYS))
    if not fits or arrays[fits[0]].size == 0:
        raise ValueError(
            f"{path} must hold an integer array [layers, tokens, top_k], it holds "
            + (", ".join(f"{k} {list(a.shape)}" for k, a in arrays.items()) or "nothing")
        )
    ids = arrays[fits[0]].astype(np.int32)
    stored = arrays.get("num_experts")
    num_experts = int(stored.reshape(-1)[0]) if stored is not None else int(ids.max()) + 1
    if int(ids.max()) >= num_experts:
        raise ValueError(f"{path} says {num_experts} experts, but holds id {int(ids.max())}")
    return Recording(ids, num_experts)


def uniform(rng: np.random.Generator, tokens: int, top_k: int, experts: int) -> Ids:
    """``top_k`` distinct experts per token, each set equally likely."""
    return _top(rng.random((tokens, experts)), top_k)


def skewed(rng: np.random.Generator, tokens: int, top_k: int, experts: int, seed: int) -> Ids:
    """Distinct experts whose popularity falls off like a power law.

    Which experts are popular depends on ``seed`` only, so that all ranks agree on it. Adding
    Gumbel noise to log weights and taking the largest draws without replacement.
    """
    order = np.random.default_rng(seed).permutation(experts)
    log_weight = np.empty(experts)
    log_weight[order] = -SKEW * np.log(np.arange(1, experts + 1))
    return _top(log_weight + rng.gumbel(size=(tokens, experts)), top_k)


def _top(score: npt.NDArray[np.float64], top_k: int) -> Ids:
    if top_k == score.shape[1]:
        return np.argsort(-score, axis=1).astype(np.int32)
    part = np.argpartition(-score, top_k, axis=1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(score, part, axis=1), axis=1)
    return np.take_along_axis(part, order, axis=1).astype(np.int32)


def recorded(recording: Recording, case: Case) -> Ids:
    """Ids for all ranks from a recording, ``[ranks, tokens, top_k]``, of its middle layer.

    Ranks take consecutive tokens; a short recording starts again from its first token.

    Raises:
        ValueError: the recording does not fit the case.
    """
    if recording.top_k < case.top_k:
        raise ValueError(f"the recording has top-k {recording.top_k}, the case wants {case.top_k}")
    if recording.num_experts > case.experts:
        raise ValueError(
            f"the recording has {recording.num_experts} experts, the case only {case.experts}"
        )
    layer = recording.ids[recording.ids.shape[0] // 2]
    rows = np.arange(case.ranks * case.tokens) % layer.shape[0]
    picked = layer[rows, : case.top_k]
    ids: Ids = picked.reshape(case.ranks, case.tokens, case.top_k)
    return ids


def route(case: Case) -> Ids:
    """Expert ids of all ranks, ``[ranks, tokens, top_k]`` int32; the same on every rank."""
    shape = (case.tokens, case.top_k, case.experts)
    rngs = [np.random.default_rng((case.seed, rank)) for rank in range(case.ranks)]
    if case.routing == "uniform":
        return np.stack([uniform(rng, *shape) for rng in rngs])
    if case.routing == "skewed":
        return np.stack([skewed(rng, *shape, seed=case.seed) for rng in rngs])
    return recorded(load_recording(case.routing), case)


def first_expert(case: Case) -> npt.NDArray[np.int64]:
    """``[ranks + 1]``: where each rank's experts begin when they are spread evenly in order."""
    small, more = divmod(case.experts, case.ranks)
    sizes = np.full(case.ranks, small, dtype=np.int64)
    sizes[:more] += 1
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def touched(ids: Ids, case: Case) -> npt.NDArray[np.bool_]:
    """``[ranks, tokens, ranks]``: does this token of this rank go to that rank?"""
    owner = np.searchsorted(first_expert(case), ids, side="right") - 1
    hit = np.zeros((*ids.shape[:2], case.ranks), dtype=np.bool_)
    for rank in range(case.ranks):
        hit[:, :, rank] = ((owner == rank) & (ids >= 0)).any(axis=2)
    return hit


def row_counts(ids: Ids, case: Case) -> npt.NDArray[np.int64]:
    """``[ranks, ranks]``: rows from source to destination, one per (token, rank)."""
    rows: npt.NDArray[np.int64] = touched(ids, case).sum(axis=1).astype(np.int64)
    return rows
