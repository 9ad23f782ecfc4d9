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
    for (std::int64_t row = first, end = first + num_rows; row < end;) {
      const std::int64_t bit = row % 64;
      const std::int64_t here = std::min(64 - bit, end - row);
      const std::uint64_t ones = here == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << here) - 1;
      body(static_cast<std::size_t>(row / 64), ones << bit);
      row += here;
    }
  }

  std::vector<std::uint64_t> words_;
};

}  // namespace fanfold::capture
