# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM's context objects, experts, and a dense layer to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import fanfold
from fanfold.compat import vllm
from fanfold.compat.vllm.manager_base import All2AllManager
from fanfold.testing import spawn_threads

HIDDEN = 16
UNQUANTISED = SimpleNamespace(quant_dtype=None, block_shape=None, per_act_token_quant=False)


class TopKWeightAndReduceDelegate:
    """Known to us by its name."""


class TopKWeightAndReduceNoOP:
    """Known by its name, too: nothing is left to do."""


class TopKWeightAndReduceContiguous:
    """Does what vLLM's class of this name does."""

    def apply(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
    ) -> Any:
        assert output is None
        rows, num_picks = topk_ids.shape
        results = fused_expert_output.view(rows, num_picks, fused_expert_output.shape[-1])
        if not apply_router_weight_on_input:
            results = results * topk_weights[..., None]
        return results.sum(1)


DELEGATE = TopKWeightAndReduceDelegate()
NO_OP = TopKWeightAndReduceNoOP()


def left_to_do(layer: Any) -> Any:
    """The impl of experts that give one weighted result per row, or, by expert, unweighted ones."""
    return DELEGATE if layer.activation_format.name == "BatchedExperts" else NO_OP


FP8_BLOCKS = SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])


class DPMetadata:
    """A stand-in for vLLM's class of this name."""

    def __init__(self, num_tokens: Sequence[int]) -> None:
        self.num_tokens_across_dp_cpu = torch.tensor(list(num_tokens), dtype=torch.int32)
        self.local_sizes: list[int] | None = list(num_tokens)

    @contextlib.contextmanager
    def sp_local_sizes(self, sp_size: int) -> Iterator[None]:
        before = self.local_sizes
        self.local_sizes = [
            -(-int(count) // sp_size)
            for count in self.num_tokens_across_dp_cpu
            for _ in range(sp_size)
        ]
        yield
        self.local_sizes = before

    def get_chunk_sizes_across_dp_rank(self) -> list[int]:
        assert self.local_sizes is not None
        return self.local_sizes

    def cu_tokens_across_sp(self, sp_size: int) -> torch.Tensor:
        shards = (self.num_tokens_across_dp_cpu - 1 + sp_size) // sp_size
        return shards.repeat_interleave(sp_size).cumsum(0)


def group(ranks: Sequence[int], rank: int) -> Any:
    """A stand-in for vLLM's GroupCoordinator."""
    return SimpleNamespace(
        world_size=len(ranks), rank_in_group=list(ranks).index(rank), ranks=list(ranks)
    )


class Batch:
    """What all ranks have in one step, the same on each. Values for which sums are exact."""

    def __init__(
        self,
        num_tokens: Sequence[int],
        *,
        num_experts: int = 6,
        top_k: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        hidden: int = HIDDEN,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        total = sum(num_tokens)
        self.num_tokens = list(num_tokens)
        self.num_experts, self.top_k, self.dtype, self.hidden = num_experts, top_k, dtype, hidden
        self.x = torch.randint(-4, 5, (total, hidden), generator=draw).to(dtype)
        order = torch.rand((total, num_experts), generator=draw).argsort(dim=1)
        self.ids = order[:, :top_k].contiguous()
        self.weights = torch.randint(1, 9, (total, top_k), generator=draw) / 8.0
        self.matrices = torch.randint(-1, 2, (num_experts, hidden, hidden), generator=draw).float()

    def of(self, rank: int) -> tuple[Any, Any, Any]:
        """One rank's tokens, weights and ids."""
        first = sum(self.num_tokens[:rank])
        rows = slice(first, first + self.num_tokens[rank])
        return self.x[rows], self.weights[rows], self.ids[rows]

    def dense(self, rank: int, *, on_input: bool = False) -> Any:
        """What one process with all experts gives for one rank's tokens, in float32."""
        x, weights, ids = self.of(rank)
        if on_input:
            x = x * weights.to(self.dtype)
        out = torch.zeros((len(x), self.hidden))
        for token in range(len(x)):
            for k in range(self.top_k):
                expert = int(ids[token, k])
                if expert >= 0:
                    result = x[token].float() @ self.matrices[expert]
                    out[token] += result * (1.0 if on_input else weights[token, k])
        return out

    def context(self) -> Any:
        return SimpleNamespace(dp_metadata=DPMetadata(self.num_tokens))

    # --- Experts, by the format of their rows ---------------------------------------------------

    def by_row(self, rows: Any, ids: Any, weights: Any, local: Sequence[int], **how: Any) -> Any:
        """One result per row, weighted and added; NaN where there is no token."""
        per_expert = self.per_row_and_expert(rows, ids, local, padding=0.0)
        factors = 1.0 if how.get("on_input") else weights.float()[..., None]
        out = (per_expert * factors).sum(1)
        if how.get("poisons", True):
            out[(ids < 0).all(1)] = torch.nan
        return out.to(self.dtype)

    def per_row_and_expert(
        self, rows: Any, ids: Any, local: Sequence[int], padding: float = 0.0
    ) -> Any:
        """``[rows, K, H]`` float32, not weighted; ``padding`` where no expert is here."""
        out = torch.full((*ids.shape, self.hidden), padding)
        for row in range(len(rows)):
            for k in range(ids.shape[1]):
                if int(ids[row, k]) in local:
                    out[row, k] = rows[row].float() @ self.matrices[int(ids[row, k])]
        return out

    def by_expert(self, rows: Any, counts: Any, local: Sequence[int], into: Any = None) -> Any:
        """One result per row of each local expert; NaN past the counts."""
        out = torch.full(rows.shape, torch.nan, dtype=self.dtype) if into is None else into
        assert counts.shape == (len(local),)
        assert counts.dtype is torch.int32
        for position, expert in enumerate(local):
            count = int(counts[position])
            result = rows[position, :count].float() @ self.matrices[expert]
            out[position, :count] = result.to(self.dtype)
        return out


def local_experts(num_experts: int, rank: int, num_ranks: int) -> list[int]:
    """The linear placement: the first ranks have one more."""
    base, more = divmod(num_experts, num_ranks)
    first = rank * base + min(rank, more)
    return list(range(first, first + base + (rank < more)))


def expert_map(num_experts: int, local: Sequence[int]) -> Any:
    """vLLM's map: the local position, -1 elsewhere."""
    made = torch.full((num_experts,), -1, dtype=torch.int32)
    made[list(local)] = torch.arange(len(local), dtype=torch.int32)
    return made


def manager(cls: type, comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    """A manager whose step is that of the batch."""
    values = {"forward_context": batch.context, "timeout_s": 20.0, **more}
    return cls(comm, **values)


# --- One class of each kind, made for a batch ---------------------------------------------------


def batched(comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    own = manager(vllm.BatchedAll2AllManager, comm, batch)
    local = local_experts(batch.num_experts, comm.rank, comm.num_ranks)
    return vllm.AllToAllBatchedPrepareAndFinalize(
        max(1, *batch.num_tokens), len(local), comm.num_ranks, comm.rank, manager=own, **more
    )


def low_latency(comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    own = manager(vllm.DeepEPLLAll2AllManager, comm, batch)
    local = local_experts(batch.num_experts, comm.rank, comm.num_ranks)
    handle = own.get_handle(
        {
            "max_num_tokens_per_dp_rank": max(1, *batch.num_tokens),
            "token_hidden_size": batch.hidden,
            "num_ep_ranks": comm.num_ranks,
            "num_global_experts": batch.num_experts,
            "num_local_experts": len(local),
        }
    )
    return vllm.DeepEPLLPrepareAndFinalize(
        handle, max(1, *batch.num_tokens), comm.num_ranks, **more
    )


def high_throughput(comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    own = manager(vllm.DeepEPHTAll2AllManager, comm, batch, max_tokens_per_rank=64)
    local = local_experts(batch.num_experts, comm.rank, comm.num_ranks)
    return vllm.DeepEPHTPrepareAndFinalize(
        own.get_handle({}), comm.num_ranks, comm.num_ranks, local[0] if local else 0, **more
    )


def one_sided(comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    own = manager(vllm.FlashInferNVLinkOneSidedManager, comm, batch)
    return vllm.FlashInferNVLinkOneSidedPrepareAndFinalize(
        max_num_tokens=max(1, *batch.num_tokens),
        top_k=batch.top_k,
        num_experts=batch.num_experts,
        hidden_size=batch.hidden,
        num_dispatchers=comm.num_ranks,
        manager=own,
        **more,
    )


def two_sided(comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    own = manager(vllm.FlashInferNVLinkTwoSidedManager, comm, batch)
    return vllm.FlashInferNVLinkTwoSidedPrepareAndFinalize(comm.num_ranks, manager=own, **more)


def _gathering(cls: type, comm: fanfold.Communicator, batch: Batch, more: dict[str, Any]) -> Any:
    own = manager(cls, comm, batch)
    return vllm.MoEPrepareAndFinalizeNaiveDPEPModular(False, comm.num_ranks, manager=own, **more)


def gather_scatter(comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    return _gathering(vllm.AgRsAll2AllManager, comm, batch, more)


def naive(comm: fanfold.Communicator, batch: Batch, **more: Any) -> Any:
    return _gathering(vllm.NaiveAll2AllManager, comm, batch, more)


BY_EXPERT = {"batched": batched, "low_latency": low_latency}
BY_ROW = {
    "high_throughput": high_throughput,
    "one_sided": one_sided,
    "two_sided": two_sided,
}
GATHERING = {"gather_scatter": gather_scatter, "naive": naive}
ALL = {**BY_EXPERT, **BY_ROW, **GATHERING}


def manager_of(layer: Any) -> All2AllManager:
    found: All2AllManager = layer._manager
    return found


def layer_output(
    layer: Any,
    batch: Batch,
    rank: int,
    num_ranks: int,
    *,
    on_input: bool = False,
    per_expert: bool = False,
    quant_config: Any = UNQUANTISED,
    defer: bool = False,
) -> Any:
    """One step of a layer: prepare, experts, finalize, as vLLM's driver does it.

    Args:
        per_expert: experts of rows give ``[rows, K, H]`` and leave weights and sums to the class.
    """
    x, weights, ids = batch.of(rank)
    local = local_experts(batch.num_experts, rank, num_ranks)
    given = [tensor.clone() for tensor in (x, weights, ids)]
    rows, scales, tokens, new_ids, new_weights = layer.prepare(
        x,
        weights,
        ids.to(layer.topk_indices_dtype() or torch.int64),
        batch.num_experts,
        expert_map(batch.num_experts, local),
        on_input,
        quant_config,
        defer,
    )
    del scales
    ids = ids if new_ids is None else new_ids
    if new_weights is not None:
        assert new_weights.dtype is weights.dtype
        weights = new_weights
    if layer.activation_format.name == "BatchedExperts":
        results = batch.by_expert(rows, tokens.expert_num_tokens, local)
    elif per_expert:
        results = batch.per_row_and_expert(rows, ids, local).to(batch.dtype)
    else:
        poisons = not isinstance(layer, vllm.MoEPrepareAndFinalizeNaiveDPEPModular)
        results = batch.by_row(rows, ids, weights, local, on_input=on_input, poisons=poisons)
    output = torch.full((batch.num_tokens[rank], batch.hidden), torch.nan, dtype=batch.dtype)
    reduce = DELEGATE if per_expert else left_to_do(layer)
    layer.finalize(output, results, weights, ids, on_input, reduce)
    after = batch.of(rank)
    for tensor, before in zip(after, given, strict=True):
        assert torch.equal(tensor, before), "an input was written to"
    return output


def each_rank(num_ranks: int, batch: Batch, make: Any, body: Any, **made: Any) -> list[Any]:
    """Run ``body(layer, comm)`` on every rank."""

    def rank(comm: fanfold.Communicator) -> Any:
        layer = make(comm, batch, **made)
        result = body(layer, comm)
        manager_of(layer).destroy()
        return result

    return spawn_threads(num_ranks, rank)


def prepare(layer: Any, batch: Batch, rank: int, config: Any = UNQUANTISED, **more: Any) -> Any:
    x, weights, ids = batch.of(rank)
    return layer.prepare(
        x, weights, ids, batch.num_experts, None, more.pop("on_input", False), config, **more
    )


# --- What ranks that are processes run ----------------------------------------------------------


def layers_in_processes(comm: fanfold.Communicator, store: str) -> list[float]:
    """Layers over a group of torch.distributed; returns how far off each was."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.num_ranks
    )
    batch = Batch([3, 1])
    errors = []
    for cls in (vllm.AgRsAll2AllManager, vllm.FlashInferNVLinkOneSidedManager):
        own = cls(dist.group.WORLD, forward_context=batch.context, timeout_s=20.0)
        assert (own.rank, own.world_size) == (comm.rank, comm.num_ranks)
        layer: Any
        if cls is vllm.AgRsAll2AllManager:
            layer = vllm.MoEPrepareAndFinalizeNaiveDPEPModular(False, 2, manager=own)
        else:
            layer = vllm.FlashInferNVLinkOneSidedPrepareAndFinalize(
                4, batch.top_k, batch.num_experts, batch.hidden, manager=own
            )
        output = layer_output(layer, batch, comm.rank, comm.num_ranks)
        errors.append(float((output - batch.dense(comm.rank)).abs().max()))
        own.destroy()
    dist.destroy_process_group()
    return errors
