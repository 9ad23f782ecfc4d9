# SPDX-License-Identifier: Apache-2.0
"""The exchanges that cross ranks: Fanfold's, and the best known scheme over gloo beside it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from moe_model.model import Experts, ModelConfig

if TYPE_CHECKING:
    from fanfold import AllToAll, Communicator

ID_BYTES = 4
WEIGHT_BYTES = 4
PHASES = ("dispatch", "experts", "combine")


def linear_placement(num_experts: int, num_ranks: int) -> list[int]:
    """Return the rank of every expert: in order, the first ranks one more when it is uneven."""
    share, extra = divmod(num_experts, num_ranks)
    sizes = [share + (rank < extra) for rank in range(num_ranks)]
    return [rank for rank, size in enumerate(sizes) for _ in range(size)]


def hold_local_experts(blocks: torch.nn.ModuleList, rank: int, num_ranks: int) -> int:
    """Drop the experts of other ranks from every block; return how many stay."""
    for block in blocks:
        owners = linear_placement(block.experts.up.shape[0], num_ranks)
        count = owners.count(rank)
        block.experts.keep_only(owners.index(rank) if count else 0, count)
    return count


@dataclass
class PhaseClock:
    """Collects the time of each phase of each round; `align` runs before it starts to count."""

    align: Callable[[], None] = lambda: None
    recording: bool = False
    nanoseconds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def phase(self, name: str, aligned: bool) -> Iterator[None]:
        """Time one phase, after all ranks have come to its start if `aligned`."""
        if aligned and self.recording:
            self.align()
        start = time.perf_counter_ns()
        yield
        if self.recording:
            self.nanoseconds[name].append(time.perf_counter_ns() - start)

    def microseconds(self) -> dict[str, numpy.ndarray]:
        """Return what was collected, one array per phase."""
        return {name: numpy.array(values) / 1000 for name, values in self.nanoseconds.items()}


class Traffic:
    """Rows that came to this rank per source rank, and the routing that its own tokens took."""

    def __init__(self, config: ModelConfig, num_ranks: int, max_tokens: int) -> None:
        import fanfold

        self.recording = False
        self.rows = torch.zeros(num_ranks, dtype=torch.int64)
        self.load = numpy.zeros((config.num_layers, config.num_experts), dtype=numpy.int64)
        self.num_steps = 0
        self.last_layer = config.num_layers - 1
        self.capture = fanfold.RoutingCapture(
            num_layers=config.num_layers,
            num_experts=config.num_experts,
            top_k=config.top_k,
            max_tokens=max_tokens,
        )

    def add(self, layer: int, rows: Tensor, topk_ids: Tensor) -> None:
        """Count the dispatch of one layer; layers come in order."""
        if not self.recording:
            return
        self.rows += rows
        if layer == 0:
            self.capture.begin_step(self.num_steps)
            self.num_steps += 1
        self.capture.record(layer, topk_ids)
        if layer == self.last_layer:
            with self.capture.snapshot(topk_ids.shape[0]) as snapshot:
                if snapshot.missing_layers:
                    raise RuntimeError(f"layers {snapshot.missing_layers} were not recorded")
                self.load += snapshot.expert_histogram()


# One row per (token, rank) in each of them, which is what the model's experts take.
LAYOUT_OF = {
    "one_sided": "rank_major",
    "low_latency": "rank_major",
    "high_throughput": "flat",
    "two_sided": "flat",
    "batched": "rank_major",
    "gather_scatter": "flat",
    "broadcast": "flat",
}


class FanfoldExchange:
    """Dispatch to the ranks of the experts, run the experts there, combine. One for all layers."""

    name = "fanfold"

    def __init__(
        self,
        comm: Communicator,
        config: ModelConfig,
        max_tokens: int,
        traffic: Traffic,
        strategy: str,
    ) -> None:
        import fanfold

        self.clock = PhaseClock(comm.barrier)
        self.traffic = traffic
        self.a2a: AllToAll = fanfold.AllToAll(
            comm,
            num_experts=config.num_experts,
            top_k=config.top_k,
            max_tokens_per_rank=max_tokens,
            hidden=config.hidden,
            dtype=torch.float32,
            strategy=strategy,
            layout=LAYOUT_OF[strategy],
            weighting="applied",
        )

    def run(
        self, layer: int, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts
    ) -> Tensor:
        """Return the folded expert outputs of this rank's rows."""
        with self.clock.phase("dispatch", aligned=True):
            recv = self.a2a.dispatch(topk_ids, [rows], topk_weights=topk_weights)
        self.traffic.add(layer, recv.rank_counts, topk_ids)
        with self.clock.phase("experts", aligned=False):
            result = recv.combine_buffer()
            used = recv.source_rank >= 0  # all of a flat layout's rows
            result[used] = experts(
                recv.payloads[0][used], recv.topk_ids[used], recv.topk_weights[used]
            )
        with self.clock.phase("combine", aligned=True):
            folded: Tensor = recv.combine(result)
        return folded

    def close(self) -> None:
        """Give the memory back; collective."""
        self.a2a.close()


class GlooExchange:
    """The same exchange over `torch.distributed`'s gloo: all-to-all with exact splits.

    A token goes once to each rank that has one of its experts. Its state, ids and weights are
    packed into one message; the split sizes are exchanged before, since nobody knows them.
    """

    name = "gloo"

    def __init__(self, comm: Communicator, config: ModelConfig, rendezvous: str) -> None:
        import torch.distributed

        self.collectives = torch.distributed
        self.collectives.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=comm.rank,
            world_size=comm.num_ranks,
        )
        self.clock = PhaseClock(comm.barrier)
        self.num_ranks = comm.num_ranks
        owners = linear_placement(config.num_experts, comm.num_ranks)
        self.owners = torch.tensor(owners, dtype=torch.int64)
        hidden_bytes = config.hidden * 4
        self.sections = [hidden_bytes, config.top_k * ID_BYTES, config.top_k * WEIGHT_BYTES]

    def run(
        self, layer: int, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts
    ) -> Tensor:
        """Return the folded expert outputs of this rank's rows."""
        del layer
        with self.clock.phase("dispatch", aligned=True):
            targets = torch.zeros(rows.shape[0], self.num_ranks, dtype=torch.bool)
            targets.scatter_(1, self.owners[topk_ids.long()], True)
            token = targets.t().nonzero()[:, 1]
            sent = targets.sum(0)
            received = torch.empty_like(sent)
            self.collectives.all_to_all_single(received, sent)
            splits = (received.tolist(), sent.tolist())
            parts = (rows[token], topk_ids[token], topk_weights[token])
            packed = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
            arrived = packed.new_empty(sum(splits[0]), packed.shape[1])
            self.collectives.all_to_all_single(arrived, packed, *splits)
            state, ids, weights = arrived.split(self.sections, dim=1)
        with self.clock.phase("experts", aligned=False):
            result = experts(
                state.contiguous().view(torch.float32),
                ids.contiguous().view(torch.int32),
                weights.contiguous().view(torch.float32),
            )
        with self.clock.phase("combine", aligned=True):
            returned = rows.new_empty(token.numel(), rows.shape[1])
            self.collectives.all_to_all_single(returned, result, *reversed(splits))
            return torch.zeros_like(rows).index_add_(0, token, returned)

    def close(self) -> None:
        """Leave the group; collective."""
        self.collectives.destroy_process_group()
