// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches of this library's kernels, all alike: blocks of kThreads, programmatic dependents. For
// .cu files.

#include <cstddef>
#include <cstdint>

#include "gpu/device/launch.h"
#include "gpu/kernels/flags.cuh"

namespace fanfold::gpu {

template <typename Params>
cudaError_t launch_blocks(const char* name, void (*kernel)(Params), std::int64_t num_blocks,
                          std::size_t dynamic_shared_bytes, cudaStream_t stream,
                          const Params& params) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(num_blocks));
  config.block = dim3(kThreads);
  config.dynamic_shared_bytes = dynamic_shared_bytes;
  config.stream = stream;
  config.programmatic_dependent = true;
  return launch(name, kernel, config, params);
}

}  // namespace fanfold::gpu
