// SPDX-License-Identifier: Apache-2.0
#include "base/byte_math.h"

#include <cstdint>
#include <set>

#include "gtest/gtest.h"

namespace fanfold::base {
namespace {

TEST(ByteMathTest, AlignUpGivesTheNextMultiple) {
  EXPECT_EQ(align_up(0, 128), 0);
  EXPECT_EQ(align_up(1, 128), 128);
  EXPECT_EQ(align_up(127, 128), 128);
  EXPECT_EQ(align_up(128, 128), 128);
  EXPECT_EQ(align_up(129, 128), 256);
  EXPECT_EQ(align_up(10, 3), 12);
  EXPECT_EQ(align_up(7, 1), 7);
}

TEST(ByteMathTest, AlignUpIsExactBeyondThirtyTwoBits) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 40;
  EXPECT_EQ(align_up(kLarge, 128), kLarge);
  EXPECT_EQ(align_up(kLarge + 1, 128), kLarge + 128);
  EXPECT_EQ(align_up((std::int64_t{1} << 31) - 1, 64), std::int64_t{1} << 31);
}

TEST(ByteMathTest, DigestIsFnv1aOverTheBytesOfEachWord) {
  EXPECT_EQ(kDigestSeed, 0xcbf29ce484222325ULL);
  // FNV-1a of the eight bytes "foobarba", which are this word on a little-endian machine.
  EXPECT_EQ(mix_digest(kDigestSeed, 0x61627261626f6f66ULL), 0x738914eb4e1451adULL);
  EXPECT_EQ(mix_digest(kDigestSeed, 0), 0xa8c7f832281a39c5ULL);
}

TEST(ByteMathTest, DigestsTellOrderAndNeighboursApart) {
  std::set<std::uint64_t> digests;
  for (std::uint64_t a = 0; a < 50; ++a) {
    for (std::uint64_t b = 0; b < 50; ++b) {
      digests.insert(mix_digest(mix_digest(kDigestSeed, a), b << 56));
    }
  }
  EXPECT_EQ(digests.size(), 2500U);
}

}  // namespace
}  // namespace fanfold::base
