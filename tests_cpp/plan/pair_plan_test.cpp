// SPDX-License-Identifier: Apache-2.0
#include "plan/pair_plan.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/number_codec.h"
#include "support/oracle.h"
#include "support/routing_generators.h"

namespace fanfold::plan {
namespace {

using testing::Exchange;
using testing::RoutingKind;
using testing::RoutingSpec;

constexpr int kNumExperts = 7;
constexpr int kTopK = 4;

struct Group {
  Exchange exchange;
  ExpertMap map;
  std::vector<SendPlan> plans;       // by source
  std::vector<PairPlan> pairs;       // by source
  std::vector<std::int32_t> counts;  // [R, E]
  std::int64_t most = 0;
};

/// What every rank plans for one round, the counts exchanged.
Group plan_round(RoutingKind kind, int num_ranks, std::int64_t alignment,
                 const std::vector<bool>& active, bool has_weights) {
  Group group;
  Exchange& exchange = group.exchange;
  exchange.num_ranks = num_ranks;
  exchange.num_experts = kNumExperts;
  exchange.top_k = kTopK;
  exchange.rank_of_expert = testing::round_robin_placement(kNumExperts, num_ranks);
  exchange.active = active;
  exchange.layout = Layout::kFlatByExpert;
  exchange.expert_alignment = alignment;
  exchange.ranks = testing::make_tokens({kind, num_ranks, kNumExperts, kTopK, 9, 3});
  group.map = build_expert_map(Placement::round_robin(), kNumExperts, num_ranks);
  for (int source = 0; source < num_ranks; ++source) {
    testing::RankTokens& tokens = exchange.ranks[static_cast<std::size_t>(source)];
    if (!active[static_cast<std::size_t>(source)]) tokens = {};
    SendPlan& plan = group.plans.emplace_back();
    plan.source_rank = source;
    reserve_send_plan(plan, group.map, kTopK, 9);
    const TensorView ids(tokens.topk_ids.data(), DType::kInt64, {tokens.num_tokens, kTopK});
    EXPECT_FALSE(build_send_plan(ids, tokens.num_tokens, group.map, active, false, plan));
    PairPlan& pairs = group.pairs.emplace_back();
    build_pairs(plan, group.map, active, has_weights ? tokens.topk_weights.data() : nullptr, kTopK,
                pairs);
    group.counts.insert(group.counts.end(), pairs.pairs_per_expert.begin(),
                        pairs.pairs_per_expert.end());
  }
  for (int source = 0; source < num_ranks; ++source) {
    group.most = place_pairs(group.counts, group.map, source, alignment,
                             group.pairs[static_cast<std::size_t>(source)]);
  }
  return group;
}

/// Every pair lies where a naive walk over the layout of its rank finds it, and no other row of any
/// layout has a token.
void expect_as_the_layout(const Group& group, bool has_weights) {
  const Exchange& exchange = group.exchange;
  std::int64_t num_rows = 0;
  std::int64_t num_pairs = 0;
  std::int64_t most = 0;
  std::map<std::pair<int, std::int64_t>, const Pair*> by_place;
  for (const PairPlan& plan : group.pairs) {
    num_pairs += static_cast<std::int64_t>(plan.pairs.size());
    for (const Pair& pair : plan.pairs) by_place[{pair.rank, pair.row}] = &pair;
  }
  EXPECT_EQ(static_cast<std::int64_t>(by_place.size()), num_pairs) << "two pairs in one row";
  for (int rank = 0; rank < exchange.num_ranks; ++rank) {
    const testing::ExpectedRows rows = testing::expected_rows(exchange, rank);
    most = std::max(most, static_cast<std::int64_t>(rows.source_rank.size()));
    for (std::size_t row = 0; row < rows.source_rank.size(); ++row) {
      const auto found = by_place.find({rank, static_cast<std::int64_t>(row)});
      if (rows.source_rank[row] < 0) {
        EXPECT_EQ(found, by_place.end()) << "row " << row << " of rank " << rank;
        continue;
      }
      ++num_rows;
      ASSERT_NE(found, by_place.end()) << "row " << row << " of rank " << rank;
      const Pair& pair = *found->second;
      EXPECT_EQ(pair.expert, rows.expert[row]);
      const auto source = static_cast<std::size_t>(rows.source_rank[row]);
      const auto token = static_cast<std::size_t>(rows.source_token[row]);
      const PairPlan& plan = group.pairs[source];
      const auto at = static_cast<std::int64_t>(&pair - plan.pairs.data());
      EXPECT_GE(at, plan.begin[token]);
      EXPECT_LT(at, plan.begin[token + 1]);
      const float weight =
          has_weights ? exchange.merged_weight(rows.source_rank[row], rows.source_token[row],
                                               pair.expert, exchange.ranks[source].topk_weights)
                      : 1.0F;
      EXPECT_EQ(pair.weight, weight);
    }
  }
  EXPECT_EQ(num_rows, num_pairs);
  EXPECT_EQ(group.most, most);
}

TEST(PairPlanTest, EveryRowLiesWhereTheLayoutOfItsRankHasIt) {
  for (const RoutingKind kind : testing::all_routings()) {
    for (const int num_ranks : {1, 2, 3}) {
      for (const std::int64_t alignment : {1, 4}) {
        const std::vector<bool> all(static_cast<std::size_t>(num_ranks), true);
        const bool has_weights = alignment == 4;
        SCOPED_TRACE(testing::name_of(kind));
        expect_as_the_layout(plan_round(kind, num_ranks, alignment, all, has_weights), has_weights);
      }
    }
  }
}

TEST(PairPlanTest, RanksThatAreLeftOutHaveNoPairs) {
  const Group group = plan_round(RoutingKind::kUniform, 3, 2, {true, false, true}, true);
  expect_as_the_layout(group, true);
  for (const PairPlan& plan : group.pairs) {
    for (const Pair& pair : plan.pairs) EXPECT_NE(pair.rank, 1);
  }
}

TEST(PairPlanTest, RanksAscendWithinATokenAndKeepTheOrderOfColumns) {
  const Group group = plan_round(RoutingKind::kDuplicates, 3, 1, {true, true, true}, true);
  for (std::size_t source = 0; source < group.pairs.size(); ++source) {
    const PairPlan& plan = group.pairs[source];
    for (std::size_t token = 0; token + 1 < plan.begin.size(); ++token) {
      const std::int32_t* ids = group.plans[source].ids_of(static_cast<std::int64_t>(token));
      std::vector<std::pair<int, std::int64_t>> places;  // rank, first column
      for (std::int64_t i = plan.begin[token]; i < plan.begin[token + 1]; ++i) {
        const Pair& pair = plan.pairs[static_cast<std::size_t>(i)];
        places.emplace_back(pair.rank, std::find(ids, ids + kTopK, pair.expert) - ids);
      }
      EXPECT_TRUE(std::is_sorted(places.begin(), places.end()));
      EXPECT_EQ(std::adjacent_find(places.begin(), places.end()), places.end());
    }
  }
}

TEST(PairPlanTest, TokensOfManyExpertsAreSortedTheSameWay) {
  constexpr int kMany = 100;
  const ExpertMap map = build_expert_map(Placement::round_robin(), kMany, 3);
  const std::vector<bool> active(3, true);
  std::vector<std::int32_t> ids(kMany);
  for (int k = 0; k < kMany; ++k) ids[static_cast<std::size_t>(k)] = (k * 37 + 11) % kMany;
  SendPlan plan;
  reserve_send_plan(plan, map, kMany, 1);
  ASSERT_FALSE(build_send_plan(TensorView(ids.data(), DType::kInt32, {1, kMany}), 1, map, active,
                               false, plan));
  PairPlan pairs;
  build_pairs(plan, map, active, nullptr, 0, pairs);
  std::vector<std::pair<int, std::int64_t>> places;  // rank, first column
  for (const Pair& pair : pairs.pairs) {
    places.emplace_back(pair.rank, std::find(ids.begin(), ids.end(), pair.expert) - ids.begin());
  }
  EXPECT_EQ(places.size(), ids.size());
  EXPECT_TRUE(std::is_sorted(places.begin(), places.end()));
}

TEST(PairPlanTest, ThePlacesOfARoutingAreCountedWithoutItsPairs) {
  const Group group = plan_round(RoutingKind::kSkewed, 3, 4, {true, true, true}, false);
  EXPECT_EQ(most_places(group.counts, group.map, 4), group.most);
  EXPECT_GT(group.most, 0);
  EXPECT_EQ(group.most % 4, 0);
}

}  // namespace
}  // namespace fanfold::plan
