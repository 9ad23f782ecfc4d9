// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scalar conversions between float32 and the 16-bit types: the definition that every instruction
// set is compared with. Round to nearest even by integer arithmetic; subnormals kept; NaN stays
// NaN.

#include <cstdint>
#include <cstring>

namespace fanfold::base {

inline std::uint32_t float_bits(float value) noexcept {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_from_bits(std::uint32_t bits) noexcept {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float float_from_bfloat16(std::uint16_t bits) noexcept {
  return float_from_bits(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t bfloat16_from_float(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  const std::uint32_t bias = 0x7fffU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>((bits + bias) >> 16);
}

float float_from_float16(std::uint16_t bits) noexcept;
std::uint16_t float16_from_float(float value) noexcept;

}  // namespace fanfold::base
