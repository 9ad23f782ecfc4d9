// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random numbers that are a function of their place, so that every rank can tell what every other
// rank holds without asking.

#include <cstdint>

namespace fanfold::testing {

/// splitmix64's finaliser: every output bit depends on every input bit.
inline std::uint64_t mix(std::uint64_t value) noexcept {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

/// One word for a tuple of numbers; their order matters.
template <class... More>
std::uint64_t mix(std::uint64_t first, std::uint64_t second, More... more) noexcept {
  return mix(mix(first) ^ second, more...);
}

/// A stream of words from a seed.
class RandomBits {
 public:
  explicit RandomBits(std::uint64_t seed) noexcept : state_(mix(seed)) {}
  std::uint64_t next() noexcept { return mix(state_++); }
  /// Uniform in [0, bound) up to a bias of bound / 2^64; bound >= 1.
  std::int64_t below(std::int64_t bound) noexcept {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  /// Uniform in [0, 1).
  float unit() noexcept { return static_cast<float>(next() >> 40) * 0x1p-24F; }

 private:
  std::uint64_t state_;
};

}  // namespace fanfold::testing
