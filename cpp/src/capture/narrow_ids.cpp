// SPDX-License-Identifier: Apache-2.0
#include "capture/narrow_ids.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/kernels.h"
#include "capture/id_types.h"

namespace fanfold::capture {
namespace {

// Both loops find out without a branch whether all ids are right, and look for a wrong one only
// afterwards. A negative id becomes -1 by or-ing its sign over it; with that, last - id has a sign
// exactly when id > last.
template <class In, class Out>
bool narrow_from(const void* ids, std::int64_t num_ids, std::int32_t num_experts, void* to) {
  const auto* in = static_cast<const In*>(ids);
  auto* out = static_cast<Out*>(to);
  const auto last = static_cast<std::uint32_t>(num_experts) - 1U;
  std::uint32_t signs = 0;
  for (std::int64_t i = 0; i < num_ids; ++i) {
    const std::int32_t given = in[i];
    const auto id = static_cast<std::uint32_t>(given) | static_cast<std::uint32_t>(given >> 31);
    signs |= last - id;
    out[i] = static_cast<Out>(id);
  }
  return signs >> 31 == 0;
}

// By halves: few processors compare 64-bit lanes. The upper half must be the sign of the result.
template <class Out>
bool narrow_from_8(const void* ids, std::int64_t num_ids, std::int32_t num_experts, void* to) {
  const auto* in = static_cast<const std::int64_t*>(ids);
  auto* out = static_cast<Out*>(to);
  const auto last = static_cast<std::uint32_t>(num_experts) - 1U;
  std::uint32_t signs = 0;
  std::uint32_t upper_bits = 0;
  for (std::int64_t i = 0; i < num_ids; ++i) {
    const auto both = static_cast<std::uint64_t>(in[i]);
    const auto upper = static_cast<std::uint32_t>(both >> 32);
    const auto sign = static_cast<std::uint32_t>(static_cast<std::int32_t>(upper) >> 31);
    const auto id = static_cast<std::uint32_t>(both) | sign;
    upper_bits |= (upper | sign) ^ static_cast<std::uint32_t>(static_cast<std::int32_t>(id) >> 31);
    signs |= last - id;
    out[i] = static_cast<Out>(id);
  }
  return signs >> 31 == 0 && upper_bits == 0;
}

int size_at(std::int64_t id_bytes) noexcept { return id_bytes == 1 ? 0 : id_bytes == 2 ? 1 : 2; }

/// One id as a number; negative for "no expert". `num_experts` decides whether the maximum of an
/// unsigned type is an id.
template <class Id>
std::int64_t number_of(Id id, std::int32_t num_experts) noexcept {
  if constexpr (!std::numeric_limits<Id>::is_signed) {
    constexpr std::int64_t kMax = std::numeric_limits<Id>::max();
    if (id == std::numeric_limits<Id>::max() && kMax >= num_experts) return -1;
  }
  return static_cast<std::int64_t>(id);
}

/// Calls `body(Id{})` with the C++ type of an id that a router gives.
template <class Body>
void with_router_type(DType dtype, Body&& body) {
  if (dtype == DType::kUInt32) return body(std::uint32_t{});
  if (dtype == DType::kInt64) return body(std::int64_t{});
  with_id_type(dtype, std::forward<Body>(body));
}

constexpr std::int64_t kBlock = 512;  // ids

/// Holds every id of type Id as a number that the tables take.
template <class Id>
using Wide = std::conditional_t<std::is_same_v<Id, std::int32_t> || (sizeof(Id) < 4), std::int32_t,
                                std::int64_t>;

/// Gathers a block of rows, `stride` apart, into a dense one of numbers.
template <class Id>
void load_block(const Id* rows, std::int64_t stride, std::int64_t num_rows,
                std::int64_t num_columns, std::int32_t num_experts, Wide<Id>* block) noexcept {
  if (stride == num_columns) {
    num_columns *= num_rows;
    num_rows = 1;
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const Id* from = rows + row * stride;
    Wide<Id>* to = block + row * num_columns;
    for (std::int64_t k = 0; k < num_columns; ++k) {
      to[k] = static_cast<Wide<Id>>(number_of(from[k], num_experts));
    }
  }
}

/// Replaces physical ids by logical ones; returns whether all were physical experts or negative.
template <class Number>
bool map_block(const IdRule& rule, std::int64_t num_ids, Number* block) noexcept {
  bool all_right = true;
  for (std::int64_t i = 0; i < num_ids; ++i) {
    const Number id = block[i];
    const bool is_expert = id >= 0 && id < rule.num_experts;
    all_right &= is_expert || id < 0;
    const std::int32_t logical = rule.logical_of_expert[is_expert ? id : 0];
    block[i] = is_expert ? logical : -1;
  }
  return all_right;
}

/// Any type, any row stride, any map: by way of a block of numbers.
template <class Id>
bool store_by_blocks(const TensorView& topk_ids, std::int64_t first, std::int64_t num_rows,
                     const IdRule& rule, const NarrowTable& table, std::byte* to) noexcept {
  const auto* rows = static_cast<const Id*>(topk_ids.data);
  const std::int64_t stride = topk_ids.strides[0];
  const NarrowIds* by_size = sizeof(Wide<Id>) == 4 ? table.from_4 : table.from_8;
  const NarrowIds narrow = by_size[size_at(rule.id_bytes)];
  const std::int64_t columns = std::min<std::int64_t>(rule.top_k, kBlock);
  const std::int64_t rows_at_a_time = kBlock / columns;  // 1 where a row has several blocks
  const bool maps = rule.logical_of_expert != nullptr;   // which checks; logical ids are right
  const std::int32_t limit = maps ? std::numeric_limits<std::int32_t>::max() : rule.num_experts;
  bool all_right = true;
  Wide<Id> block[kBlock];
  for (std::int64_t row = 0; row < num_rows; row += rows_at_a_time) {
    const std::int64_t rows_here = std::min(rows_at_a_time, num_rows - row);
    for (std::int64_t column = 0; column < rule.top_k; column += columns) {
      const std::int64_t columns_here = std::min(columns, rule.top_k - column);
      const std::int64_t num_ids = rows_here * columns_here;
      load_block(rows + (first + row) * stride + column, stride, rows_here, columns_here,
                 rule.num_experts, block);
      if (maps) all_right &= map_block(rule, num_ids, block);
      all_right &= narrow(block, num_ids, limit, to);
      to += num_ids * rule.id_bytes;
    }
  }
  return all_right;
}

}  // namespace

const NarrowTable& portable_narrow_table() noexcept {
  using In2 = std::int16_t;
  using In4 = std::int32_t;
  static constexpr NarrowTable kTable = {
      {&narrow_from<In2, std::uint8_t>, &narrow_from<In2, std::uint16_t>,
       &narrow_from<In2, std::uint32_t>},
      {&narrow_from<In4, std::uint8_t>, &narrow_from<In4, std::uint16_t>,
       &narrow_from<In4, std::uint32_t>},
      {&narrow_from_8<std::uint8_t>, &narrow_from_8<std::uint16_t>, &narrow_from_8<std::uint32_t>}};
  return kTable;
}

const NarrowTable& narrow_table() noexcept {
  const NarrowTable* wide = base::is_supported(base::Isa::kAvx2) ? avx2_narrow_table() : nullptr;
  return wide != nullptr ? *wide : portable_narrow_table();
}

bool is_router_dtype(DType dtype) noexcept {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kInt32:
    case DType::kUInt32:
    case DType::kInt64:
      return true;
    default:
      return false;
  }
}

bool store_ids(const TensorView& topk_ids, std::int64_t first, std::int64_t num_rows,
               const IdRule& rule, const NarrowTable& table, std::byte* to) noexcept {
  if (num_rows == 0) return true;
  const bool is_dense = topk_ids.strides[0] == rule.top_k || num_rows == 1;
  const DType dtype = topk_ids.dtype;
  const bool is_direct = dtype == DType::kInt16 || dtype == DType::kInt32 || dtype == DType::kInt64;
  if (is_dense && rule.logical_of_expert == nullptr && is_direct) {
    const NarrowIds* by_size = dtype == DType::kInt16   ? table.from_2
                               : dtype == DType::kInt32 ? table.from_4
                                                        : table.from_8;
    const auto* ids =
        static_cast<const std::byte*>(topk_ids.data) + first * topk_ids.row_stride_bytes();
    return by_size[size_at(rule.id_bytes)](ids, num_rows * rule.top_k, rule.num_experts, to);
  }
  bool all_right = true;
  with_router_type(dtype, [&](auto type) {
    all_right = store_by_blocks<decltype(type)>(topk_ids, first, num_rows, rule, table, to);
  });
  return all_right;
}

WrongId find_wrong_id(const TensorView& topk_ids, std::int64_t first, std::int64_t num_rows,
                      const IdRule& rule) noexcept {
  WrongId found{};
  with_router_type(topk_ids.dtype, [&](auto type) {
    using Id = decltype(type);
    const auto* rows = static_cast<const Id*>(topk_ids.data);
    for (std::int64_t row = first; row < first + num_rows; ++row) {
      for (int k = 0; k < rule.top_k; ++k) {
        const std::int64_t id = number_of(rows[row * topk_ids.strides[0] + k], rule.num_experts);
        if (id < rule.num_experts) continue;
        found = WrongId{row, k, id};
        return;
      }
    }
  });
  return found;
}

}  // namespace fanfold::capture
