// SPDX-License-Identifier: Apache-2.0
#pragma once

// FP8 rows, for the kernels of all instruction sets: see kernels_inl.h for what V is.
//
// Here V has also
//   divide(Vec, Vec)
//   max_magnitude(vecs)             bits of the largest |float| of an array of Vecs, NaN above all
//   store_e4m3<Order>(bytes, vec)   kLanes E4M3, to nearest even, of finite numbers below 464
//   load_e4m3(bytes)                kLanes E4M3, in sequence
//   lane_of<Order>(i)               the lane of element i

#include "base/fp8.h"
#include "base/kernels_inl.h"

namespace fanfold::base {

/// See biased_e4m3 of the instruction sets.
constexpr short kE4M3Bias = 8 * (147 - 7) + 8;

template <class V>
float float_of_bits(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class V>
std::uint32_t bits_of_float(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// fp8_scale, here again to be compiled into the loop: around a call to another file all vectors
/// would have to leave their registers.
template <class V>
float scale_of_block(std::uint32_t max_bits, bool power_of_two) {
  if (max_bits == 0) return 1.0F;
  float scale = float_of_bits<V>(max_bits) / 448.0F;
  if (scale < 0x1p-126F) scale = 0x1p-126F;
  if (!power_of_two) return scale;
  return float_of_bits<V>((bits_of_float<V>(scale) + 0x7fffffU) & 0x7f800000U);
}

template <class V>
void store_scale(std::byte* scales, std::int64_t block, float scale, bool power_of_two) {
  if (power_of_two) {
    scales[block] = static_cast<std::byte>(bits_of_float<V>(scale) >> 23);
  } else {
    std::memcpy(scales + block * 4, &scale, sizeof scale);
  }
}

template <class V>
float load_scale(const std::byte* scales, std::int64_t block, bool power_of_two) {
  if (!power_of_two) {
    float scale = 0;
    std::memcpy(&scale, scales + block * 4, sizeof scale);
    return scale;
  }
  // As float_from_ue8m0.
  const auto exponent = static_cast<std::uint32_t>(scales[block]);
  std::uint32_t bits = exponent << 23;
  if (exponent == 0) bits = 0x400000U;
  if (exponent == 0xff) bits |= 0x400000U;
  return float_of_bits<V>(bits);
}

/// One row, columns by columns, as RowAdder gives sums of several.
template <class V, DType kRow, Order kRowOrder>
struct RowReader {
  static constexpr Order kLaneOrder = kRowOrder;
  static constexpr std::int64_t kRowBytes = kElementBytes<kRow>;

  const std::byte* row;

  template <int kNumVecs>
  void load(std::int64_t column, typename V::Vec* values) const {
    for (int i = 0; i < kNumVecs; ++i) {
      values[i] = V::template load<kRow, kLaneOrder>(row + (column + i * V::kLanes) * kRowBytes);
    }
  }

  typename V::Vec load_first(std::int64_t column, std::int64_t num_columns) const {
    return V::template load_first<kRow, kLaneOrder>(row + column * kRowBytes, num_columns);
  }
};

/// Packs the columns of `Source`.
template <class V, class Source>
struct ColumnPacker {
  static constexpr Order kLaneOrder = Source::kLaneOrder;
  static constexpr std::int64_t kNumVecs = kFp8Block / V::kLanes;
  static constexpr std::uint32_t kInfinityBits = 0x7f800000U;

  struct Block {
    typename V::Vec values[static_cast<std::size_t>(kNumVecs)];
    float scale;
    bool is_special;  // has infinities or NaN
  };

  Source source;
  bool power_of_two;

  /// A block is written after the next one was read: until its scale is known, which takes a chain
  /// of reductions and a division, the processor has the reading to do.
  void pack(std::byte* packed, std::byte* scales, std::int64_t hidden) const {
    Block blocks[2];
    const std::int64_t num_blocks = (hidden + kFp8Block - 1) / kFp8Block;
    for (std::int64_t i = 0; i < num_blocks; ++i) {
      Block& block = blocks[i % 2];
      read(block, i * kFp8Block, hidden - i * kFp8Block);
      store_scale<V>(scales, i, block.scale, power_of_two);
      if (i > 0) write(packed + (i - 1) * kFp8Block, blocks[(i - 1) % 2]);
    }
    if (num_blocks == 0) return;
    const Block& last = blocks[(num_blocks - 1) % 2];
    const std::int64_t column = (num_blocks - 1) * kFp8Block;
    if (column + kFp8Block == hidden) {
      write(packed + column, last);
      return;
    }
    std::byte padded[kFp8Block];
    write(padded, last);
    std::memcpy(packed + column, padded, static_cast<std::size_t>(hidden - column));
  }

 private:
  /// `num_columns` of them, then zeros, which do not change the scale.
  void read(Block& block, std::int64_t column, std::int64_t num_columns) const {
    if (num_columns >= kFp8Block) {
      for (std::int64_t i = 0; i < kNumVecs; i += V::kBlockVecs) {
        source.template load<V::kBlockVecs>(column + i * V::kLanes, block.values + i);
      }
    } else {
      for (std::int64_t i = 0; i < kNumVecs; ++i) {
        const std::int64_t left = num_columns - i * V::kLanes;
        if (left >= V::kLanes) {
          source.template load<1>(column + i * V::kLanes, block.values + i);
        } else {
          block.values[i] = left > 0 ? source.load_first(column + i * V::kLanes, left) : V::zero();
        }
      }
    }
    std::uint32_t max_bits = V::max_magnitude(block.values);
    block.is_special = max_bits >= kInfinityBits;
    if (block.is_special) max_bits = max_finite(block);
    block.scale = scale_of_block<V>(max_bits, power_of_two);
  }

  void write(std::byte* packed, const Block& block) const {
    if (block.is_special) {
      write_special(packed, block);
    } else if (power_of_two) {
      // The inverse is a normal power of two as well: the product is the quotient.
      const auto inverse = V::broadcast(1.0F / block.scale);
      for (std::int64_t i = 0; i < kNumVecs; ++i) {
        V::template store_e4m3<kLaneOrder>(packed + i * V::kLanes,
                                           V::multiply(block.values[i], inverse));
      }
    } else {
      const auto scale = V::broadcast(block.scale);
      for (std::int64_t i = 0; i < kNumVecs; ++i) {
        V::template store_e4m3<kLaneOrder>(packed + i * V::kLanes,
                                           V::divide(block.values[i], scale));
      }
    }
  }

  /// The numbers of a vector, by lane.
  static void to_lanes(const typename V::Vec& values, float* lanes) {
    std::memcpy(lanes, &values, V::kLanes * sizeof(float));
  }

  static std::uint32_t max_finite(const Block& block) {
    std::uint32_t result = 0;
    for (const typename V::Vec& values : block.values) {
      float lanes[V::kLanes];
      to_lanes(values, lanes);
      for (const float lane : lanes) {
        const std::uint32_t magnitude = bits_of_float<V>(lane) & 0x7fffffffU;
        if (magnitude < kInfinityBits && magnitude > result) result = magnitude;
      }
    }
    return result;
  }

  static void write_special(std::byte* packed, const Block& block) {
    for (const typename V::Vec& values : block.values) {
      float lanes[V::kLanes];
      to_lanes(values, lanes);
      for (std::int64_t i = 0; i < V::kLanes; ++i) {
        const float quotient = lanes[V::template lane_of<kLaneOrder>(i)] / block.scale;
        *packed++ = static_cast<std::byte>(e4m3_from_float(quotient));
      }
    }
  }
};

template <DType kRow>
constexpr Order kPackOrder = kRow == DType::kBFloat16 ? Order::kEvenOdd : Order::kSequential;

template <class V, class Source>
void pack_columns(std::byte* packed, std::byte* scales, bool power_of_two, const Source& source,
                  std::int64_t hidden) {
  ColumnPacker<V, Source>{source, power_of_two}.pack(packed, scales, hidden);
}

template <class V>
void pack_fp8(std::byte* packed, std::byte* scales, bool power_of_two, const void* row,
              DType row_dtype, std::int64_t hidden) {
  const auto pack = [&](auto source) {
    pack_columns<V>(packed, scales, power_of_two, source, hidden);
  };
  const auto* bytes = static_cast<const std::byte*>(row);
  if (row_dtype == DType::kBFloat16) {
    pack(RowReader<V, DType::kBFloat16, Order::kEvenOdd>{bytes});
  } else if (row_dtype == DType::kFloat16) {
    pack(RowReader<V, DType::kFloat16, Order::kSequential>{bytes});
  } else {
    assert(row_dtype == DType::kFloat32);
    pack(RowReader<V, DType::kFloat32, Order::kSequential>{bytes});
  }
}

template <class V, DType kRow>
void sum_pack_fp8_of_type(std::byte* packed, std::byte* scales, bool power_of_two,
                          const void* const* rows, const float* weights, std::int64_t num_rows,
                          std::int64_t hidden) {
  if (weights == nullptr) {
    const RowAdder<V, kRow, kPackOrder<kRow>, false> source{rows, weights, num_rows};
    pack_columns<V>(packed, scales, power_of_two, source, hidden);
  } else {
    const RowAdder<V, kRow, kPackOrder<kRow>, true> source{rows, weights, num_rows};
    pack_columns<V>(packed, scales, power_of_two, source, hidden);
  }
}

template <class V>
void sum_pack_fp8(std::byte* packed, std::byte* scales, bool power_of_two, const void* const* rows,
                  const float* weights, std::int64_t num_rows, DType row_dtype,
                  std::int64_t hidden) {
  auto* sum_pack = &sum_pack_fp8_of_type<V, DType::kFloat32>;
  if (row_dtype == DType::kBFloat16) {
    sum_pack = &sum_pack_fp8_of_type<V, DType::kBFloat16>;
  } else if (row_dtype == DType::kFloat16) {
    sum_pack = &sum_pack_fp8_of_type<V, DType::kFloat16>;
  } else {
    assert(row_dtype == DType::kFloat32);
  }
  sum_pack(packed, scales, power_of_two, rows, weights, num_rows, hidden);
}

/// Sums of packed rows, columns by columns, none of them across the end of a block.
template <class V, bool kWeighted>
struct PackedRowAdder {
  static constexpr Order kLaneOrder = Order::kSequential;

  const void* const* rows;
  std::int64_t scales_offset;
  bool power_of_two;
  const float* weights;
  std::int64_t num_rows;

  typename V::Vec scale_at(std::int64_t row_idx, std::int64_t column) const {
    const std::byte* scales = static_cast<const std::byte*>(rows[row_idx]) + scales_offset;
    return V::broadcast(load_scale<V>(scales, column / kFp8Block, power_of_two));
  }

  typename V::Vec unpack(const std::byte* packed, typename V::Vec scale,
                         std::int64_t row_idx) const {
    const auto part = V::multiply(V::load_e4m3(packed), scale);
    if constexpr (kWeighted) return V::multiply(V::broadcast(weights[row_idx]), part);
    return part;
  }

  template <int kNumVecs>
  void load(std::int64_t column, typename V::Vec* sums) const {
    for (int i = 0; i < kNumVecs; ++i) sums[i] = V::zero();
    for (std::int64_t row_idx = 0; row_idx < num_rows; ++row_idx) {
      const std::byte* packed = static_cast<const std::byte*>(rows[row_idx]) + column;
      const auto scale = scale_at(row_idx, column);
      for (int i = 0; i < kNumVecs; ++i) {
        sums[i] = V::add(sums[i], unpack(packed + i * V::kLanes, scale, row_idx));
      }
    }
  }

  typename V::Vec load_first(std::int64_t column, std::int64_t num_columns) const {
    typename V::Vec sum = V::zero();
    for (std::int64_t row_idx = 0; row_idx < num_rows; ++row_idx) {
      std::byte padded[V::kLanes] = {};
      std::memcpy(padded, static_cast<const std::byte*>(rows[row_idx]) + column,
                  static_cast<std::size_t>(num_columns));
      sum = V::add(sum, unpack(padded, scale_at(row_idx, column), row_idx));
    }
    return sum;
  }
};

template <class V, bool kWeighted>
void sum_unpack_fp8_to(std::byte* out, DType out_dtype, const PackedRowAdder<V, kWeighted>& source,
                       std::int64_t hidden) {
  if (out_dtype == DType::kBFloat16) {
    store_columns<V, DType::kBFloat16>(out, source, hidden);
  } else if (out_dtype == DType::kFloat16) {
    store_columns<V, DType::kFloat16>(out, source, hidden);
  } else {
    assert(out_dtype == DType::kFloat32);
    store_columns<V, DType::kFloat32>(out, source, hidden);
  }
}

template <class V>
void sum_unpack_fp8(void* out, DType out_dtype, const void* const* rows, std::int64_t scales_offset,
                    bool power_of_two, const float* weights, std::int64_t num_rows,
                    std::int64_t hidden) {
  auto* bytes = static_cast<std::byte*>(out);
  if (weights == nullptr) {
    const PackedRowAdder<V, false> source{rows, scales_offset, power_of_two, weights, num_rows};
    sum_unpack_fp8_to(bytes, out_dtype, source, hidden);
  } else {
    const PackedRowAdder<V, true> source{rows, scales_offset, power_of_two, weights, num_rows};
    sum_unpack_fp8_to(bytes, out_dtype, source, hidden);
  }
}

/// The whole table.
template <class V>
constexpr Kernels kKernelsOf = {V::kIsa,         V::kName,          V::kCopyStreaming,
                                &V::store_fence, &copy_fetching<V>, &sum_rows<V>,
                                &pack_fp8<V>,    &sum_pack_fp8<V>,  &sum_unpack_fp8<V>};

}  // namespace fanfold::base
