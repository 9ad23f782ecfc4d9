// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels of all instruction sets share. Only the kernels_*.cpp files include it.
//
// Everything here is a template on `V`, a traits type from the unnamed namespace of the including
// file, so that every instance has internal linkage. An inline function with external linkage,
// std:: templates included, would be compiled once with AVX options, and the linker could pick that
// copy for a file that runs on every processor.
//
// V has
//   kIsa, kName     of its table;
//   kLanes          floats in a Vec;
//   kBlockVecs      Vecs whose sums fit in registers;
//   Vec             kLanes floats; for kEvenOdd first the even lanes, then the odd ones;
//   zero(), broadcast(float), add(Vec, Vec), multiply(Vec, Vec)
//   load<DType, Order>(bytes), store<DType, Order>(bytes, vec)      kLanes elements
//   load_first<DType, Order>(bytes, n), store_first<...>(bytes, vec, n)  only the first n elements
//   kCopyStreaming, store_fence     as in Kernels;
//   store_lines<n>(dst, src)        copies n cache lines with ordinary stores, all loads first;
// and what kernels_fp8_inl.h lists.

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/kernels.h"

namespace fanfold::base {

#if defined(__SANITIZE_THREAD__)
#define FANFOLD_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FANFOLD_THREAD_SANITIZER 1
#endif
#endif

// ThreadSanitizer does not see non-temporal stores: its builds copy with ordinary ones.
#if defined(FANFOLD_THREAD_SANITIZER)
constexpr bool kSeesOnlyOrdinaryStores = true;
#undef FANFOLD_THREAD_SANITIZER
#else
constexpr bool kSeesOnlyOrdinaryStores = false;
#endif

constexpr std::int64_t kLineBytes = 64;

/// Order of a vector's lanes in registers. bf16 pairs split into even and odd with one shift and
/// one mask, and join again with one blend, where keeping the order takes lane-crossing shuffles.
enum class Order : std::uint8_t { kSequential, kEvenOdd };

template <DType kType>
constexpr std::int64_t kElementBytes = kType == DType::kFloat32 ? 4 : 2;

template <DType kRow, DType kOut>
constexpr Order kOrder =
    kRow == DType::kBFloat16 && kOut == DType::kBFloat16 ? Order::kEvenOdd : Order::kSequential;

template <class V>
void copy_ordinary(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  // An empty copy may come with null pointers, which memcpy does not allow.
  if (bytes > 0) std::memcpy(dst, src, static_cast<std::size_t>(bytes));
}

/// Whole lines of `dst` in groups of four, so that loads overlap; the rest with ordinary stores, as
/// a partly written line would cost a read of memory.
template <class V>
void copy_by_lines(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  const auto misalignment =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(dst) % kLineBytes);
  const std::int64_t to_line = misalignment == 0 ? 0 : kLineBytes - misalignment;
  const std::int64_t head = to_line < bytes ? to_line : bytes;
  copy_ordinary<V>(dst, src, head);
  std::int64_t offset = head;
  for (; offset + 4 * kLineBytes <= bytes; offset += 4 * kLineBytes) {
    V::template stream_lines<4>(dst + offset, src + offset);
  }
  for (; offset + kLineBytes <= bytes; offset += kLineBytes) {
    V::template stream_lines<1>(dst + offset, src + offset);
  }
  copy_ordinary<V>(dst + offset, src + offset, bytes - offset);
}

template <class V>
void copy_fetching(std::byte* dst, const std::byte* src, std::int64_t bytes,
                   const std::byte* next) {
  constexpr std::int64_t kGroupBytes = 4 * kLineBytes;
  std::int64_t offset = 0;
  for (; offset + kGroupBytes <= bytes; offset += kGroupBytes) {
    for (std::int64_t line = offset; line < offset + kGroupBytes; line += kLineBytes) {
      __builtin_prefetch(next + line, /*for writing*/ 1, /*all levels*/ 3);
    }
    V::template store_lines<4>(dst + offset, src + offset);
  }
  copy_ordinary<V>(dst + offset, src + offset, bytes - offset);
}

/// Sums of rows, columns by columns.
template <class V, DType kRow, Order kRowOrder, bool kWeighted>
struct RowAdder {
  static constexpr Order kLaneOrder = kRowOrder;
  static constexpr std::int64_t kRowBytes = kElementBytes<kRow>;

  const void* const* rows;
  const float* weights;
  std::int64_t num_rows;

  typename V::Vec weighted(typename V::Vec row, std::int64_t row_idx) const {
    if constexpr (kWeighted) return V::multiply(V::broadcast(weights[row_idx]), row);
    return row;
  }

  const std::byte* row_at(std::int64_t row_idx, std::int64_t column) const {
    return static_cast<const std::byte*>(rows[row_idx]) + column * kRowBytes;
  }

  /// `kNumVecs` vectors of columns from `column` on.
  template <int kNumVecs>
  void load(std::int64_t column, typename V::Vec* sums) const {
    for (int i = 0; i < kNumVecs; ++i) sums[i] = V::zero();
    for (std::int64_t row_idx = 0; row_idx < num_rows; ++row_idx) {
      const std::byte* row = row_at(row_idx, column);
      for (int i = 0; i < kNumVecs; ++i) {
        const auto part = V::template load<kRow, kLaneOrder>(row + i * V::kLanes * kRowBytes);
        sums[i] = V::add(sums[i], weighted(part, row_idx));
      }
    }
  }

  /// `num_columns` < kLanes columns, then zeros.
  typename V::Vec load_first(std::int64_t column, std::int64_t num_columns) const {
    typename V::Vec sum = V::zero();
    for (std::int64_t row_idx = 0; row_idx < num_rows; ++row_idx) {
      const auto part =
          V::template load_first<kRow, kLaneOrder>(row_at(row_idx, column), num_columns);
      sum = V::add(sum, weighted(part, row_idx));
    }
    return sum;
  }
};

/// Rounds what `source` loads to `out`. Of each column all is read before anything is written:
/// `out` may be one of the rows. The last columns are not made up to a full vector by stepping
/// back, which would add those that it repeats twice.
template <class V, DType kOut, class Source>
void store_columns(std::byte* out, const Source& source, std::int64_t hidden) {
  constexpr Order kOrder = Source::kLaneOrder;
  constexpr std::int64_t kOutBytes = kElementBytes<kOut>;
  constexpr std::int64_t kBlockLanes = V::kLanes * V::kBlockVecs;
  std::int64_t column = 0;
  for (; column + kBlockLanes <= hidden; column += kBlockLanes) {
    typename V::Vec sums[static_cast<std::size_t>(V::kBlockVecs)];
    source.template load<V::kBlockVecs>(column, sums);
    for (int i = 0; i < V::kBlockVecs; ++i) {
      V::template store<kOut, kOrder>(out + (column + i * V::kLanes) * kOutBytes, sums[i]);
    }
  }
  for (; column + V::kLanes <= hidden; column += V::kLanes) {
    typename V::Vec sum;
    source.template load<1>(column, &sum);
    V::template store<kOut, kOrder>(out + column * kOutBytes, sum);
  }
  if (column == hidden) return;
  V::template store_first<kOut, kOrder>(
      out + column * kOutBytes, source.load_first(column, hidden - column), hidden - column);
}

template <class V, DType kRow, DType kOut>
void sum_rows_of_types(std::byte* out, const void* const* rows, const float* weights,
                       std::int64_t num_rows, std::int64_t hidden) {
  constexpr Order kLaneOrder = kOrder<kRow, kOut>;
  if (weights == nullptr) {
    store_columns<V, kOut>(out, RowAdder<V, kRow, kLaneOrder, false>{rows, weights, num_rows},
                           hidden);
  } else {
    store_columns<V, kOut>(out, RowAdder<V, kRow, kLaneOrder, true>{rows, weights, num_rows},
                           hidden);
  }
}

template <class V, DType kRow>
void sum_rows_of_row_type(std::byte* out, DType out_dtype, const void* const* rows,
                          const float* weights, std::int64_t num_rows, std::int64_t hidden) {
  if (out_dtype == DType::kBFloat16) {
    sum_rows_of_types<V, kRow, DType::kBFloat16>(out, rows, weights, num_rows, hidden);
  } else if (out_dtype == DType::kFloat16) {
    sum_rows_of_types<V, kRow, DType::kFloat16>(out, rows, weights, num_rows, hidden);
  } else {
    assert(out_dtype == DType::kFloat32);
    sum_rows_of_types<V, kRow, DType::kFloat32>(out, rows, weights, num_rows, hidden);
  }
}

template <class V>
void sum_rows(void* out, DType out_dtype, const void* const* rows, const float* weights,
              std::int64_t num_rows, DType row_dtype, std::int64_t hidden) {
  auto* bytes = static_cast<std::byte*>(out);
  if (row_dtype == DType::kBFloat16) {
    sum_rows_of_row_type<V, DType::kBFloat16>(bytes, out_dtype, rows, weights, num_rows, hidden);
  } else if (row_dtype == DType::kFloat16) {
    sum_rows_of_row_type<V, DType::kFloat16>(bytes, out_dtype, rows, weights, num_rows, hidden);
  } else {
    assert(row_dtype == DType::kFloat32);
    sum_rows_of_row_type<V, DType::kFloat32>(bytes, out_dtype, rows, weights, num_rows, hidden);
  }
}

}  // namespace fanfold::base
