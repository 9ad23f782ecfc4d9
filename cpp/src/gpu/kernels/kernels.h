// SPDX-License-Identifier: Apache-2.0
#pragma once

// One function per kernel, in the file of the same name. Each enqueues one launch, handles zero
// rows, allocates nothing and reads nothing back. Graph capture: allowed.

#include <cuda_runtime_api.h>

#include "exec/capture_params.h"
#include "exec/device_params.h"

namespace fanfold::gpu {

/// Where kernels may start before the one ahead of them has ended (programmatic launches).
enum class EarlyStart { kNever, kOutsideCaptures, kAlways };

/// Devices of compute capability 9.0 know it, where the code was compiled for them too (code for
/// older ones, which a driver may compile anew, does not wait for the kernel ahead), and graphs
/// since the driver of CUDA 12.3. `ptx_version`: the oldest of the kernels, 90 for 9.0. `driver`:
/// as cudaDriverGetVersion tells it.
constexpr EarlyStart early_start(int compute_capability_major, int ptx_version,
                                 int driver) noexcept {
  if (compute_capability_major < 9 || ptx_version < 90) return EarlyStart::kNever;
  return driver < 12030 ? EarlyStart::kOutsideCaptures : EarlyStart::kAlways;
}

/// What launches are held to.
struct LaunchLimits {
  int max_blocks;  // of a grid, where more would only wait: two for each multiprocessor
  EarlyStart early_start = EarlyStart::kAlways;
};

/// An instance of a kernel, as cudaFuncGetAttributes takes it. All of them make a list, before
/// main.
struct KernelEntry {
  explicit KernelEntry(const void* function) noexcept;

  const void* function;
  const KernelEntry* next;
};
const KernelEntry* first_kernel() noexcept;

cudaError_t signal(const exec::DeviceSignalParams& params, LaunchLimits limits,
                   cudaStream_t stream);
cudaError_t dispatch_send(const exec::DeviceDispatchSendParams& params, LaunchLimits limits,
                          cudaStream_t stream);
cudaError_t compact_rows(const exec::DeviceCompactParams& params, LaunchLimits limits,
                         cudaStream_t stream);
cudaError_t arrange(const exec::DeviceArrangeParams& params, LaunchLimits limits,
                    cudaStream_t stream);
cudaError_t describe_rows(const exec::DeviceDescribeParams& params, LaunchLimits limits,
                          cudaStream_t stream);
cudaError_t combine_send(const exec::DeviceCombineSendParams& params, LaunchLimits limits,
                         cudaStream_t stream);
cudaError_t sum_rows(const exec::DeviceSumParams& params, LaunchLimits limits, cudaStream_t stream);
cudaError_t pack_rows(const exec::DevicePackParams& params, LaunchLimits limits,
                      cudaStream_t stream);
cudaError_t sanitize(const exec::DeviceSanitizeParams& params, LaunchLimits limits,
                     cudaStream_t stream);
cudaError_t begin_step(const exec::DeviceBeginStepParams& params, LaunchLimits limits,
                       cudaStream_t stream);
cudaError_t record_ids(const exec::DeviceRecordParams& params, LaunchLimits limits,
                       cudaStream_t stream);
cudaError_t copy_snapshot(const exec::DeviceSnapshotParams& params, LaunchLimits limits,
                          cudaStream_t stream);

}  // namespace fanfold::gpu
