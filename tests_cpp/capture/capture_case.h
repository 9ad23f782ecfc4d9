// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small captures and readable ids.

#include <cstdint>
#include <cstring>
#include <vector>

#include "fanfold/routing_capture.h"

namespace fanfold::testing {

/// Two layers, 8 experts, 2 ids per token.
inline RoutingCaptureConfig small_capture(int num_layers = 2, std::int64_t max_tokens = 8) {
  RoutingCaptureConfig config;
  config.num_layers = num_layers;
  config.num_experts = 8;
  config.top_k = 2;
  config.max_tokens = max_tokens;
  return config;
}

/// A view of ids [rows, columns].
template <class Id>
TensorView ids_view(const std::vector<Id>& ids, std::int64_t columns);

#define FANFOLD_IDS_VIEW(Id, dtype)                                                  \
  template <>                                                                        \
  inline TensorView ids_view<Id>(const std::vector<Id>& ids, std::int64_t columns) { \
    return {static_cast<const void*>(ids.data()),                                    \
            dtype,                                                                   \
            {static_cast<std::int64_t>(ids.size()) / columns, columns}};             \
  }
FANFOLD_IDS_VIEW(std::int8_t, DType::kInt8)
FANFOLD_IDS_VIEW(std::uint8_t, DType::kUInt8)
FANFOLD_IDS_VIEW(std::int16_t, DType::kInt16)
FANFOLD_IDS_VIEW(std::uint16_t, DType::kUInt16)
FANFOLD_IDS_VIEW(std::int32_t, DType::kInt32)
FANFOLD_IDS_VIEW(std::uint32_t, DType::kUInt32)
FANFOLD_IDS_VIEW(std::int64_t, DType::kInt64)
#undef FANFOLD_IDS_VIEW

/// The elements of a contiguous tensor of an integer type, in order.
inline std::vector<std::int64_t> numbers_of(const TensorView& view) {
  std::vector<std::int64_t> numbers;
  const auto add = [&](auto type) {
    using Id = decltype(type);
    for (std::int64_t i = 0; i < view.num_elements(); ++i) {
      numbers.push_back(static_cast<std::int64_t>(static_cast<const Id*>(view.data)[i]));
    }
  };
  switch (view.dtype) {
    case DType::kInt8:
      add(std::int8_t{});
      break;
    case DType::kUInt8:
      add(std::uint8_t{});
      break;
    case DType::kInt16:
      add(std::int16_t{});
      break;
    case DType::kUInt16:
      add(std::uint16_t{});
      break;
    default:
      add(std::int32_t{});
      break;
  }
  return numbers;
}

/// Rows of ids, given as numbers in the spec's type.
inline RoutingRows rows_of(const RoutingSpec& spec, const std::vector<std::int64_t>& ids,
                           std::int64_t first_position = 0) {
  RoutingRows rows;
  rows.spec = spec;
  rows.first_position = first_position;
  rows.num_tokens = static_cast<std::int64_t>(ids.size()) / spec.num_layers / spec.top_k;
  for (const std::int64_t id : ids) {
    std::byte bytes[sizeof(id)];
    std::memcpy(bytes, &id, sizeof(id));  // little-endian: the low bytes come first
    rows.data.insert(rows.data.end(), bytes, bytes + size_of(spec.dtype));
  }
  return rows;
}

using Ids = std::vector<std::int32_t>;
using Numbers = std::vector<std::int64_t>;

/// Ids that name their row: row i has i and 7.
inline Ids numbered_rows(int num_rows) {
  Ids ids;
  for (int row = 0; row < num_rows; ++row) {
    ids.push_back(row);
    ids.push_back(7);
  }
  return ids;
}

}  // namespace fanfold::testing
