// SPDX-License-Identifier: Apache-2.0
#include "plan/send_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <ostream>
#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/random_bits.h"

namespace fanfold::plan {

bool operator==(const Target& a, const Target& b) { return a.rank == b.rank && a.row == b.row; }
std::ostream& operator<<(std::ostream& out, const Target& target) {
  return out << "row " << target.row << " of rank " << target.rank;
}

namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kSeed = 20240301;
constexpr int kNumRanks = 3;
constexpr int kNumExperts = 7;  // linear: 0..2 on rank 0, 3 and 4 on rank 1, 5 and 6 on rank 2
constexpr std::int64_t kMaxTokens = 9;

template <class Id>
constexpr DType kDTypeOf = DType::kInt32;
template <>
constexpr DType kDTypeOf<std::int16_t> = DType::kInt16;
template <>
constexpr DType kDTypeOf<std::int64_t> = DType::kInt64;
template <>
constexpr DType kDTypeOf<std::uint32_t> = DType::kUInt32;

/// Ids of a dispatch, `top_k` to a row, and the plans that they give.
template <class Id>
struct Ids {
  int top_k = 1;
  std::vector<Id> values;
  std::int64_t row_stride = 0;  // 0: dense
  std::vector<bool> active = std::vector<bool>(kNumRanks, true);
  bool drop = false;
  std::int64_t max_tokens = kMaxTokens;
  ExpertMap map = build_expert_map(Placement::linear(), kNumExperts, kNumRanks);

  std::int64_t num_tokens() const {
    return static_cast<std::int64_t>(values.size()) / std::max(top_k, 1);
  }

  /// Builds into `plan`, reading `count` rows of all those given.
  std::optional<BadId> build_into(SendPlan& plan, std::int64_t count) const {
    const std::int64_t stride = row_stride == 0 ? top_k : row_stride;
    // Between the rows lies what would be refused if it were read.
    std::vector<Id> strided(static_cast<std::size_t>(num_tokens() * stride), Id{kNumExperts});
    for (std::int64_t row = 0; row < num_tokens(); ++row) {
      std::copy_n(values.begin() + row * top_k, top_k, strided.begin() + row * stride);
    }
    TensorView view(strided.data(), kDTypeOf<Id>, {num_tokens(), top_k});
    view.strides[0] = stride;
    return build_send_plan(view, count, map, active, drop, plan);
  }

  std::optional<BadId> build(SendPlan& plan) const {
    reserve_send_plan(plan, map, top_k, max_tokens);
    return build_into(plan, num_tokens());
  }

  /// The plan of ids that are all good, or dropped.
  SendPlan plan() const {
    SendPlan plan;
    EXPECT_FALSE(build(plan).has_value());
    return plan;
  }
};

std::vector<Target> targets_of(const SendPlan& plan, std::size_t token) {
  return {plan.targets.begin() + plan.target_begin[token],
          plan.targets.begin() + plan.target_begin[token + 1]};
}

std::vector<std::int32_t> tokens_for(const SendPlan& plan, int rank) {
  const std::int32_t* tokens = plan.tokens_for(rank);
  return {tokens, tokens + plan.rows_per_rank[static_cast<std::size_t>(rank)]};
}

/// The contract, one rank at a time.
void expect_contract(const SendPlan& plan, const std::vector<std::int32_t>& ids, int top_k,
                     const ExpertMap& map, const std::vector<bool>& active) {
  const std::size_t num_tokens = ids.size() / static_cast<std::size_t>(top_k);
  ASSERT_EQ(plan.num_tokens, static_cast<std::int64_t>(num_tokens));
  EXPECT_EQ(plan.ids, ids);
  std::vector<std::vector<std::int32_t>> tokens(active.size());
  ASSERT_EQ(plan.target_begin.size(), num_tokens + 1);
  for (std::size_t token = 0; token < num_tokens; ++token) {
    std::set<std::int32_t> hosts;
    for (int k = 0; k < top_k; ++k) {
      const std::int32_t id =
          ids[token * static_cast<std::size_t>(top_k) + static_cast<std::size_t>(k)];
      if (id >= 0) hosts.insert(map.rank_of[static_cast<std::size_t>(id)]);
    }
    std::vector<Target> expected;
    for (const std::int32_t rank : hosts) {
      if (!active[static_cast<std::size_t>(rank)]) continue;
      auto& of_rank = tokens[static_cast<std::size_t>(rank)];
      expected.push_back({rank, static_cast<std::int32_t>(of_rank.size())});
      of_rank.push_back(static_cast<std::int32_t>(token));
    }
    EXPECT_EQ(targets_of(plan, token), expected) << "token " << token;
  }
  for (std::size_t rank = 0; rank < active.size(); ++rank) {
    EXPECT_EQ(tokens_for(plan, static_cast<int>(rank)), tokens[rank]) << "rank " << rank;
  }
}

TEST(SendPlanTest, ATokenGoesOnceToEachRankThatHostsOneOfItsExperts) {
  const SendPlan plan = Ids<std::int32_t>{3, {0, 1, 2, 0, 3, 4, 6, 5, 0}}.plan();
  EXPECT_THAT(targets_of(plan, 0), ElementsAre(Target{0, 0}));
  EXPECT_THAT(targets_of(plan, 1), ElementsAre(Target{0, 1}, Target{1, 0}));
  EXPECT_THAT(targets_of(plan, 2), ElementsAre(Target{0, 2}, Target{2, 0}));
  EXPECT_THAT(plan.rows_per_rank, ElementsAre(3, 1, 1));
}

TEST(SendPlanTest, TargetsAscendByRankWhateverTheOrderOfTheIds) {
  const SendPlan plan = Ids<std::int32_t>{3, {6, 3, 0, 3, 6, 0, 0, 6, 3}}.plan();
  for (std::size_t token = 0; token < 3; ++token) {
    const auto row = static_cast<std::int32_t>(token);
    EXPECT_THAT(targets_of(plan, token),
                ElementsAre(Target{0, row}, Target{1, row}, Target{2, row}));
  }
}

TEST(SendPlanTest, RowsOfARankKeepTheOrderOfTheTokens) {
  const SendPlan plan = Ids<std::int32_t>{1, {5, 0, 6, 3, 0, 5}}.plan();
  EXPECT_THAT(tokens_for(plan, 0), ElementsAre(1, 4));
  EXPECT_THAT(tokens_for(plan, 1), ElementsAre(3));
  EXPECT_THAT(tokens_for(plan, 2), ElementsAre(0, 2, 5));
  EXPECT_EQ(plan.tokens_for(2) - plan.tokens_for(1), kMaxTokens);
}

TEST(SendPlanTest, RepeatedExpertsGiveOneRowAndStayAsSent) {
  const SendPlan plan = Ids<std::int32_t>{4, {5, 5, 6, 5}}.plan();
  EXPECT_THAT(targets_of(plan, 0), ElementsAre(Target{2, 0}));
  EXPECT_THAT(plan.ids, ElementsAre(5, 5, 6, 5));
}

TEST(SendPlanTest, NoTokensGiveAnEmptyPlan) {
  const SendPlan plan = Ids<std::int32_t>{2, {}}.plan();
  EXPECT_EQ(plan.num_tokens, 0);
  EXPECT_THAT(plan.target_begin, ElementsAre(0));
  EXPECT_THAT(plan.targets, IsEmpty());
  EXPECT_THAT(plan.rows_per_rank, ElementsAre(0, 0, 0));
}

TEST(SendPlanTest, OnlyTheFirstTokensOfTheTensorAreRead) {
  const Ids<std::int32_t> ids{2, {0, 3, 6, 6, 99, 99}};
  SendPlan plan;
  reserve_send_plan(plan, ids.map, ids.top_k, kMaxTokens);
  EXPECT_FALSE(ids.build_into(plan, 2).has_value());
  EXPECT_EQ(plan.num_tokens, 2);
  EXPECT_THAT(plan.ids, ElementsAre(0, 3, 6, 6));
  EXPECT_THAT(plan.rows_per_rank, ElementsAre(1, 1, 1));
}

TEST(SendPlanTest, AllTokensMayGoToOneExpert) {
  const SendPlan plan = Ids<std::int32_t>{1, std::vector<std::int32_t>(kMaxTokens, 4)}.plan();
  EXPECT_THAT(plan.rows_per_rank, ElementsAre(0, kMaxTokens, 0));
}

TEST(SendPlanTest, InactiveRanksGetNoRow) {
  Ids<std::int32_t> ids{3, {0, 3, 6, 3, 4, 3, 6, 0, -1}};
  ids.active = {true, false, true};
  const SendPlan plan = ids.plan();
  EXPECT_THAT(targets_of(plan, 0), ElementsAre(Target{0, 0}, Target{2, 0}));
  EXPECT_THAT(targets_of(plan, 1), IsEmpty());
  EXPECT_THAT(targets_of(plan, 2), ElementsAre(Target{0, 1}, Target{2, 1}));
  EXPECT_THAT(plan.rows_per_rank, ElementsAre(2, 0, 2));
  EXPECT_EQ(plan.ids, ids.values);
}

TEST(SendPlanTest, ALaterBuildForgetsTheEarlierOne) {
  Ids<std::int32_t> ids{2, {0, 3, 6, 99, 5, 5}};
  ids.drop = true;
  SendPlan plan;
  ASSERT_FALSE(ids.build(plan).has_value());
  ASSERT_EQ(plan.num_dropped, 1);
  ids.values = {4, -1};
  ASSERT_FALSE(ids.build_into(plan, 1).has_value());
  EXPECT_EQ(plan.num_dropped, 0);
  expect_contract(plan, {4, -1}, 2, ids.map, ids.active);
}

TEST(SendPlanTest, ReservedPlansDoNotGrow) {
  const ExpertMap map = build_expert_map(Placement::linear(), kNumExperts, kNumRanks);
  for (const int top_k : {1, 2, 5}) {
    Ids<std::int32_t> ids{top_k, {}};
    for (std::int64_t i = 0; i < kMaxTokens * top_k; ++i) {
      ids.values.push_back(static_cast<std::int32_t>(3 * i % kNumExperts));
    }
    SendPlan plan;
    reserve_send_plan(plan, map, top_k, kMaxTokens);
    const auto capacities = [&plan] {
      return std::vector<std::size_t>{plan.ids.capacity(), plan.target_begin.capacity(),
                                      plan.targets.capacity(), plan.tokens_by_rank.capacity()};
    };
    const std::vector<std::size_t> reserved = capacities();
    ASSERT_FALSE(ids.build_into(plan, kMaxTokens).has_value());
    EXPECT_EQ(capacities(), reserved) << "top_k " << top_k;
  }
}

TEST(SendPlanTest, RandomRoutingsKeepTheContract) {
  testing::RandomBits random(kSeed);
  for (int i = 0; i < 300; ++i) {
    SCOPED_TRACE(::testing::Message() << "case " << i << ", seed " << kSeed);
    const int num_ranks = 1 + static_cast<int>(random.below(6));
    const int num_experts = 1 + static_cast<int>(random.below(12));
    Ids<std::int32_t> ids;
    ids.top_k = 1 + static_cast<int>(random.below(5));
    ids.row_stride = ids.top_k + random.below(3);
    ids.map = build_expert_map(Placement::round_robin(), num_experts, num_ranks);
    ids.active.clear();
    for (int rank = 0; rank < num_ranks; ++rank) ids.active.push_back(random.below(4) != 0);
    const std::int64_t num_ids = random.below(kMaxTokens + 1) * ids.top_k;
    for (std::int64_t j = 0; j < num_ids; ++j) {
      ids.values.push_back(static_cast<std::int32_t>(random.below(num_experts + 2) - 2));
    }
    expect_contract(ids.plan(), ids.values, ids.top_k, ids.map, ids.active);
  }
}

// --- Replicas -----------------------------------------------------------------------------------

/// Logical expert 0 has copies 0 (rank 0), 3 (rank 1) and 6 (rank 2), logical 1 has 1, 2 and 4 on
/// ranks 0 and 1, logical 2 has only 5 on rank 2.
template <class Id>
Ids<Id> replicated_ids(std::vector<Id> values) {
  Ids<Id> ids{2, std::move(values)};
  Placement placement = Placement::linear();
  placement.logical_of_expert = {0, 1, 1, 0, 1, 2, 0};
  ids.map = build_expert_map(placement, kNumExperts, kNumRanks);
  return ids;
}

TEST(SendPlanReplicaTest, TheRankAndTheTokenPickTheCopy) {
  const auto ids = replicated_ids<std::int32_t>({0, 1, 0, 1, 0, 1, 2, -3});
  SendPlan plan;
  plan.source_rank = 1;
  ASSERT_FALSE(ids.build(plan).has_value());
  expect_contract(plan, {3, 2, 6, 4, 0, 1, 5, -3}, 2, ids.map, ids.active);
  plan.source_rank = 0;
  ASSERT_FALSE(ids.build(plan).has_value());
  expect_contract(plan, {0, 1, 3, 2, 6, 4, 5, -3}, 2, ids.map, ids.active);
}

TEST(SendPlanReplicaTest, RepeatedLogicalIdsMeetAtOneCopy) {
  const auto ids = replicated_ids<std::int32_t>({0, 0, 0, 0, 1, 1});
  const SendPlan plan = ids.plan();
  expect_contract(plan, {0, 0, 3, 3, 4, 4}, 2, ids.map, ids.active);
  EXPECT_EQ(plan.targets.size(), 3U);
}

TEST(SendPlanReplicaTest, AnIdBeyondTheLogicalExpertsIsTooLarge) {
  auto ids = replicated_ids<std::int64_t>({0, 1, 2, 3, 2, 6});
  SendPlan plan;
  const auto bad = ids.build(plan);
  ASSERT_TRUE(bad.has_value());
  EXPECT_EQ(bad->row, 1);
  EXPECT_EQ(bad->column, 1);
  EXPECT_EQ(bad->id, 3);
  ids.drop = true;
  ASSERT_FALSE(ids.build(plan).has_value());
  EXPECT_EQ(plan.num_dropped, 2);
  expect_contract(plan, {0, 1, 5, -1, 5, -1}, 2, ids.map, ids.active);
}

TEST(SendPlanReplicaTest, ACopyOnAnInactiveRankGetsNoRow) {
  auto ids = replicated_ids<std::int32_t>({0, 2, 0, 2});
  ids.active = {true, true, false};
  const SendPlan plan = ids.plan();
  expect_contract(plan, {0, 5, 3, 5}, 2, ids.map, ids.active);
  EXPECT_EQ(plan.targets.size(), 2U);
}

// --- Id types ---------------------------------------------------------------------------------

template <class Id>
class SendPlanIdTest : public ::testing::Test {};
using IdTypes = ::testing::Types<std::int16_t, std::int32_t, std::int64_t, std::uint32_t>;
TYPED_TEST_SUITE(SendPlanIdTest, IdTypes);

TYPED_TEST(SendPlanIdTest, AllTypesAndRowStridesGiveTheSamePlan) {
  const std::vector<std::int32_t> values = {0, 6, 3, 3, 5, 1, 2, 4, 6, 6};
  Ids<TypeParam> ids{2, {values.begin(), values.end()}};
  for (const std::int64_t stride : {2, 3, 7}) {
    ids.row_stride = stride;
    expect_contract(ids.plan(), values, 2, ids.map, ids.active);
  }
}

TYPED_TEST(SendPlanIdTest, AnIdThatIsTooLargeIsNamedWithItsPlace) {
  const auto highest = std::numeric_limits<TypeParam>::max();
  for (const TypeParam bad_id : {TypeParam{kNumExperts}, TypeParam{kNumExperts + 1}, highest}) {
    Ids<TypeParam> ids{3, {0, 1, 2, 3, 4, bad_id, bad_id, 0, 0}};
    ids.row_stride = 5;
    SendPlan plan;
    const auto bad = ids.build(plan);
    ASSERT_TRUE(bad.has_value());
    EXPECT_EQ(bad->row, 1);
    EXPECT_EQ(bad->column, 2);
    EXPECT_EQ(bad->id, static_cast<std::int64_t>(bad_id));
  }
}

TYPED_TEST(SendPlanIdTest, TheLastExpertIsNotTooLarge) {
  const SendPlan plan = Ids<TypeParam>{1, {TypeParam{kNumExperts - 1}}}.plan();
  EXPECT_THAT(targets_of(plan, 0), ElementsAre(Target{2, 0}));
}

TYPED_TEST(SendPlanIdTest, DroppedIdsAreCountedAndBecomeNoExpert) {
  const auto highest = std::numeric_limits<TypeParam>::max();
  Ids<TypeParam> ids{2, {0, TypeParam{kNumExperts}, highest, highest, 6, 3}};
  ids.drop = true;
  const SendPlan plan = ids.plan();
  EXPECT_EQ(plan.num_dropped, 3);
  expect_contract(plan, {0, -1, -1, -1, 6, 3}, 2, ids.map, ids.active);
}

template <class Id>
class SendPlanSignedIdTest : public ::testing::Test {};
using SignedIdTypes = ::testing::Types<std::int16_t, std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(SendPlanSignedIdTest, SignedIdTypes);

TYPED_TEST(SendPlanSignedIdTest, NegativeIdsSelectNoExpert) {
  const auto lowest = std::numeric_limits<TypeParam>::min();
  const auto minus = [](int value) { return static_cast<TypeParam>(-value); };
  const Ids<TypeParam> ids{3, {minus(1), 4, minus(7), lowest, minus(2), minus(1)}};
  for (const bool drop : {false, true}) {
    SendPlan plan;
    auto with_mode = ids;
    with_mode.drop = drop;
    ASSERT_FALSE(with_mode.build(plan).has_value());
    EXPECT_THAT(targets_of(plan, 0), ElementsAre(Target{1, 0}));
    EXPECT_THAT(targets_of(plan, 1), IsEmpty());
    EXPECT_EQ(plan.num_dropped, 0);
    const auto lowest_sent = std::max<std::int64_t>(static_cast<std::int64_t>(lowest),
                                                    std::numeric_limits<std::int32_t>::min());
    EXPECT_THAT(plan.ids, ElementsAre(-1, 4, -7, lowest_sent, -2, -1));
  }
}

TEST(SendPlanIdWidthTest, WideIdsNeverWrapIntoTheRangeOfExperts) {
  const std::int64_t wraps_to_two = (std::int64_t{1} << 32) + 2;
  Ids<std::int64_t> wide{1, {wraps_to_two, -wraps_to_two}};
  SendPlan plan;
  const auto bad = wide.build(plan);
  ASSERT_TRUE(bad.has_value());
  EXPECT_EQ(bad->id, wraps_to_two);
  wide.drop = true;
  plan = wide.plan();
  EXPECT_EQ(plan.num_dropped, 1);
  EXPECT_THAT(plan.ids, Each(::testing::Lt(0)));
  EXPECT_THAT(plan.targets, IsEmpty());
}

// --- Plans without ids ------------------------------------------------------------------------

TEST(FullPlanTest, EveryTokenGoesToEveryActiveRank) {
  const ExpertMap map = build_expert_map(Placement::linear(), kNumExperts, kNumRanks);
  SendPlan plan;
  reserve_send_plan(plan, map, 2, kMaxTokens);
  build_full_plan(4, map, {true, false, true}, plan);
  EXPECT_EQ(plan.num_tokens, 4);
  for (std::size_t token = 0; token < 4; ++token) {
    const auto row = static_cast<std::int32_t>(token);
    EXPECT_THAT(targets_of(plan, token), ElementsAre(Target{0, row}, Target{2, row}));
  }
  EXPECT_THAT(plan.rows_per_rank, ElementsAre(4, 0, 4));
  EXPECT_THAT(tokens_for(plan, 2), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(plan.ids, IsEmpty());
}

TEST(FullPlanTest, ForgetsAnEarlierPlanWithIds) {
  Ids<std::int32_t> ids{1, {99, 3}};
  ids.drop = true;
  SendPlan plan = ids.plan();
  build_full_plan(0, ids.map, ids.active, plan);
  EXPECT_EQ(plan.num_dropped, 0);
  EXPECT_THAT(plan.targets, IsEmpty());
  EXPECT_THAT(plan.target_begin, ElementsAre(0));
}

// --- Repeats ----------------------------------------------------------------------------------

TEST(RepeatTest, AColumnRepeatsOnlyEarlierColumns) {
  const std::int32_t ids[] = {4, 2, 4, 2, 2, 7};
  std::vector<bool> repeats;
  for (int k = 0; k < 6; ++k) repeats.push_back(is_repeat(ids, k));
  EXPECT_THAT(repeats, ElementsAre(false, false, true, true, true, false));
}

TEST(RepeatTest, MergedWeightsAreSummedInTheOrderOfTheColumns) {
  const std::int32_t ids[] = {4, 9, 4, 4};
  // In float32 1 is lost beside 1e8; any other order than the first to the last gives 1 or 0.
  const float first_is_lost[] = {1.0F, 0.5F, 1e8F, -1e8F};
  const float last_is_kept[] = {1e8F, 0.5F, -1e8F, 1.0F};
  EXPECT_EQ(merged_weight(ids, first_is_lost, 0, 4), 0.0F);
  EXPECT_EQ(merged_weight(ids, last_is_kept, 0, 4), 1.0F);
  EXPECT_EQ(merged_weight(ids, last_is_kept, 1, 4), 0.5F);
}

}  // namespace
}  // namespace fanfold::plan
