# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel communication: fan tokens out to their experts, fold the results back."""

from fanfold._core import (
    Allocator,
    AllocatorMemory,
    AllocatorStats,
    Capabilities,
    Capacities,
    Communicator,
    FabricMemory,
    HostCounts,
    MemoryPool,
    Metainfo,
    Received,
    Round,
    Routing,
    SymmetricMemory,
    build_info,
)
from fanfold.all_to_all import AllToAll
from fanfold.config import AllToAllConfig
from fanfold.errors import (
    CapacityExceeded,
    CudaFailure,
    Error,
    InvalidArgument,
    InvalidState,
    PeerAborted,
    PeerLost,
    PeerTimeout,
    SystemFailure,
    Unsupported,
)
from fanfold.placement import Placement

__all__ = [
    "AllToAll",
    "AllToAllConfig",
    "Allocator",
    "AllocatorMemory",
    "AllocatorStats",
    "Capabilities",
    "Capacities",
    "CapacityExceeded",
    "Communicator",
    "CudaFailure",
    "Error",
    "FabricMemory",
    "HostCounts",
    "InvalidArgument",
    "InvalidState",
    "MemoryPool",
    "Metainfo",
    "PeerAborted",
    "PeerLost",
    "PeerTimeout",
    "Placement",
    "Received",
    "Round",
    "Routing",
    "SymmetricMemory",
    "SystemFailure",
    "Unsupported",
    "build_info",
]
