# SPDX-License-Identifier: Apache-2.0
"""The small model of the demo: its weights, its exchange split over ranks, the demo itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

from moe_model.corpus import MissingPackageError, package_files, sample  # noqa: E402
from moe_model.evaluate import Evaluation, evaluate, load_ratios  # noqa: E402
from moe_model.exchanges import linear_placement  # noqa: E402
from moe_model.model import WEIGHTS_PATH, Experts, ModelConfig, MoeModel, load_model  # noqa: E402
from moe_model.record import ROUTING_PATH, record  # noqa: E402
from moe_model.report import Findings  # noqa: E402

SAMPLE_BYTES = 8192


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> MoeModel:
    return load_model()


def test_weights_are_small() -> None:
    assert WEIGHTS_PATH.stat().st_size < 2_000_000


@pytest.mark.parametrize("kind", ["documentation", "code"])
def test_held_out_sample_is_predicted_well(model: MoeModel, kind: str) -> None:
    result = evaluate(model, sample(kind)[:SAMPLE_BYTES])
    assert result.bits_per_byte <= 2.2
    highest, lowest = load_ratios(result.expert_load)
    assert max(highest) >= 1.5
    assert min(lowest) > 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16, 20])
def test_partial_sums_of_ranks_add_up(num_ranks: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig()
    rows = torch.randn(50, config.hidden)
    ids = torch.stack([torch.randperm(config.num_experts)[: config.top_k] for _ in range(50)])
    weights = torch.rand(50, config.top_k)
    whole = Experts(config).requires_grad_(False)
    expected = whole(rows, ids, weights)
    owners = linear_placement(config.num_experts, num_ranks)
    total = torch.zeros_like(rows)
    for rank in range(num_ranks):
        part = Experts(config)
        part.load_state_dict(whole.state_dict())
        count = owners.count(rank)
        part.keep_only(owners.index(rank) if count else 0, count)
        assert part.up.shape[0] == count
        total += part(rows, ids, weights)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def test_a_rank_without_tokens_still_takes_part(model: MoeModel) -> None:
    calls: list[tuple[int, tuple[int, ...]]] = []

    class Counting:
        def run(
            self, layer: int, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts
        ) -> Tensor:
            calls.append((layer, tuple(rows.shape)))
            return experts(rows, topk_ids, topk_weights)

    logits, _ = model(torch.zeros(0, model.config.context, dtype=torch.int64), Counting())
    assert logits.shape == (0, model.config.context, 256)
    assert calls == [(layer, (0, model.config.hidden)) for layer in range(model.config.num_layers)]


def test_recorded_routing_is_the_models_own(model: MoeModel) -> None:
    with np.load(ROUTING_PATH) as stored:
        ids = stored["topk_ids"]
        assert int(stored["num_experts"]) == model.config.num_experts
    assert ROUTING_PATH.stat().st_size < 200_000
    assert ids.dtype == np.int16
    assert ids.shape == (model.config.num_layers, 8192, model.config.top_k)
    assert ids.min() >= 0
    assert ids.max() < model.config.num_experts
    assert (ids[..., 0] != ids[..., 1]).all()
    # Another machine's matrix product may turn a near tie round, no more than that.
    again = record(model, 1024)
    assert (again[:, :256] == ids[:, :256]).mean() > 0.99


@pytest.mark.parametrize("strategy", ["one_sided", "high_throughput"])
def test_smoke_demo_agrees_with_one_process(tmp_path: Path, strategy: str) -> None:
    text = TOOLS / "moe_model" / "samples" / "documentation.txt"
    result, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    command = [sys.executable, "-m", "moe_model.demo", "--smoke", "--text", str(text)]
    command += ["--strategy", strategy]
    search = os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, "--json", str(result), "--png", str(picture)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["num_ranks"] == 2
    assert found["num_tokens"] == 2048
    assert found["loss_difference"] <= found["loss_tolerance"] == 1e-4
    assert found["faults"] == []
    assert np.array(found["expert_load"]).sum(1).tolist() == [2048 * 2] * 3
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"loss": 1.4002}, "the loss through Fanfold"),
        ({"loss": float("nan")}, "the loss through Fanfold"),
        ({"gloo_loss": 1.41}, "the loss through gloo"),
        ({"num_correct": 597}, "597 next bytes are right"),
        ({"load": np.full((3, 16), 124)}, "its experts received 1984"),
    ],
)
def test_disagreement_is_a_fault(change: dict[str, Any], word: str) -> None:
    load = np.full((3, 16), 125)
    single = Evaluation(1000, 1.4, 600, torch.from_numpy(load))
    phases = dict.fromkeys(("dispatch", "experts", "combine"), 1.0)
    found = Findings(
        single=single,
        loss=1.40005,
        gloo_loss=1.4,
        num_correct=601,
        rows=np.zeros((2, 2), dtype=np.int64),
        load=load,
        median_us={"fanfold": phases, "gloo": phases},
        config=ModelConfig(),
    )
    assert found.faults() == []
    faults = replace(found, **change).faults()
    assert faults
    assert word in faults[0]


def test_training_says_which_package_is_missing() -> None:
    with pytest.raises(MissingPackageError, match=r"no-such-package"):
        package_files("no-such-package")


def test_demo_says_what_is_wrong_with_a_short_text(tmp_path: Path) -> None:
    from moe_model.demo import main

    text = tmp_path / "short.txt"
    text.write_text("too short")
    assert main(["--text", str(text)]) == 1
