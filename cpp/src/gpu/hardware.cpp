// SPDX-License-Identifier: Apache-2.0
#include "gpu/platform.h"

namespace fanfold::gpu {

const char* const kDriverLibrary = "libcuda.so.1";
const char* const kNvmlLibrary = "libnvidia-ml.so.1";
const bool kHostReachesDeviceMemory = false;

}  // namespace fanfold::gpu
