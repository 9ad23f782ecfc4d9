// SPDX-License-Identifier: Apache-2.0
#pragma once

// The group of the ranks that a transport connects.

#include <memory>

#include "base/clock.h"
#include "comm/group.h"
#include "fanfold/transport.h"

namespace fanfold::comm {

/// Collective. A group over the transport, or one of processes that met through it, which is then
/// closed. A failure on one rank fails on all of them.
/// @throws InvalidArgument  no transport, its numbers are no ranks, or the ranks differ in `use`.
/// @throws Unsupported      kSharedMemory, and the ranks are on different hosts.
/// @throws PeerTimeout, PeerLost, what the transport throws
std::unique_ptr<Group> join_over_transport(std::shared_ptr<Transport> transport, TransportUse use,
                                           base::Deadline deadline);

}  // namespace fanfold::comm
