// SPDX-License-Identifier: Apache-2.0
#include "exchange/row_stream.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"

namespace fanfold::exchange {
namespace {

void copy(std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

/// Every part of the stream, whatever its ends cut through, is that part of all rows in turn.
TEST(RowStreamTest, AnyPartOfStridedAndDenseRowsIsTheirBytesInTurn) {
  std::vector<std::byte> memory(200);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i);
  const std::byte* data = memory.data();
  const std::vector<RowSpan> spans = {
      {data, 3, 5, 5}, {data + 20, 4, 3, 7}, {nullptr, 0, 9, 9}, {data + 90, 2, 11, 20}};
  std::vector<std::byte> whole;
  for (const RowSpan& span : spans) {
    for (std::int64_t row = 0; row < span.num_rows; ++row) {
      const std::byte* start = span.rows + row * span.stride_bytes;
      whole.insert(whole.end(), start, start + span.row_bytes);
    }
  }
  const auto length = static_cast<std::int64_t>(whole.size());
  ASSERT_EQ(stream_bytes(spans), length);
  for (std::int64_t begin = 0; begin <= length; ++begin) {
    for (std::int64_t end = begin; end <= length; ++end) {
      std::vector<std::byte> part(static_cast<std::size_t>(end - begin + 1), std::byte{0xee});
      put_stream(spans, part.data(), begin, end - begin, copy);
      ASSERT_EQ(
          std::memcmp(part.data(), whole.data() + begin, static_cast<std::size_t>(end - begin)), 0);
      ASSERT_EQ(part.back(), std::byte{0xee});
    }
  }
}

TEST(RowStreamTest, TheArraysThatAPartTouchesAreVisitedInOrder) {
  const std::vector<std::int64_t> sizes = {4, 0, 6, 10};
  std::vector<SpanPart> parts;
  const auto visit = [&](const SpanPart& part) { parts.push_back(part); };
  const auto bytes_of = [&](std::size_t span) { return sizes[span]; };
  for_each_span(0, 4, bytes_of, 3, 8, visit);
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_EQ(parts[0].span, 0U);
  EXPECT_EQ(parts[0].begin, 3);
  EXPECT_EQ(parts[0].end, 4);
  EXPECT_EQ(parts[0].offset, 0);
  EXPECT_EQ(parts[1].span, 2U);
  EXPECT_EQ(parts[1].begin, 0);
  EXPECT_EQ(parts[1].end, 6);
  EXPECT_EQ(parts[1].offset, 1);
  EXPECT_EQ(parts[2].span, 3U);
  EXPECT_EQ(parts[2].end, 1);
  EXPECT_EQ(parts[2].offset, 7);
  parts.clear();
  for_each_span(2, 4, bytes_of, 6, 100, visit);
  ASSERT_EQ(parts.size(), 1U);
  EXPECT_EQ(parts[0].span, 3U);
  EXPECT_EQ(parts[0].end, 10);
}

}  // namespace
}  // namespace fanfold::exchange
