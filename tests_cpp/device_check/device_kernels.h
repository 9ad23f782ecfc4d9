// SPDX-License-Identifier: Apache-2.0
#pragma once

// Kernels of device_check: an expert, and a meeting of streams.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace fanfold::device_check {

/// An expert whose results are exact: row (g, i) of bfloat16 is multiplied by 2^(g mod 4).
struct ScaleRowsParams {
  const std::byte* x;          // in [num_groups, rows_per_group, hidden] bfloat16
  std::byte* y;                // out, likewise
  const std::int32_t* counts;  // in [num_groups] rows of each
  std::int64_t rows_per_group;
  std::int64_t hidden;
  std::int32_t num_groups;
};
cudaError_t scale_rows(const ScaleRowsParams& params, int num_blocks, cudaStream_t stream);

/// Waits until `num_streams` kernels like this run at the same time, for two seconds at most.
struct MeetParams {
  std::uint32_t* num_arrived;  // in/out, 0 at first
  std::uint32_t* has_met;      // out [num_streams] 1 if all were there
  std::uint32_t num_streams;
  std::uint32_t index;
};
cudaError_t meet(const MeetParams& params, cudaStream_t stream);

}  // namespace fanfold::device_check
