// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"
#include "gpu/kernels/rows.cuh"
#include "gpu/kernels/tiles.cuh"

namespace fanfold::gpu {
namespace {

using Params = exec::DeviceArrangeParams;

constexpr std::uint8_t kNoPair = 0xff;  // no row has more than kMaxDeviceTopK pairs
static_assert(exec::kMaxDeviceTopK < kNoPair);

/// Shared memory of a block, for one tile of received rows.
struct TileRows {
  std::int32_t* experts;        // [rows, K] local expert of each id, -1 none
  std::int32_t* positions;      // [rows, Q] of each pair, among its expert's rows
  std::uint8_t* first_columns;  // [rows, Q] first column of each pair
  std::uint8_t* pair_of;        // [rows, K] of an expert's first column, else kNoPair
  std::int32_t* num_pairs;      // [rows]
  std::int32_t* row_at;         // [rows] r * m + i
};

/// Bytes of TileRows' first four arrays.
constexpr std::size_t shared_bytes(const Params& p, int rows) {
  const auto per_row = static_cast<std::size_t>(p.round.top_k + p.max_pairs) * 5;
  return per_row * static_cast<std::size_t>(rows);
}

/// Where each source's rows begin among all received rows.
struct Starts {
  std::int32_t of[exec::kMaxDeviceRanks + 1];
};

__device__ inline void find_starts(const Params& p, Starts& starts) {
  const int source = static_cast<int>(threadIdx.x);
  std::int32_t total = 0;
  const std::int32_t end =
      scan_block(source < p.round.num_ranks ? p.rank_counts[source] : 0, &total);
  if (source < p.round.num_ranks) starts.of[source + 1] = end;
  if (source == 0) starts.of[0] = 0;
  __syncthreads();
}

/// Fills elements `begin` to `end` of an array that begins on 16 bytes.
__device__ inline void fill(std::int32_t* array, std::int64_t begin, std::int64_t end,
                            std::int32_t value) {
  const auto word = static_cast<unsigned>(value);
  const std::int64_t thread = threadIdx.x;
  for (std::int64_t at = begin / 4 * 4 + thread * 4; at < end; at += std::int64_t{4} * kThreads) {
    if (at >= begin && at + 4 <= end) {
      st16(array + at, make_uint4(word, word, word, word));
      continue;
    }
    for (std::int64_t i = max(at, begin); i < min(at + 4, end); ++i) array[i] = value;
  }
}

/// Copies elements `begin` to `end` of an array to the same places of another.
template <typename T>
__device__ inline void copy_elements(const T* from, T* to, std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin + threadIdx.x; at < end; at += kThreads) to[at] = from[at];
}

/// Indices of an earlier routing, and the ids of rows without a token. Blocks take turns at pieces
/// of each source's rows.
__device__ inline void restore_and_pad(const Params& p) {
  if (p.routed_ids == nullptr && !p.pads_ids) return;
  constexpr std::int64_t kPiece = std::int64_t{16} * kThreads;
  const std::int64_t m = p.round.round_max_tokens;
  const std::int64_t top_k = p.round.top_k;
  const std::int64_t num_pieces = (m * top_k + kPiece - 1) / kPiece;
  for (std::int64_t piece = blockIdx.x; piece < num_pieces * p.round.num_ranks;
       piece += gridDim.x) {
    const std::int64_t source = piece / num_pieces;
    const std::int64_t first = piece % num_pieces * kPiece;
    const std::int64_t last = min(first + kPiece, m * top_k);
    const std::int64_t num_rows = p.rank_counts[source];
    const std::int64_t end = min(last, num_rows * top_k);  // of rows with a token
    const std::int64_t base = source * m * top_k;
    if (p.routed_ids != nullptr) {
      copy_elements(p.routed_ids, p.topk_ids, base + first, base + end);
      if (p.routed_weights != nullptr) {
        copy_elements(p.routed_weights, p.restored_weights, base + first, base + end);
      }
      if (first == 0) {
        copy_elements(p.routed_tokens, p.source_tokens, source * m, source * m + num_rows);
      }
    }
    if (!p.pads_ids) continue;
    const std::int64_t padded = has(Fault::kPadsLastRow) ? max(end - top_k, first) : end;
    fill(p.topk_ids, base + max(first, padded), base + last, p.invalid_expert_id);
  }
}

/// Which received rows a tile has, and which local experts they name.
__device__ inline void read_experts(const Params& p, const Starts& starts, const Tile& tile,
                                    const TileRows& rows) {
  const int top_k = p.round.top_k;
  const std::int32_t* const ids = p.routed_ids != nullptr ? p.routed_ids : p.topk_ids;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < tile.rows) {
    const std::int32_t row = tile.first + thread;
    int source = 0;  // the last that begins at `row` or before
    for (int end = p.round.num_ranks; end - source > 1;) {
      const int middle = (source + end) / 2;
      (starts.of[middle] <= row ? source : end) = middle;
    }
    rows.row_at[thread] =
        static_cast<std::int32_t>(source * p.round.round_max_tokens) + row - starts.of[source];
  }
  __syncthreads();
  for (int at = thread; at < tile.rows * top_k; at += kThreads) {
    const int row = at / top_k;
    const std::int32_t id = ids[std::int64_t{rows.row_at[row]} * top_k + (at - row * top_k)];
    const bool is_local =
        id >= 0 && id < p.round.num_experts && p.round.rank_of[id] == p.round.rank;
    rows.experts[at] = is_local ? p.round.local_of[id] : -1;
  }
  if (!has(Fault::kNoBarrierBeforeRepeats)) __syncthreads();
  for (int at = thread; at < tile.rows * top_k; at += kThreads) {
    const int first = at - at % top_k;
    bool is_first = rows.experts[at] >= 0;
    for (int i = first; is_first && i < at; ++i) is_first = rows.experts[i] != rows.experts[at];
    rows.pair_of[at] = is_first ? 0 : kNoPair;
  }
  __syncthreads();
  if (thread < tile.rows) {
    int num = 0;
    for (int k = 0; k < top_k; ++k) {
      std::uint8_t& pair = rows.pair_of[thread * top_k + k];
      if (pair == kNoPair) continue;
      rows.first_columns[thread * p.max_pairs + num] = static_cast<std::uint8_t>(k);
      pair = static_cast<std::uint8_t>(num++);
    }
    rows.num_pairs[thread] = num;
    if (p.pairs == nullptr) return;
    plan::ExpertRow* const pairs = p.pairs + std::int64_t{rows.row_at[thread]} * p.max_pairs;
    for (int i = num; i < p.max_pairs; ++i) pairs[i] = plan::ExpertRow{-1, 0, 0.0F};
  }
}

/// The weight of the expert that column `k` is the first to name: the sum over its columns in
/// float32, k ascending. 1 where no weights came.
__device__ inline float weight_of(const Params& p, const TileRows& rows, int row, int k) {
  const float* const all = p.routed_ids != nullptr ? p.routed_weights : p.topk_weights;
  if (all == nullptr) return 1.0F;
  const int top_k = p.round.top_k;
  const float* const weights = all + std::int64_t{rows.row_at[row]} * top_k;
  const std::int32_t* const experts = rows.experts + std::ptrdiff_t{row} * top_k;
  float sum = weights[k];
  if (has(Fault::kWeightOfFirst)) return sum;
  for (int i = k + 1; i < top_k; ++i) {
    if (experts[i] == experts[k]) sum += weights[i];
  }
  return sum;
}

/// Rows of the layout of one expert.
__device__ inline std::int64_t rows_per_expert(const Params& p) {
  return p.round.num_ranks * p.round.round_max_tokens;
}

/// Gives the rows of a tile their places among their experts' rows; false when kernels have failed.
__device__ inline bool place_pairs(const Params& p, const TileTag& tag, const Tile& tile,
                                   const TileRows& rows) {
  FANFOLD_SHARED(TileBits, bits);
  const int top_k = p.round.top_k;
  const auto place = [&](int row, std::int32_t expert, std::int32_t position) {
    int k = 0;
    while (rows.experts[row * top_k + k] != expert) ++k;
    const int pair = rows.pair_of[row * top_k + k];
    rows.positions[row * p.max_pairs + pair] = position;
    if (p.pairs == nullptr && p.expert_weights == nullptr) return;
    const float weight = weight_of(p, rows, row, k);
    if (p.pairs != nullptr) {
      p.pairs[std::int64_t{rows.row_at[row]} * p.max_pairs + pair] =
          plan::ExpertRow{expert, position, weight};
    }
    if (p.expert_weights != nullptr) {
      p.expert_weights[expert * rows_per_expert(p) + position] = weight;
    }
  };
  return place_rows(p.round, p.tiles, tag, tile, rows.experts, top_k, p.round.num_local_experts,
                    p.expert_counts, bits, place);
}

/// One warp: one segment of a received row, to all its experts.
__device__ inline void expand_segment(const Params& p, const exec::DeviceExpansion& payload,
                                      const TileRows& rows, int row, int segment) {
  const std::int64_t skipped = segment * kSegmentBytes;
  const std::byte* const from = payload.source + rows.row_at[row] * payload.stride_bytes + skipped;
  const int bytes = segment_bytes(payload.row_bytes, segment);
  const int num_pairs = rows.num_pairs[row];
  for (int first = 0; first < num_pairs; first += 32) {
    const int num = min(32, num_pairs - first);
    std::byte* to = nullptr;
    if (static_cast<int>(lane_id()) < num) {
      const int pair = row * p.max_pairs + first + static_cast<int>(lane_id());
      const std::int64_t expert = rows.experts[row * p.round.top_k + rows.first_columns[pair]];
      to = payload.target +
           (expert * rows_per_expert(p) + rows.positions[pair]) * payload.stride_bytes + skipped;
    }
    copy_segment(from, to, num, bytes, payload.unit);
  }
}

/// Warps take turns at the segments of all payloads.
__device__ inline void expand_tile(const Params& p, const Tile& tile, const TileRows& rows) {
  int item = static_cast<int>(threadIdx.x) / 32;
  for (int i = 0; i < p.num_payloads; ++i) {
    const exec::DeviceExpansion& payload = p.payloads[i];
    const int num_segments = segments_of(payload.row_bytes);
    const int num_items = tile.rows * num_segments;
    for (; item < num_items; item += kWarps) {
      const int row = item / num_segments;
      expand_segment(p, payload, rows, row, item - row * num_segments);
    }
    item -= num_items;
  }
}

/// The last block: exclusive sums of the counts, which are zeros where nothing came.
__device__ inline void write_offsets(const Params& p, bool is_empty) {
  const std::int32_t num_experts = p.round.num_local_experts;
  std::int32_t before = 0;
  for (std::int32_t first = 0; first < num_experts; first += kThreads) {
    const std::int32_t expert = first + static_cast<std::int32_t>(threadIdx.x);
    if (is_empty && expert < num_experts) p.expert_counts[expert] = 0;
    if (p.offsets == nullptr) continue;
    const std::int32_t count = expert < num_experts ? p.expert_counts[expert] : 0;
    std::int32_t total = 0;
    const std::int32_t end = before + scan_block(count, &total);
    if (expert < num_experts) p.offsets[expert] = has(Fault::kOffsetsInclusive) ? end : end - count;
    before += total;
  }
  if (p.offsets != nullptr && threadIdx.x == 0) p.offsets[num_experts] = before;
}

/// Any grid. Blocks share the indices to restore and to pad. Then, if experts are counted, they
/// take tiles of at most 32 received rows, agree with the other blocks on the rows' places among
/// those of each local expert (tiles.cuh), and copy them there. What arrived is visible since the
/// kernel before this one ended. No block waits for a peer. The last block to end adds up the
/// offsets and leaves the counters of the slot at 0; nothing else needs resetting.
__global__ void __launch_bounds__(kThreads, 2) arrange_kernel(const __grid_constant__ Params p) {
  const Known* const known = begin(p.round);
  if (known == nullptr) return;
  struct TileNumbers {
    std::int32_t num_pairs[exec::kTileRows];
    std::int32_t row_at[exec::kTileRows];
  };
  FANFOLD_SHARED(Starts, starts);
  FANFOLD_SHARED(TileNumbers, numbers);
  FANFOLD_DYN_SHARED(std::int32_t, memory);
  restore_and_pad(p);
  if (p.expert_counts == nullptr) return;
  find_starts(p, starts);
  const std::int32_t num_rows = starts.of[p.round.num_ranks];
  const std::int64_t most_rows = tile_rows(num_rows, gridDim.x);
  std::int32_t* const positions = memory + most_rows * p.round.top_k;
  auto* const first_columns = reinterpret_cast<std::uint8_t*>(positions + most_rows * p.max_pairs);
  const TileRows rows{memory,
                      positions,
                      first_columns,
                      first_columns + most_rows * p.max_pairs,
                      numbers.num_pairs,
                      numbers.row_at};
  const TileTag tag = tile_tag(known->epoch, known->generation, TileUse::kArrange);
  Tile tile;
  while (take_tile(p.round.slot, num_rows, &tile)) {
    read_experts(p, starts, tile, rows);
    if (!place_pairs(p, tag, tile, rows)) return;
    expand_tile(p, tile, rows);
  }
  grid_dependency_launch();
  if (!is_last_block(p.round.slot)) return;
  write_offsets(p, num_rows == 0);
  if (!has(Fault::kArrangeCountersStay)) reset_counters(p.round.slot);
}

}  // namespace

cudaError_t arrange(const exec::DeviceArrangeParams& params, LaunchLimits limits,
                    cudaStream_t stream) {
  const std::int64_t num_rows = params.round.num_ranks * params.round.round_max_tokens;
  const std::int64_t most = limits.max_blocks;
  const std::int64_t num_blocks = num_rows < 1 ? 1 : num_rows < most ? num_rows : most;
  const int rows = max_tile_rows(num_rows, num_blocks);
  return launch_blocks<arrange_kernel>("arrange", num_blocks, shared_bytes(params, rows), limits,
                                       stream, params);
}

}  // namespace fanfold::gpu
