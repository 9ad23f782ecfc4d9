# SPDX-License-Identifier: Apache-2.0
"""Train the model once and write its weights: `PYTHONPATH=tools python -m moe_model.train`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from moe_model.corpus import Corpus, MissingPackageError, load_corpora, read_bytes
from moe_model.evaluate import evaluate, load_ratios
from moe_model.model import WEIGHTS_PATH, LocalExchange, MoeModel, load_model

BITS_PER_BYTE_BOUND = 2.2
BUSIEST_BOUND = 1.5
IDLEST_BOUND = 0.1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults are those of the weights that are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.005, help="weight of the balance term")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=WEIGHTS_PATH)
    return parser.parse_args(arguments)


def sample_batch(texts: list[Tensor], batch: int, context: int, random: torch.Generator) -> Tensor:
    """Draw `batch` windows of `context + 1` bytes, the kinds of text in turn."""
    rows = []
    for index in range(batch):
        text = texts[index % len(texts)]
        start = int(torch.randint(text.numel() - context - 1, (1,), generator=random))
        rows.append(text[start : start + context + 1])
    return torch.stack(rows).long()


def make_optimizer(model: MoeModel, learning_rate: float) -> torch.optim.AdamW:
    """Decay the matrices, not the norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), foreach=True)


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Warm up over 100 steps, then fall along a cosine to 2 % of the peak."""
    warm = min(1.0, (step + 1) / 100)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: MoeModel, texts: list[Tensor], options: argparse.Namespace) -> tuple[float, float]:
    """Train `model` in place; return the seconds it took by the clock and of processor time."""
    optimizer = make_optimizer(model, options.learning_rate)
    random = torch.Generator().manual_seed(options.seed)
    exchange = LocalExchange()
    start, start_processor = time.monotonic(), time.process_time()
    model.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, options.steps, options.learning_rate)
        tokens = sample_batch(texts, options.batch, model.config.context, random)
        logits, balance = model(tokens[:, :-1], exchange)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        (loss + options.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step + 1 == options.steps:
            seconds = time.monotonic() - start
            bits = loss.item() / math.log(2)
            print(
                f"step {step:5d}  {bits:.3f} bits/byte  balance {balance.item():.3f}  "
                f"{seconds:.0f} s",
                flush=True,
            )
    return time.monotonic() - start, time.process_time() - start_processor


def save(model: MoeModel, path: Path) -> None:
    """Write the weights as bf16."""
    from safetensors.torch import save_file

    state = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(state, path)


def report(path: Path, corpora: list[Corpus]) -> bool:
    """Print the held-out numbers of the stored weights; say whether they meet the bounds."""
    model = load_model(path)
    passed, busiest = True, 0.0
    for corpus in corpora:
        result = evaluate(model, read_bytes(corpus.held_out))
        highest, lowest = load_ratios(result.expert_load)
        busiest = max(busiest, *highest)
        passed &= result.bits_per_byte <= BITS_PER_BYTE_BOUND and min(lowest) >= IDLEST_BOUND
        print(
            f"held-out {corpus.kind}: {result.bits_per_byte:.3f} bits/byte, next-byte accuracy "
            f"{result.accuracy:.4f}, {result.num_tokens} bytes in {len(corpus.held_out)} files\n"
            f"  busiest expert over mean, per layer: {[round(v, 2) for v in highest]}\n"
            f"  idlest expert over mean, per layer:  {[round(v, 2) for v in lowest]}"
        )
    passed &= busiest >= BUSIEST_BOUND
    print("bounds met" if passed else "BOUNDS NOT MET")
    return passed


def main(arguments: list[str] | None = None) -> int:
    """Train, store, measure."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    try:
        corpora = load_corpora()
    except MissingPackageError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    texts = [read_bytes(corpus.train) for corpus in corpora]
    model = MoeModel()
    parameters = sum(p.numel() for p in model.parameters())
    sizes = ", ".join(
        f"{text.numel()} bytes of {c.kind}" for text, c in zip(texts, corpora, strict=True)
    )
    print(f"{parameters} parameters; training on {sizes}", flush=True)
    seconds, processor = train(model, texts, options)
    save(model, options.out)
    print(
        f"trained in {seconds:.0f} s, {processor:.0f} s of them on a processor; "
        f"{options.out.stat().st_size} bytes written"
    )
    return 0 if report(options.out, corpora) else 1


if __name__ == "__main__":
    sys.exit(main())
