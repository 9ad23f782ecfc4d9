// SPDX-License-Identifier: Apache-2.0
#include "plan/expert_map.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;

constexpr std::pair<int, int> kSizes[] = {{1, 1},  {1, 7},  {2, 3},  {5, 2},   {6, 6},
                                          {7, 8},  {8, 7},  {30, 8}, {64, 16}, {100, 9},
                                          {3, 50}, {17, 4}, {16, 4}, {257, 16}};

std::vector<int> sizes(const ExpertMap& map) {
  std::vector<int> sizes;
  for (const auto& experts : map.experts_of) sizes.push_back(static_cast<int>(experts.size()));
  return sizes;
}

/// What holds for every placement: the three tables tell the same.
void expect_consistent(const ExpertMap& map, int num_experts, int num_ranks) {
  EXPECT_EQ(map.num_experts, num_experts);
  EXPECT_EQ(map.num_ranks, num_ranks);
  ASSERT_EQ(map.rank_of.size(), static_cast<std::size_t>(num_experts));
  ASSERT_EQ(map.local_of.size(), static_cast<std::size_t>(num_experts));
  ASSERT_EQ(map.experts_of.size(), static_cast<std::size_t>(num_ranks));
  for (std::size_t expert = 0; expert < map.rank_of.size(); ++expert) {
    const auto& experts = map.experts_of[static_cast<std::size_t>(map.rank_of[expert])];
    ASSERT_LT(static_cast<std::size_t>(map.local_of[expert]), experts.size());
    EXPECT_EQ(experts[static_cast<std::size_t>(map.local_of[expert])],
              static_cast<std::int32_t>(expert));
  }
  for (const auto& experts : map.experts_of) {
    EXPECT_TRUE(std::is_sorted(experts.begin(), experts.end()));
  }
  const std::vector<int> counts = sizes(map);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), 0), num_experts);
  EXPECT_EQ(map.max_local_experts, *std::max_element(counts.begin(), counts.end()));
}

TEST(ExpertMapTest, LinearPlacementGivesTheFirstRanksOneExpertMore) {
  const ExpertMap map = build_expert_map(Placement::linear(), 30, 8);
  EXPECT_THAT(sizes(map), ElementsAre(4, 4, 4, 4, 4, 4, 3, 3));
  EXPECT_EQ(map.max_local_experts, 4);
  EXPECT_THAT(map.experts_of[0], ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(map.experts_of[5], ElementsAre(20, 21, 22, 23));
  EXPECT_THAT(map.experts_of[6], ElementsAre(24, 25, 26));
  EXPECT_THAT(map.experts_of[7], ElementsAre(27, 28, 29));
  EXPECT_EQ(map.rank_of[24], 6);
  EXPECT_EQ(map.local_of[24], 0);
  EXPECT_EQ(map.local_of[29], 2);
}

TEST(ExpertMapTest, LinearPlacementLeavesRanksEmptyWhenExpertsAreFew) {
  const ExpertMap map = build_expert_map(Placement::linear(), 2, 3);
  EXPECT_THAT(sizes(map), ElementsAre(1, 1, 0));
  EXPECT_THAT(map.rank_of, ElementsAre(0, 1));
  EXPECT_THAT(map.local_of, ElementsAre(0, 0));
  EXPECT_THAT(map.experts_of[2], IsEmpty());
  EXPECT_EQ(map.max_local_experts, 1);
}

TEST(ExpertMapTest, LinearPlacementIsBlocksOfConsecutiveExperts) {
  for (const auto& [num_experts, num_ranks] : kSizes) {
    SCOPED_TRACE(::testing::Message() << num_experts << " experts, " << num_ranks << " ranks");
    std::vector<std::int32_t> expected;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int size = num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0);
      expected.insert(expected.end(), static_cast<std::size_t>(size), rank);
    }
    const ExpertMap map = build_expert_map(Placement::linear(), num_experts, num_ranks);
    expect_consistent(map, num_experts, num_ranks);
    EXPECT_EQ(map.rank_of, expected);
  }
}

TEST(ExpertMapTest, RoundRobinPlacementDealsExpertsInTurn) {
  for (const auto& [num_experts, num_ranks] : kSizes) {
    SCOPED_TRACE(::testing::Message() << num_experts << " experts, " << num_ranks << " ranks");
    const ExpertMap map = build_expert_map(Placement::round_robin(), num_experts, num_ranks);
    expect_consistent(map, num_experts, num_ranks);
    for (int expert = 0; expert < num_experts; ++expert) {
      EXPECT_EQ(map.rank_of[static_cast<std::size_t>(expert)], expert % num_ranks);
      EXPECT_EQ(map.local_of[static_cast<std::size_t>(expert)], expert / num_ranks);
    }
  }
}

TEST(ExpertMapTest, TablePlacesEachExpertWhereItSays) {
  const std::vector<std::int32_t> table = {3, 0, 3, 1, 3, 0};
  const ExpertMap map = build_expert_map(Placement::from_table(table), 6, 5);
  expect_consistent(map, 6, 5);
  EXPECT_THAT(map.rank_of, ElementsAreArray(table));
  EXPECT_THAT(map.local_of, ElementsAre(0, 0, 1, 0, 2, 1));
  EXPECT_THAT(sizes(map), ElementsAre(2, 1, 0, 3, 0));
  EXPECT_THAT(map.experts_of[3], ElementsAre(0, 2, 4));
}

TEST(ExpertMapTest, TableMayPutAllExpertsOnTheLastRank) {
  const std::vector<std::int32_t> table(9, 3);
  const ExpertMap map = build_expert_map(Placement::from_table(table), 9, 4);
  expect_consistent(map, 9, 4);
  EXPECT_THAT(sizes(map), ElementsAre(0, 0, 0, 9));
  EXPECT_EQ(map.max_local_experts, 9);
}

TEST(ExpertMapTest, TableOfAnotherLengthIsRefused) {
  for (const std::size_t length : {0U, 3U, 5U}) {
    const Placement placement = Placement::from_table(std::vector<std::int32_t>(length, 0));
    EXPECT_EQ(
        testing::expect_error<InvalidArgument>({}, [&] { build_expert_map(placement, 4, 2); }),
        "placement: expected a table of 4 ranks (num_experts), got " + std::to_string(length));
  }
}

TEST(ExpertMapTest, TableThatNamesAnUnknownRankIsRefused) {
  const auto error_of = [](std::int32_t rank) {
    return testing::expect_error<InvalidArgument>(
        {}, [&] { build_expert_map(Placement::from_table({0, 1, rank}), 3, 2); });
  };
  EXPECT_EQ(error_of(2), "placement: expected ranks in [0, 2), got rank 2 for expert 2");
  EXPECT_EQ(error_of(-1), "placement: expected ranks in [0, 2), got rank -1 for expert 2");
}

// --- Replicas -----------------------------------------------------------------------------------

TEST(ExpertMapTest, WithoutReplicasEveryExpertIsItsOwnCopy) {
  const ExpertMap map = build_expert_map(Placement::round_robin(), 5, 2);
  EXPECT_FALSE(map.has_replicas());
  EXPECT_EQ(map.num_logical, 5);
  for (std::int32_t expert = 0; expert < 5; ++expert) {
    EXPECT_EQ(map.copy_for(expert, /*source_rank=*/1, /*token=*/3), expert);
  }
}

TEST(ExpertMapTest, CopiesAreListedByLogicalExpertAscending) {
  const ExpertMap map =
      build_expert_map(Placement::from_replicas({0, 1, 1, 0, 2, 2}, {1, 0, 1, 2, 1, 0}), 6, 3);
  expect_consistent(map, 6, 3);
  EXPECT_TRUE(map.has_replicas());
  EXPECT_EQ(map.num_logical, 3);
  EXPECT_THAT(map.copy_begin, ElementsAre(0, 2, 5, 6));
  EXPECT_THAT(map.copies, ElementsAre(1, 5, 0, 2, 4, 3));
}

TEST(ExpertMapTest, SourceRankAndTokenTakeTurnsAmongTheCopies) {
  const ExpertMap map =
      build_expert_map(Placement::from_replicas({0, 1, 1, 0, 2, 2}, {1, 0, 1, 2, 1, 0}), 6, 3);
  std::vector<std::int32_t> picked;
  for (std::int64_t token = 0; token < 4; ++token) picked.push_back(map.copy_for(1, 2, token));
  EXPECT_THAT(picked, ElementsAre(4, 0, 2, 4));  // copies 0, 2, 4 from number (2 + token) mod 3
  EXPECT_EQ(map.copy_for(2, 2, std::int64_t{1} << 40), 3);
  EXPECT_EQ(map.copy_for(0, 1, (std::int64_t{1} << 40) + 1), 1);
}

TEST(ExpertMapTest, EveryPlacementMayHaveReplicas) {
  Placement placement = Placement::linear();
  placement.logical_of_expert = {0, 1, 0, 1};
  const ExpertMap map = build_expert_map(placement, 4, 2);
  EXPECT_EQ(map.num_logical, 2);
  EXPECT_THAT(map.rank_of, ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(map.copies, ElementsAre(0, 2, 1, 3));
}

TEST(ExpertMapTest, ReplicasThatCannotBeAreRefused) {
  const auto error_of = [](std::vector<std::int32_t> logical) {
    const Placement placement = Placement::from_replicas({0, 1, 0}, std::move(logical));
    return testing::expect_error<InvalidArgument>({}, [&] { build_expert_map(placement, 3, 2); });
  };
  EXPECT_EQ(error_of({0, 1}),
            "placement.logical_of_expert: expected 3 logical ids (num_experts), got 2");
  EXPECT_EQ(error_of({0, -1, 1}),
            "placement.logical_of_expert: expected ids in [0, 3), got -1 for expert 1");
  EXPECT_EQ(error_of({0, 3, 1}),
            "placement.logical_of_expert: expected ids in [0, 3), got 3 for expert 1");
  EXPECT_EQ(error_of({0, 2, 0}),
            "placement.logical_of_expert: expected a copy of each of the 3 logical experts, got "
            "none of 1");
}

}  // namespace
}  // namespace fanfold::plan
