// SPDX-License-Identifier: Apache-2.0
#pragma once

// float16 and bfloat16 by arithmetic in double precision: written apart from the library's
// conversions, which work on bits, so that the two can be compared.

#include <cstddef>
#include <cstdint>

#include "fanfold/dtype.h"

namespace fanfold::testing {

/// The element at `bytes`; exact. float32, float16 or bfloat16.
float decode(DType dtype, const std::byte* bytes);

/// Writes `value` rounded to nearest, ties to even; subnormals kept, overflow to infinity.
void encode(DType dtype, float value, std::byte* bytes);

/// `value` after a trip through `dtype`.
float round_to(DType dtype, float value);

/// a + b and a * b, each rounded once to float32 whatever the compiler may fuse.
float add(float a, float b);
float multiply(float a, float b);

/// Whether two elements are the same bits or both NaN.
bool same_number(DType dtype, const std::byte* a, const std::byte* b);

}  // namespace fanfold::testing
