# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for classes of vLLM. Importing this loads neither vLLM nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fanfold.compat.vllm.routed_experts import RoutedExpertsCapturer

__all__ = ["RoutedExpertsCapturer"]


def __getattr__(name: str) -> Any:
    """Load a class when it is first asked for."""
    if name == "RoutedExpertsCapturer":
        from fanfold.compat.vllm.routed_experts import RoutedExpertsCapturer

        return RoutedExpertsCapturer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
