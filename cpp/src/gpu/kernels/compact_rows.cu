// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"
#include "gpu/kernels/rows.cuh"
#include "gpu/kernels/tiles.cuh"

namespace fanfold::gpu {
namespace {

using Params = exec::DeviceCompactParams;

/// Shared memory of a block, for one tile of tokens (r, i).
struct TileTokens {
  std::int32_t source[exec::kTileRows];  // r where the token is kept, else -1
  std::int32_t to[exec::kTileRows];      // its row there; -1: not kept
};

/// Looks which tokens of a tile name an expert of this rank: a warp for each token in turn.
__device__ inline void find_kept(const Params& p, const Tile& tile, TileTokens& tokens) {
  const std::int64_t m = p.round.round_max_tokens;
  const int top_k = p.round.top_k;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < tile.rows; row += kWarps) {
    const std::int64_t at = std::int64_t{tile.first} + row;
    const auto source = static_cast<std::int32_t>(at / m);
    const bool is_token =
        at - source * m < p.token_counts[source] + (has(Fault::kKeepsBehindTokens) ? 1 : 0);
    bool is_named = false;
    for (int k = static_cast<int>(lane_id()); is_token && k < top_k; k += 32) {
      const std::int32_t id = p.staged_ids[at * top_k + k];
      is_named =
          is_named || (id >= 0 && id < p.round.num_experts && p.round.rank_of[id] == p.round.rank);
    }
    const bool is_kept = __any_sync(kAllLanes, is_named ? 1 : 0) != 0;
    if (lane_id() == 0) {
      tokens.source[row] = is_kept ? source : -1;
      tokens.to[row] = -1;
    }
  }
  __syncthreads();
}

/// Gives the kept tokens of a tile their rows; false when kernels have failed.
__device__ inline bool place_tokens(const Params& p, const TileTag& tag, const Tile& tile,
                                    TileTokens& tokens) {
  FANFOLD_SHARED(TileBits, bits);
  find_kept(p, tile, tokens);
  const auto m = static_cast<std::int32_t>(p.round.round_max_tokens);
  const auto place = [&](int row, std::int32_t source, std::int32_t place_there) {
    tokens.to[row] = source * m + place_there;
  };
  return place_rows(p.round, p.tiles, tag, tile, tokens.source, 1, p.round.num_ranks, p.rank_counts,
                    bits, place);
}

/// One warp: ids, weights and number of a kept token.
__device__ inline void copy_indices(const Params& p, std::int64_t from, std::int64_t to) {
  const int top_k = p.round.top_k;
  for (int k = static_cast<int>(lane_id()); k < top_k; k += 32) {
    p.topk_ids[to * top_k + k] = p.staged_ids[from * top_k + k];
    if (p.staged_weights != nullptr) {
      p.topk_weights[to * top_k + k] = p.staged_weights[from * top_k + k];
    }
  }
  if (lane_id() == 0) {
    p.source_tokens[to] = static_cast<std::int32_t>(from % p.round.round_max_tokens);
  }
}

/// Warps take turns at the indices and the segments of all payloads of `num_rows` rows. `from_of`
/// and `to_of` say the rows, -1 none.
template <typename FromOf, typename ToOf>
__device__ inline void copy_rows(const Params& p, int num_rows, FromOf&& from_of, ToOf&& to_of) {
  int item = static_cast<int>(threadIdx.x) / 32;
  if (p.routed_counts == nullptr) {
    for (; item < num_rows; item += kWarps) {
      if (to_of(item) >= 0) copy_indices(p, from_of(item), to_of(item));
    }
    item -= num_rows;
  }
  for (int i = 0; i < p.num_payloads; ++i) {
    const exec::DeviceExpansion& payload = p.payloads[i];
    const int num_segments = segments_of(payload.row_bytes);
    const int num_items = num_rows * num_segments;
    for (; item < num_items; item += kWarps) {
      const int row = item / num_segments;
      const int segment = item - row * num_segments;
      const std::int64_t to = to_of(row);
      if (to < 0) continue;
      const std::int64_t skipped = segment * kSegmentBytes;
      copy_segment(payload.source + from_of(row) * payload.stride_bytes + skipped,
                   payload.target + to * payload.stride_bytes + skipped, 1,
                   segment_bytes(payload.row_bytes, segment), payload.unit);
    }
    item -= num_items;
  }
}

/// Along an earlier routing: blocks take turns at 32 rows, whose tokens it names.
__device__ inline void copy_routed(const Params& p) {
  const std::int64_t m = p.round.round_max_tokens;
  const std::int64_t num_rows = p.round.num_ranks * m;
  for (std::int64_t first = std::int64_t{blockIdx.x} * exec::kTileRows; first < num_rows;
       first += std::int64_t{gridDim.x} * exec::kTileRows) {
    const auto to_of = [&](int row) -> std::int64_t {
      const std::int64_t at = first + row;
      return at - at / m * m < p.routed_counts[at / m] ? at : -1;
    };
    const auto from_of = [&](int row) -> std::int64_t {
      const std::int64_t at = first + row;
      return at / m * m + p.routed_tokens[at];
    };
    copy_rows(p, static_cast<int>(min(std::int64_t{exec::kTileRows}, num_rows - first)), from_of,
              to_of);
  }
}

/// Any grid. Blocks take tiles of at most 32 of all ranks' tokens, agree with the other blocks on
/// the rows of those that name an expert of this rank (tiles.cuh), and copy them there; along an
/// earlier routing they only copy. The collective before this kernel has ended, so that all tokens
/// are there. No block waits for a peer. The last block to end adds up the counts and leaves the
/// counters of the slot at 0; nothing else needs resetting.
__global__ void __launch_bounds__(kThreads, 2)
    compact_rows_kernel(const __grid_constant__ Params p) {
  const Known* const known = begin(p.round);
  if (known == nullptr) return;
  FANFOLD_SHARED(TileTokens, tokens);
  const auto num_tokens = static_cast<std::int32_t>(p.round.num_ranks * p.round.round_max_tokens);
  if (p.routed_counts != nullptr) {
    copy_routed(p);
  } else {
    const TileTag tag = tile_tag(known->epoch, known->generation, TileUse::kCompact);
    Tile tile;
    while (take_tile(p.round.slot, num_tokens, &tile)) {
      if (!place_tokens(p, tag, tile, tokens)) return;
      copy_rows(
          p, tile.rows, [&](int row) { return std::int64_t{tile.first} + row; },
          [&](int row) { return std::int64_t{tokens.to[row]}; });
    }
  }
  grid_dependency_launch();
  if (!is_last_block(p.round.slot)) return;
  if (threadIdx.x == 0) {
    std::int32_t total = 0;
    for (int rank = 0; rank < p.round.num_ranks; ++rank) {
      if (p.routed_counts != nullptr) p.rank_counts[rank] = p.routed_counts[rank];
      if (p.routed_counts == nullptr && num_tokens == 0) p.rank_counts[rank] = 0;
      total += p.rank_counts[rank];
    }
    *p.num_rows = total;
  }
  if (!has(Fault::kCompactCountersStay)) reset_counters(p.round.slot);
}

}  // namespace

cudaError_t compact_rows(const exec::DeviceCompactParams& params, LaunchLimits limits,
                         cudaStream_t stream) {
  const std::int64_t num_tokens = params.round.num_ranks * params.round.round_max_tokens;
  const std::int64_t most = limits.max_blocks;
  const std::int64_t num_blocks = num_tokens < 1 ? 1 : num_tokens < most ? num_tokens : most;
  return launch_blocks<compact_rows_kernel>("compact_rows", num_blocks, 0, limits, stream, params);
}

}  // namespace fanfold::gpu
