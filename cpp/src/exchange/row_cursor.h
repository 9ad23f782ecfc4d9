// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows in memory as one stream of bytes, in pieces as long as they are contiguous.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fanfold::exchange {

/// Rows of equal size. `Byte` is std::byte where they are written, const std::byte where only read.
template <class Byte>
struct RowBlock {
  Byte* first = nullptr;
  std::int64_t stride_bytes = 0;
  std::int64_t row_bytes = 0;
  std::int64_t num_rows = 0;
  const std::int32_t* picks = nullptr;  // [num_rows] which rows; null: from the first on
};

/// Walks over blocks of rows, one after the other. Re-used without allocation.
template <class Byte>
class RowCursor {
 public:
  struct Piece {
    Byte* data;
    std::int64_t bytes;
  };

  void clear() noexcept {
    blocks_.clear();
    remaining_ = 0;
    block_ = 0;
    row_ = 0;
    piece_ = {nullptr, 0};
  }
  /// Appends a block. Not after the first `advance`.
  void add(const RowBlock<Byte>& block) {
    if (block.num_rows * block.row_bytes == 0) return;
    blocks_.push_back(block);
    remaining_ += block.num_rows * block.row_bytes;
    if (piece_.bytes == 0) find_piece();
  }
  std::int64_t remaining() const noexcept { return remaining_; }
  /// The next contiguous bytes; none at the end.
  Piece piece() const noexcept { return piece_; }
  /// Leaves `bytes` <= piece().bytes behind.
  void advance(std::int64_t bytes) noexcept {
    remaining_ -= bytes;
    piece_.bytes -= bytes;
    piece_.data += bytes;
    if (piece_.bytes == 0) find_piece();
  }

 private:
  void find_piece() noexcept {
    if (block_ < blocks_.size() && row_ == blocks_[block_].num_rows) {
      ++block_;
      row_ = 0;
    }
    if (block_ == blocks_.size()) return;
    const RowBlock<Byte>& block = blocks_[block_];
    const bool is_dense = block.stride_bytes == block.row_bytes;
    const std::int64_t row = block.picks != nullptr ? block.picks[row_] : row_;
    std::int64_t run = 1;
    if (is_dense && block.picks == nullptr) run = block.num_rows - row_;
    if (is_dense && block.picks != nullptr) {
      while (row_ + run < block.num_rows && block.picks[row_ + run] == row + run) ++run;
    }
    piece_ = {block.first + row * block.stride_bytes, run * block.row_bytes};
    row_ += run;
  }

  std::vector<RowBlock<Byte>> blocks_;
  std::int64_t remaining_ = 0;
  std::size_t block_ = 0;
  std::int64_t row_ = 0;  // of the block: the first behind the piece
  Piece piece_{nullptr, 0};
};

/// Copies what is left of `from` to `to`, which has as many bytes left.
inline void copy_rows(RowCursor<const std::byte>& from, RowCursor<std::byte>& to) noexcept {
  while (from.remaining() > 0) {
    const std::int64_t bytes = std::min(from.piece().bytes, to.piece().bytes);
    std::memcpy(to.piece().data, from.piece().data, static_cast<std::size_t>(bytes));
    from.advance(bytes);
    to.advance(bytes);
  }
}

}  // namespace fanfold::exchange
