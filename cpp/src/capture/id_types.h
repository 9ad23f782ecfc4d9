// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ids in the five types that routing is stored in. The sentinel has all bits set in each.

#include <cstdint>
#include <cstring>
#include <limits>

#include "fanfold/dtype.h"

namespace fanfold::capture {

/// The largest value of an integer type that routing is stored in, its sentinel not counted; 0 for
/// any other type.
constexpr std::int64_t max_id_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kInt8:
      return std::numeric_limits<std::int8_t>::max();
    case DType::kUInt8:
      return std::numeric_limits<std::uint8_t>::max() - 1;
    case DType::kInt16:
      return std::numeric_limits<std::int16_t>::max();
    case DType::kUInt16:
      return std::numeric_limits<std::uint16_t>::max() - 1;
    case DType::kInt32:
      return std::numeric_limits<std::int32_t>::max();
    default:
      return 0;
  }
}

template <class Id>
Id load_id(const std::byte* data, std::int64_t at) noexcept {
  Id id;
  std::memcpy(&id, data + at * static_cast<std::int64_t>(sizeof(Id)), sizeof(Id));
  return id;
}

template <class Id>
std::int64_t load_number(const std::byte* data, std::int64_t at) noexcept {
  return static_cast<std::int64_t>(load_id<Id>(data, at));
}

/// Calls `body(Id{})` with the C++ type of `dtype`, one of those that routing is stored in.
template <class Body>
decltype(auto) with_id_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kInt8:
      return body(std::int8_t{});
    case DType::kUInt8:
      return body(std::uint8_t{});
    case DType::kInt16:
      return body(std::int16_t{});
    case DType::kUInt16:
      return body(std::uint16_t{});
    default:
      return body(std::int32_t{});
  }
}

}  // namespace fanfold::capture
