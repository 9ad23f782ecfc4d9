// SPDX-License-Identifier: Apache-2.0

#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"
#include "gpu/kernels/received_rows.cuh"
#include "gpu/kernels/row_sums.cuh"

namespace fanfold::gpu {
namespace {

// Vectors of a row that a lane has on their way: of one row, and of each of several.
constexpr int kCopyUnits = 4;
template <DType kY>
constexpr int kRoundUnits = kY == DType::kFloat32 ? 1 : 2;
template <DType kY>
constexpr int kFoldUnits = kY == DType::kFloat32 ? 1 : 2;
constexpr int kFoldRows = 3;

/// Columns `begin` to `end` of what one received row sends home.
struct Part {
  std::int64_t row;  // source * m + i
  int begin;
  int end;
};

__device__ Destination destination_of(const exec::DeviceCombineSendParams& p, std::byte* row) {
  const int hidden = static_cast<int>(p.hidden);
  if (p.wire == Wire::kNone) return row_destination(row, p.combine_dtype, hidden);
  return packed_destination(row, row + plan::packed_scales_offset(p.hidden),
                            {hidden, 0, p.wire_scale == WireScale::kUe8m0});
}

/// `bytes` bytes, by a warp; both lie on 16 bytes, where `is_vector`, else on their numbers.
template <DType kY>
__device__ void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes,
                           bool is_vector) {
  const auto lane = static_cast<std::int64_t>(lane_id());
  if (!is_vector) {
    constexpr std::int64_t kBytes = number_bytes(kY);
    for (std::int64_t at = lane * kBytes; at < bytes; at += 32 * kBytes) {
      if constexpr (kBytes == 4) {
        *reinterpret_cast<std::uint32_t*>(to + at) =
            *reinterpret_cast<const std::uint32_t*>(from + at);
      } else {
        *reinterpret_cast<std::uint16_t*>(to + at) =
            *reinterpret_cast<const std::uint16_t*>(from + at);
      }
    }
    return;
  }
  constexpr std::int64_t kWarpBytes = std::int64_t{32} * 16;
  for (std::int64_t at = lane * 16; at < bytes; at += kCopyUnits * kWarpBytes) {
    uint4 words[kCopyUnits];
    for (int unit = 0; unit < kCopyUnits; ++unit) {
      if (at + unit * kWarpBytes < bytes) words[unit] = ld16(from + at + unit * kWarpBytes);
    }
    for (int unit = 0; unit < kCopyUnits; ++unit) {
      if (at + unit * kWarpBytes < bytes) st16_stream(to + at + unit * kWarpBytes, words[unit]);
    }
  }
}

/// One row of `y`, as a sum of one row.
template <DType kY>
__device__ void round_row(const exec::DeviceCombineSendParams& p, const Part& part,
                          const std::byte* from, std::byte* to, bool is_vector) {
  const int hidden = static_cast<int>(p.hidden);
  move_columns<kY, kRoundUnits<kY>, true>(from, is_vector, part.begin, part.end, {hidden, 0, false},
                                          destination_of(p, to));
}

/// A row of a layout per rank. A copy where nothing is to be rounded.
template <DType kY>
__device__ void stage(const exec::DeviceCombineSendParams& p, const Part& part, bool is_vector) {
  constexpr std::int64_t kBytes = number_bytes(kY);
  const std::byte* const from = p.y + part.row * p.hidden * kBytes;
  std::byte* const to =
      p.rows + (part.row + (has(Fault::kSendsToNextRow) ? 1 : 0)) * p.rows_per_token * p.row_bytes;
  if (p.wire != Wire::kNone || p.combine_dtype != kY) {
    round_row<kY>(p, part, from, to, is_vector);
    return;
  }
  copy_bytes<kY>(to + part.begin * kBytes, from + part.begin * kBytes,
                 (min(part.end, static_cast<int>(p.hidden)) - part.begin) * kBytes,
                 is_vector && reinterpret_cast<std::uintptr_t>(to) % 16 == 0);
}

/// The experts' rows of one received row: their sum, or (origin) each for itself.
template <DType kY>
__device__ void send_pairs(const exec::DeviceCombineSendParams& p, const Part& part,
                           Summands& summands, bool is_vector) {
  const plan::ExpertRow* const pairs = p.pairs + part.row * p.max_pairs;
  const std::int64_t expert_rows = p.round.num_ranks * p.round.round_max_tokens;
  const std::int64_t y_row_bytes = p.hidden * number_bytes(kY);
  const int hidden = static_cast<int>(p.hidden);
  int count = 0;
  for (int first = 0; first < p.max_pairs; first += 32) {
    const int at = first + static_cast<int>(lane_id());
    const bool is_pair = at < p.max_pairs && pairs[at].local_expert >= 0;
    if (is_pair) {
      const plan::ExpertRow& pair = pairs[at];
      summands.rows[at] = p.y + (pair.local_expert * expert_rows + pair.position) * y_row_bytes;
      summands.weights[at] = p.carried ? pair.weight : 1.0F;
    }
    const unsigned lanes = __ballot_sync(kAllLanes, is_pair ? 1 : 0);
    count += __popc(lanes);
    if (lanes != kAllLanes) break;
  }
  if (!has(Fault::kListNotReady)) __syncwarp();
  std::byte* const to = p.rows + part.row * p.rows_per_token * p.row_bytes;
  if (p.origin) {
    for (int at = 0; at < count; ++at) {
      round_row<kY>(p, part, summands.rows[at], to + at * p.row_bytes, is_vector);
    }
  } else {
    sum_columns<kY, kFoldRows, kFoldUnits<kY>>(summands, count, is_vector, part.begin, part.end,
                                               {hidden, 0, false}, destination_of(p, to));
  }
  __syncwarp();  // the list is used again
}

/// Grid: any number of blocks. A warp takes parts of received rows in turn: it copies or rounds the
/// row of `y`, or adds those of the row's pairs, to this rank's own window. No block waits for
/// another one; the last block raises the flags, which carry what all blocks wrote (flags.cuh), and
/// waits for the peers' where the host wants that. It resets the slot's counters. Reads nothing
/// that changes while it runs.
template <DType kY>
__global__ void __launch_bounds__(kThreads, 2)
    combine_send_kernel(const __grid_constant__ exec::DeviceCombineSendParams p) {
  FANFOLD_SHARED(ReceivedRows, received);
  FANFOLD_SHARED(Summands[kWarps], summands);
  const Known* const known = begin(p.round);
  if (known == nullptr) return;
  exec::DeviceSlot* const slot = p.round.slot;
  const std::uint64_t epoch = combine_epoch(*known);
  if (has(Fault::kAnnouncesFirst) && blockIdx.x == 0) {
    announce(p.round, *known, p.flags, epoch, nullptr, known->num_tokens);
  }
  find_received_rows(received, p.rank_counts, p.round.num_ranks);
  const std::int64_t num_rows =
      received.begin[p.round.num_ranks] - (has(Fault::kSendsOneRowLess) ? 1 : 0);
  const Shares shares = shares_of<kCopyUnits>(num_rows, p.hidden);
  const bool is_vector = p.hidden % kVector == 0 && is_aligned<kY>(p.y);
  for (std::int64_t item = grid_warp(); item < num_rows * shares.num_parts;
       item += num_grid_warps()) {
    const auto number = static_cast<std::int32_t>(item / shares.num_parts);
    const int source = received.source_of(number, p.round.num_ranks);
    const int first = static_cast<int>(item % shares.num_parts) * shares.part_columns;
    const Part part = {source * p.round.round_max_tokens + number - received.begin[source], first,
                       first + shares.part_columns};
    if (p.pairs != nullptr) {
      send_pairs<kY>(p, part, summands[threadIdx.x / 32], is_vector);
    } else {
      stage<kY>(p, part, is_vector);
    }
  }
  // While the last block waits, the next kernel's blocks would take the room of those waited for.
  if (!p.waits || has(Fault::kLaunchesWhileWaiting)) grid_dependency_launch();
  if (!is_last_block(slot)) return;
  if (!has(Fault::kCombineCountersStay)) reset_counters(slot);
  if (!has(Fault::kAnnouncesFirst)) {
    announce(p.round, *known, p.flags, epoch, nullptr, known->num_tokens);
  }
  if (p.waits && !has(Fault::kCombineDoesNotWait)) {
    await(p.round, *known, p.flags, epoch, exec::DeviceCounts{}, known->num_tokens);
  }
}

template <DType kY>
cudaError_t launch_for(const exec::DeviceCombineSendParams& params, LaunchLimits limits,
                       cudaStream_t stream) {
  const std::int64_t num_rows = params.round.num_ranks * params.round.round_max_tokens;
  return launch_blocks<combine_send_kernel<kY>>(
      "combine_send", num_blocks_for<kCopyUnits>(num_rows, params.hidden, limits.max_blocks), 0,
      limits, stream, params);
}

}  // namespace

cudaError_t combine_send(const exec::DeviceCombineSendParams& params, LaunchLimits limits,
                         cudaStream_t stream) {
  if (params.y_dtype == DType::kBFloat16) {
    return launch_for<DType::kBFloat16>(params, limits, stream);
  }
  if (params.y_dtype == DType::kFloat16) {
    return launch_for<DType::kFloat16>(params, limits, stream);
  }
  return launch_for<DType::kFloat32>(params, limits, stream);
}

}  // namespace fanfold::gpu
