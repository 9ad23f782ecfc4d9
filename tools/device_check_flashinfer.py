#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times FlashInfer's one-sided all-to-all on one GPU, as device_check's bench times ours.

Needs torch with CUDA and flashinfer; it needs nothing of this repository, and has not been run on
hardware yet. Ranks are streams of one device over a plain workspace, as in FlashInfer's own tests.

Usage: device_check_flashinfer.py [--ranks 8] [--tokens 128] [--hidden 7168] [--top-k 8] ...
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from typing import Any

WARM_UPS = 3


def parse() -> argparse.Namespace:
    """Sizes, as those of device_check."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        ("ranks", 8),
        ("tokens", 128),
        ("hidden", 7168),
        ("top-k", 8),
        ("experts", 256),
        ("rounds", 100),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


class Ranks:
    """All ranks of one device: streams, inputs and their parts of one workspace."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.comm: Any = importlib.import_module("flashinfer.comm")
        torch: Any = importlib.import_module("torch")
        self.torch = torch
        row_bytes = 2 * options.hidden
        size = self.comm.moe_a2a_get_workspace_size_per_rank(
            options.ranks, options.tokens, row_bytes + 4 * options.top_k, row_bytes
        )
        size = (size + 127) // 128 * 128
        self.workspace = torch.zeros(options.ranks, size, dtype=torch.uint8, device="cuda")
        self.metainfo = [
            self.comm.moe_a2a_initialize(self.workspace, rank, options.ranks, options.tokens)
            for rank in range(options.ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(options.ranks)]
        generator = torch.Generator(device="cuda").manual_seed(1)
        scores = torch.rand(
            options.ranks, options.tokens, options.experts, device="cuda", generator=generator
        )
        self.ids = scores.topk(options.top_k).indices.to(torch.int32)
        self.x = torch.randn(
            options.ranks, options.tokens, options.hidden, device="cuda", generator=generator
        ).to(torch.bfloat16)
        torch.cuda.synchronize()

    def _event(self, stream: Any) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def round(self) -> tuple[float, float]:
        """Dispatch and combine of all ranks; the slowest rank's microseconds of each."""
        o = self.options
        events = []
        offsets = []
        for rank, stream in enumerate(self.streams):
            with self.torch.cuda.stream(stream):
                begin = self._event(stream)
                _, offset, *_ = self.comm.moe_a2a_dispatch(
                    self.ids[rank],
                    [self.x[rank], self.ids[rank]],
                    self.workspace,
                    self.metainfo[rank],
                    o.tokens,
                    rank,
                    o.ranks,
                    o.top_k,
                    o.experts,
                )
                offsets.append(offset)
                events.append([begin, self._event(stream)])
        for rank, stream in enumerate(self.streams):
            with self.torch.cuda.stream(stream):
                begin = offsets[rank]
                y = self.comm.moe_a2a_wrap_payload_tensor_in_workspace(
                    self.workspace[rank],
                    [o.ranks, o.tokens],
                    begin,
                    begin + o.ranks * o.tokens * o.hidden * 2,
                    self.torch.bfloat16,
                )
                self.comm.moe_a2a_combine(
                    y,
                    o.tokens,
                    self.workspace,
                    self.metainfo[rank],
                    o.tokens,
                    rank,
                    o.ranks,
                    o.top_k,
                    offsets[rank],
                    payload_in_workspace=True,
                )
                events[rank].append(self._event(stream))
        self.torch.cuda.synchronize()
        dispatch = max(1000 * e[0].elapsed_time(e[1]) for e in events)
        combine = max(1000 * e[1].elapsed_time(e[2]) for e in events)
        return dispatch, combine


def main() -> None:
    """Print one line, as device_check's bench does."""
    options = parse()
    ranks = Ranks(options)
    times = [ranks.round() for _ in range(WARM_UPS + options.rounds)][WARM_UPS:]
    dispatch, combine = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"flashinfer: ranks={options.ranks} tokens={options.tokens} hidden={options.hidden} "
        f"top_k={options.top_k} experts={options.experts}: dispatch {dispatch:.1f} us, "
        f"combine {combine:.1f} us"
    )


if __name__ == "__main__":
    main()
