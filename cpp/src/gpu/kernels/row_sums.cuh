// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums of rows, a warp for each part of a row: lists of rows, where results go, and how a kernel's
// warps share its rows.

#include "gpu/kernels/flags.cuh"
#include "gpu/kernels/numbers.cuh"

namespace fanfold::gpu {

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kMaxSummands = exec::kMaxDeviceTopK;

/// The rows that a warp adds, in their order. Each warp of a block has one in shared memory.
struct Summands {
  const std::byte* rows[kMaxSummands];
  float weights[kMaxSummands];
  std::int32_t scratch[kMaxSummands];
};

/// Where a sum goes: to a row of `dtype`, or packed (`scales` not null).
struct Destination {
  std::byte* row;
  DType dtype;
  std::byte* scales;
  bool is_vector;  // the row lies on 16 bytes and ends with a whole vector
  RowFormat format;

  /// The whole warp calls it. Columns from hidden on are left alone.
  __device__ void put(int column, const float* numbers) const {
    if (scales != nullptr) {
      pack_vector(row, scales, column, numbers, format);
    } else if (dtype == DType::kBFloat16) {
      store<DType::kBFloat16>(row, column, numbers, format.hidden, is_vector);
    } else if (dtype == DType::kFloat16) {
      store<DType::kFloat16>(row, column, numbers, format.hidden, is_vector);
    } else {
      store<DType::kFloat32>(row, column, numbers, format.hidden, is_vector);
    }
  }
};

__device__ inline Destination row_destination(std::byte* row, DType dtype, int hidden) {
  const bool is_vector = hidden % kVector == 0 && reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  return {row, dtype, nullptr, is_vector, {hidden, 0, false}};
}

__device__ inline Destination packed_destination(std::byte* row, std::byte* scales,
                                                 const RowFormat& format) {
  return {row, DType::kFloat8E4M3, scales, false, format};
}

/// Columns that all lanes' vectors have together.
constexpr int kWarpColumns = 32 * kVector;

/// Writes columns `begin` to `end` of `row` to `to`: the numbers themselves, or (kIsSum) their sums
/// with +0, as a sum of one row has them. `is_vector`: the row lies as vectors want it and ends
/// with a whole one. kUnits vectors are on their way at a time. `begin` is a multiple of
/// kWarpColumns. A warp calls it, together.
template <DType kRow, int kUnits, bool kIsSum>
__device__ void move_columns(const std::byte* row, bool is_vector, int begin, int end,
                             const RowFormat& format, const Destination& to) {
  const int own = static_cast<int>(lane_id()) * kVector;
  for (int base = begin; base < min(end, format.hidden); base += kUnits * kWarpColumns) {
    float numbers[std::size_t{kUnits}][kVector] = {};
    if (is_vector) {
      Vector<kRow> vectors[std::size_t{kUnits}];
      FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
        const int column = base + own + unit * kWarpColumns;
        if (column < format.hidden) vectors[unit] = load_vector<kRow>(row, column, format);
      }
      FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
        const int column = base + own + unit * kWarpColumns;
        if (column < format.hidden) numbers_of<kRow>(vectors[unit], numbers[unit]);
      }
    } else {
      FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
        for (int i = 0; i < kVector; ++i) {
          const int column = base + own + unit * kWarpColumns + i;
          if (column < format.hidden) numbers[unit][i] = load_number<kRow>(row, column, format);
        }
      }
    }
    FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
      const int first = base + unit * kWarpColumns;
      if (first >= format.hidden) break;
      if constexpr (kIsSum) {
        for (int i = 0; i < kVector; ++i) numbers[unit][i] = __fadd_rn(0.0F, numbers[unit][i]);
      }
      to.put(first + own, numbers[unit]);
    }
  }
}

/// sums[] += weight * numbers of one row, the product rounded before it is added.
__device__ inline void add_numbers(float* sums, float weight, const float* numbers) {
  for (int i = 0; i < kVector; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(weight, numbers[i]));
}

/// Writes the sums of columns `begin` to `end` of `count` rows to `to`: from +0, rows in turn. As
/// move_columns; kUnits vectors of each of kAtOnce rows are on their way at a time.
template <DType kRow, int kAtOnce, int kUnits>
__device__ void sum_columns(const Summands& list, int count, bool is_vector, int begin, int end,
                            const RowFormat& format, const Destination& to) {
  const int own = static_cast<int>(lane_id()) * kVector;
  for (int base = begin; base < min(end, format.hidden); base += kUnits * kWarpColumns) {
    float sums[std::size_t{kUnits}][kVector] = {};
    for (int first = 0; is_vector && first < count; first += kAtOnce) {
      Vector<kRow> vectors[std::size_t{kAtOnce}][std::size_t{kUnits}];
      FANFOLD_UNROLL for (int at = 0; at < kAtOnce; ++at) {
        if (first + at >= count) continue;
        FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
          const int column = base + own + unit * kWarpColumns;
          if (column >= format.hidden) continue;
          vectors[at][unit] = load_vector<kRow>(list.rows[first + at], column, format);
        }
      }
      FANFOLD_UNROLL for (int at = 0; at < kAtOnce; ++at) {
        if (first + at >= count) continue;
        FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
          if (base + own + unit * kWarpColumns >= format.hidden) continue;
          float numbers[kVector];
          numbers_of<kRow>(vectors[at][unit], numbers);
          add_numbers(sums[unit], list.weights[first + at], numbers);
        }
      }
    }
    for (int at = 0; !is_vector && at < count; ++at) {
      FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
        float numbers[kVector] = {};
        for (int i = 0; i < kVector; ++i) {
          const int column = base + own + unit * kWarpColumns + i;
          if (column < format.hidden) numbers[i] = load_number<kRow>(list.rows[at], column, format);
        }
        add_numbers(sums[unit], list.weights[at], numbers);
      }
    }
    FANFOLD_UNROLL for (int unit = 0; unit < kUnits; ++unit) {
      const int first = base + unit * kWarpColumns;
      if (first < format.hidden) to.put(first + own, sums[unit]);
    }
  }
}

/// How the warps of a kernel share `num_rows` rows: each takes parts of rows in turn.
struct Shares {
  std::int64_t num_parts;  // of a row
  int part_columns;        // but for the last one
};

/// Columns that a warp takes in one step: parts of rows are whole steps.
template <int kUnits>
constexpr int kStepColumns = kUnits * kWarpColumns;

__device__ constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Rows are parted when there are few: what a warp does once for each part should be rare, but all
/// warps should have as much to do.
template <int kUnits>
__device__ Shares shares_of(std::int64_t num_rows, std::int64_t hidden) {
  constexpr std::int64_t kPartsPerWarp = 2;
  const std::int64_t num_warps = std::int64_t{gridDim.x} * kWarps;
  const std::int64_t num_steps = max(ceil_div(hidden, kStepColumns<kUnits>), std::int64_t{1});
  const std::int64_t wanted = num_rows == 0 ? 1 : ceil_div(kPartsPerWarp * num_warps, num_rows);
  const std::int64_t part_steps = ceil_div(num_steps, min(wanted, num_steps));
  return {ceil_div(num_steps, part_steps), static_cast<int>(part_steps) * kStepColumns<kUnits>};
}

/// This warp's number in the grid, and the number of all.
__device__ inline std::int64_t grid_warp() {
  return std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
}
__device__ inline std::int64_t num_grid_warps() { return std::int64_t{gridDim.x} * kWarps; }

/// Blocks that `num_rows` rows keep busy.
template <int kUnits>
std::int64_t num_blocks_for(std::int64_t num_rows, std::int64_t hidden, int max_blocks) {
  const std::int64_t num_steps = (hidden + kStepColumns<kUnits> - 1) / kStepColumns<kUnits>;
  const std::int64_t num_blocks = (num_rows * num_steps + kWarps - 1) / kWarps;
  if (num_blocks < 1) return 1;
  return num_blocks < max_blocks ? num_blocks : max_blocks;
}

}  // namespace fanfold::gpu
