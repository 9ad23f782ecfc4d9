# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for classes of vLLM. Importing this loads neither vLLM nor torch.

``RoutedExpertsCapturer``; managers (``*Manager``) and the prepare/finalize classes that use them
(``*PrepareAndFinalize*``), by vLLM's names; and ``for_vllm``, which makes such a class one that
vLLM's kernels accept.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fanfold.compat.vllm.exchange_managers import (
        BatchedAll2AllManager,
        DeepEPHTAll2AllManager,
        DeepEPLLAll2AllManager,
        FlashInferNVLinkOneSidedManager,
        FlashInferNVLinkTwoSidedManager,
    )
    from fanfold.compat.vllm.gather_managers import AgRsAll2AllManager, NaiveAll2AllManager
    from fanfold.compat.vllm.prepare_batched import AllToAllBatchedPrepareAndFinalize
    from fanfold.compat.vllm.prepare_gather import (
        MoEPrepareAndFinalizeNaiveDPEPModular,
        MoEPrepareAndFinalizeNaiveDPEPMonolithic,
    )
    from fanfold.compat.vllm.prepare_low_latency import DeepEPLLPrepareAndFinalize
    from fanfold.compat.vllm.prepare_standard import (
        DeepEPHTPrepareAndFinalize,
        FlashInferNVLinkOneSidedPrepareAndFinalize,
        FlashInferNVLinkTwoSidedPrepareAndFinalize,
    )
    from fanfold.compat.vllm.routed_experts import RoutedExpertsCapturer
    from fanfold.compat.vllm.vllm_types import for_vllm

_MODULE_OF = {
    "AgRsAll2AllManager": "gather_managers",
    "AllToAllBatchedPrepareAndFinalize": "prepare_batched",
    "BatchedAll2AllManager": "exchange_managers",
    "DeepEPHTAll2AllManager": "exchange_managers",
    "DeepEPHTPrepareAndFinalize": "prepare_standard",
    "DeepEPLLAll2AllManager": "exchange_managers",
    "DeepEPLLPrepareAndFinalize": "prepare_low_latency",
    "FlashInferNVLinkOneSidedManager": "exchange_managers",
    "FlashInferNVLinkOneSidedPrepareAndFinalize": "prepare_standard",
    "FlashInferNVLinkTwoSidedManager": "exchange_managers",
    "FlashInferNVLinkTwoSidedPrepareAndFinalize": "prepare_standard",
    "MoEPrepareAndFinalizeNaiveDPEPModular": "prepare_gather",
    "MoEPrepareAndFinalizeNaiveDPEPMonolithic": "prepare_gather",
    "NaiveAll2AllManager": "gather_managers",
    "RoutedExpertsCapturer": "routed_experts",
    "for_vllm": "vllm_types",
}

__all__ = [
    "AgRsAll2AllManager",
    "AllToAllBatchedPrepareAndFinalize",
    "BatchedAll2AllManager",
    "DeepEPHTAll2AllManager",
    "DeepEPHTPrepareAndFinalize",
    "DeepEPLLAll2AllManager",
    "DeepEPLLPrepareAndFinalize",
    "FlashInferNVLinkOneSidedManager",
    "FlashInferNVLinkOneSidedPrepareAndFinalize",
    "FlashInferNVLinkTwoSidedManager",
    "FlashInferNVLinkTwoSidedPrepareAndFinalize",
    "MoEPrepareAndFinalizeNaiveDPEPModular",
    "MoEPrepareAndFinalizeNaiveDPEPMonolithic",
    "NaiveAll2AllManager",
    "RoutedExpertsCapturer",
    "for_vllm",
]


def __getattr__(name: str) -> Any:
    """Load a class when it is first asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
