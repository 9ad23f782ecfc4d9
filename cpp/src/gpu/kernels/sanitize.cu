// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"

namespace fanfold::gpu {
namespace {

using Params = exec::DeviceSanitizeParams;

template <typename Id>
__device__ inline Id sanitized(Id id, const Params& p, Id invalid) {
  if (p.policy == SanitizePolicy::kPadding) return id;
  const auto global = static_cast<std::int64_t>(id);
  if (global < 0 || global >= p.num_experts || p.rank_of[global] != p.rank) return invalid;
  return p.policy == SanitizePolicy::kPaddingAndNonLocal ? id : static_cast<Id>(p.local_of[global]);
}

template <typename Id>
__device__ inline void sanitize_all(const Params& p) {
  const auto* const in = static_cast<const Id*>(p.ids);
  auto* const out = static_cast<Id*>(p.out);
  const auto invalid = static_cast<Id>(p.invalid_expert_id);
  const std::int64_t per_source = p.num_rows * p.top_k;
  const std::int64_t num_threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       at < p.num_sources * per_source; at += num_threads) {
    const std::int64_t source = at / per_source;
    const std::int64_t row = (at - source * per_source) / p.top_k;
    const std::int64_t k = at - source * per_source - row * p.top_k;
    const bool has_token =
        has(Fault::kSanitizesLastRow) ? row + 1 < p.counts[source] : row < p.counts[source];
    Id id = invalid;
    if (has_token) {
      id = sanitized(in[source * p.source_stride + row * p.row_stride + k], p, invalid);
    }
    out[source * p.out_source_stride + row * p.out_row_stride + k] = id;
  }
}

/// Any grid: a thread for each id. Waits for nobody; nothing needs resetting. Belongs to no round:
/// it also runs once kernels have failed.
__global__ void __launch_bounds__(kThreads, 2) sanitize_kernel(const __grid_constant__ Params p) {
  grid_dependency_wait();
  switch (p.dtype) {
    case DType::kInt16:
      return sanitize_all<std::int16_t>(p);
    case DType::kInt64:
      return sanitize_all<std::int64_t>(p);
    case DType::kUInt32:
      return sanitize_all<std::uint32_t>(p);
    default:  // the caller has checked: int32
      return sanitize_all<std::int32_t>(p);
  }
}

}  // namespace

cudaError_t sanitize(const exec::DeviceSanitizeParams& params, LaunchLimits limits,
                     cudaStream_t stream) {
  const std::int64_t num_ids = params.num_sources * params.num_rows * params.top_k;
  const std::int64_t wanted = (num_ids + kThreads - 1) / kThreads;
  const std::int64_t most = limits.max_blocks;
  const std::int64_t num_blocks = wanted < 1 ? 1 : wanted < most ? wanted : most;
  return launch_blocks<sanitize_kernel>("sanitize", num_blocks, 0, limits, stream, params);
}

}  // namespace fanfold::gpu
