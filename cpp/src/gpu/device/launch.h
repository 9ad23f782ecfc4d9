// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one way to launch a kernel, on a GPU and on the simulated device. For .cu files.

#include <cstddef>
#include <utility>

#include "gpu/device/device.cuh"

namespace fanfold::gpu {

struct LaunchConfig {
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  std::size_t dynamic_shared_bytes = 0;
  cudaStream_t stream = nullptr;
  /// The kernel may start before the one ahead of it in the stream has ended, from the moment that
  /// one calls grid_dependency_launch; it calls grid_dependency_wait before it reads what that one
  /// wrote.
  bool programmatic_dependent = false;
};

/// Enqueues `kernel`, which reports know as `name`; the arguments are copied now. Never
/// synchronizes. Graph capture: allowed.
template <typename... Parameters, typename... Arguments>
cudaError_t launch([[maybe_unused]] const char* name, void (*kernel)(Parameters...),
                   const LaunchConfig& config, Arguments&&... arguments) {
#if defined(FANFOLD_SIM)
  ::cudasim::KernelLaunch request;
  request.name = name;
  request.grid = config.grid;
  request.block = config.block;
  request.dynamic_shared_bytes = config.dynamic_shared_bytes;
  request.stream = config.stream;
  request.programmatic_dependent = config.programmatic_dependent;
  return ::cudasim::launch_kernel(request, kernel, std::forward<Arguments>(arguments)...);
#else
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t request = {};
  request.gridDim = config.grid;
  request.blockDim = config.block;
  request.dynamicSmemBytes = config.dynamic_shared_bytes;
  request.stream = config.stream;
  request.attrs = &attribute;
  request.numAttrs = config.programmatic_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&request, kernel, std::forward<Arguments>(arguments)...);
#endif
}

}  // namespace fanfold::gpu
