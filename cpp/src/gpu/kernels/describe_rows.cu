// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"

namespace fanfold::gpu {
namespace {

/// Any grid: a thread for each row that may have come, which writes where it lies in the layout.
/// Waits for nobody; nothing needs resetting.
__global__ void __launch_bounds__(kThreads, 2)
    describe_rows_kernel(const __grid_constant__ exec::DeviceDescribeParams p) {
  if (begin(p.round) == nullptr) return;
  const std::int64_t m = p.round.round_max_tokens;
  const std::int64_t num_rows = p.round.num_ranks * m;
  const std::int64_t num_threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; row < num_rows;
       row += num_threads) {
    const std::int64_t source = row / m;
    const std::int64_t place = row - source * m;
    const bool is_there = has(Fault::kDescribesPadding) ? place <= p.rank_counts[source]
                                                        : place < p.rank_counts[source];
    if (!is_there) continue;
    const std::int32_t token = p.source_tokens[row];
    const auto describe = [&](std::int64_t at) {
      p.source_rank[at] = static_cast<std::int32_t>(source);
      p.source_token[at] = token;
    };
    if (p.pairs == nullptr) {
      describe(row);
      continue;
    }
    for (std::int32_t i = 0; i < p.max_pairs; ++i) {
      const plan::ExpertRow pair = p.pairs[row * p.max_pairs + i];
      if (pair.local_expert < 0) break;
      describe(pair.local_expert * num_rows + pair.position);
    }
  }
}

}  // namespace

cudaError_t describe_rows(const exec::DeviceDescribeParams& params, LaunchLimits limits,
                          cudaStream_t stream) {
  const std::int64_t num_rows = params.round.num_ranks * params.round.round_max_tokens;
  const std::int64_t wanted = (num_rows + kThreads - 1) / kThreads;
  const std::int64_t most = limits.max_blocks;
  const std::int64_t num_blocks = wanted < 1 ? 1 : wanted < most ? wanted : most;
  return launch_blocks<describe_rows_kernel>("describe_rows", num_blocks, 0, limits, stream,
                                             params);
}

}  // namespace fanfold::gpu
