# SPDX-License-Identifier: Apache-2.0
"""Exchanges as people write them today over a process group's collectives (gloo on the CPU).

``gloo_batched``      fixed capacity per destination, three equal-split all-to-alls, then an
                      expert-major block per local expert
``gloo_agrs``         all-gather of everything, reduce-scatter of partial sums
``gloo_naive``        a broadcast per rank and tensor, all-reduce of partial sums
``gloo_a2av``         exact splits, one row per (token, expert), expert order
``gloo_a2av_dedup``   exact splits, one row per (token, rank)
"""

from __future__ import annotations

from fanfold_bench.baselines.batched import Batched
from fanfold_bench.baselines.collectives import Collectives
from fanfold_bench.baselines.exact import ExactByExpert, ExactByRank
from fanfold_bench.baselines.replicated import BroadcastReduce, GatherScatter
from fanfold_bench.batch import Batch

Scheme = Batched | GatherScatter | BroadcastReduce | ExactByExpert | ExactByRank

SCHEMES: dict[str, type[Scheme]] = {
    "gloo_batched": Batched,
    "gloo_agrs": GatherScatter,
    "gloo_naive": BroadcastReduce,
    "gloo_a2av": ExactByExpert,
    "gloo_a2av_dedup": ExactByRank,
}

__all__ = ["SCHEMES", "Collectives", "Scheme", "make_scheme"]


def make_scheme(name: str, group: Collectives, batch: Batch) -> Scheme:
    """The scheme of that name for one case."""
    return SCHEMES[name](group, batch)
