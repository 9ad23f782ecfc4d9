# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``flashinfer.moe_ep`` 0.7.2: the names and parameters, and nothing behind them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

_registry: dict[str, type] = {}


@dataclass
class BootstrapConfig:
    """The expert-parallel group."""

    world_size: int
    rank: int
    process_group: Any = None


@dataclass
class MoEEpCommParams:
    """Sizes."""

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: Any = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1

    @property
    def dispatch_bytes_per_token(self) -> int:
        return self.hidden_size * (self.dtype or torch.bfloat16).itemsize


@dataclass
class MoEEpDispatchResult:
    """Received rows."""

    hidden_states: Any
    topk_ids: Any
    topk_weights: Any
    tokens_per_rank: int
    hidden_states_scale: Any = None
    eplb_gathered_stats: Any = None


class MoEEpCommunication(ABC):
    """The base of backends."""

    backend_name = ""
    supports_cuda_graph = True

    def __init__(self, bootstrap: Any, params: Any) -> None:
        self.bootstrap = bootstrap
        self.params = params

    @classmethod
    @abstractmethod
    def is_platform_supported(cls) -> bool: ...

    @abstractmethod
    def dispatch(
        self,
        hidden_states: Any,
        topk_ids: Any,
        topk_weights: Any = None,
        *,
        hidden_states_scale: Any = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: Any = None,
    ) -> MoEEpDispatchResult: ...

    @abstractmethod
    def combine(self, expert_output: Any, *, output: Any = None) -> Any: ...

    def get_combine_input_buffer(self, dtype: Any) -> Any:
        raise NotImplementedError

    def destroy(self) -> None:
        self.params = None


@dataclass
class NVLinkOneSidedConfig:
    """Options of FlashInfer's own backend."""

    backend_name: str = "nvlink_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None


class NVLinkOneSidedAlltoAll(MoEEpCommunication):
    """FlashInfer's own backend, which needs a GPU."""

    backend_name = "nvlink_one_sided"

    def __init__(self, bootstrap: Any, params: Any, config: Any = None) -> None:
        super().__init__(bootstrap, params)
        raise RuntimeError("FlashInfer's own memory was asked for")

    @classmethod
    def is_platform_supported(cls) -> bool:
        return False

    def dispatch(self, *args: Any, **kwargs: Any) -> MoEEpDispatchResult:
        raise NotImplementedError

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def register_communication(name: str) -> Any:
    def decorate(made: type) -> type:
        _registry[name] = made
        return made

    return decorate


def available_communication_backends() -> list[str]:
    return [name for name, made in _registry.items() if made.is_platform_supported()]


def create_communication(bootstrap: Any, params: Any, backend: Any, **options: Any) -> Any:
    if isinstance(backend, str):
        return _registry[backend](bootstrap, params, **options)
    return _registry[backend.backend_name](bootstrap, params, config=backend, **options)


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let ``import flashinfer.moe_ep`` find this module, with its own backend registered."""
    _registry.clear()
    _registry["nvlink_one_sided"] = NVLinkOneSidedAlltoAll
    module = sys.modules[__name__]
    package = ModuleType("flashinfer")
    package.moe_ep = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", module)
    return module
