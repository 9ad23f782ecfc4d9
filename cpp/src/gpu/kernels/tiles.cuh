// SPDX-License-Identifier: Apache-2.0
#pragma once

// Places that do not depend on timing. The rows of a kernel are cut into tiles; blocks take tiles
// in order, count the rows that each has for each column (a rank, or a local expert), and learn
// from the tiles before where their own begin ("decoupled look-back"). So row i comes before row
// i + 1 in every column, whichever blocks run first.
//
// A block waits only for tiles that others took before it, whose blocks run and wait for nobody
// behind them: any number of resident blocks will do.
//
// Of a word in TileWords: bits 0 to 28 a count, bit 29 whether it includes all tiles before, then a
// tag that only this kernel of this round writes. A word says all by itself, so relaxed accesses
// do, and words of earlier rounds count as not written: nothing needs clearing.

#include "exec/device_params.h"
#include "gpu/device/device.cuh"
#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/tile_rows.h"

namespace fanfold::gpu {

constexpr unsigned kAllLanes = 0xffffffffU;

struct Tile {
  std::int32_t index = -1;
  std::int32_t first = 0;  // row
  std::int32_t rows = 0;
  bool is_last = false;
};

/// Takes the tile after `tile`, the block's last one; false when none is left. All threads call it,
/// and meet in a barrier at least once between two calls. Shared memory of the tile before is free
/// afterwards.
__device__ inline bool take_tile(exec::DeviceSlot* slot, std::int32_t num_rows, Tile* tile) {
  FANFOLD_SHARED(std::uint32_t, taken);
  if (threadIdx.x == 0) {
    taken = gridDim.x == 1 ? static_cast<std::uint32_t>(tile->index + 1)  // nobody else takes any
                           : atom_add_relaxed_gpu(&slot->next_tile, 1U);
  }
  if (!has(Fault::kNoBarrierBetweenTiles)) __syncthreads();
  const int rows = tile_rows(num_rows, gridDim.x);
  const std::int32_t num_tiles = (num_rows + rows - 1) / rows;
  if (taken >= static_cast<std::uint32_t>(num_tiles)) return false;
  tile->index = static_cast<std::int32_t>(taken);
  tile->first = tile->index * rows;
  tile->rows = min(rows, num_rows - tile->first);
  tile->is_last = tile->index + 1 == num_tiles;
  return true;
}

/// The kernels that share the words of one slot.
enum class TileUse : std::uint32_t { kDispatch = 1, kArrange = 2, kCompact = 3 };

/// What the words of one kernel are known by.
struct TileTag {
  std::uint64_t epoch;
  // 34 of them, never all zero: so are words that nobody has written. A word of an older round has
  // others, unless its epoch was 2^31 lower.
  std::uint64_t bits;
};

__device__ inline TileTag tile_tag(std::uint64_t epoch, std::uint32_t generation, TileUse use) {
  const std::uint64_t low = has(Fault::kTagWithoutEpoch) ? 0 : epoch & 0x7fffffffU;
  return {epoch, (low << 3) | ((generation & 1U) << 2) | static_cast<std::uint32_t>(use)};
}

constexpr int kCountBits = 29;
static_assert(exec::kMaxDeviceRows < std::int64_t{1} << kCountBits);

__device__ inline void publish_count(const exec::TileWords& tiles, const TileTag& tag,
                                     std::int32_t tile, std::int32_t column, std::int32_t count,
                                     bool is_inclusive) {
  const std::uint64_t flag = is_inclusive ? std::uint64_t{1} << kCountBits : 0;
  st_relaxed_gpu(tiles.words + column * tiles.stride + tile,
                 (tag.bits << (kCountBits + 1)) | flag | static_cast<std::uint32_t>(count));
}

/// Whether a block that waits for others of its grid should give up; the same for all lanes.
__device__ inline bool gives_up(const exec::DeviceRound& round, const TileTag& tag,
                                std::uint64_t start) {
  bool stops = false;
  if (lane_id() == 0) {
    stops = ld_relaxed_gpu(&round.control->has_failed) != 0;
    if (!stops && round.timeout_ns != 0 && globaltimer_ns() - start > round.timeout_ns) {
      exec::FlagFields fields;
      fields.epoch = tag.epoch;
      // What a dispatch brought is counted in its phase, too.
      fail(round, {0, fields, exec::DevicePhase::kDispatch}, exec::DeviceFailure::kStuck,
           round.rank, fields, fields);
      stops = true;
    }
  }
  return __any_sync(kAllLanes, stops) != 0;
}

/// The word of a column of the tile that lies as many before `last` as this lane says.
__device__ inline std::uint64_t word_before(const exec::TileWords& tiles, std::int32_t last,
                                            std::int32_t column) {
  const std::int32_t at = last - static_cast<std::int32_t>(lane_id());
  return at < 0 ? 0 : ld_relaxed_gpu(tiles.words + column * tiles.stride + at);
}

/// What a warp knows of a column from a look at 32 tiles.
struct Look {
  bool is_there;     // all that was needed was written
  bool is_all;       // nothing is left to add
  std::int32_t sum;  // of these tiles, or of them and all before
};

/// Of what word_before says. All lanes of a warp call it.
__device__ inline Look look_at(const TileTag& tag, std::int32_t last, std::uint64_t word) {
  const std::int32_t at = last - static_cast<std::int32_t>(lane_id());
  const bool is_there = at < 0 || word >> (kCountBits + 1) == tag.bits;
  const bool ends = at < 0 || (is_there && ((word >> kCountBits) & 1) != 0);
  const unsigned there = __ballot_sync(kAllLanes, is_there);
  const unsigned end = __ballot_sync(kAllLanes, ends);
  // The lanes up to the first sum over everything before.
  const unsigned wanted = end == 0 ? kAllLanes : end ^ (end - 1);
  if ((there & wanted) != wanted) return {false, false, 0};
  const bool counts = at >= 0 && ((wanted >> lane_id()) & 1) != 0;
  const std::uint64_t count = word & ((std::uint64_t{1} << kCountBits) - 1);
  const unsigned sum = __reduce_add_sync(kAllLanes, counts ? static_cast<unsigned>(count) : 0U);
  return {true, end != 0 || has(Fault::kLooksBackOnce), static_cast<std::int32_t>(sum)};
}

/// Sums a column over all tiles before `tile`, 32 tiles at a time. All lanes of a warp call it, and
/// all get the sum. False when kernels have failed.
__device__ inline bool look_back(const exec::DeviceRound& round, const exec::TileWords& tiles,
                                 const TileTag& tag, std::int32_t tile, std::int32_t column,
                                 std::int32_t* sum) {
  constexpr unsigned kLooks = 64;  // between two looks at the clock
  const std::uint64_t start = globaltimer_ns();
  *sum = 0;
  unsigned num_looks = 0;
  for (std::int32_t last = tile - 1; last >= 0;) {
    const Look look = look_at(tag, last, word_before(tiles, last, column));
    if (!look.is_there) {
      if (++num_looks % kLooks == 0 && gives_up(round, tag, start)) return false;
      continue;
    }
    *sum += look.sum;
    if (look.is_all) return true;
    last -= 32;
  }
  return true;
}

/// Columns that a tile handles at a time, and which rows are in them.
constexpr int kTileWords = 8;
static_assert(kTileWords <= kWarps);  // a warp has at most a column for each lane
struct TileBits {
  std::uint32_t words[kTileWords][exec::kTileRows];
};

/// How many of `row`'s columns come before `column`. Of at most 32 * kTileWords columns.
__device__ inline int columns_before(const TileBits& bits, int row, int column) {
  int count = 0;
  for (int word = 0; word < column / 32; ++word) count += __popc(bits.words[word][row]);
  return count + __popc(bits.words[column / 32][row] & ((1U << (column % 32)) - 1));
}

/// Finds the place of each row of a tile in each of its columns and calls place(row of the tile,
/// column, place) once for each, from any thread. All threads call it, behind a barrier that
/// `keys` have passed, which say the columns: [rows, keys_per_row] of shared memory, with repeats,
/// -1 none. The last tile writes `totals` [num_columns]. False, for all threads, when kernels have
/// failed; else a barrier has passed since the last call of `place`. `bits` then have the columns
/// of each row, if there are at most 32 * kTileWords.
template <typename Key, typename Place>
__device__ inline bool place_rows(const exec::DeviceRound& round, const exec::TileWords& tiles,
                                  const TileTag& tag, const Tile& tile, const Key* keys,
                                  int keys_per_row, std::int32_t num_columns, std::int32_t* totals,
                                  TileBits& bits, Place&& place) {
  const int lane = static_cast<int>(lane_id());
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kLooksAtOnce = 4;
  bool is_well = true;
  for (std::int32_t first = 0; first < num_columns; first += 32 * kTileWords) {
    const std::int32_t end = min(num_columns, first + 32 * kTileWords);
    const int num_words = (end - first + 31) / 32;
    for (int at = static_cast<int>(threadIdx.x); at < num_words * exec::kTileRows; at += kThreads) {
      const int row = at % exec::kTileRows;
      const std::int32_t base = first + at / exec::kTileRows * 32;
      std::uint32_t found = 0;
      for (int k = 0; row < tile.rows && k < keys_per_row; ++k) {
        const std::int32_t bit = keys[row * keys_per_row + k] - base;
        if (bit >= 0 && bit < 32) found |= 1U << bit;
      }
      bits.words[at / exec::kTileRows][row] = found;
    }
    if (!has(Fault::kNoBarrierBeforeBallot)) __syncthreads();
    const auto rows_of = [&](std::int32_t column) {
      const std::uint32_t word = bits.words[(column - first) / 32][lane];
      return __ballot_sync(kAllLanes, static_cast<int>(word >> ((column - first) % 32) & 1));
    };
    const auto column_of = [&](int i) { return first + warp + i * kWarps; };
    // All counts are told before any is asked for.
    for (int i = 0; column_of(i) < end; ++i) {
      const int count = __popc(rows_of(column_of(i)));
      if (lane == 0) publish_count(tiles, tag, tile.index, column_of(i), count, tile.index == 0);
    }
    // Of the warp's column i: lane i has the rows in the tiles before, and bit i whether it has.
    std::int32_t rows_before = 0;
    unsigned known = 0;
    const auto keep = [&](int i, std::int32_t before) {
      const std::int32_t sum = before + __popc(rows_of(column_of(i)));
      if (lane == i) rows_before = before;
      known |= 1U << i;
      if (lane != 0) return;
      if (tile.index != 0) publish_count(tiles, tag, tile.index, column_of(i), sum, true);
      if (tile.is_last) totals[column_of(i)] = sum;
    };
    // One look at each column, several on their way at once, is most often enough.
    for (int i = 0; column_of(i) < end; i += kLooksAtOnce) {
      std::uint64_t words[kLooksAtOnce];
      FANFOLD_UNROLL for (int look = 0; look < kLooksAtOnce; ++look) {
        const std::int32_t column = min(column_of(i + look), end - 1);
        words[look] = word_before(tiles, tile.index - 1, column);
      }
      FANFOLD_UNROLL for (int look = 0; look < kLooksAtOnce; ++look) {
        const Look seen = look_at(tag, tile.index - 1, words[look]);
        if (seen.is_all && column_of(i + look) < end) keep(i + look, seen.sum);
      }
    }
    for (int i = 0; is_well && column_of(i) < end; ++i) {
      if (((known >> i) & 1) != 0) continue;
      std::int32_t before = 0;
      is_well = look_back(round, tiles, tag, tile.index, column_of(i), &before);
      if (is_well) keep(i, before);
    }
    for (int i = 0; is_well && column_of(i) < end; ++i) {
      const unsigned rows = rows_of(column_of(i));
      const int kept_by = has(Fault::kPlacesOfNextColumn) ? i + 1 : i;
      const std::int32_t before = __shfl_sync(kAllLanes, rows_before, kept_by);
      if (((rows >> lane) & 1) == 0) continue;
      const unsigned below = has(Fault::kPlacesFromOne) ? (2U << lane) - 1 : (1U << lane) - 1;
      place(lane, column_of(i), before + __popc(rows & below));
    }
    if (__syncthreads_or(is_well ? 0 : 1) != 0) return false;
  }
  return true;
}

/// The sum of `value` over this and all lower threads of the block; all threads call it.
__device__ inline std::int32_t scan_block(std::int32_t value, std::int32_t* total) {
  struct Sums {
    std::int32_t of_warp[kWarps];
  };
  FANFOLD_SHARED(Sums, sums);
  const unsigned lane = lane_id();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (unsigned step = 1; step < 32; step *= 2) {
    const std::int32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) sums.of_warp[warp] = value;
  __syncthreads();
  *total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) value += sums.of_warp[i];
    *total += sums.of_warp[i];
  }
  __syncthreads();
  return value;
}

}  // namespace fanfold::gpu
