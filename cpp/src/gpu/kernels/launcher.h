// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches of this library's kernels, all alike: blocks of kThreads, which start early where they
// may. For .cu files.

#include <cstddef>
#include <cstdint>

#include "gpu/device/launch.h"
#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"

namespace fanfold::gpu {

/// Whether a kernel may start early on `stream`. An error for one that launches would refuse.
inline cudaError_t may_start_early(EarlyStart early_start, cudaStream_t stream, bool* may) {
  *may = early_start == EarlyStart::kAlways;
  if (early_start != EarlyStart::kOutsideCaptures) return cudaSuccess;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  *may = status == cudaStreamCaptureStatusNone;
  return error;
}

template <auto kKernel>
struct Listed {
  static inline const KernelEntry kEntry{reinterpret_cast<const void*>(kKernel)};
};

template <auto kKernel, typename Params>
cudaError_t launch_blocks(const char* name, std::int64_t num_blocks,
                          std::size_t dynamic_shared_bytes, LaunchLimits limits,
                          cudaStream_t stream, const Params& params) {
  (void)Listed<kKernel>::kEntry;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(num_blocks));
  config.block = dim3(kThreads);
  config.dynamic_shared_bytes = dynamic_shared_bytes;
  config.stream = stream;
  const cudaError_t error =
      may_start_early(limits.early_start, stream, &config.programmatic_dependent);
  return error == cudaSuccess ? launch(name, kKernel, config, params) : error;
}

}  // namespace fanfold::gpu
