// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows of a buffer hold something.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fanfold::capture {

/// A set of rows 0 to max_rows - 1, one bit each; ranges cost a word per 64 rows.
class RowSet {
 public:
  explicit RowSet(std::int64_t max_rows) : words_(static_cast<std::size_t>((max_rows + 63) / 64)) {}

  void clear() noexcept { std::fill(words_.begin(), words_.end(), 0U); }

  bool contains(std::int64_t row) const noexcept {
    return (words_[static_cast<std::size_t>(row / 64)] >> (row % 64) & 1U) != 0;
  }
  bool has_any(std::int64_t first, std::int64_t num_rows) const noexcept {
    std::uint64_t found = 0;
    for_words(first, num_rows,
              [&](std::size_t at, std::uint64_t mask) { found |= words_[at] & mask; });
    return found != 0;
  }
  std::int64_t count(std::int64_t first, std::int64_t num_rows) const noexcept {
    std::int64_t sum = 0;
    for_words(first, num_rows, [&](std::size_t at, std::uint64_t mask) {
      sum += __builtin_popcountll(words_[at] & mask);
    });
    return sum;
  }
  void add(std::int64_t first, std::int64_t num_rows) noexcept {
    for_words(first, num_rows, [&](std::size_t at, std::uint64_t mask) { words_[at] |= mask; });
  }

 private:
  /// Calls `body(word, mask)` for each word that has some of the rows.
  template <class Body>
  static void for_words(std::int64_t first, std::int64_t num_rows, Body&& body) noexcept {
    if (num_rows <= 0) return;
    constexpr std::uint64_t kAll = ~std::uint64_t{0};
    const auto begin = static_cast<std::uint64_t>(first);
    const auto back = static_cast<std::uint64_t>(first + num_rows - 1);
    std::uint64_t at = begin / 64;
    const std::uint64_t last = back / 64;
    const std::uint64_t from_begin = kAll << (begin % 64);
    const std::uint64_t to_back = kAll >> (63 - back % 64);
    if (at == last) return body(at, from_begin & to_back);
    body(at, from_begin);
    for (++at; at < last; ++at) body(at, kAll);
    body(last, to_back);
  }

  std::vector<std::uint64_t> words_;
};

}  // namespace fanfold::capture
