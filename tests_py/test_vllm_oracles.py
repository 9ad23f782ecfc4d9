# SPDX-License-Identifier: Apache-2.0
"""vLLM's own capturer and batched class as second witnesses, where their files are installed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import vllm_files
from support.vllm_capture import Step, config, context, rows
from support.vllm_managers import DELEGATE, UNQUANTISED, Batch, batched, local_experts, manager_of

import fanfold
from fanfold.testing import spawn_threads

LAYER = "vllm.model_executor.layers.fused_moe."


@pytest.fixture
def root() -> Path:
    found = vllm_files.installed()
    if found is None:
        pytest.skip("vllm is not installed: nothing was compared with its own classes")
    return found


@pytest.fixture
def capturer_file(root: Path) -> Iterator[Any]:
    with vllm_files.loaded_alone(root, [LAYER + "routed_experts_capturer"]) as (module,):
        module.current_platform = SimpleNamespace(device_type="cpu")
        module.dbo_current_ubatch_token_offset = lambda: 0
        yield module


def rows_of_vllm(file: Any, now: Any, num_rows: int, dp_rank: int, tp_size: int) -> list[int]:
    """Which rows vLLM's capturer keeps; a gather gives the rows of all shards."""
    values = config(100, 1, hf={"model_type": "any"}, data_parallel_rank=dp_rank)
    values.parallel_config.tensor_parallel_size = tp_size
    file.get_forward_context = lambda: now

    def gather(ids: Any, dim: int) -> Any:
        del ids, dim
        return torch.from_numpy(rows(tp_size * num_rows))

    file.get_tp_group = lambda: SimpleNamespace(all_gather=gather)
    capturer = file.RoutedExpertsCapturer(16, values)
    capturer.device_buffer.fill_(-1)
    capturer.capture(0, torch.from_numpy(rows(num_rows)))
    return [int(row) for row in capturer.device_buffer[:, 0, 0] if row >= 0]


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_rows_that_are_kept_are_those_that_vllm_keeps(capturer_file: Any, tp_size: int) -> None:
    """Or none, where several rules fit."""
    num_kept = 0
    for counts in itertools.product(range(4), repeat=2):
        shards = [-(-count // tp_size) for count in counts for _ in range(tp_size)]
        for dp_rank, sizes, num_rows in itertools.product(range(2), (None, shards), range(13)):
            now = context(list(counts), local_sizes=sizes)
            try:
                expected = rows_of_vllm(capturer_file, now, num_rows, dp_rank, tp_size)
            except AssertionError:
                expected = None
            step = Step(now, dp_rank=dp_rank, tp_size=tp_size)
            step.capturer._tp_all_gather = lambda ids: rows(tp_size * len(ids))
            try:
                kept = step.kept(num_rows)
            except fanfold.InvalidArgument:
                continue
            assert kept == expected, (counts, dp_rank, sizes, num_rows)
            num_kept += 1
    assert num_kept > 50


def test_batched_rows_and_sums_are_those_of_vllm(root: Path) -> None:
    """One object of vLLM's per rank, given all tokens; their outputs added."""
    names = [LAYER + each for each in ("modular_kernel", "topk_weight_and_reduce")]
    names.append(LAYER + "prepare_finalize.batched")
    batch, num_ranks = Batch([3, 2], num_experts=6), 2
    with vllm_files.loaded_alone(root, names) as (kernel, _, module):
        module.normalize_scales_shape = lambda scale: scale
        total = torch.zeros((5, batch.hidden))
        quant = SimpleNamespace(quant_dtype=None, is_quantized=False, a1_scale=None)
        theirs = []
        for rank in range(num_ranks):
            local = local_experts(6, rank, num_ranks)
            layer = module.BatchedPrepareAndFinalize(5, 3, num_ranks, rank)
            assert isinstance(layer, kernel.FusedMoEPrepareAndFinalizeModular)
            x = batch.x.clone()
            received = layer.prepare(x, batch.weights, batch.ids, 6, None, False, quant)
            counts = received[2].expert_num_tokens[:3]
            results = batch.by_expert(received[0], counts.int(), local)
            output = torch.zeros((5, batch.hidden))
            layer.finalize(
                output, results, batch.weights, batch.ids, False,
                module.TopKWeightAndReduceDelegate(),
            )  # fmt: skip
            total += output
            theirs.append((received[0], counts.tolist()))

    def one(comm: fanfold.Communicator) -> None:
        layer = batched(comm, batch)
        x, weights, ids = batch.of(comm.rank)
        received, _, tokens, _, _ = layer.prepare(x, weights, ids, 6, None, False, UNQUANTISED)
        expected, counts = theirs[comm.rank]
        assert tokens.expert_num_tokens.tolist() == counts
        for local, count in enumerate(counts):
            assert torch.equal(received[local, :count], expected[local, :count])
        local = local_experts(6, comm.rank, num_ranks)
        results = batch.by_expert(received, tokens.expert_num_tokens, local)
        output = torch.empty((len(x), batch.hidden))
        layer.finalize(output, results, weights, ids, False, DELEGATE)
        first = sum(batch.num_tokens[: comm.rank])
        assert torch.equal(output, total[first : first + len(x)])
        manager_of(layer).destroy()

    spawn_threads(num_ranks, one)
