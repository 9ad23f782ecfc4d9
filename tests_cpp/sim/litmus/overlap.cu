// SPDX-License-Identifier: Apache-2.0

#include "gpu/device/launch.h"
#include "kernels.h"
#include "launch_on.h"

namespace fanfold::gpu::litmus {

namespace {

__global__ void primary_kernel(const __grid_constant__ Words w) {
  if (w.mode == 1) {
    grid_dependency_launch();
    // So long that a dependent that does not wait is certain to come first.
    for (int i = 0; i < 200; ++i) {
      ld_relaxed_gpu(w.flag + 32 + (i & 1));
    }
  }
  w.data[threadIdx.x] = 1;
  if (w.mode == 0) {
    grid_dependency_launch();
  }
}

__global__ void dependent_kernel(const __grid_constant__ Words w) {
  if (w.mode == kReadAfterWait) {
    grid_dependency_wait();
  }
  w.out[threadIdx.x] = w.data[threadIdx.x];
  if (w.mode == kReadBeforeWait) {
    grid_dependency_wait();
  }
}

}  // namespace

cudaError_t primary(const Words& words, cudaStream_t stream) {
  return launch("primary", primary_kernel, on(stream, 32), words);
}

cudaError_t dependent(const Words& words, bool is_programmatic, cudaStream_t stream) {
  LaunchConfig config = on(stream, 32);
  config.programmatic_dependent = is_programmatic;
  return launch("dependent", dependent_kernel, config, words);
}

}  // namespace fanfold::gpu::litmus
