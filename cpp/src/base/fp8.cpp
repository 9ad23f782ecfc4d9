// SPDX-License-Identifier: Apache-2.0
#include "base/fp8.h"

#include <algorithm>

#include "base/float_convert.h"

namespace fanfold::base {

namespace {

constexpr std::uint32_t kFloat32Infinity = 0x7f800000U;
constexpr std::uint32_t kFloat32NaN = 0x7fc00000U;
constexpr std::uint8_t kNaN = 0x7f;
constexpr std::uint8_t kLargest = 0x7e;

// Magnitudes of float32 at which the result changes its kind.
constexpr std::uint32_t kSaturates = 0x43e00000U;       // 448
constexpr std::uint32_t kSmallestNormal = 0x3c800000U;  // 2^-6
constexpr std::uint32_t kHalfSubnormal = 0x3a800000U;   // 2^-10, the tie between 0 and 2^-9

// float32 and E4M3 exponents are biased by 127 and 7; mantissas have 23 and 3 bits.
constexpr std::uint32_t kExponentOffset = 127 - 7;
constexpr std::uint32_t kMantissaShift = 23 - 3;

}  // namespace

std::uint8_t e4m3_from_float(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude >= kFloat32Infinity) return static_cast<std::uint8_t>(sign | kNaN);
  if (magnitude >= kSaturates) return static_cast<std::uint8_t>(sign | kLargest);
  if (magnitude >= kSmallestNormal) {
    // A carry out of the mantissa steps the exponent, as it should.
    const std::uint32_t bias = 0x7ffffU + ((magnitude >> kMantissaShift) & 1U);
    const std::uint32_t rebased = magnitude - (kExponentOffset << 23) + bias;
    return static_cast<std::uint8_t>(sign | (rebased >> kMantissaShift));
  }
  if (magnitude <= kHalfSubnormal) return static_cast<std::uint8_t>(sign);
  // Subnormal result: count in units of 2^-9.
  const std::uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t shift = 141 - (magnitude >> 23);
  const std::uint32_t floor = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  const bool up = rest > half || (rest == half && (floor & 1U) != 0);
  return static_cast<std::uint8_t>(sign | (floor + (up ? 1U : 0U)));
}

float float_from_e4m3(std::uint8_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x80U) << 24;
  const std::uint32_t exponent = (bits >> 3) & 0xfU;
  const std::uint32_t mantissa = bits & 0x7U;
  if ((bits & 0x7fU) == kNaN) return float_from_bits(sign | kFloat32NaN);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;
    return float_from_bits(sign | float_bits(magnitude));
  }
  return float_from_bits(sign | ((exponent + kExponentOffset) << 23) |
                         (mantissa << kMantissaShift));
}

float float_from_ue8m0(std::uint8_t bits) noexcept {
  if (bits == 0xff) return float_from_bits(kFloat32NaN);
  if (bits == 0) return 0x1p-127F;
  return float_from_bits(std::uint32_t{bits} << 23);
}

float fp8_scale(float amax, bool power_of_two) noexcept {
  if (amax == 0) return 1.0F;
  const float scale = std::max(amax / 448.0F, 0x1p-126F);
  if (!power_of_two) return scale;
  return float_from_bits((float_bits(scale) + 0x7fffffU) & kFloat32Infinity);
}

}  // namespace fanfold::base
