// SPDX-License-Identifier: Apache-2.0

#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"
#include "gpu/kernels/row_sums.cuh"

namespace fanfold::gpu {
namespace {

// Rows, and vectors of each, that a lane has on their way.
constexpr int kRows = 4;
constexpr int kUnits = 2;

/// Row `row` of those that this rank's tokens have on `rank`.
__device__ const std::byte* pulled_row(const exec::DeviceSumParams& p, const Known& known,
                                       std::int32_t rank, std::int64_t row) {
  const exec::DeviceRound& round = p.round;
  const int block = round.route == exec::DeviceRoute::kWindows ? round.rank : rank;
  const std::int64_t at =
      block * round.round_max_tokens * p.rows_per_token + row + (has(Fault::kPullsNextRow) ? 1 : 0);
  return known.windows[rank] + round.store_offset + p.combine_offset + at * p.row_bytes;
}

/// Lists the rows of a token: one for each of its targets. A warp calls it, together.
__device__ int list_targets(const exec::DeviceSumParams& p, const Known& known, std::int64_t token,
                            int max_targets, Summands& summands) {
  const plan::Target* const targets = p.targets + token * max_targets;
  int count = 0;
  for (int first = 0; first < max_targets; first += 32) {
    const int at = first + static_cast<int>(lane_id());
    const plan::Target target = at < max_targets ? targets[at] : plan::Target{-1, 0};
    if (target.rank >= 0) {
      summands.rows[at] = pulled_row(p, known, target.rank, target.row * p.rows_per_token);
      summands.weights[at] = 1.0F;
    }
    const unsigned lanes = __ballot_sync(kAllLanes, target.rank >= 0 ? 1 : 0);
    count += __popc(lanes);
    if (lanes != kAllLanes) break;
  }
  return count;
}

/// The row of a token among this rank's rows on `rank`; -1 for a rank that is left out.
__device__ std::int32_t row_on(const plan::Target* targets, int max_targets, std::int32_t rank) {
  for (int i = 0; i < max_targets && targets[i].rank >= 0; ++i) {
    if (targets[i].rank == rank) return targets[i].row;
  }
  return -1;
}

__device__ bool is_repeated(const std::int32_t* ids, int k) {
  for (int i = 0; i < k; ++i) {
    if (ids[i] == ids[k]) return true;
  }
  return false;
}

/// As plan::merged_weight.
__device__ float merged(const std::int32_t* ids, const float* weights, int k, int top_k) {
  float sum = weights[k];
  for (int i = k + 1; i < top_k; ++i) {
    if (ids[i] == ids[k]) sum = __fadd_rn(sum, weights[i]);
  }
  return sum;
}

/// Lists the rows of a token, one for each of its experts, k ascending, which lie on a rank in the
/// order of its experts. A warp calls it, together.
__device__ int list_experts(const exec::DeviceSumParams& p, const Known& known, std::int64_t token,
                            int max_targets, Summands& summands) {
  const int top_k = p.round.top_k;
  const std::int32_t* const ids = p.sent_ids + token * top_k;
  const float* const weights = p.topk_weights + token * p.weights_stride;
  std::int32_t* const ranks = summands.scratch;  // of each column that counts; else -1
  for (int k = static_cast<int>(lane_id()); k < top_k; k += 32) {
    const bool counts = ids[k] >= 0 && !is_repeated(ids, k);
    ranks[k] = counts ? p.round.rank_of[ids[k]] : -1;
  }
  __syncwarp();
  int count = 0;
  for (int first = 0; first < top_k; first += 32) {
    const int k = first + static_cast<int>(lane_id());
    const std::int32_t rank = k < top_k ? ranks[k] : -1;
    const std::int32_t row =
        rank < 0 ? -1 : row_on(p.targets + token * max_targets, max_targets, rank);
    const unsigned lanes = __ballot_sync(kAllLanes, row >= 0 ? 1 : 0);
    if (row >= 0) {
      std::int64_t place = 0;
      for (int i = 0; i < k; ++i) place += ranks[i] == rank ? 1 : 0;
      const int at = count + __popc(lanes & ((1U << lane_id()) - 1));
      summands.rows[at] = pulled_row(p, known, rank, row * p.rows_per_token + place);
      summands.weights[at] = merged(ids, weights, k, top_k);
    }
    count += __popc(lanes);
  }
  return count;
}

/// The list from its end, for a fault.
__device__ void turn(Summands& summands, int count) {
  __syncwarp();
  if (lane_id() == 0) {
    for (int i = 0; i < count / 2; ++i) {
      const std::byte* const row = summands.rows[i];
      summands.rows[i] = summands.rows[count - 1 - i];
      summands.rows[count - 1 - i] = row;
    }
  }
}

/// Whether vectors can be loaded from all rows of the list.
template <DType kRow>
__device__ bool are_vectors(const Summands& summands, int count, int hidden) {
  bool are = hidden % kVector == 0;
  for (int i = static_cast<int>(lane_id()); i < count; i += 32) {
    are = are && is_aligned<kRow>(summands.rows[i]);
  }
  return __all_sync(kAllLanes, are ? 1 : 0) != 0;
}

/// Grid: any number of blocks. A warp takes parts of rows of `out` in turn: it pulls the token's
/// rows from the windows where they lie, and writes their sum. What it pulls was published before:
/// a kernel ahead of this one has waited for the flags. No block waits for another one. The last
/// block counts the combine and resets the slot's counters; where the round stays open, it first
/// tells the peers that all is pulled, and then waits until they have pulled as well, for the
/// experts may write again.
template <DType kRow>
__global__ void __launch_bounds__(kThreads, 2)
    sum_rows_kernel(const __grid_constant__ exec::DeviceSumParams p) {
  FANFOLD_SHARED(Summands[kWarps], all_summands);
  const Known* const known = begin(p.round);
  if (known == nullptr) return;
  exec::DeviceSlot* const slot = p.round.slot;
  const std::uint64_t epoch = combine_epoch(*known);
  const std::int32_t num_tokens = known->num_tokens;
  if (has(Fault::kAcksFirst) && p.acks && blockIdx.x == 0) {
    announce(p.round, *known, p.ack, epoch, nullptr, num_tokens);
  }
  const int max_targets = min(p.round.top_k, p.round.num_ranks);
  const int hidden = static_cast<int>(p.hidden);
  const RowFormat format = {hidden, static_cast<int>(plan::packed_scales_offset(hidden)),
                            p.wire_scale == WireScale::kUe8m0};
  const Shares shares = shares_of<kUnits>(p.num_tokens, p.hidden);
  Summands& summands = all_summands[threadIdx.x / 32];
  for (std::int64_t item = grid_warp(); item < p.num_tokens * shares.num_parts;
       item += num_grid_warps()) {
    const std::int64_t token = item / shares.num_parts;
    const int first = static_cast<int>(item % shares.num_parts) * shares.part_columns;
    if (has(Fault::kRowsBehindStay) && token >= num_tokens) continue;
    int count = 0;
    if (token < num_tokens) {
      count = p.origin ? list_experts(p, *known, token, max_targets, summands)
                       : list_targets(p, *known, token, max_targets, summands);
    }
    if (has(Fault::kSkipsLastTarget) && count > 0) --count;
    if (has(Fault::kAddsBackwards)) turn(summands, count);
    __syncwarp();
    sum_columns<kRow, kRows, kUnits>(
        summands, count, are_vectors<kRow>(summands, count, hidden), first,
        first + shares.part_columns, format,
        row_destination(p.out + token * p.out_stride_bytes, p.out_dtype, hidden));
    __syncwarp();  // the list is used again
  }
  if (!p.acks) grid_dependency_launch();  // see combine_send.cu
  if (!is_last_block(slot)) return;
  if (p.acks && !has(Fault::kAcksFirst))
    announce(p.round, *known, p.ack, epoch, nullptr, num_tokens);
  reset_counters(slot);
  if (threadIdx.x == 0 && !has(Fault::kCombineNotCounted)) ++slot->num_combines;
  if (p.acks) await(p.round, *known, p.ack, epoch, exec::DeviceCounts{}, num_tokens);
}

template <DType kRow>
cudaError_t launch_for(const exec::DeviceSumParams& params, LaunchLimits limits,
                       cudaStream_t stream) {
  return launch_blocks<sum_rows_kernel<kRow>>(
      "sum_rows", num_blocks_for<kUnits>(params.num_tokens, params.hidden, limits.max_blocks), 0,
      limits, stream, params);
}

}  // namespace

cudaError_t sum_rows(const exec::DeviceSumParams& params, LaunchLimits limits,
                     cudaStream_t stream) {
  if (params.wire != Wire::kNone) return launch_for<DType::kFloat8E4M3>(params, limits, stream);
  if (params.combine_dtype == DType::kBFloat16) {
    return launch_for<DType::kBFloat16>(params, limits, stream);
  }
  if (params.combine_dtype == DType::kFloat16) {
    return launch_for<DType::kFloat16>(params, limits, stream);
  }
  return launch_for<DType::kFloat32>(params, limits, stream);
}

}  // namespace fanfold::gpu
