// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of numbers whose sums tell the order in which they were added.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fanfold/dtype.h"
#include "support/number_codec.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {

constexpr DType kSummable[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

/// `count` numbers of very different size: every sum of three rounds.
inline testing::Bytes random_numbers(DType dtype, std::int64_t count, std::uint64_t seed) {
  testing::RandomBits random(seed);
  testing::Bytes bytes(static_cast<std::size_t>(count * size_of(dtype)));
  for (std::int64_t i = 0; i < count; ++i) {
    const float scale = random.below(3) == 0 ? 4000.0F : 1.0F;
    testing::encode(dtype, scale * (random.unit() - 0.5F), bytes.data() + i * size_of(dtype));
  }
  return bytes;
}

inline float number_at(const std::byte* row, DType dtype, std::int64_t column) {
  return testing::decode(dtype, row + column * size_of(dtype));
}

/// A row and what it is multiplied by.
struct Term {
  const std::byte* row;
  float weight;
};

/// The contract of a sum: from +0, terms in turn, each product rounded before it is added,
/// `weighted` or not; then rounded to `out_dtype`.
inline void write_sum(std::byte* out, DType out_dtype, const std::vector<Term>& terms,
                      bool weighted, DType dtype, std::int64_t hidden) {
  for (std::int64_t column = 0; column < hidden; ++column) {
    float sum = 0;
    for (const Term& term : terms) {
      const float number = number_at(term.row, dtype, column);
      sum = testing::add(sum, weighted ? testing::multiply(term.weight, number) : number);
    }
    testing::encode(out_dtype, sum, out + column * size_of(out_dtype));
  }
}

}  // namespace fanfold::cpu
