# SPDX-License-Identifier: Apache-2.0
"""What the capturer asks vLLM for: its config, and functions that are looked up when needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from fanfold.errors import InvalidState, Unsupported

_UBATCHING = "vllm.v1.worker.ubatching"


def of_config(vllm_config: Any) -> dict[str, int]:
    """What a vLLM config says, by the names of our constructor."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    if pcp_size > 1:
        raise Unsupported(
            f"prefill_context_parallel_size: expected 1, got {pcp_size}; routing of context "
            "shards is not captured"
        )
    values = {
        "num_layers": model.get_total_num_hidden_layers(),
        "num_experts": model.get_num_experts(),
        "top_k": model.get_num_experts_per_tok(),
        "dp_rank": parallel.data_parallel_rank,
        "tp_size": parallel.tensor_parallel_size,
    }
    if hasattr(parallel, "data_parallel_size"):
        values["dp_size"] = parallel.data_parallel_size
    return values


def sequence_parallel(vllm_config: Any) -> bool | None:
    """False where a vLLM config says that routers see no shards, else None: not known."""
    shards = getattr(vllm_config.parallel_config, "use_sequence_parallel_moe", None)
    return False if shards is False else None


def moe_layers(vllm_config: Any, num_layers: int) -> list[int] | None:
    """The layers with a router, where a vLLM config says how many before them are dense."""
    model = vllm_config.model_config
    text = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    first = getattr(text, "first_k_dense_replace", None)
    every = getattr(text, "moe_layer_freq", 1)
    if not isinstance(first, int) or not isinstance(every, int) or every < 1:
        return None
    return [layer for layer in range(first, num_layers) if layer % every == 0]


def _from_vllm(module: str, name: str, instead: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidState(
            f"{instead}: expected vLLM's {module}.{name}, or {instead}= in the constructor, got "
            f"neither ({error})"
        ) from error


def forward_context() -> Any:
    """vLLM's forward context of the running step."""
    return _from_vllm("vllm.forward_context", "get_forward_context", "forward_context")()


def token_offset(context: Any) -> int:
    """The token at which the running micro-batch begins; 0 where there are none.

    Raises:
        InvalidState: vLLM runs micro-batches, and the context does not say where they begin.
    """
    slices = getattr(context, "ubatch_slices", None)
    if not slices:
        # Micro-batches run only where their module is loaded, so it is not imported for this.
        enabled = getattr(sys.modules.get(_UBATCHING), "dbo_enabled", None)
        if enabled is not None and enabled():
            raise InvalidState(
                "token_offset: expected ubatch_slices in the forward context, as vLLM's "
                "dbo_enabled() says that micro-batches run, got none: give token_offset= in the "
                "constructor"
            )
        return 0
    current = _from_vllm(_UBATCHING, "dbo_current_ubatch_id", "token_offset")
    return int(slices[current()].token_slice.start)


def tp_all_gather(topk_ids: Any) -> Any:
    """The ids of all tensor-parallel ranks, by vLLM's group of them."""
    group = _from_vllm("vllm.distributed.parallel_state", "get_tp_group", "tp_all_gather")
    return group().all_gather(topk_ids, dim=0)


def loaded(module: str, name: str) -> Any:
    """What a module of vLLM has under a name, where that module is loaded already; else None."""
    return getattr(sys.modules.get(module), name, None)


def context_if_any() -> Any:
    """vLLM's forward context of the running step; None where vLLM does not run one."""
    available = loaded("vllm.forward_context", "is_forward_context_available")
    if available is not None and not available():
        return None
    get = loaded("vllm.forward_context", "get_forward_context")
    return None if get is None else get()


def current_ubatch() -> int:
    """The number of the running micro-batch; 0 where vLLM runs none."""
    current = loaded(_UBATCHING, "dbo_current_ubatch_id")
    return 0 if current is None else int(current())


def _current_config() -> Any:
    get = loaded("vllm.config", "get_current_vllm_config_or_none")
    return None if get is None else get()


def max_num_batched_tokens() -> int | None:
    """The most tokens of a step by vLLM's config, where there is one."""
    config = _current_config()
    return None if config is None else int(config.scheduler_config.max_num_batched_tokens)


def enable_fault_tolerance() -> bool | None:
    """Whether vLLM's config, where there is one, asks for faults to be watched."""
    config = _current_config()
    return None if config is None else bool(config.parallel_config.enable_fault_tolerance)


def group_of(kind: str) -> Any:
    """vLLM's group of that kind ("ep", "dp", "tp", "pcp"); None where vLLM has made none."""
    get = loaded("vllm.distributed.parallel_state", f"get_{kind}_group")
    if get is None:
        return None
    try:
        return get()
    except AssertionError:  # vLLM's word for a group that is not made
        return None


def local_sizes(context: Any) -> list[int] | None:
    """Rows of each rank of the group in this step, by rank; None without DP metadata."""
    metadata = getattr(context, "dp_metadata", None)
    if metadata is None:
        return None
    return [int(size) for size in metadata.get_chunk_sizes_across_dp_rank()]
