// SPDX-License-Identifier: Apache-2.0
#include "support/number_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace fanfold::testing {
namespace {

/// A 16-bit format: sign, exponent, mantissa.
struct Format {
  int mantissa_bits;
  int min_exponent;  // of normal numbers
  int max_exponent;
};

Format format_of(DType dtype) {
  if (dtype == DType::kFloat16) return {10, -14, 15};
  if (dtype == DType::kBFloat16) return {7, -126, 127};
  throw std::logic_error(std::string("number_codec: no format for ") + name_of(dtype));
}

std::uint16_t load16(const std::byte* bytes) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits;
}

double decode16(const Format& format, std::uint16_t bits) {
  const int magnitude = bits & 0x7fff;
  const int mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
  const int exponent = magnitude >> format.mantissa_bits;
  const int infinity = format.max_exponent - format.min_exponent + 2;
  double value = 0;
  if (exponent == infinity) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << format.mantissa_bits),
                       exponent - 1 + format.min_exponent - format.mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t encode16(const Format& format, float value) {
  const unsigned sign = std::signbit(value) ? 0x8000U : 0U;
  const auto infinity = static_cast<unsigned>(format.max_exponent - format.min_exponent + 2)
                        << format.mantissa_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | (infinity >> 1));
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  if (magnitude == 0) return static_cast<std::uint16_t>(sign);
  // Count the value in units of the last place of its binade; nearbyint rounds ties to even, and a
  // mantissa that rounds up to the next power of two carries into the exponent by the addition.
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  if (exponent > format.max_exponent) return static_cast<std::uint16_t>(sign | infinity);
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const auto bits =
      (static_cast<unsigned>(exponent - format.min_exponent) << format.mantissa_bits) +
      static_cast<unsigned>(units);
  return static_cast<std::uint16_t>(sign | bits);
}

}  // namespace

float decode(DType dtype, const std::byte* bytes) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  return static_cast<float>(decode16(format_of(dtype), load16(bytes)));
}

void encode(DType dtype, float value, std::byte* bytes) {
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = encode16(format_of(dtype), value);
  std::memcpy(bytes, &bits, sizeof bits);
}

float round_to(DType dtype, float value) {
  std::byte bytes[sizeof(float)];
  encode(dtype, value, bytes);
  return decode(dtype, bytes);
}

// A double holds the product of two floats exactly, and it has more than twice the digits of a
// float, so rounding the sum twice gives what rounding it once does.
float add(float a, float b) { return static_cast<float>(static_cast<double>(a) + b); }
float multiply(float a, float b) { return static_cast<float>(static_cast<double>(a) * b); }

bool same_number(DType dtype, const std::byte* a, const std::byte* b) {
  if (std::memcmp(a, b, static_cast<std::size_t>(size_of(dtype))) == 0) return true;
  return std::isnan(decode(dtype, a)) && std::isnan(decode(dtype, b));
}

}  // namespace fanfold::testing
