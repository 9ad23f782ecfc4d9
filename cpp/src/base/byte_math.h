// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arithmetic on byte counts; 64 bit throughout.

#include <cstdint>

namespace fanfold::base {

constexpr std::int64_t kCacheLine = 64;

constexpr std::int64_t align_up(std::int64_t value, std::int64_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

/// FNV-1a over 64-bit words: digests of configurations and payload sets.
constexpr std::uint64_t kDigestSeed = 14695981039346656037ULL;
constexpr std::uint64_t mix_digest(std::uint64_t digest, std::uint64_t word) noexcept {
  for (int byte = 0; byte < 8; ++byte) {
    digest = (digest ^ ((word >> (8 * byte)) & 0xffU)) * 1099511628211ULL;
  }
  return digest;
}

}  // namespace fanfold::base
