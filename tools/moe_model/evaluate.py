# SPDX-License-Identifier: Apache-2.0
"""Loss, accuracy and expert load of the model on a text, in one process."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_model.model import LocalExchange, MoeModel


@dataclass(frozen=True)
class Evaluation:
    """What one pass over a text measured."""

    num_tokens: int
    loss: float  # mean, nats per byte
    num_correct: int  # bytes whose most likely prediction was right
    expert_load: Tensor  # [layers, experts] (token, expert) pairs

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits."""
        return self.loss / math.log(2)

    @property
    def accuracy(self) -> float:
        """Share of next bytes predicted right."""
        return self.num_correct / max(self.num_tokens, 1)


def windows(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut `text` into whole windows: inputs and their next bytes, both `[W, context]` int64."""
    count = max((text.numel() - 1) // context, 0)
    used = text[: count * context + 1].long()
    return used[:-1].view(count, context), used[1:].view(count, context)


def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss per token and whether the most likely byte was right, both `[tokens]`."""
    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    losses = functional.cross_entropy(flat, wanted, reduction="none")
    return losses, flat.argmax(-1) == wanted


def expert_load(exchange: LocalExchange, num_experts: int) -> Tensor:
    """Count the (token, expert) pairs that an exchange kept, `[layers, experts]`."""
    return torch.stack(
        [
            torch.bincount(torch.cat(ids).flatten().int(), minlength=num_experts)
            for _, ids in sorted(exchange.routing.items())
        ]
    )


@torch.no_grad()
def evaluate(model: MoeModel, text: Tensor, batch: int = 64) -> Evaluation:
    """Evaluate `model` on `text` (uint8), in windows that do not overlap."""
    inputs, targets = windows(text, model.config.context)
    exchange = LocalExchange(keep_routing=True)
    total, correct = 0.0, 0
    for start in range(0, inputs.shape[0], batch):
        logits, _ = model(inputs[start : start + batch], exchange)
        losses, right = token_losses(logits, targets[start : start + batch])
        total += losses.double().sum().item()
        correct += int(right.sum())
    load = expert_load(exchange, model.config.num_experts)
    return Evaluation(targets.numel(), total / max(targets.numel(), 1), correct, load)


def load_ratios(load: Tensor) -> tuple[list[float], list[float]]:
    """Return per layer the load of the busiest and of the idlest expert, over the mean."""
    share = load.float() / load.float().mean(1, keepdim=True)
    return share.amax(1).tolist(), share.amin(1).tolist()
