// SPDX-License-Identifier: Apache-2.0
#pragma once

// NCCL as the carrier of collectives on GPU memory. No CUDA here: a build without it has
// no_gpu.cpp.

#include <memory>
#include <vector>

#include "base/clock.h"
#include "comm/device_collectives.h"
#include "comm/group.h"
#include "fanfold/nccl.h"

namespace fanfold::gpu {

/// Collective over `group`, which it borrows: a failure on one rank fails on all, in words.
/// `call_timeout` bounds the waits within later calls.
/// @throws Unsupported      no NCCL, one too old, none on a rank, other versions on other ranks, no
///         such device, or a build without the GPU backend.
/// @throws InvalidArgument  a handle is of other ranks or another device, or some ranks only give
///         one.
/// @throws CudaFailure, SystemFailure  NCCL could not make its communicator.
/// @throws PeerTimeout, PeerLost
std::unique_ptr<comm::DeviceCollectives> make_nccl_collectives(
    comm::Group& group, const NcclOptions& options, std::chrono::nanoseconds call_timeout,
    base::Deadline deadline);

/// The same on the communicator of `old`, a result of these functions, without the ranks `lost`:
/// by ncclCommShrink, where NCCL has it and the communicator allows, else anew. What still runs on
/// the old one is ended. Collective over `group`, the ranks that are left in their old order.
std::unique_ptr<comm::DeviceCollectives> shrink_nccl_collectives(
    comm::DeviceCollectives& old, const std::vector<int>& lost, comm::Group& group,
    std::chrono::nanoseconds call_timeout, base::Deadline deadline);

}  // namespace fanfold::gpu
