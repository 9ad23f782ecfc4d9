// SPDX-License-Identifier: Apache-2.0
#pragma once

// FP8 E4M3 and its scales, one number at a time: the definition that every instruction set is
// compared with. Nothing here is inline, so that the kernels of all instruction sets may call it.
//
// E4M3 is the "fn" format: a sign, 4 bits of exponent (bias 7), 3 of mantissa; largest 448,
// smallest normal 2^-6, subnormals in steps of 2^-9, both zeros, no infinity; all other bits set is
// NaN.

#include <cstdint>

namespace fanfold::base {

/// Elements of a row that share a scale.
constexpr std::int64_t kFp8Block = 128;

/// To nearest, ties to even; magnitudes above 448 become 448; infinities and NaN become NaN. The
/// sign stays, zeros included.
std::uint8_t e4m3_from_float(float value) noexcept;
/// Exact.
float float_from_e4m3(std::uint8_t bits) noexcept;

/// 2^(bits - 127); 255 is NaN.
float float_from_ue8m0(std::uint8_t bits) noexcept;

/// The scale of a block whose largest finite magnitude is `amax`: 1 for 0; else amax / 448, at
/// least 2^-126, so that it is a normal number; `power_of_two`: the least power of two not below
/// that. Nothing divided by it exceeds 448 but by the rounding of the division.
float fp8_scale(float amax, bool power_of_two) noexcept;

}  // namespace fanfold::base
