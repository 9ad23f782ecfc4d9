// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which parts of a fixed piece of memory are free.

#include <cstdint>
#include <map>
#include <optional>

namespace fanfold::memory {

/// Hands out offsets. Equal calls in equal order give equal offsets, so that ranks which agree on
/// the calls need not exchange what they get.
class Arena {
 public:
  static constexpr std::int64_t kAlignment = 128;

  explicit Arena(std::int64_t bytes);

  /// The lowest free offset with room for `bytes`, rounded up to the alignment; nothing if none
  /// has.
  std::optional<std::int64_t> take(std::int64_t bytes);
  /// Takes back what `take` gave for `bytes`.
  void give(std::int64_t offset, std::int64_t bytes);
  std::int64_t free_bytes() const noexcept;
  /// The most that one `take` could get.
  std::int64_t largest_free_bytes() const noexcept;

 private:
  std::map<std::int64_t, std::int64_t> free_;  // offset -> bytes; no two of them touch
};

}  // namespace fanfold::memory
