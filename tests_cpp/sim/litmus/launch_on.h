// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gpu/device/launch.h"

namespace fanfold::gpu::litmus {

/// One dimension is all that the litmus kernels need.
inline LaunchConfig on(cudaStream_t stream, int num_threads, int num_blocks = 1) {
  LaunchConfig config;
  config.grid = static_cast<unsigned>(num_blocks);
  config.block = static_cast<unsigned>(num_threads);
  config.stream = stream;
  return config;
}

}  // namespace fanfold::gpu::litmus
