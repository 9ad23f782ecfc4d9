# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for FlashInfer's MoE all-to-all. Importing this loads neither flashinfer nor torch.

``MoeAlltoAll``, the ``moe_a2a_*`` functions and what they are made from have the names, parameters
and results of FlashInfer 0.7.2. Tensors on the CPU are exchanged on the CPU, each rank on a thread
or in a process of its own; tensors on a GPU on that GPU, on torch's current stream. ``register``
puts Fanfold into FlashInfer's own registry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fanfold.compat.flashinfer.checks import (
        MOE_A2A_RANK_MASK_WORDS,
        moe_a2a_active_rank_mask,
    )
    from fanfold.compat.flashinfer.errors import (
        CalledTooEarly,
        CallOrder,
        Refused,
        WorkspaceTooSmall,
    )
    from fanfold.compat.flashinfer.functions import (
        moe_a2a_combine,
        moe_a2a_dispatch,
        moe_a2a_dispatch_pair,
        moe_a2a_initialize,
        moe_a2a_sanitize_expert_ids,
        moe_a2a_wrap_payload_tensor_in_workspace,
    )
    from fanfold.compat.flashinfer.groups import (
        CommBackend,
        CommunicatorBackend,
        MnnvlConfig,
        TorchDistBackend,
    )
    from fanfold.compat.flashinfer.mapping import Mapping
    from fanfold.compat.flashinfer.mnnvl import MnnvlMemory
    from fanfold.compat.flashinfer.module import get_moe_alltoall_module
    from fanfold.compat.flashinfer.moe_alltoall import MoeAlltoAll
    from fanfold.compat.flashinfer.moe_ep import register
    from fanfold.compat.flashinfer.sizes import moe_a2a_get_workspace_size_per_rank

__all__ = [
    "MOE_A2A_RANK_MASK_WORDS",
    "CallOrder",
    "CalledTooEarly",
    "CommBackend",
    "CommunicatorBackend",
    "Mapping",
    "MnnvlConfig",
    "MnnvlMemory",
    "MoeAlltoAll",
    "Refused",
    "TorchDistBackend",
    "WorkspaceTooSmall",
    "get_moe_alltoall_module",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_dispatch_pair",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
    "register",
]

_MODULE_OF = {
    "MOE_A2A_RANK_MASK_WORDS": "checks",
    "moe_a2a_active_rank_mask": "checks",
    "CallOrder": "errors",
    "CalledTooEarly": "errors",
    "WorkspaceTooSmall": "errors",
    "Refused": "errors",
    "CommBackend": "groups",
    "CommunicatorBackend": "groups",
    "MnnvlConfig": "groups",
    "TorchDistBackend": "groups",
    "Mapping": "mapping",
    "MnnvlMemory": "mnnvl",
    "MoeAlltoAll": "moe_alltoall",
    "get_moe_alltoall_module": "module",
    "moe_a2a_get_workspace_size_per_rank": "sizes",
    "register": "moe_ep",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'functions')}")
    return getattr(module, name)
