# SPDX-License-Identifier: Apache-2.0
"""Record which experts the kept samples take: `PYTHONPATH=tools python -m moe_model.record`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy
import torch

from moe_model.corpus import SAMPLE_FILES, sample
from moe_model.evaluate import windows
from moe_model.model import LocalExchange, MoeModel, load_model

ROUTING_PATH = Path(__file__).resolve().parents[1] / "data" / "routing_demo.npz"
NUM_TOKENS = 8192


@torch.no_grad()
def record(model: MoeModel, num_tokens: int = NUM_TOKENS) -> numpy.ndarray:
    """Return the ids `[layers, tokens, top_k]` int16; windows of the two texts take turns."""
    per_kind = -(-num_tokens // (model.config.context * len(SAMPLE_FILES)))
    texts = [windows(sample(kind), model.config.context)[0][:per_kind] for kind in SAMPLE_FILES]
    batch = torch.stack(texts, dim=1).flatten(0, 1)
    exchange = LocalExchange(keep_routing=True)
    model(batch, exchange)
    layers = [torch.cat(exchange.routing[layer]) for layer in range(model.config.num_layers)]
    return torch.stack(layers)[:, :num_tokens].numpy()


def main(arguments: list[str] | None = None) -> int:
    """Write the routing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--out", type=Path, default=ROUTING_PATH)
    options = parser.parse_args(arguments)
    model = load_model()
    ids = record(model, options.tokens)
    options.out.parent.mkdir(exist_ok=True)
    num_experts = numpy.int16(model.config.num_experts)
    numpy.savez_compressed(options.out, topk_ids=ids, num_experts=num_experts)
    print(f"{options.out}: {ids.shape} {ids.dtype}, {options.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
