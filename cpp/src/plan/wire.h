// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sizes of rows that travel as FP8 with scales.

#include <cstdint>

#include "base/byte_math.h"
#include "base/fp8.h"
#include "fanfold/all_to_all_config.h"

namespace fanfold::plan {

/// Elements that share a scale; the last block of a row may be shorter.
constexpr std::int64_t kWireBlock = base::kFp8Block;

constexpr std::int64_t num_wire_blocks(std::int64_t hidden) noexcept {
  return (hidden + kWireBlock - 1) / kWireBlock;
}

constexpr std::int64_t size_of(WireScale scale) noexcept {
  return scale == WireScale::kFloat32 ? 4 : 1;
}

constexpr DType dtype_of(WireScale scale) noexcept {
  return scale == WireScale::kFloat32 ? DType::kFloat32 : DType::kUInt8;
}

/// Where the scales begin in a packed row: behind its elements.
constexpr std::int64_t packed_scales_offset(std::int64_t hidden) noexcept {
  return base::align_up(hidden, 4);
}

/// Bytes of a packed row: `hidden` FP8 elements, a gap up to 4 bytes, the scales; a multiple of 4.
constexpr std::int64_t packed_row_bytes(std::int64_t hidden, WireScale scale) noexcept {
  return base::align_up(packed_scales_offset(hidden) + num_wire_blocks(hidden) * size_of(scale), 4);
}

}  // namespace fanfold::plan
