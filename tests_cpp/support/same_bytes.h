// SPDX-License-Identifier: Apache-2.0
#pragma once

// Buffers of bytes that tests fill, hand out and compare as a whole, so that a byte written where
// none belongs shows as well as one that is wrong.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "support/random_bits.h"

namespace fanfold::testing {

using Bytes = std::vector<std::byte>;

/// What a buffer holds before the library writes to it.
constexpr std::byte kUntouched{0xa5};

inline Bytes untouched_bytes(std::int64_t size) {
  return Bytes(static_cast<std::size_t>(size), kUntouched);
}

inline void copy_bytes(std::byte* to, const void* from, std::int64_t size) {
  if (size > 0) std::memcpy(to, from, static_cast<std::size_t>(size));
}

inline Bytes random_bytes(std::int64_t size, std::uint64_t seed) {
  RandomBits random(seed);
  Bytes bytes(static_cast<std::size_t>(size));
  for (std::int64_t at = 0; at < size; at += 8) {
    const std::uint64_t word = random.next();
    copy_bytes(bytes.data() + at, &word, std::min<std::int64_t>(8, size - at));
  }
  return bytes;
}

/// Whether two buffers are equal; the message tells the first difference.
inline ::testing::AssertionResult same_bytes(const Bytes& got, const Bytes& expected) {
  if (got.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << got.size() << " bytes, expected " << expected.size() << " bytes";
  }
  if (got.empty() || std::memcmp(got.data(), expected.data(), got.size()) == 0) {
    return ::testing::AssertionSuccess();
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    return ::testing::AssertionFailure()
           << "byte " << i << " of " << got.size() << " is " << std::to_integer<int>(got[i])
           << ", expected " << std::to_integer<int>(expected[i])
           << (expected[i] == kUntouched ? " (perhaps untouched)" : "");
  }
  return ::testing::AssertionSuccess();
}

}  // namespace fanfold::testing
