// SPDX-License-Identifier: Apache-2.0
#include "device_check/device_kernels.h"

#include "gpu/device/launch.h"

namespace fanfold::device_check {
namespace {

using gpu::LaunchConfig;

constexpr int kThreads = 256;
constexpr std::uint64_t kPatienceNs = 2'000'000'000;

/// bfloat16 times 2^exponent, of numbers whose exponents have room for it.
__device__ std::uint16_t scaled(std::uint16_t bits, int exponent) {
  return (bits & 0x7fffU) == 0 ? bits : static_cast<std::uint16_t>(bits + (exponent << 7));
}

/// Grid: any; a block takes rows in turn.
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const __grid_constant__ ScaleRowsParams p) {
  const std::int64_t num_rows = p.rows_per_group * p.num_groups;
  const auto* const x = reinterpret_cast<const std::uint16_t*>(p.x);
  auto* const y = reinterpret_cast<std::uint16_t*>(p.y);
  for (std::int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const auto group = static_cast<int>(row / p.rows_per_group);
    if (row % p.rows_per_group >= p.counts[group]) continue;
    for (std::int64_t i = threadIdx.x; i < p.hidden; i += kThreads) {
      y[row * p.hidden + i] = scaled(x[row * p.hidden + i], group % 4);
    }
  }
}

/// Grid: one block of one warp, of which one thread acts.
__global__ void __launch_bounds__(32) meet_kernel(const __grid_constant__ MeetParams p) {
  if (threadIdx.x != 0) return;
  gpu::atom_add_acq_rel_gpu(p.num_arrived, 1U);
  const std::uint64_t start = gpu::globaltimer_ns();
  bool has_met = false;
  while (!has_met && gpu::globaltimer_ns() - start < kPatienceNs) {
    has_met = gpu::ld_acquire_gpu(p.num_arrived) >= p.num_streams;
  }
  p.has_met[p.index] = has_met ? 1 : 0;
}

}  // namespace

cudaError_t scale_rows(const ScaleRowsParams& params, int num_blocks, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(num_blocks));
  config.block = dim3(kThreads);
  config.stream = stream;
  return gpu::launch("scale_rows", scale_rows_kernel, config, params);
}

cudaError_t meet(const MeetParams& params, cudaStream_t stream) {
  LaunchConfig config;
  config.block = dim3(32);
  config.stream = stream;
  return gpu::launch("meet", meet_kernel, config, params);
}

}  // namespace fanfold::device_check
