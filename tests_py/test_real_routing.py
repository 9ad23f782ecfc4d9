# SPDX-License-Identifier: Apache-2.0
"""Routing as a trained router made it: skewed, with experts that co-occur."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

import fanfold
from fanfold.testing import spawn_threads

RECORDED = Path(__file__).resolve().parent.parent / "tools" / "data" / "routing_demo.npz"
HIDDEN = 24
TOKENS = 96


def _exchange_layers(comm: fanfold.Communicator, strategy: str) -> None:
    with numpy.load(RECORDED) as recorded:
        layers, num_experts = recorded["topk_ids"], int(recorded["num_experts"])
    a2a = fanfold.AllToAll(
        comm,
        num_experts=num_experts,
        top_k=layers.shape[2],
        max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        dtype="float32",
        strategy=strategy,
    )
    per_rank = num_experts // comm.num_ranks
    start = comm.rank * TOKENS
    for ids in layers[:, start : start + TOKENS]:
        x = numpy.random.default_rng(comm.rank).standard_normal((TOKENS, HIDDEN)).astype("float32")
        recv = a2a.dispatch(ids, [x])
        here = recv.topk_ids // per_rank == comm.rank
        valid = recv.topk_ids >= 0
        assert recv.host_counts().num_rows == (here & valid).any(axis=2).sum()
        assert recv.expert_counts.sum() == (here & valid).sum()
        y = recv.combine_buffer()
        y[...] = recv.payloads[0]
        out = recv.combine(y)
        num_ranks = [len({int(e) // per_rank for e in token}) for token in ids]
        assert numpy.array_equal(out, x * numpy.float32(num_ranks)[:, None])
    a2a.close()


@pytest.mark.parametrize("strategy", ["one_sided", "broadcast"])
def test_recorded_routing_goes_out_and_comes_home(strategy: str) -> None:
    spawn_threads(4, _exchange_layers, strategy)
