# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel communication: fan tokens out to their experts, fold the results back."""

from fanfold._core import (
    Allocator,
    AllocatorStats,
    Capabilities,
    Communicator,
    HostCounts,
    Metainfo,
    Received,
    Round,
    Routing,
    SymmetricMemory,
    build_info,
)
from fanfold.all_to_all import AllToAll
from fanfold.errors import (
    CapacityExceeded,
    Error,
    InvalidArgument,
    InvalidState,
    PeerAborted,
    PeerLost,
    PeerTimeout,
    SystemFailure,
    Unsupported,
)

__all__ = [
    "AllToAll",
    "Allocator",
    "AllocatorStats",
    "Capabilities",
    "CapacityExceeded",
    "Communicator",
    "Error",
    "HostCounts",
    "InvalidArgument",
    "InvalidState",
    "Metainfo",
    "PeerAborted",
    "PeerLost",
    "PeerTimeout",
    "Received",
    "Round",
    "Routing",
    "SymmetricMemory",
    "SystemFailure",
    "Unsupported",
    "build_info",
]
