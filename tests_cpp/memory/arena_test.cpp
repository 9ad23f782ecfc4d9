// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>

#include "gtest/gtest.h"
#include "support/random_bits.h"

namespace fanfold::memory {
namespace {

TEST(ArenaTest, GivesTheLowestRoomOnAlignedOffsets) {
  Arena arena(1024);
  EXPECT_EQ(arena.take(1), 0);
  EXPECT_EQ(arena.take(129), 128);
  EXPECT_EQ(arena.take(128), 384);
  EXPECT_EQ(arena.free_bytes(), 512);
  arena.give(128, 129);
  EXPECT_EQ(arena.free_bytes(), 768);
  EXPECT_EQ(arena.largest_free_bytes(), 512);
  EXPECT_EQ(arena.take(257), 512);
  EXPECT_EQ(arena.take(256), 128);
  EXPECT_EQ(arena.take(129), std::nullopt);
  EXPECT_EQ(arena.take(128), 896);
  EXPECT_EQ(arena.free_bytes(), 0);
  EXPECT_EQ(arena.take(1), std::nullopt);
}

TEST(ArenaTest, WhatIsTooShortForAStepHoldsNothing) {
  EXPECT_EQ(Arena(127).take(1), std::nullopt);
  EXPECT_EQ(Arena(0).take(1), std::nullopt);
  EXPECT_EQ(Arena(255).free_bytes(), 128);
  EXPECT_EQ(Arena(128).take(INT64_MAX), std::nullopt);
}

TEST(ArenaTest, NeighboursThatComeBackJoin) {
  for (const auto& [first, second, third] :
       {std::tuple{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}) {
    Arena arena(3 * 128);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(arena.take(100), i * 128);
    for (const int i : {first, second, third}) arena.give(i * 128, 100);
    EXPECT_EQ(arena.largest_free_bytes(), 3 * 128);
    EXPECT_EQ(arena.take(3 * 128), 0);
  }
}

TEST(ArenaTest, PartsNeverOverlapAndNothingIsLost) {
  constexpr std::uint64_t kSeed = 71;
  constexpr std::int64_t kBytes = 64 * 128;
  testing::RandomBits random(kSeed);
  Arena arena(kBytes);
  std::map<std::int64_t, std::int64_t> taken;
  std::int64_t in_use = 0;
  const auto rounded = [](std::int64_t bytes) { return (bytes + 127) / 128 * 128; };
  for (int i = 0; i < 5000; ++i) {
    if (!taken.empty() && random.below(2) == 0) {
      auto part = taken.begin();
      std::advance(part, random.below(static_cast<std::int64_t>(taken.size())));
      arena.give(part->first, part->second);
      in_use -= rounded(part->second);
      taken.erase(part);
    } else {
      const std::int64_t bytes = 1 + random.below(9 * 128);
      const std::int64_t largest = arena.largest_free_bytes();
      const auto offset = arena.take(bytes);
      ASSERT_EQ(offset.has_value(), rounded(bytes) <= largest) << "step " << i;
      if (offset) {
        const auto next = taken.lower_bound(*offset);
        if (next != taken.end()) {
          ASSERT_LE(*offset + bytes, next->first);
        }
        if (next != taken.begin()) {
          const auto before = std::prev(next);
          ASSERT_LE(before->first + before->second, *offset);
        }
        ASSERT_LE(*offset + bytes, kBytes);
        taken.emplace(*offset, bytes);
        in_use += rounded(bytes);
      }
    }
    ASSERT_EQ(arena.free_bytes(), kBytes - in_use) << "seed " << kSeed << ", step " << i;
  }
}

}  // namespace
}  // namespace fanfold::memory
