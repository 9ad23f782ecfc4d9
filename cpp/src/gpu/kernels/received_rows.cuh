// SPDX-License-Identifier: Apache-2.0
#pragma once

// The received rows of a round, numbered over sources and then their rows, without the padding.

#include "gpu/kernels/flags.cuh"

namespace fanfold::gpu {

/// Of a block, in shared memory.
struct ReceivedRows {
  std::int32_t begin[exec::kMaxDeviceRanks + 1];  // of each source's rows; then their number

  /// The source of received row `row`.
  __device__ int source_of(std::int32_t row, int num_ranks) const {
    int source = 0;
    for (int end = num_ranks; end - source > 1;) {
      const int middle = source + (end - source) / 2;
      if (begin[middle] <= row) {
        source = middle;
      } else {
        end = middle;
      }
    }
    return source;
  }
};

/// Fills `rows` from `rank_counts` [num_ranks]. All threads of the block call it, once.
__device__ inline void find_received_rows(ReceivedRows& rows, const std::int32_t* rank_counts,
                                          int num_ranks) {
  constexpr unsigned kAll = 0xffffffffU;
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(lane_id());
    std::int32_t before = 0;
    for (int first = 0; first < num_ranks; first += 32) {
      const int source = first + lane;
      std::int32_t sum = source < num_ranks ? rank_counts[source] : 0;
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const std::int32_t lower = __shfl_up_sync(kAll, sum, static_cast<unsigned>(lanes));
        if (lane >= lanes) sum += lower;
      }
      if (source < num_ranks) rows.begin[source + 1] = before + sum;
      before += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) rows.begin[0] = 0;
  }
  __syncthreads();
}

}  // namespace fanfold::gpu
