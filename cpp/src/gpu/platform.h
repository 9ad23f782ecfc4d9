// SPDX-License-Identifier: Apache-2.0
#pragma once

// What differs between GPUs and the simulated device.

namespace fanfold::gpu {

/// Shared libraries with the CUDA driver and with NVML.
extern const char* const kDriverLibrary;
extern const char* const kNvmlLibrary;
/// Whether the host may read and write device memory, as on the simulated device only.
extern const bool kHostReachesDeviceMemory;

}  // namespace fanfold::gpu
