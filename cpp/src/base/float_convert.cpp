// SPDX-License-Identifier: Apache-2.0
#include "base/float_convert.h"

#include <cstdint>

namespace fanfold::base {

namespace {

constexpr std::uint32_t kFloat32Infinity = 0x7f800000U;
constexpr std::uint32_t kFloat32QuietBit = 0x00400000U;

// Magnitudes of float32 at which the float16 result changes its kind.
constexpr std::uint32_t kRoundsToInfinity = 0x477ff000U;  // 65520, half a step above the largest
constexpr std::uint32_t kSmallestNormal = 0x38800000U;    // 2^-14
constexpr std::uint32_t kHalfSubnormal = 0x33000000U;     // 2^-25, the tie between 0 and 2^-24

// float32 and float16 exponents are biased by 127 and 15; mantissas have 23 and 10 bits.
constexpr std::uint32_t kExponentOffset = 127 - 15;
constexpr std::uint32_t kMantissaShift = 23 - 10;

}  // namespace

float float_from_float16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0) {
    // Exact: at most 10 bits, and every multiple of 2^-24 is a normal float32.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return float_from_bits(sign | float_bits(magnitude));
  }
  if (exponent == 0x1fU) {
    const std::uint32_t quiet = mantissa == 0 ? 0 : kFloat32QuietBit;
    return float_from_bits(sign | kFloat32Infinity | quiet | (mantissa << kMantissaShift));
  }
  return float_from_bits(sign | ((exponent + kExponentOffset) << 23) |
                         (mantissa << kMantissaShift));
}

std::uint16_t float16_from_float(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > kFloat32Infinity) {
    // The quiet bit keeps a payload whose upper bits are zero from turning into infinity.
    return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> kMantissaShift) & 0x1ffU));
  }
  if (magnitude >= kRoundsToInfinity) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (magnitude >= kSmallestNormal) {
    // A carry out of the mantissa steps the exponent, as it should.
    const std::uint32_t bias = 0xfffU + ((magnitude >> kMantissaShift) & 1U);
    const std::uint32_t rebased = magnitude - (kExponentOffset << 23) + bias;
    return static_cast<std::uint16_t>(sign | (rebased >> kMantissaShift));
  }
  if (magnitude <= kHalfSubnormal) return static_cast<std::uint16_t>(sign);
  // Subnormal result: count in units of 2^-24.
  const std::uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t shift = 126 - (magnitude >> 23);
  const std::uint32_t floor = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  const bool up = rest > half || (rest == half && (floor & 1U) != 0);
  return static_cast<std::uint16_t>(sign | (floor + (up ? 1U : 0U)));
}

}  // namespace fanfold::base
