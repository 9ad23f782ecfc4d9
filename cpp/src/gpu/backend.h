// SPDX-License-Identifier: Apache-2.0
#pragma once

// The phases on a GPU.

#include <memory>

#include "exec/device_backend.h"

namespace fanfold::gpu {

/// @throws Unsupported  no such device, no driver, or a build without the GPU backend.
/// @throws CudaFailure
std::unique_ptr<exec::DeviceBackend> make_backend(int device);

}  // namespace fanfold::gpu
