// SPDX-License-Identifier: Apache-2.0
#include "exchange/row_cursor.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"

namespace fanfold::exchange {
namespace {

using testing::Bytes;
using testing::random_bytes;
using testing::RandomBits;
using testing::same_bytes;
using testing::untouched_bytes;

using ReadCursor = RowCursor<const std::byte>;
using WriteCursor = RowCursor<std::byte>;

/// All that is left, at most `max_piece` bytes at a time.
Bytes drain(ReadCursor& cursor, std::int64_t max_piece) {
  Bytes bytes;
  while (cursor.remaining() > 0) {
    const auto piece = cursor.piece();
    const std::int64_t taken = std::min(piece.bytes, max_piece);
    bytes.insert(bytes.end(), piece.data, piece.data + taken);
    cursor.advance(taken);
  }
  EXPECT_EQ(cursor.piece().bytes, 0);
  return bytes;
}

/// Rows `picks` of `data`, one by one.
Bytes rows_of(const Bytes& data, std::int64_t stride_bytes, std::int64_t row_bytes,
              const std::vector<std::int32_t>& picks) {
  Bytes bytes;
  for (const std::int32_t row : picks) {
    const std::byte* first = data.data() + row * stride_bytes;
    bytes.insert(bytes.end(), first, first + row_bytes);
  }
  return bytes;
}

TEST(RowCursorTest, IsEmptyWithoutRows) {
  ReadCursor cursor;
  const Bytes data = random_bytes(8, 1);
  EXPECT_EQ(cursor.remaining(), 0);
  cursor.add({data.data(), 4, 4, 0, nullptr});
  EXPECT_EQ(cursor.remaining(), 0);
  EXPECT_EQ(cursor.piece().bytes, 0);
}

TEST(RowCursorTest, DenseRowsAreOnePiece) {
  const Bytes data = random_bytes(40, 1);
  ReadCursor cursor;
  cursor.add({data.data(), 4, 4, 10, nullptr});
  EXPECT_EQ(cursor.piece().data, data.data());
  EXPECT_EQ(cursor.piece().bytes, 40);
}

TEST(RowCursorTest, ConsecutivePicksAreOnePiece) {
  const Bytes data = random_bytes(40, 1);
  const std::vector<std::int32_t> picks{2, 3, 4, 7, 8, 1};
  ReadCursor cursor;
  cursor.add({data.data(), 4, 4, 6, picks.data()});
  EXPECT_EQ(cursor.piece().bytes, 12);
  cursor.advance(12);
  EXPECT_EQ(cursor.piece().data, data.data() + 28);
  EXPECT_EQ(cursor.piece().bytes, 8);
  cursor.advance(8);
  EXPECT_EQ(cursor.piece().bytes, 4);
}

TEST(RowCursorTest, GivesTheRowsOfItsBlocksInOrder) {
  RandomBits random(5);
  for (int round = 0; round < 200; ++round) {
    ReadCursor cursor;
    Bytes expected;
    std::vector<Bytes> memory;
    std::vector<std::vector<std::int32_t>> picks;
    memory.reserve(4);
    picks.reserve(4);
    for (std::int64_t block = random.below(4); block >= 0; --block) {
      const std::int64_t row_bytes = 1 + random.below(9);
      const std::int64_t stride_bytes = row_bytes + random.below(2) * 3;
      const std::int64_t num_rows = random.below(6);
      memory.push_back(random_bytes(20 * stride_bytes, random.next()));
      picks.emplace_back();
      const bool is_picked = random.below(2) == 0;
      for (std::int64_t row = 0; row < num_rows; ++row) {
        picks.back().push_back(static_cast<std::int32_t>(is_picked ? random.below(20) : row));
      }
      cursor.add({memory.back().data(), stride_bytes, row_bytes, num_rows,
                  is_picked ? picks.back().data() : nullptr});
      const Bytes rows = rows_of(memory.back(), stride_bytes, row_bytes, picks.back());
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    ASSERT_EQ(cursor.remaining(), static_cast<std::int64_t>(expected.size()));
    ASSERT_TRUE(same_bytes(drain(cursor, 1 + random.below(12)), expected)) << round;
  }
}

TEST(RowCursorTest, CopiesBetweenStridesAndTouchesNothingElse) {
  const Bytes data = random_bytes(60, 1);
  const std::vector<std::int32_t> picks{4, 0, 1, 2};
  Bytes out = untouched_bytes(50);
  ReadCursor from;
  WriteCursor to;
  from.add({data.data(), 8, 6, 4, picks.data()});
  from.add({data.data(), 3, 3, 5, nullptr});
  to.add({out.data(), 6, 6, 4, nullptr});
  to.add({out.data() + 24, 5, 3, 5, nullptr});
  copy_rows(from, to);
  EXPECT_EQ(from.remaining(), 0);
  EXPECT_EQ(to.remaining(), 0);
  Bytes expected = untouched_bytes(50);
  const Bytes first = rows_of(data, 8, 6, picks);
  std::copy(first.begin(), first.end(), expected.begin());
  for (std::ptrdiff_t row = 0; row < 5; ++row) {
    std::copy_n(data.begin() + row * 3, 3, expected.begin() + 24 + row * 5);
  }
  EXPECT_TRUE(same_bytes(out, expected));
}

TEST(RowCursorTest, MayBeUsedAgain) {
  const Bytes data = random_bytes(12, 1);
  ReadCursor cursor;
  for (int i = 0; i < 3; ++i) {
    cursor.clear();
    cursor.add({data.data(), 4, 4, 3, nullptr});
    EXPECT_TRUE(same_bytes(drain(cursor, 5), data));
  }
}

}  // namespace
}  // namespace fanfold::exchange
