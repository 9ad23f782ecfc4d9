// SPDX-License-Identifier: Apache-2.0
// The conformance suites on threads as ranks, and what needs no strategy, layout or group.

#include "fanfold/all_to_all.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "api/all_to_all_conformance.h"
#include "api/all_to_all_rounds_conformance.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fanfold {
namespace {

using ::testing::Values;
using ::testing::ValuesIn;

void spawn_threads(int num_ranks, const std::function<void(Communicator&)>& rank_body) {
  testing::spawn_ranks(num_ranks, rank_body);
}

bool is_in(const std::vector<Layout>& layouts, Layout layout) {
  return std::find(layouts.begin(), layouts.end(), layout) != layouts.end();
}

/// Every layout of every strategy. What a strategy lays out itself runs with several numbers of
/// ranks; its other layouts are made from these rows by code that all strategies share, so for
/// most strategies one weighting will do, and no sanitizer.
std::vector<ConformanceCase> all_cases() {
  std::vector<ConformanceCase> cases;
  for (const Strategy strategy : kStrategies) {
    const Capabilities record = exchange::capabilities_of(strategy);
    for (const Layout layout : record.layouts) {
      std::vector<int> rank_counts = {3};
      const bool is_first = strategy == Strategy::kOneSided || strategy == Strategy::kBroadcast;
      if (is_in(record.native_layouts, layout)) rank_counts = {1, 2, 4};
      if (is_first && is_per_expert(layout)) rank_counts = {2, 4};
      const bool is_derived = rank_counts.size() == 1;
      if (testing::kIsSanitizer) {
        if (is_derived) continue;
        rank_counts = {3};  // one rank has no peer, and more of them show no more
        if (!testing::kIsThreadSanitizer) rank_counts.push_back(1);
      } else if (is_first && is_in(record.native_layouts, layout)) {
        rank_counts.push_back(7);
      }
      for (const ConformanceCase& c :
           conformance_cases(strategy, layout, rank_counts, spawn_threads)) {
        const bool is_representative = !is_per_expert(layout) || c.weighting == Weighting::kCarried;
        if (!is_derived || is_representative) cases.push_back(c);
      }
    }
  }
  return cases;
}

bool is_applied(const ConformanceCase& c) { return c.weighting == Weighting::kApplied; }
/// Results are summed in two ways only: as one_sided does, and where each expert has left them.
bool sums_differently(const ConformanceCase& c) {
  return c.strategy == Strategy::kOneSided ||
         (c.strategy == Strategy::kHighThroughput && c.layout == Layout::kFlatByExpert);
}
bool is_origin(const ConformanceCase& c) { return c.weighting == Weighting::kOrigin; }
bool is_gathered(const ConformanceCase& c) { return c.layout == Layout::kGathered; }
bool is_flat(const ConformanceCase& c) {
  return c.layout == Layout::kFlat || c.layout == Layout::kFlatByExpert;
}
bool has_flat_groups(const ConformanceCase& c) { return c.layout == Layout::kFlatByExpert; }
bool can_mask(const ConformanceCase& c) {
  return exchange::capabilities_of(c.strategy).rank_mask && c.num_ranks > 1;
}

INSTANTIATE_TEST_SUITE_P(Threads, AllToAllConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, RoundsConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, AppliedConformance, ValuesIn(select(all_cases(), is_applied)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, KernelConformance,
                         ValuesIn(select(all_cases(), sums_differently)), name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, OriginConformance, ValuesIn(select(all_cases(), is_origin)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, GatheredConformance, ValuesIn(select(all_cases(), is_gathered)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, FlatConformance, ValuesIn(select(all_cases(), is_flat)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, GroupConformance, ValuesIn(select(all_cases(), has_flat_groups)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Threads, MaskConformance, ValuesIn(select(all_cases(), can_mask)),
                         name_of_case);

AllToAllConfig small_config(Strategy strategy = Strategy::kOneSided) {
  AllToAllConfig config;
  config.num_experts = 6;
  config.top_k = 2;
  config.max_tokens_per_rank = 4;
  config.hidden = 8;
  config.dtype = DType::kFloat32;
  config.strategy = strategy;
  return config;
}

// --- Many ranks -------------------------------------------------------------------------------

/// Hundreds of threads under a sanitizer take minutes: there the fewest of one strategy.
std::vector<std::pair<Strategy, int>> many_ranks_cases() {
  std::vector<std::pair<Strategy, int>> cases = {{Strategy::kOneSided, 129}};
  if (testing::kIsSanitizer) return cases;
  cases.emplace_back(Strategy::kOneSided, 257);
  for (const Strategy strategy : kStrategies) {
    if (strategy != Strategy::kOneSided) cases.emplace_back(strategy, 129);
  }
  return cases;
}

class ManyRanksTest : public ::testing::TestWithParam<std::pair<Strategy, int>> {};

TEST_P(ManyRanksTest, MoreRanksThanAWarpOrABlockExchange) {
  const auto [strategy, num_ranks] = GetParam();
  AllToAllConfig config = small_config(strategy);
  config.num_experts = num_ranks;
  config.top_k = 3;
  config.max_tokens_per_rank = 1;
  config.channel_bytes = 4096;
  if (strategy == Strategy::kHighThroughput) config.layout = Layout::kFlat;
  const auto plan = testing::make_round(config, num_ranks, testing::RoutingKind::kUniform, 1, 7);
  testing::spawn_ranks(num_ranks, [&, &config = config](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    for (int i = 0; i < 2; ++i) {
      testing::RoundRun round(all_to_all, plan);
      round.dispatch();
      round.combine();
    }
    all_to_all.close();
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, ManyRanksTest, ValuesIn(many_ranks_cases()),
                         [](const auto& param) {
                           return std::string(name_of(param.param.first)) + "_" +
                                  std::to_string(param.param.second);
                         });

// --- Sizes ------------------------------------------------------------------------------------

TEST(AllToAllSizeTest, RequiredBytesAreWhatAnAllToAllHolds) {
  for (const Strategy strategy : kStrategies) {
    for (const Layout layout : exchange::capabilities_of(strategy).layouts) {
      AllToAllConfig config = small_config(strategy);
      config.layout = layout;
      config.max_in_flight = 3;
      testing::spawn_ranks(3, [&](Communicator& communicator) {
        AllToAll all_to_all(communicator, config);
        EXPECT_EQ(AllToAll::required_bytes(3, config), all_to_all.workspace_bytes());
        const Metainfo& info = all_to_all.metainfo();
        EXPECT_EQ(info.at("workspace_bytes"), all_to_all.workspace_bytes());
        EXPECT_EQ(info.at("symmetric_bytes") + info.at("local_bytes"), info.at("workspace_bytes"));
        EXPECT_EQ(info.at("max_tokens_per_rank"), config.max_tokens_per_rank);
        all_to_all.close();
      });
    }
  }
}

TEST(AllToAllSizeTest, RowsTimesHiddenMayExceedThirtyOneBits) {
  AllToAllConfig config = small_config();
  config.max_tokens_per_rank = std::int64_t{1} << 16;
  config.hidden = std::int64_t{1} << 16;
  config.dtype = DType::kBFloat16;
  const std::int64_t rows = 8 * config.max_tokens_per_rank;  // of one payload region
  const std::int64_t elements = rows * config.hidden;
  ASSERT_GT(elements, std::int64_t{1} << 31);
  const std::int64_t once = AllToAll::required_bytes(8, config);
  // Rows received and rows returned, and little besides.
  EXPECT_GE(once, 2 * 2 * elements);
  EXPECT_LE(once, 2 * 2 * elements + elements / 8);
  config.max_in_flight = 4;
  const std::int64_t four = AllToAll::required_bytes(8, config);
  EXPECT_GE(four, 4 * 2 * 2 * elements);
  EXPECT_LE(four, 4 * once);
}

TEST(AllToAllSizeTest, TheRegionsOfASlotDoNotOverlap) {
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    const Metainfo& info = all_to_all.metainfo();
    const char* const regions[] = {"source_token_offset", "topk_ids_offset", "topk_weights_offset",
                                   "payload_offset", "combine_offset"};
    std::int64_t end = 0;
    for (const char* region : regions) {
      EXPECT_GE(info.at(region), end) << region;
      EXPECT_EQ(info.at(region) % 128, 0) << region;
      end = info.at(region) + 1;
    }
    EXPECT_GE(info.at("combine_offset"), info.at("payload_offset") + info.at("payload_bytes"));
    EXPECT_GE(info.at("slot_stride"), info.at("combine_offset") + info.at("combine_bytes"));
    EXPECT_THROW(info.at("no_such_entry"), InvalidArgument);
    all_to_all.close();
  });
}

// --- What a strategy says of itself ------------------------------------------------------------

TEST(AllToAllCapabilityTest, AStrategyRefusesTheLayoutsItDoesNotList) {
  for (const Strategy strategy : kStrategies) {
    testing::spawn_ranks(2, [&](Communicator& communicator) {
      AllToAllConfig config = small_config(strategy);
      config.layout = Layout::kFlat;  // all have it
      AllToAll listed(communicator, config);
      const Capabilities capabilities = listed.capabilities();
      EXPECT_EQ(capabilities.strategy, strategy);
      EXPECT_THAT(listed.choice(), ::testing::HasSubstr(name_of(strategy)));
      EXPECT_EQ(capabilities.deterministic, capabilities.error_bound.empty());
      const std::set<Layout> layouts(capabilities.layouts.begin(), capabilities.layouts.end());
      for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor,
                                  Layout::kFlat, Layout::kFlatByExpert}) {
        config.layout = layout;
        if (layouts.count(layout) != 0) {
          AllToAll all_to_all(communicator, config);
          all_to_all.close();
        } else {
          EXPECT_THROW(AllToAll(communicator, config), Unsupported) << name_of(layout);
        }
      }
      listed.close();
    });
  }
}

TEST(AllToAllCapabilityTest, FeasibleSaysWhatDoesNotFit) {
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    EXPECT_TRUE(all_to_all.feasible(4, 32, Layout::kRankMajor).feasible);
    const Feasibility too_many = all_to_all.feasible(5, 32, Layout::kRankMajor);
    EXPECT_FALSE(too_many.feasible);
    EXPECT_THAT(too_many.reason,
                ::testing::AllOf(::testing::HasSubstr("5"), ::testing::HasSubstr("4")));
    EXPECT_FALSE(all_to_all.feasible(4, 33, Layout::kRankMajor).feasible);
    EXPECT_FALSE(all_to_all.feasible(4, 32, Layout::kGathered).feasible);
    all_to_all.close();
  });
}

// --- Lifetime ---------------------------------------------------------------------------------

TEST(AllToAllLifetimeTest, MemoryKeepsViewsMappedPastTheEnd) {
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    std::shared_ptr<const void> memory;
    const std::byte* row = nullptr;
    std::byte before{};
    {
      AllToAll all_to_all(communicator, small_config());
      testing::RoundRun round(
          all_to_all,
          testing::make_round(small_config(), 2, testing::RoutingKind::kAllToOne, 4, 1));
      round.dispatch();
      row = static_cast<const std::byte*>(round.received().payloads().front().data);
      memory = all_to_all.memory();
      round.combine();
      all_to_all.close();
    }
    std::memcpy(&before, row, 1);  // would fault if it were unmapped
    EXPECT_EQ(*row, before);
  });
}

TEST(AllToAllLifetimeTest, MovingKeepsOpenRounds) {
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll first(communicator, small_config());
    const auto plan = testing::make_round(small_config(), 2, testing::RoutingKind::kUniform, 4, 1);
    AllToAll second = std::move(first);
    testing::RoundRun round(second, plan);
    round.dispatch();
    round.combine();
    second.close();
    EXPECT_TRUE(second.is_closed());
  });
}

}  // namespace
}  // namespace fanfold
