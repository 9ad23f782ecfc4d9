// SPDX-License-Identifier: Apache-2.0
#include "gpu/platform.h"

namespace fanfold::gpu {

const char* const kDriverLibrary = "libcudasim.so";
const char* const kNvmlLibrary = "libcudasim.so";
const bool kHostReachesDeviceMemory = true;

}  // namespace fanfold::gpu
