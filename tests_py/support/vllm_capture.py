# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM's objects, and a capturer that says which rows it kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import torch

from fanfold.compat.vllm import RoutedExpertsCapturer


def context(
    counts: list[int] | None = None,
    *,
    local_sizes: list[int] | None = None,
    num_tokens: int | None = None,
    slices: list[slice] | None = None,
) -> Any:
    """A stand-in for vLLM's ForwardContext."""
    metadata = None
    if counts is not None:
        metadata = SimpleNamespace(
            num_tokens_across_dp_cpu=torch.tensor(counts, dtype=torch.int32),
            local_sizes=local_sizes,
        )
    return SimpleNamespace(
        dp_metadata=metadata,
        batch_descriptor=None if num_tokens is None else SimpleNamespace(num_tokens=num_tokens),
        ubatch_slices=slices and [SimpleNamespace(token_slice=part) for part in slices],
    )


def config(
    num_experts: int = 8, num_layers: int = 3, hf: dict[str, Any] | None = None, **parallel: Any
) -> Any:
    """A stand-in for vLLM's VllmConfig: top-2; ``hf`` are the values of hf_text_config."""
    named = {} if hf is None else {"hf_text_config": SimpleNamespace(**hf)}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: num_layers,
            get_num_experts=lambda: num_experts,
            get_num_experts_per_tok=lambda: 2,
            **named,
        ),
        parallel_config=SimpleNamespace(
            **{"data_parallel_rank": 0, "tensor_parallel_size": 1, **parallel}
        ),
    )


class Step:
    """A capturer of one layer whose forward context a test sets."""

    def __init__(self, now: Any = None, **values: Any) -> None:
        self.context = now or context()
        self.offset = 0
        self.gathers: list[Any] = []
        values = {"num_layers": 1, "num_experts": 100, "top_k": 2, **values}
        values.setdefault("tp_all_gather", self._no_gather)
        self.capturer = RoutedExpertsCapturer(
            16,
            forward_context=lambda: self.context,
            token_offset=lambda _: self.offset,
            **values,
        )

    def _no_gather(self, ids: Any) -> Any:
        raise AssertionError(f"gathered {len(ids)} rows")

    def kept(self, num_rows: int) -> list[int]:
        """Which of ``num_rows`` rows are recorded."""
        self.capturer.begin_step()
        self.capturer.capture(0, rows(num_rows))
        return self.recorded()

    def recorded(self, layer: int = 0) -> list[int]:
        column = self.capturer.device_buffer[:, layer, 0]
        return [int(row) for row in column if row >= 0]


def rows(num_rows: int, first: int = 0) -> Any:
    """Ids that say which row they are."""
    column = numpy.arange(first, first + num_rows, dtype=numpy.int64)
    return numpy.stack([column, (column + 1) % 100], axis=1)
