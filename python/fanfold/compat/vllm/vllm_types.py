# SPDX-License-Identifier: Apache-2.0
"""Types that travel between vLLM's kernels and ours: vLLM's own where it runs, else their like."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from fanfold.compat.vllm import vllm_values
from fanfold.errors import InvalidArgument, InvalidState

MODULAR_KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel"


class FusedMoEActivationFormat(enum.Enum):
    """How rows lie that experts take, by vLLM's names."""

    Standard = "standard"  # [rows, hidden]
    BatchedExperts = "batched_experts"  # [local experts, rows, hidden]


@dataclass
class ExpertTokensMetadata:
    """Rows of each local expert, by vLLM's names.

    Attributes:
        expert_num_tokens: ``[L]`` int32.
        expert_num_tokens_cpu: the same on the CPU, where known.
        psum_recv_per_rank, rank_expert_offset: never given.
    """

    expert_num_tokens: Any
    expert_num_tokens_cpu: Any = None
    psum_recv_per_rank: Any = None
    rank_expert_offset: Any = None


def activation_format(*, is_batched: bool) -> Any:
    """A value of vLLM's enumeration, which kernels compare; of ours where vLLM does not run."""
    formats = vllm_values.loaded(MODULAR_KERNEL, "FusedMoEActivationFormat")
    if formats is None:
        formats = FusedMoEActivationFormat
    return formats.BatchedExperts if is_batched else formats.Standard


def expert_tokens(counts: Any, counts_cpu: Any = None) -> Any:
    """Metadata of vLLM's type, of ours where vLLM does not run."""
    made = vllm_values.loaded(MODULAR_KERNEL, "ExpertTokensMetadata") or ExpertTokensMetadata
    return made(expert_num_tokens=counts, expert_num_tokens_cpu=counts_cpu)


def is_delegate(weight_and_reduce_impl: Any) -> bool:
    """Whether the experts leave weights and sums to the prepare/finalize class."""
    return type(weight_and_reduce_impl).__name__ == "TopKWeightAndReduceDelegate"


def is_no_op(weight_and_reduce_impl: Any) -> bool:
    """Whether the experts have weighted and added their results."""
    return type(weight_and_reduce_impl).__name__ == "TopKWeightAndReduceNoOP"


def for_vllm(cls: type) -> type:
    """The class as a subclass of vLLM's base class too, which ``FusedMoEKernel`` insists on.

    Args:
        cls: a prepare/finalize class of this package.

    Returns:
        A class of the same name, constructor and behaviour.

    Raises:
        InvalidState: vLLM's ``modular_kernel`` is not loaded.
        InvalidArgument: no prepare/finalize class, or vLLM's base asks for more than it has.
    """
    kind = getattr(cls, "kernel_kind", None)
    if kind not in ("Modular", "Monolithic"):
        raise InvalidArgument(f"cls: expected a prepare/finalize class of Fanfold, got {cls!r}")
    name = f"FusedMoEPrepareAndFinalize{kind}"
    base = vllm_values.loaded(MODULAR_KERNEL, name)
    if base is None:
        raise InvalidState(f"for_vllm: expected {MODULAR_KERNEL}.{name} to be loaded, got nothing")
    made = type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})
    missing = sorted(getattr(made, "__abstractmethods__", ()))
    if missing:
        raise InvalidArgument(
            f"cls: expected all that vLLM's {name} asks for, got {cls.__name__} without "
            f"{', '.join(missing)}"
        )
    return made
