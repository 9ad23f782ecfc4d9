// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of FP8 E4M3 with a scale per 128 elements, by arithmetic in double precision: written apart
// from the library's conversions, which work on bits, so that the two can be compared.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fanfold/all_to_all_config.h"

namespace fanfold::testing {

/// To nearest, ties to even, at most 448; infinities and NaN become NaN.
std::uint8_t encode_e4m3(float value);
float decode_e4m3(std::uint8_t bits);

/// A row as it travels; scales as numbers.
struct Fp8Row {
  std::vector<std::uint8_t> elements;
  std::vector<float> scales;
};

Fp8Row pack_row(const std::vector<float>& values, WireScale wire_scale);
std::vector<float> unpack_row(const Fp8Row& row);
/// `values` after their trip.
std::vector<float> trip(const std::vector<float>& values, WireScale wire_scale);

/// The element of a row at `elements` and of its scales at `scales`.
inline std::uint8_t element_at(const std::byte* elements, std::int64_t column) {
  return static_cast<std::uint8_t>(elements[column]);
}
float scale_at(const std::byte* scales, WireScale wire_scale, std::int64_t block);
/// Whether two E4M3 are the same bits or both NaN.
bool same_e4m3(std::uint8_t a, std::uint8_t b);

}  // namespace fanfold::testing
