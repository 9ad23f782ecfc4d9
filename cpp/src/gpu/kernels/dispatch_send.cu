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

using Params = exec::DeviceDispatchSendParams;

/// Shared memory of a block, for one tile. `ranks` are first those of the ids, then of the targets.
struct TileRows {
  std::int32_t* ids;          // [rows, K] as they travel
  std::int32_t* places;       // [rows, P] row of this rank's rows on each target's rank
  std::int16_t* ranks;        // [rows, K] of the ids, -1 none; then [rows, P]
  std::int32_t* num_targets;  // [rows]
};

__host__ __device__ constexpr int max_targets(const Params& p) {
  return p.round.top_k < p.round.num_ranks ? p.round.top_k : p.round.num_ranks;
}

/// Bytes of TileRows' first three arrays.
constexpr std::size_t shared_bytes(const Params& p, int rows) {
  const auto per_row =
      static_cast<std::size_t>(p.round.top_k) * 6 + static_cast<std::size_t>(max_targets(p)) * 4;
  return per_row * static_cast<std::size_t>(rows);
}

/// The id as a number of at least the same range; more negative ones than travel are as good as
/// the lowest.
__device__ inline std::int64_t load_id(const Params& p, std::int64_t at) {
  switch (p.id_dtype) {
    case DType::kInt16:
      return static_cast<const std::int16_t*>(p.topk_ids)[at];
    case DType::kInt64:
      return static_cast<const std::int64_t*>(p.topk_ids)[at];
    case DType::kUInt32:
      return static_cast<const std::uint32_t*>(p.topk_ids)[at];
    default:  // the caller has checked: int32
      return static_cast<const std::int32_t*>(p.topk_ids)[at];
  }
}

/// The copy of `logical` that this token goes to; as plan::ExpertMap::copy_for.
__device__ inline std::int32_t copy_for(const exec::DeviceRound& round, std::int64_t logical,
                                        std::int32_t token) {
  if (round.copy_begin == nullptr) return static_cast<std::int32_t>(logical);
  const std::int32_t begin = round.copy_begin[logical];
  const auto num_copies = static_cast<std::uint32_t>(round.copy_begin[logical + 1] - begin);
  const auto turn =
      static_cast<std::uint32_t>(has(Fault::kCopyByToken) ? token : round.rank + token);
  return round.copies[begin + static_cast<std::int32_t>(turn % num_copies)];
}

/// Reads the ids of a tile; which ranks do they name?
__device__ inline void read_ids(const Params& p, const Known& known, const Tile& tile,
                                const TileRows& rows) {
  const int top_k = p.round.top_k;
  std::uint64_t num_dropped = 0;
  for (int at = static_cast<int>(threadIdx.x); at < tile.rows * top_k; at += kThreads) {
    const int row = at / top_k;
    const std::int32_t token = tile.first + row;
    const int k = at - row * top_k;
    const std::int64_t given = load_id(p, token * p.ids_stride + k);
    std::int32_t id = -1;
    std::int16_t rank = -1;
    if (given < 0) {
      constexpr std::int64_t kLowest = -(std::int64_t{1} << 31);
      id = static_cast<std::int32_t>(max(given, kLowest));
    } else if (given >= p.round.num_logical) {
      ++num_dropped;
    } else {
      id = copy_for(p.round, given, token);
      const std::int32_t host = p.round.rank_of[id];
      if (known.is_active[host] || has(Fault::kSendsToInactive)) {
        rank = static_cast<std::int16_t>(host);
      }
    }
    rows.ids[at] = id;
    rows.ranks[at] = rank;
    p.sent_ids[std::int64_t{token} * top_k + k] = id;
    if (p.sent_weights != nullptr) {
      p.sent_weights[std::int64_t{token} * top_k + k] =
          p.topk_weights[token * p.weights_stride + k];
    }
  }
  if (num_dropped != 0) atom_add_relaxed_gpu(&p.round.control->num_dropped_ids, num_dropped);
}

/// Works out the targets of a tile's tokens; false when kernels have failed.
__device__ inline bool find_targets(const Params& p, const Known& known, const TileTag& tag,
                                    const Tile& tile, const TileRows& rows) {
  FANFOLD_SHARED(TileBits, bits);
  const int per_token = max_targets(p);
  read_ids(p, known, tile, rows);
  if (!has(Fault::kNoBarrierBeforeKeys)) __syncthreads();
  const auto place = [&](int row, std::int32_t rank, std::int32_t place_there) {
    const int at = row * per_token + columns_before(bits, row, rank);
    rows.ranks[at] = static_cast<std::int16_t>(rank);
    rows.places[at] = place_there;
    p.targets[std::int64_t{tile.first} * per_token + at] = plan::Target{rank, place_there};
  };
  if (!place_rows(p.round, p.tiles, tag, tile, rows.ranks, p.round.top_k, p.round.num_ranks,
                  p.rows_per_rank, bits, place)) {
    return false;
  }
  const int row = static_cast<int>(threadIdx.x);
  if (row < tile.rows) {
    int num = 0;
    for (int word = 0; word * 32 < p.round.num_ranks; ++word) num += __popc(bits.words[word][row]);
    rows.num_targets[row] = num;
    plan::Target* const targets = p.targets + (std::int64_t{tile.first} + row) * per_token;
    for (int i = num; i < per_token; ++i) targets[i] = plan::Target{-1, 0};
  }
  __syncthreads();
  return true;
}

/// Takes the targets of a tile's tokens from an earlier routing.
__device__ inline void read_targets(const Params& p, const Tile& tile, const TileRows& rows) {
  const int per_token = max_targets(p);
  for (int at = static_cast<int>(threadIdx.x); at < tile.rows * per_token; at += kThreads) {
    const plan::Target target = p.targets[std::int64_t{tile.first} * per_token + at];
    rows.ranks[at] = static_cast<std::int16_t>(target.rank);
    rows.places[at] = target.row;
  }
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x);
  if (row < tile.rows) {
    int num = 0;
    while (num < per_token && rows.ranks[row * per_token + num] >= 0) ++num;
    rows.num_targets[row] = num;
  }
  __syncthreads();
}

/// The store of this slot in a rank's window.
__device__ inline std::byte* store_of(const exec::DeviceRound& round, const Known& known,
                                      int rank) {
  return known.windows[rank] + round.store_offset;
}

/// Row of the regions on `rank` where this rank's row `place` lies.
__device__ inline std::int64_t row_on(const exec::DeviceRound& round, int rank,
                                      std::int32_t place) {
  const bool is_staged =
      round.route == exec::DeviceRoute::kBlocks && !has(Fault::kStagesInOwnBlock);
  const int block = is_staged || has(Fault::kRowsOfReader) ? rank : round.rank;
  return block * round.round_max_tokens + place;
}

/// Where a row goes: a store, and the row of its regions.
struct Destination {
  std::byte* store;
  std::int64_t row;
};

/// How many a token has: one of its own where all are gathered.
__device__ inline int num_destinations(const Params& p, const TileRows& rows, int row) {
  return p.round.route == exec::DeviceRoute::kGather ? 1 : rows.num_targets[row];
}

__device__ inline Destination destination_of(const Params& p, const Known& known, const Tile& tile,
                                             const TileRows& rows, int row, int number) {
  if (p.round.route == exec::DeviceRoute::kGather) {
    return {p.round.staging + p.round.store_offset,
            p.round.rank * p.round.round_max_tokens + tile.first + row};
  }
  const int target = row * max_targets(p) + number;
  const int rank = rows.ranks[target];
  return {store_of(p.round, known, rank), row_on(p.round, rank, rows.places[target])};
}

/// One warp: ids, weights and number of a token, to all its destinations.
__device__ inline void push_indices(const Params& p, const Known& known, const Tile& tile,
                                    const TileRows& rows, int row) {
  const int top_k = p.round.top_k;
  const int num = num_destinations(p, rows, row);
  const std::int32_t token = tile.first + row;
  for (int at = static_cast<int>(lane_id()); at < num * top_k; at += 32) {
    const int k = at % top_k;
    const Destination to = destination_of(p, known, tile, rows, row, at / top_k);
    reinterpret_cast<std::int32_t*>(to.store + p.topk_ids_offset)[to.row * top_k + k] =
        rows.ids[row * top_k + k];
    if (p.topk_weights != nullptr) {
      reinterpret_cast<float*>(to.store + p.topk_weights_offset)[to.row * top_k + k] =
          p.topk_weights[token * p.weights_stride + k];
    }
  }
  for (int i = static_cast<int>(lane_id()); i < num; i += 32) {
    const Destination to = destination_of(p, known, tile, rows, row, i);
    reinterpret_cast<std::int32_t*>(to.store + p.source_token_offset)[to.row] = token;
  }
}

/// One warp: one segment of a token's row, likewise.
__device__ inline void push_segment(const Params& p, const Known& known,
                                    const exec::DevicePayload& payload, const Tile& tile,
                                    const TileRows& rows, int row, int segment) {
  const std::int64_t skipped = segment * kSegmentBytes;
  const std::byte* const from =
      payload.rows + (std::int64_t{tile.first} + row) * payload.row_stride_bytes + skipped;
  const int bytes = segment_bytes(payload.row_bytes, segment);
  const int num_all = num_destinations(p, rows, row);
  for (int first = 0; first < num_all; first += 32) {
    const int num = min(32, num_all - first);
    std::byte* to = nullptr;
    if (static_cast<int>(lane_id()) < num) {
      const Destination place =
          destination_of(p, known, tile, rows, row, first + static_cast<int>(lane_id()));
      to = place.store + payload.region_offset + place.row * payload.region_stride_bytes + skipped;
    }
    copy_segment(from, to, num, bytes, payload.unit);
  }
}

/// Warps take turns at all there is to push: rows of indices, then segments of each payload.
__device__ inline void push_tile(const Params& p, const Known& known, const Tile& tile,
                                 const TileRows& rows) {
  int item = static_cast<int>(threadIdx.x) / 32;
  if (!p.is_routed) {
    for (; item < tile.rows; item += kWarps) push_indices(p, known, tile, rows, item);
    item -= tile.rows;
  }
  for (int i = 0; i < p.num_payloads; ++i) {
    const exec::DevicePayload& payload = p.payloads[i];
    const int num_segments = segments_of(payload.row_bytes);
    const int num_items = tile.rows * num_segments;
    for (; item < num_items; item += kWarps) {
      const int row = item / num_segments;
      push_segment(p, known, payload, tile, rows, row, item - row * num_segments);
    }
    item -= num_items;
  }
}

/// Tells the host how many ids were dropped, if it does not know: behind the flags, whose fence
/// would else wait until the host's memory has it. One thread of the last block.
__device__ inline void tell_dropped_ids(const exec::DeviceRound& round) {
  if (threadIdx.x != 0) return;
  const std::uint64_t num_dropped = ld_relaxed_gpu(&round.control->num_dropped_ids);
  if (num_dropped == round.slot->num_told_ids) return;
  round.slot->num_told_ids = num_dropped;
  st_relaxed_sys(&round.report->num_dropped_ids, num_dropped);
}

/// Any grid. Blocks take tiles of at most 32 tokens: read their ids, agree with the other blocks on
/// the tokens' rows (tiles.cuh), push what travels straight into the targets' windows or to where
/// collectives take it from (exec::DeviceRoute). The last
/// block to end begins the slot's next epoch, raises this rank's flags (after all blocks' rows:
/// flags.cuh) and, if `waits`, waits for those of the peers; no other block waits for a peer.
/// It also leaves the counters of the slot at 0; nothing else needs resetting.
__global__ void __launch_bounds__(kThreads, 2)
    dispatch_send_kernel(const __grid_constant__ Params p) {
  const Known* const known = begin(p.round);
  if (known == nullptr) return;
  struct NumTargets {
    std::int32_t of[exec::kTileRows];
  };
  FANFOLD_SHARED(NumTargets, num_targets);
  FANFOLD_DYN_SHARED(std::int32_t, memory);
  exec::DeviceSlot* const slot = p.round.slot;
  const std::uint64_t epoch = known->epoch + 1;
  auto num_tokens = static_cast<std::int32_t>(p.num_tokens);
  if (p.num_tokens_word != nullptr) {
    const std::int32_t wanted = *p.num_tokens_word;
    num_tokens = has(Fault::kTokensOfWord) ? wanted : max(0, min(wanted, num_tokens));
  }
  const TileTag tag = tile_tag(epoch, known->generation, TileUse::kDispatch);
  const std::int64_t most_rows = tile_rows(num_tokens, gridDim.x);
  std::int32_t* const places = memory + most_rows * p.round.top_k;
  auto* const ranks = reinterpret_cast<std::int16_t*>(places + most_rows * max_targets(p));
  const TileRows rows{memory, places, ranks, num_targets.of};
  Tile tile;
  while (take_tile(slot, num_tokens, &tile)) {
    if (p.is_routed) {
      read_targets(p, tile, rows);
    } else if (!find_targets(p, *known, tag, tile, rows)) {
      return;
    }
    push_tile(p, *known, tile, rows);
  }
  // Not where peers are waited for. Blocks of this rank's next kernel would fill the device, and
  // what the peers wait for might not start: another rank's kernel, if they share the device, or
  // one of this rank on another stream, if the peer has begun its rounds in another order.
  if (!p.waits) grid_dependency_launch();
  if (!is_last_block(slot) && !has(Fault::kEveryBlockAnnounces)) return;
  if (num_tokens == 0 && !p.is_routed) {
    for (int rank = static_cast<int>(threadIdx.x); rank < p.round.num_ranks; rank += kThreads) {
      p.rows_per_rank[rank] = 0;
    }
  }
  if (threadIdx.x == 0) {
    slot->epoch = epoch;
    slot->num_tokens = num_tokens;
    slot->num_combines = 0;
  }
  if (!has(Fault::kCountersStay)) reset_counters(slot);
  __syncthreads();
  announce(p.round, *known, p.flags, epoch, p.rows_per_rank, num_tokens);
  tell_dropped_ids(p.round);
  if (p.waits) await(p.round, *known, p.flags, epoch, p.counts, num_tokens);
}

}  // namespace

cudaError_t dispatch_send(const exec::DeviceDispatchSendParams& params, LaunchLimits limits,
                          cudaStream_t stream) {
  const std::int64_t most = limits.max_blocks;
  const std::int64_t wanted = params.num_tokens < 1 ? 1 : params.num_tokens;
  const std::int64_t num_blocks = wanted < most ? wanted : most;
  const int rows = max_tile_rows(params.num_tokens, num_blocks);
  return launch_blocks<dispatch_send_kernel>("dispatch_send", num_blocks,
                                             shared_bytes(params, rows), limits, stream, params);
}

}  // namespace fanfold::gpu
