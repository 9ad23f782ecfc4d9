// SPDX-License-Identifier: Apache-2.0
#include "support/fp8_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/number_codec.h"

namespace fanfold::testing {
namespace {

constexpr std::size_t kBlock = 128;
constexpr int kMantissaBits = 3;
constexpr int kMinExponent = -6;  // of normal numbers
constexpr unsigned kNaN = 0x7f;

float scale_of(const float* values, std::size_t count, WireScale wire_scale) {
  float amax = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isfinite(values[i])) amax = std::max(amax, std::fabs(values[i]));
  }
  if (amax == 0) return 1;
  const double scale =
      std::max(static_cast<float>(static_cast<double>(amax) / 448.0), std::ldexp(1.0F, -126));
  if (wire_scale == WireScale::kFloat32) return static_cast<float>(scale);
  int exponent = 0;  // scale = mantissa * 2^exponent, mantissa in [0.5, 1)
  const double mantissa = std::frexp(scale, &exponent);
  return std::ldexp(1.0F, mantissa == 0.5 ? exponent - 1 : exponent);
}

}  // namespace

std::uint8_t encode_e4m3(float value) {
  const unsigned sign = std::signbit(value) ? 0x80U : 0U;
  if (!std::isfinite(value)) return static_cast<std::uint8_t>(sign | kNaN);
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), 448.0);
  if (magnitude == 0) return static_cast<std::uint8_t>(sign);
  // Counted in units of the last place of its binade; nearbyint rounds ties to even, and a mantissa
  // that rounds up to the next power of two carries into the exponent by the addition.
  const int exponent = std::max(std::ilogb(magnitude), kMinExponent);
  const double units = std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent));
  const auto bits = (static_cast<unsigned>(exponent - kMinExponent) << kMantissaBits) +
                    static_cast<unsigned>(units);
  return static_cast<std::uint8_t>(sign | bits);
}

float decode_e4m3(std::uint8_t bits) {
  const int magnitude = bits & 0x7f;
  const int mantissa = magnitude & 7;
  const int exponent = magnitude >> kMantissaBits;
  double value = exponent == 0
                     ? std::ldexp(mantissa, kMinExponent - kMantissaBits)
                     : std::ldexp(mantissa + 8, exponent - 1 + kMinExponent - kMantissaBits);
  if (magnitude == kNaN) value = std::numeric_limits<double>::quiet_NaN();
  return static_cast<float>((bits & 0x80) != 0 ? -value : value);
}

Fp8Row pack_row(const std::vector<float>& values, WireScale wire_scale) {
  Fp8Row row;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const std::size_t count = std::min(kBlock, values.size() - begin);
    const float scale = scale_of(values.data() + begin, count, wire_scale);
    row.scales.push_back(scale);
    for (std::size_t i = begin; i < begin + count; ++i) {
      // A double has more than twice the digits of a float: this rounds as a division of floats.
      const double quotient = static_cast<double>(values[i]) / scale;
      row.elements.push_back(encode_e4m3(static_cast<float>(quotient)));
    }
  }
  return row;
}

std::vector<float> unpack_row(const Fp8Row& row) {
  std::vector<float> values(row.elements.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = multiply(decode_e4m3(row.elements[i]), row.scales[i / kBlock]);
  }
  return values;
}

std::vector<float> trip(const std::vector<float>& values, WireScale wire_scale) {
  return unpack_row(pack_row(values, wire_scale));
}

float scale_at(const std::byte* scales, WireScale wire_scale, std::int64_t block) {
  if (wire_scale == WireScale::kUe8m0) {
    return std::ldexp(1.0F, static_cast<int>(scales[block]) - 127);
  }
  float scale = 0;
  std::memcpy(&scale, scales + 4 * block, sizeof scale);
  return scale;
}

bool same_e4m3(std::uint8_t a, std::uint8_t b) {
  return a == b || ((a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f);
}

}  // namespace fanfold::testing
