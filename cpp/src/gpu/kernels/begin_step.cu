// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"

namespace fanfold::gpu {
namespace {

using Params = exec::DeviceBeginStepParams;

/// Any grid: the threads together fill all sinks, 16 bytes each; the first thread counts the step
/// up. Waits for nobody, nothing needs resetting. What it writes is read by later kernels of the
/// capture.
__global__ void __launch_bounds__(kThreads, 2) begin_step_kernel(const __grid_constant__ Params p) {
  grid_dependency_wait();
  if (p.state != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    p.state->step += 1;
    p.state->step_id = p.step_id;
    if (!has(Fault::kErrorOutlives)) p.state->error.number = 0;
  }
  if (has(Fault::kSinksStay) && p.state != nullptr) return;
  for (int i = 0; i < p.num_sinks; ++i) {
    const exec::CaptureSink sink = p.sinks[i];
    if (sink.data == nullptr) continue;
    const auto low = static_cast<std::uint32_t>(sink.empty);
    const auto high = static_cast<std::uint32_t>(sink.empty >> 32);
    const std::int64_t step = std::int64_t{gridDim.x} * kThreads * 16;
    for (std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 16;
         at < sink.bytes; at += step) {
      st16(sink.data + at, make_uint4(low, high, low, high));
    }
  }
}

}  // namespace

cudaError_t begin_step(const exec::DeviceBeginStepParams& params, LaunchLimits limits,
                       cudaStream_t stream) {
  const std::int64_t wanted = (params.num_bytes / 16 + kThreads - 1) / kThreads;
  const std::int64_t most = limits.max_blocks;
  const std::int64_t num_blocks = wanted < 1 ? 1 : wanted < most ? wanted : most;
  return launch_blocks<begin_step_kernel>("begin_step", num_blocks, 0, limits, stream, params);
}

}  // namespace fanfold::gpu
