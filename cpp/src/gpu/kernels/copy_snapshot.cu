// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"
#include "gpu/kernels/rows.cuh"

namespace fanfold::gpu {
namespace {

using Params = exec::DeviceSnapshotParams;

constexpr unsigned kAllLanes = 0xffffffffU;

/// Copies one cell, or fills it with the sentinel, all bits set in every type: `from` null.
template <typename Unit>
__device__ inline void copy_cell(const std::byte* from, std::byte* to, std::int64_t bytes,
                                 Unit sentinel) {
  constexpr std::int64_t kUnitBytes = sizeof(Unit);
  for (std::int64_t at = 0; at < bytes; at += kUnitBytes) {
    const Unit value =
        from == nullptr ? sentinel : load_unit(reinterpret_cast<const Unit*>(from + at));
    store_unit(reinterpret_cast<Unit*>(to + at), value);
  }
}

__device__ inline void copy_cell(const Params& p, const std::byte* from, std::byte* to) {
  switch (p.unit) {
    case 16:
      return copy_cell(from, to, p.cell_bytes,
                       make_uint4(kAllLanes, kAllLanes, kAllLanes, kAllLanes));
    case 8:
      return copy_cell(from, to, p.cell_bytes, ~std::uint64_t{0});
    case 4:
      return copy_cell(from, to, p.cell_bytes, ~std::uint32_t{0});
    case 2:
      return copy_cell(from, to, p.cell_bytes, std::uint16_t{0xffff});
    default:
      return copy_cell(from, to, p.cell_bytes, std::uint8_t{0xff});
  }
}

/// Any grid: a thread for each cell, those of a token side by side, so that a warp writes one range
/// of the host's memory. The first thread writes the head. Waits for nobody, nothing needs
/// resetting; the host reads behind an event.
__global__ void __launch_bounds__(kThreads, 2)
    copy_snapshot_kernel(const __grid_constant__ Params p) {
  grid_dependency_wait();
  const std::uint64_t step = p.state->step;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.head->step_id = p.state->step_id;
    const auto* const from = reinterpret_cast<const std::uint64_t*>(&p.state->error);
    auto* const to = reinterpret_cast<std::uint64_t*>(&p.head->error);
    for (int i = 0; i < exec::kCaptureErrorWords; ++i) to[i] = from[i];
  }
  const std::int64_t num_cells = p.num_tokens * p.num_layers;
  const std::int64_t num_threads = std::int64_t{gridDim.x} * kThreads;
  const auto lane = static_cast<std::int64_t>(lane_id());
  // All lanes of a warp take the same turns: they vote.
  for (std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x - lane;
       first < num_cells; first += num_threads) {
    const std::int64_t cell = first + lane;
    bool is_recorded = false;
    if (cell < num_cells) {
      const std::int64_t token = cell / p.num_layers;
      const std::int64_t row = (cell - token * p.num_layers) * p.max_tokens + token;
      const std::uint64_t stamp = p.stamps[row];
      is_recorded = has(Fault::kSnapshotOfOldSteps) ? stamp != 0 : stamp == step;
      if (!has(Fault::kSkipsLastCell) || cell + 1 < num_cells) {
        copy_cell(p, is_recorded ? p.cells + row * p.cell_bytes : nullptr,
                  p.ids + cell * p.cell_bytes);
      }
    }
    const unsigned lanes = __ballot_sync(kAllLanes, is_recorded ? 1 : 0);
    if (lane == 0) {
      p.recorded[first / 32] =
          has(Fault::kBitsOfFirstLane) ? (is_recorded ? kAllLanes : 0U) : lanes;
    }
  }
}

}  // namespace

cudaError_t copy_snapshot(const exec::DeviceSnapshotParams& params, LaunchLimits limits,
                          cudaStream_t stream) {
  const std::int64_t num_cells = params.num_tokens * params.num_layers;
  const std::int64_t wanted = (num_cells + kThreads - 1) / kThreads;
  const std::int64_t most = limits.max_blocks;
  const std::int64_t num_blocks = wanted < 1 ? 1 : wanted < most ? wanted : most;
  return launch_blocks<copy_snapshot_kernel>("copy_snapshot", num_blocks, 0, limits, stream,
                                             params);
}

}  // namespace fanfold::gpu
