// SPDX-License-Identifier: Apache-2.0
#pragma once

// GPU memory as a kind of symmetric memory. No CUDA here: a build without it has no_gpu.cpp.

#include <memory>

#include "base/clock.h"
#include "comm/device_collectives.h"
#include "comm/group.h"
#include "fanfold/allocator.h"
#include "memory/window_source.h"

namespace fanfold::gpu {

/// Collective; allocates nothing. Borrows `group`. `device`: of the same ranks, for kNccl; may be
/// null.
/// @throws Unsupported      no driver, no such device, no GPU backend (on every rank).
/// @throws InvalidArgument  the ranks give different kinds, one twice, or kNccl beside others, on
///         another device or without `device` (on every rank).
std::unique_ptr<memory::WindowSource> make_memory_source(
    comm::Group& group, std::shared_ptr<comm::DeviceCollectives> device,
    const GpuMemoryConfig& config, base::Deadline deadline);

}  // namespace fanfold::gpu
