# SPDX-License-Identifier: Apache-2.0
"""The model in plain torch, with the exchange of the experts' rows as a pluggable object.

Everything but the experts is replicated on every rank. A block hands its routed rows to an
`Exchange`, which brings each row to the experts it names and folds the results back:
`LocalExchange` holds all experts itself, `moe_model.exchanges` has the ones that cross ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS_PATH = Path(__file__).with_name("weights.safetensors")
VOCABULARY = 256  # one token is one byte


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are those of the weights that are kept with it."""

    num_layers: int = 3
    hidden: int = 128
    num_heads: int = 4
    num_experts: int = 16
    top_k: int = 2
    inner: int = 48
    context: int = 128


class Exchange(Protocol):
    """Runs the experts of one layer on `rows`, wherever the experts are."""

    def run(
        self, layer: int, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts
    ) -> Tensor:
        """Return the weighted expert outputs `[T, hidden]` of `rows` `[T, hidden]`."""
        ...


class Experts(nn.Module):
    """The feed-forward networks of one layer, GELU between two matrices: all, or one rank's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.num_experts, config.hidden, config.inner)
        self.up = nn.Parameter(torch.randn(shape) * config.hidden**-0.5)
        self.down = nn.Parameter(torch.randn(shape).transpose(1, 2) * config.inner**-0.5)
        self.first = 0  # the global id of the first expert that is held here

    def keep_only(self, first: int, count: int) -> None:
        """Hold only the experts `first .. first + count` and drop the weights of the others."""
        held = slice(first, first + count)
        self.up = nn.Parameter(self.up.detach()[held].clone(), requires_grad=False)
        self.down = nn.Parameter(self.down.detach()[held].clone(), requires_grad=False)
        self.first = first

    def forward(self, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Apply the experts held here to the rows that name them.

        Args:
            rows: `[N, hidden]` float32.
            topk_ids: `[N, top_k]` global expert ids; ids of experts held elsewhere are ignored.
            topk_weights: `[N, top_k]` float32.

        Returns:
            `[N, hidden]`: per row the sum over `k` ascending of weight times output, each
            product rounded before it is added: the order that Fanfold's combine states.
        """
        count, top_k = self.up.shape[0], topk_ids.shape[1]
        local = topk_ids.long() - self.first
        row, k = ((local >= 0) & (local < count)).nonzero(as_tuple=True)
        expert = local[row, k]
        order = expert.argsort(stable=True)
        row, k = row[order], k[order]
        sizes = torch.bincount(expert, minlength=count).tolist()
        outputs = [
            functional.gelu(part @ up) @ down
            for part, up, down in zip(
                rows.index_select(0, row).split(sizes), self.up, self.down, strict=True
            )
        ]
        spread = rows.new_zeros(rows.shape[0] * top_k, rows.shape[1])
        if outputs:
            weighted = torch.cat(outputs) * topk_weights[row, k].unsqueeze(1)
            spread = spread.index_copy(0, row * top_k + k, weighted)
        slots = spread.view(-1, top_k, rows.shape[1])
        total = slots[:, 0]
        for slot in range(1, top_k):
            total = total + slots[:, slot]
        return total


class LocalExchange:
    """The exchange of a single process, which holds every expert; optionally keeps the routing."""

    def __init__(self, keep_routing: bool = False) -> None:
        self.keep_routing = keep_routing
        self.routing: dict[int, list[Tensor]] = {}

    def run(
        self, layer: int, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts
    ) -> Tensor:
        """Run all experts here."""
        if self.keep_routing:
            self.routing.setdefault(layer, []).append(topk_ids.to(torch.int16))
        folded: Tensor = experts(rows, topk_ids, topk_weights)
        return folded


class Router(nn.Module):
    """Chooses `top_k` experts per row; weights are the chosen probabilities, scaled to sum to 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids `[T, top_k]` int32, weights `[T, top_k]`, probabilities `[T, experts]`."""
        probabilities = functional.softmax(self.gate(rows), dim=-1)
        weights, ids = probabilities.topk(self.top_k, dim=-1)
        return ids.int(), weights / weights.sum(-1, keepdim=True), probabilities


def balance_loss(topk_ids: Tensor, probabilities: Tensor) -> Tensor:
    """Return Switch Transformer's balance term: 1 when every expert takes an equal share."""
    num_experts = probabilities.shape[1]
    load = torch.bincount(topk_ids.flatten(), minlength=num_experts) / topk_ids.numel()
    return num_experts * (load * probabilities.mean(0)).sum()


def rotary_table(context: int, width: int) -> Tensor:
    """Return cosine and sine of the position angles, `[2, context, width // 2]`."""
    rate = 10_000.0 ** -(torch.arange(0, width, 2).float() / width)
    angle = torch.outer(torch.arange(context).float(), rate)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate the halves of `heads` `[B, heads, S, width]` by their position."""
    cosine, sine = table[:, : heads.shape[2]]
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class Block(nn.Module):
    """Causal attention, then the experts, each behind a norm and a residual sum."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.projection = nn.Linear(config.hidden, config.hidden, bias=False)
        self.expert_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.router = Router(config)
        self.experts = Experts(config)

    def attend(self, x: Tensor, table: Tensor) -> Tensor:
        """Return the attention output for `x` `[B, S, hidden]`; it never crosses ranks."""
        batch, length, hidden = x.shape
        width = hidden // self.num_heads
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, width)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, table), rotate(key, table), value, is_causal=True
        )
        output: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return output

    def forward(
        self, x: Tensor, table: Tensor, layer: int, exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output and its balance term."""
        x = x + self.attend(x, table)
        rows = self.expert_norm(x).reshape(-1, x.shape[-1])
        topk_ids, topk_weights, probabilities = self.router(rows)
        folded = exchange.run(layer, rows, topk_ids, topk_weights, self.experts)
        balance = balance_loss(topk_ids, probabilities) if self.training else x.new_zeros(())
        return x + folded.view_as(x), balance


class MoeModel(nn.Module):
    """A causal byte model: embedding (tied to the output), blocks, norm."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config or ModelConfig()
        self.embedding = nn.Embedding(VOCABULARY, self.config.hidden)
        nn.init.normal_(self.embedding.weight, std=self.config.hidden**-0.5)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.num_layers))
        self.norm = nn.RMSNorm(self.config.hidden, eps=1e-5)
        width = self.config.hidden // self.config.num_heads
        self.register_buffer("table", rotary_table(self.config.context, width), persistent=False)

    def forward(self, tokens: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """Return logits `[B, S, 256]` and the mean balance term for `tokens` `[B, S]`.

        `B = 0` is allowed: the exchange then still runs once per layer, as its peers need.
        """
        x = self.embedding(tokens) * self.config.hidden**0.5
        balance = x.new_zeros(())
        for layer, block in enumerate(self.blocks):
            x, term = block(x, self.table, layer, exchange)
            balance = balance + term
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return logits, balance / self.config.num_layers


def load_model(path: Path = WEIGHTS_PATH) -> MoeModel:
    """Return the trained model for evaluation: weights are stored as bf16, used as float32."""
    from safetensors.torch import load_file

    model = MoeModel()
    model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return model.eval().requires_grad_(False)
