// SPDX-License-Identifier: Apache-2.0

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"

namespace fanfold::gpu {
namespace {

/// Grid: one block. Announces what the kernels before it in the stream have written (their end
/// carries it to this kernel, the fence in `announce` on to the peers), waits for the peers' flags
/// of the phase, or does both. Nothing resets the flags: epochs grow.
__global__ void __launch_bounds__(kThreads, 2)
    signal_kernel(const __grid_constant__ exec::DeviceSignalParams p) {
  const Known* const known = begin(p.round);
  if (known == nullptr) return;
  const bool is_dispatch = p.flags.phase == exec::DevicePhase::kDispatch;
  const std::uint64_t epoch = is_dispatch ? known->epoch : combine_epoch(*known);
  if (p.announces) announce(p.round, *known, p.flags, epoch, nullptr, known->num_tokens);
  if (p.waits) await(p.round, *known, p.flags, epoch, p.counts, known->num_tokens);
}

}  // namespace

cudaError_t signal(const exec::DeviceSignalParams& params, LaunchLimits limits,
                   cudaStream_t stream) {
  return launch_blocks<signal_kernel>("signal", 1, 0, limits, stream, params);
}

}  // namespace fanfold::gpu
