# SPDX-License-Identifier: Apache-2.0
"""What each rank of the demo does; importable at top level, since new processes run it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch

from moe_model.evaluate import token_losses, windows
from moe_model.exchanges import FanfoldExchange, GlooExchange, Traffic, hold_local_experts
from moe_model.model import MoeModel, load_model

if TYPE_CHECKING:
    from fanfold import Communicator


@dataclass(frozen=True)
class Job:
    """What the demo asks of all ranks."""

    text: numpy.ndarray  # uint8
    folder: Path  # private to this run: progress and gloo's rendezvous
    windows_per_step: int
    timed_passes: int
    strategy: str = "one_sided"

    def num_windows(self, context: int) -> int:
        """Return how many whole windows the text has."""
        return max((len(self.text) - 1) // context, 0)

    def num_steps(self, context: int, num_ranks: int) -> int:
        """Return the steps of one pass: equal on all ranks, the last may lack windows on some."""
        per_rank = -(-self.num_windows(context) // num_ranks)
        return -(-per_rank // self.windows_per_step)

    @property
    def num_passes(self) -> int:
        """Return the passes over the text: one that counts and the timed ones, per scheme."""
        return 2 * (1 + self.timed_passes)


@dataclass(frozen=True)
class RankReport:
    """What one rank measured; arrays only, so that it travels between processes."""

    losses: numpy.ndarray  # [tokens] of this rank, in text order, through Fanfold
    correct: numpy.ndarray  # [tokens] bool
    gloo_losses: numpy.ndarray
    rows_from: numpy.ndarray  # [ranks] rows received, all layers, one pass
    load: numpy.ndarray  # [layers, experts] (token, expert) pairs of its own tokens, one pass
    microseconds: dict[str, dict[str, numpy.ndarray]] = field(default_factory=dict)


class Progress:
    """One counter per rank in a file that the parent process reads."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * num_ranks))
        self.counters = numpy.memmap(path, dtype=numpy.int64, mode="r+", shape=(num_ranks,))

    def advance(self, rank: int) -> None:
        """Count one step of `rank`."""
        self.counters[rank] += 1

    def done(self) -> int:
        """Return the steps of all ranks together."""
        return int(self.counters.sum())


def one_pass(
    model: MoeModel,
    exchange: FanfoldExchange | GlooExchange,
    mine: tuple[torch.Tensor, torch.Tensor],
    steps: int,
    after_step: Progress,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run this rank's windows through the model; return losses and hits per token."""
    batch = -(-mine[0].shape[0] // max(steps, 1))
    losses, correct = [], []
    for step in range(steps):
        part = slice(step * batch, (step + 1) * batch)
        logits, _ = model(mine[0][part], exchange)
        loss, right = token_losses(logits, mine[1][part])
        losses.append(loss)
        correct.append(right)
        after_step.advance(rank)
    return torch.cat(losses), torch.cat(correct)


@torch.no_grad()
def run_rank(comm: Communicator, job: Job) -> RankReport:
    """Run one rank: its share of the windows, its share of the experts."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    rank, num_ranks = comm.rank, comm.num_ranks
    model = load_model()
    config = model.config
    hold_local_experts(model.blocks, rank, num_ranks)
    inputs, targets = windows(torch.from_numpy(job.text), config.context)
    mine = inputs.tensor_split(num_ranks)[rank], targets.tensor_split(num_ranks)[rank]
    steps = job.num_steps(config.context, num_ranks)
    progress = Progress(job.folder / "progress", num_ranks)

    capacity = job.windows_per_step * config.context
    traffic = Traffic(config, num_ranks, capacity)
    exchange = FanfoldExchange(comm, config, capacity, traffic, job.strategy)
    rival = GlooExchange(comm, config, str(job.folder / "gloo"))
    traffic.recording = True
    losses, correct = one_pass(model, exchange, mine, steps, progress, rank)
    traffic.recording = False
    gloo_losses, _ = one_pass(model, rival, mine, steps, progress, rank)
    exchange.clock.recording = rival.clock.recording = True
    for _ in range(job.timed_passes):  # in turn, so that a busy moment meets both
        one_pass(model, exchange, mine, steps, progress, rank)
        one_pass(model, rival, mine, steps, progress, rank)
    rival.close()
    exchange.close()
    return RankReport(
        losses=losses.numpy(),
        correct=correct.numpy(),
        gloo_losses=gloo_losses.numpy(),
        rows_from=traffic.rows.numpy(),
        load=traffic.load,
        microseconds={each.name: each.clock.microseconds() for each in (exchange, rival)},
    )
