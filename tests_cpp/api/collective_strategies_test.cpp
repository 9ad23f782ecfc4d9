// SPDX-License-Identifier: Apache-2.0
// The strategies over collectives, broadcast, gather_scatter and batched: every layout and
// weighting, rounds larger than a step of the channel, the transport's own sums.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/number_codec.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::make_round;
using testing::RoundPlan;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;

constexpr Strategy kStrategies[] = {Strategy::kBroadcast, Strategy::kGatherScatter,
                                    Strategy::kBatched};

struct Case {
  Strategy strategy;
  Layout layout;
  Weighting weighting;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << name_of(c.strategy) << ' ' << name_of(c.layout) << ' ' << name_of(c.weighting);
}

/// Pairs of layout and weighting that the contract allows. Under a sanitizer one weighting stands
/// for a layout: they differ in code that all strategies share.
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Strategy strategy : kStrategies) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor,
                                Layout::kFlat, Layout::kFlatByExpert}) {
      if (layout == Layout::kGathered && strategy == Strategy::kBatched) continue;
      cases.push_back({strategy, layout, Weighting::kApplied});
      if (!is_per_expert(layout) || testing::kIsSanitizer) continue;
      cases.push_back({strategy, layout, Weighting::kCarried});
      cases.push_back({strategy, layout, Weighting::kOrigin});
    }
  }
  return cases;
}

class CollectiveStrategyTest : public ::testing::TestWithParam<Case> {
 protected:
  static AllToAllConfig config(int num_ranks) {
    AllToAllConfig config;
    config.num_experts = 2 * num_ranks + 1;
    config.top_k = 3;
    config.max_tokens_per_rank = 6;
    config.hidden = 37;
    config.dtype = DType::kBFloat16;
    config.extra_bytes_per_token = 9;
    config.strategy = GetParam().strategy;
    config.layout = GetParam().layout;
    config.weighting = GetParam().weighting;
    if (config.layout == Layout::kFlatByExpert) config.expert_alignment = 4;
    return config;
  }
  /// Every rank runs each of the rounds to its end, without any other synchronisation.
  static void run_rounds(const AllToAllConfig& config, int num_ranks,
                         const std::vector<RoundPlan>& plans) {
    spawn_ranks(num_ranks, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, config);
      for (const RoundPlan& plan : plans) {
        RoundRun round(all_to_all, plan);
        round.dispatch();
        round.combine();
      }
      all_to_all.close();
    });
  }
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(name_of(c.strategy)) + "_" + name_of(c.layout) + "_" + name_of(c.weighting);
}

INSTANTIATE_TEST_SUITE_P(Threads, CollectiveStrategyTest, ::testing::ValuesIn(all_cases()),
                         name_of_case);

TEST_P(CollectiveStrategyTest, EveryRoutingGivesTheOraclesBits) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    const AllToAllConfig sized = config(num_ranks);
    std::vector<RoundPlan> plans;
    std::int64_t m = sized.max_tokens_per_rank;
    for (const RoutingKind kind : testing::all_routings()) {
      plans.push_back(make_round(sized, num_ranks, kind, m, 3));
      m = m == 2 ? sized.max_tokens_per_rank : m - 1;  // padded rows come and go
    }
    run_rounds(sized, num_ranks, plans);
  }
}

TEST_P(CollectiveStrategyTest, AnyPlacementIsRight) {
  const int num_ranks = 3;
  AllToAllConfig placed = config(num_ranks);
  for (const Placement& placement :
       {Placement::round_robin(), Placement::from_table({2, 0, 0, 2, 0, 2, 2})}) {
    placed.placement = placement;
    run_rounds(placed, num_ranks,
               {make_round(placed, num_ranks, RoutingKind::kUneven, 6, 1),
                make_round(placed, num_ranks, RoutingKind::kDuplicates, 5, 2)});
  }
}

TEST_P(CollectiveStrategyTest, StridedRowsGuardBytesAndPoisonChangeNothing) {
  const int num_ranks = 3;
  AllToAllConfig guarded = config(num_ranks);
  guarded.test_knobs.row_guard_bytes = 64;
  guarded.debug_poison = true;
  guarded.max_in_flight = 2;
  RoundPlan strided = make_round(guarded, num_ranks, RoutingKind::kUneven, 6, 4);
  strided.row_padding = 3;
  strided.payloads.push_back({DType::kUInt8, {4, 2}});  // scales, LoRA ids: payloads as others
  RoundPlan dense = make_round(guarded, num_ranks, RoutingKind::kUniform, 4, 5);
  dense.zero_copy = false;
  run_rounds(guarded, num_ranks, {strided, dense, strided, dense});
}

/// More bytes than a step of the channel carries, so that steps begin within rows.
TEST_P(CollectiveStrategyTest, RoundsOfManyStepsAreWhole) {
  for (const int num_ranks : {2, 3}) {
    if (num_ranks == 3 && is_per_expert(GetParam().layout)) continue;  // takes long
    AllToAllConfig large = config(num_ranks);
    large.hidden = 4099;
    large.dtype = DType::kFloat32;
    large.max_tokens_per_rank = 67;
    RoundPlan most =
        make_round(large, num_ranks, RoutingKind::kUniform, large.max_tokens_per_rank, 1);
    RoundPlan some =
        make_round(large, num_ranks, RoutingKind::kOneExpertPerToken, large.max_tokens_per_rank, 2);
    std::swap(some.payloads[0], some.payloads[1]);
    some.row_padding = 5;
    RoundPlan few = make_round(large, num_ranks, RoutingKind::kUneven, 2, 3);
    run_rounds(large, num_ranks, {most, few, some});
  }
}

TEST_P(CollectiveStrategyTest, ARoutingIsUsedAgainAndARoundIsCombinedTwice) {
  const int num_ranks = 3;
  const AllToAllConfig routed = config(num_ranks);
  const RoundPlan plan = make_round(routed, num_ranks, RoutingKind::kSomeNone, 5, 8);
  spawn_ranks(num_ranks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, routed);
    RoundRun first(all_to_all, plan);
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine(/*release=*/false);
    first.combine();
    for (int i = 0; i < 2; ++i) {
      RoundRun again(all_to_all, plan);
      again.inputs.topk_ids = TensorView();
      again.inputs.topk_weights = TensorView();
      again.inputs.routing = routing;
      again.dispatch();
      if (i == 0) {
        again.release();
      } else {
        again.combine();
      }
    }
    all_to_all.close();
  });
}

/// Those whose transport can add, in an order of its own.
std::vector<Case> summing_cases() {
  std::vector<Case> cases = all_cases();
  const auto cannot = [](const Case& c) { return c.strategy == Strategy::kBatched; };
  cases.erase(std::remove_if(cases.begin(), cases.end(), cannot), cases.end());
  return cases;
}

class SummingStrategyTest : public CollectiveStrategyTest {};
INSTANTIATE_TEST_SUITE_P(Threads, SummingStrategyTest, ::testing::ValuesIn(summing_cases()),
                         name_of_case);

TEST_P(SummingStrategyTest, OwnSumsOfTheTransportAreTheSameBitsInTheTypeThatTravels) {
  for (const int num_ranks : {1, 2, 4}) {
    AllToAllConfig loose = config(num_ranks);
    loose.deterministic = false;
    run_rounds(loose, num_ranks,
               {make_round(loose, num_ranks, RoutingKind::kUneven, 6, 1),
                make_round(loose, num_ranks, RoutingKind::kSomeNone, 5, 2),
                make_round(loose, num_ranks, RoutingKind::kZeroTokens, 4, 3)});
  }
}

// --- The bound of deterministic = false ----------------------------------------------------------

class TransportSumTest : public ::testing::TestWithParam<Strategy> {};
INSTANTIATE_TEST_SUITE_P(Threads, TransportSumTest,
                         ::testing::Values(Strategy::kBroadcast, Strategy::kGatherScatter),
                         [](const auto& param) { return std::string(name_of(param.param)); });

/// Partials of every magnitude and sign, exact in bfloat16.
float partial(int rank, int source, std::int64_t token, std::int64_t column) {
  const auto draw = static_cast<int>((rank * 77 + source * 31 + token * 13 + column * 7) % 251);
  return std::ldexp(static_cast<float>(draw - 125), draw % 12 - 8);
}

TEST_P(TransportSumTest, SumsStayWithinTheStatedBound) {
  const int num_ranks = 4;
  AllToAllConfig config;
  config.num_experts = 8;
  config.top_k = 6;
  config.max_tokens_per_rank = 9;
  config.hidden = 50;
  config.dtype = DType::kBFloat16;
  config.strategy = GetParam();
  config.deterministic = false;
  RoundPlan plan = make_round(config, num_ranks, RoutingKind::kSomeNone, 9, 1);
  spawn_ranks(num_ranks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    EXPECT_FALSE(all_to_all.capabilities().deterministic);
    EXPECT_NE(all_to_all.capabilities().error_bound, "");
    RoundRun round(all_to_all, plan);
    round.dispatch();
    const int rank = all_to_all.rank();
    const TensorView y = all_to_all.combine_buffer(round.handle());
    const auto* sources = static_cast<const std::int32_t*>(round.received().source_rank().data);
    const auto* tokens = static_cast<const std::int32_t*>(round.received().source_token().data);
    for (std::int64_t row = 0; row < num_ranks * 9; ++row) {
      for (std::int64_t column = 0; column < config.hidden && sources[row] >= 0; ++column) {
        testing::encode(DType::kBFloat16, partial(rank, sources[row], tokens[row], column),
                        static_cast<std::byte*>(y.data) + 2 * (row * config.hidden + column));
      }
    }
    const std::int64_t num_tokens = plan.exchange.tokens_of(rank).num_tokens;
    std::vector<float> out(static_cast<std::size_t>(num_tokens * config.hidden), -1.0F);
    CombineInputs inputs;
    inputs.y = y;
    inputs.out = TensorView(out.data(), DType::kFloat32, {num_tokens, config.hidden});
    all_to_all.combine(inputs, round.handle());
    bool differs = false;
    for (std::int64_t i = 0; i < num_tokens * config.hidden; ++i) {
      const std::int64_t token = i / config.hidden;
      float stated = 0.0F;
      float magnitude = 0.0F;
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (!plan.exchange.is_routed(rank, token, peer)) continue;
        const float value = partial(peer, rank, token, i % config.hidden);
        stated += value;
        magnitude += std::fabs(value);
      }
      const float reordered = 2.0F * static_cast<float>(num_ranks - 1) * 0x1p-24F * magnitude;
      const float bound = reordered + 0x1p-8F * (std::fabs(stated) + reordered);
      const float got = out[static_cast<std::size_t>(i)];
      ASSERT_LE(std::fabs(got - stated), bound) << "token " << token;
      differs = differs || got != stated;
    }
    EXPECT_TRUE(differs) << "the rounding to combine_dtype should show";
    all_to_all.close();
  });
}

// --- One answer ----------------------------------------------------------------------------------

TEST(CollectiveAnswerTest, AllStrategiesReceiveAndReturnTheSameBytes) {
  const int num_ranks = 3;
  std::vector<std::vector<std::byte>> answers;
  for (const Strategy strategy :
       {Strategy::kOneSided, Strategy::kBroadcast, Strategy::kGatherScatter, Strategy::kBatched}) {
    AllToAllConfig config;
    config.num_experts = 7;
    config.top_k = 4;
    config.max_tokens_per_rank = 5;
    config.hidden = 33;
    config.dtype = DType::kFloat16;
    config.strategy = strategy;
    config.layout = Layout::kExpertMajor;
    config.weighting = Weighting::kCarried;
    const RoundPlan plan = make_round(config, num_ranks, RoutingKind::kDuplicates, 5, 9);
    std::vector<std::byte> answer(static_cast<std::size_t>(num_ranks * 5 * 33 * 2));
    spawn_ranks(num_ranks, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, config);
      RoundRun round(all_to_all, plan);
      round.dispatch();
      round.check_received();
      const CombineInputs inputs = round.prepare_combine();
      all_to_all.combine(inputs, round.handle());
      std::memcpy(answer.data() + std::int64_t{all_to_all.rank()} * 5 * 33 * 2, inputs.out.data,
                  static_cast<std::size_t>(inputs.out.num_elements() * 2));
      all_to_all.close();
    });
    answers.push_back(answer);
  }
  for (const auto& answer : answers) EXPECT_EQ(answer, answers.front());
}

TEST(CollectiveAnswerTest, RouterLogitsTravelWithoutIds) {
  for (const Strategy strategy : {Strategy::kBroadcast, Strategy::kGatherScatter}) {
    AllToAllConfig config;
    config.num_experts = 6;
    config.top_k = 2;
    config.max_tokens_per_rank = 5;
    config.hidden = 16;
    config.extra_bytes_per_token = 24;
    config.strategy = strategy;
    config.layout = Layout::kGathered;
    RoundPlan plan = make_round(config, 3, RoutingKind::kUneven, 5, 2);
    plan.payloads = {{DType::kBFloat16, {16}}, {DType::kFloat32, {6}}};
    plan.exchange.has_ids = false;
    plan.exchange.has_weights = false;
    spawn_ranks(3, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, config);
      RoundRun round(all_to_all, plan);
      round.inputs.num_tokens_per_rank.emplace();
      for (const testing::RankTokens& tokens : plan.exchange.ranks) {
        round.inputs.num_tokens_per_rank->push_back(tokens.num_tokens);
      }
      round.dispatch();
      round.combine();
      all_to_all.close();
    });
  }
}

TEST(BatchedTest, CapacitiesAreThoseOfTheFixedBlocks) {
  AllToAllConfig config;
  config.num_experts = 5;
  config.top_k = 4;
  config.max_tokens_per_rank = 7;
  config.hidden = 8;
  config.strategy = Strategy::kBatched;
  config.layout = Layout::kExpertMajor;
  spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    const Capacities capacities = all_to_all.capacities();
    const int num_local = all_to_all.rank() == 0 ? 3 : 2;
    EXPECT_EQ(capacities.tokens_per_rank, 7);
    EXPECT_EQ(capacities.experts_per_token, num_local);
    EXPECT_EQ(capacities.rows_per_expert, 14);
    EXPECT_EQ(capacities.rows, num_local * 14);
    all_to_all.close();
  });
}

}  // namespace
}  // namespace fanfold
