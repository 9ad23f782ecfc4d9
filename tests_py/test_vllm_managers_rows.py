# SPDX-License-Identifier: Apache-2.0
"""Each prepare/finalize class against a dense layer of one process, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.vllm_managers import ALL, BY_ROW, GATHERING, Batch, layer_output, layers_in_processes

import fanfold
from fanfold.testing import spawn_processes, spawn_threads

STEPS = [[2, 3, 1], [0, 5, 2], [4, 0, 0], [0, 0, 0], [1, 1, 1]]


def steps_of(name: str, batches: list[Batch], **how: Any) -> list[list[Any]]:
    """The outputs of every step on every rank, by one layer that serves them all."""

    def rank(comm: fanfold.Communicator) -> list[Any]:
        largest = max(batches, key=lambda batch: max(batch.num_tokens))
        layer = ALL[name](comm, largest, **how.get("made", {}))
        outputs = []
        for batch in batches:
            layer._manager._forward_context = batch.context
            arguments = how.get("called", {})
            outputs.append(layer_output(layer, batch, comm.rank, comm.num_ranks, **arguments))
        layer._manager.destroy()
        return outputs

    return spawn_threads(len(batches[0].num_tokens), rank)


def check(batches: list[Batch], outputs: list[list[Any]], **how: Any) -> None:
    for rank, steps in enumerate(outputs):
        for step, (batch, output) in enumerate(zip(batches, steps, strict=True)):
            expected = batch.dense(rank, **how)
            if batch.dtype is torch.float32:
                torch.testing.assert_close(output, expected, rtol=0, atol=0, msg=f"{rank} {step}")
            else:
                torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_steps_of_any_number_of_tokens(name: str, top_k: int) -> None:
    batches = [
        Batch(num_tokens, top_k=top_k, num_experts=7, seed=seed)
        for seed, num_tokens in enumerate(STEPS)
    ]
    check(batches, steps_of(name, batches))


@pytest.mark.parametrize("name", ALL)
def test_one_rank(name: str) -> None:
    batches = [Batch([tokens], seed=tokens) for tokens in (3, 0, 1)]
    check(batches, steps_of(name, batches))


@pytest.mark.parametrize("name", ALL)
def test_a_rank_without_experts(name: str) -> None:
    batches = [Batch([2, 3, 2], num_experts=2)]
    check(batches, steps_of(name, batches))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    batches = [Batch([3, 2], dtype=dtype)]
    check(batches, steps_of(name, batches))


@pytest.mark.parametrize("name", ALL)
def test_ids_that_select_no_expert_and_ids_that_repeat(name: str) -> None:
    batch = Batch([4, 3], top_k=3)
    batch.ids[0] = torch.tensor([-1, 2, -1])
    batch.ids[1] = -1  # a row of padding: exact zeros
    batch.ids[2] = torch.tensor([5, 5, 0])
    batch.ids[5] = torch.tensor([1, 1, 1])
    batch.ids[6] = torch.tensor([-7, 3, 4])
    outputs = steps_of(name, [batch])
    check([batch], outputs)
    assert torch.equal(outputs[0][0][1], torch.zeros(batch.hidden))


@pytest.mark.parametrize("name", ALL)
def test_a_step_that_is_all_padding(name: str) -> None:
    batch = Batch([2, 2])
    batch.ids[:] = -1
    check([batch], steps_of(name, [batch]))


@pytest.mark.parametrize("name", ALL)
def test_weights_on_the_input_of_one_expert(name: str) -> None:
    batches = [Batch([3, 2], top_k=1)]
    outputs = steps_of(name, batches, called={"on_input": True})
    check(batches, outputs, on_input=True)


@pytest.mark.parametrize("name", [*BY_ROW, *GATHERING])
def test_experts_that_leave_weights_and_sums_to_the_class(name: str) -> None:
    batches = [Batch([3, 2], top_k=3)]
    check(batches, steps_of(name, batches, called={"per_expert": True}))
    batches = [Batch([3, 2], top_k=1)]
    called = {"per_expert": True, "on_input": True}
    check(batches, steps_of(name, batches, called=called), on_input=True)


@pytest.mark.parametrize("name", ALL)
def test_weights_of_another_type(name: str) -> None:
    batches = [Batch([3, 2])]
    batches[0].weights = batches[0].weights.to(torch.bfloat16)
    check(batches, steps_of(name, batches))


@pytest.mark.parametrize("name", ALL)
def test_rows_that_experts_quantise_go_as_they_are(name: str) -> None:
    quantised = type("Config", (), {"quant_dtype": torch.float8_e4m3fn, "block_shape": None})
    called = {"quant_config": quantised, "defer": True}
    batches = [Batch([3, 2])]
    if name == "batched":
        with pytest.raises(NotImplementedError, match="without quantisation"):
            steps_of(name, batches, called=called)
        return
    check(batches, steps_of(name, batches, called=called))


@pytest.mark.multiproc
def test_ranks_of_torch_distributed(tmp_path: Any) -> None:
    errors = spawn_processes(2, layers_in_processes, str(tmp_path / "store"))
    assert errors == [[0.0, 0.0]] * 2
