// SPDX-License-Identifier: Apache-2.0
// Replicas, and placements that change between rounds.

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using testing::expect_error;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;

constexpr int kNumExperts = 7;

struct Case {
  Strategy strategy;
  Layout layout;
  Weighting weighting;
  int num_ranks;
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(name_of(c.strategy)) + "_" + name_of(c.layout) + "_" + name_of(c.weighting) +
         "_" + std::to_string(c.num_ranks);
}

AllToAllConfig config_of(const Case& c) {
  AllToAllConfig config;
  config.num_experts = kNumExperts;
  config.top_k = 3;
  config.max_tokens_per_rank = 6;
  config.hidden = 9;
  config.dtype = DType::kFloat32;
  config.strategy = c.strategy;
  config.layout = c.layout;
  config.weighting = c.weighting;
  config.max_local_experts = kNumExperts;
  config.max_in_flight = 2;
  config.test_knobs.delay_seed = 5;
  config.name = "moe";
  return config;
}

/// A table that any seed gives; every logical expert has a copy.
Placement random_replicas(int num_ranks, std::uint64_t seed) {
  testing::RandomBits random(seed);
  const auto num_logical = static_cast<std::int32_t>(1 + random.below(kNumExperts));
  std::vector<std::int32_t> ranks;
  std::vector<std::int32_t> logical;
  for (std::int32_t expert = 0; expert < kNumExperts; ++expert) {
    ranks.push_back(static_cast<std::int32_t>(random.below(num_ranks)));
    logical.push_back(expert < num_logical ? expert
                                           : static_cast<std::int32_t>(random.below(num_logical)));
  }
  for (std::size_t i = logical.size() - 1; i > 0; --i) {
    std::swap(logical[i],
              logical[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i + 1)))]);
  }
  return Placement::from_replicas(ranks, logical);
}

void run_round(AllToAll& all_to_all, RoutingKind kind, std::uint64_t seed) {
  RoundRun round(all_to_all, testing::make_round(all_to_all.config(), all_to_all.num_ranks(), kind,
                                                 all_to_all.config().max_tokens_per_rank, seed));
  round.dispatch();
  round.combine();
}

class PlacementTest : public ::testing::TestWithParam<Case> {};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int num_ranks : {1, 2, 3}) {
    for (const Strategy strategy :
         {Strategy::kOneSided, Strategy::kBroadcast, Strategy::kGatherScatter, Strategy::kBatched,
          Strategy::kTwoSided}) {
      all.push_back({strategy, Layout::kRankMajor, Weighting::kApplied, num_ranks});
      all.push_back({strategy, Layout::kExpertMajor, Weighting::kOrigin, num_ranks});
    }
    all.push_back({Strategy::kBroadcast, Layout::kGathered, Weighting::kApplied, num_ranks});
    all.push_back({Strategy::kHighThroughput, Layout::kFlat, Weighting::kApplied, num_ranks});
    all.push_back(
        {Strategy::kHighThroughput, Layout::kFlatByExpert, Weighting::kCarried, num_ranks});
    all.push_back({Strategy::kLowLatency, Layout::kExpertMajor, Weighting::kCarried, num_ranks});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Threads, PlacementTest, ::testing::ValuesIn(cases()), name_of_case);

TEST_P(PlacementTest, TokensTakeTurnsAmongTheCopiesOfALogicalExpert) {
  for (std::uint64_t seed = 1; seed < 4; ++seed) {
    AllToAllConfig config = config_of(GetParam());
    config.placement = random_replicas(GetParam().num_ranks, seed);
    spawn_ranks(GetParam().num_ranks, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, config);
      for (const RoutingKind kind : testing::all_routings()) run_round(all_to_all, kind, seed);
      all_to_all.close();
    });
  }
}

TEST_P(PlacementTest, ExpertsMoveBetweenRoundsWithoutOtherSynchronisation) {
  const AllToAllConfig config = config_of(GetParam());
  constexpr int kNumMoves = testing::kIsSanitizer ? 4 : 12;
  spawn_ranks(GetParam().num_ranks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    run_round(all_to_all, RoutingKind::kUniform, 1);
    for (std::uint64_t move = 0; move < kNumMoves; ++move) {
      const Placement placement =
          move % 3 == 2 ? Placement::round_robin() : random_replicas(GetParam().num_ranks, move);
      all_to_all.set_placement(placement);
      EXPECT_EQ(all_to_all.config().placement.table, placement.table);
      run_round(all_to_all, RoutingKind::kUniform, 10 + move);
      run_round(all_to_all, RoutingKind::kDuplicates, 50 + move);
      if (::testing::Test::HasFailure()) return;
    }
    all_to_all.close();
  });
}

AllToAllConfig small_config(int num_experts = 6) {
  AllToAllConfig config =
      config_of({Strategy::kOneSided, Layout::kRankMajor, Weighting::kApplied, 0});
  config.num_experts = num_experts;
  config.max_local_experts = 0;
  config.test_knobs.delay_seed = 0;
  return config;
}

TEST(SetPlacementTest, LocalExpertsFollow) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config(4));
    all_to_all.set_placement(Placement::from_table({1, 0, 0, 1}));
    if (all_to_all.rank() == 0) {
      EXPECT_THAT(all_to_all.local_experts(), ElementsAre(1, 2));
    } else {
      EXPECT_THAT(all_to_all.local_experts(), ElementsAre(0, 3));
    }
    EXPECT_EQ(all_to_all.num_local_experts(), 2);
    run_round(all_to_all, RoutingKind::kUniform, 3);
    all_to_all.close();
  });
}

TEST(SetPlacementTest, DifferentPlacementsAreNamedOnEveryRankAndNothingChanges) {
  spawn_ranks(3, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    const bool odd = all_to_all.rank() == 1;
    expect_error<InvalidArgument>(
        {"moe", "placement differs", "rank 0 has round_robin", "rank 1 has table 0 0 1 1 2 2"},
        [&] {
          all_to_all.set_placement(odd ? Placement::from_table({0, 0, 1, 1, 2, 2})
                                       : Placement::round_robin());
        });
    EXPECT_EQ(all_to_all.config().placement.kind, Placement::Kind::kLinear);
    EXPECT_FALSE(all_to_all.is_failed());
    Placement replicas = Placement::round_robin();
    replicas.logical_of_expert = {0, 1, 2, 0, 1, odd ? 0 : 2};
    expect_error<InvalidArgument>(
        {"placement.logical_of_expert differs", "rank 0 has 0 1 2 0 1 2", "rank 1 has 0 1 2 0 1 0"},
        [&] { all_to_all.set_placement(replicas); });
    run_round(all_to_all, RoutingKind::kUniform, 4);
    all_to_all.close();
  });
}

TEST(SetPlacementTest, TwoExchangesAreNotMixedUp) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config());
    AllToAll b(communicator, small_config());
    AllToAll& chosen = communicator.rank() == 0 ? a : b;
    expect_error<InvalidArgument>({"AllToAll whose placement is set differs"},
                                  [&] { chosen.set_placement(Placement::round_robin()); });
    a.close();
    b.close();
  });
}

TEST(SetPlacementTest, ARankWithoutRoomIsNamed) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    expect_error<InvalidArgument>(
        {"placement", "at most 3 experts", "max_local_experts", "4 on rank 1"},
        [&] { all_to_all.set_placement(Placement::from_table({0, 0, 1, 1, 1, 1})); });
    expect_error<InvalidArgument>({"placement", "table of 6", "got 7"}, [&] {
      all_to_all.set_placement(Placement::from_table({0, 0, 0, 1, 1, 1, 1}));
    });
    run_round(all_to_all, RoutingKind::kUniform, 4);
    all_to_all.close();
  });
}

TEST(SetPlacementTest, AnOpenRoundForbidsItAndAReleasedOneDoesNot) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    RoundRun round(all_to_all,
                   testing::make_round(all_to_all.config(), 2, RoutingKind::kUniform, 6, 1));
    round.dispatch();
    expect_error<InvalidState>({"moe", "set_placement", "round 0", "received"},
                               [&] { all_to_all.set_placement(Placement::round_robin()); });
    round.release();
    all_to_all.set_placement(Placement::round_robin());
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      run_round(all_to_all, RoutingKind::kUniform, seed);
    }
    all_to_all.close();
  });
}

TEST(SetPlacementTest, RoutingsOfEarlierPlacementsAreRefused) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    const testing::RoundPlan plan =
        testing::make_round(all_to_all.config(), 2, RoutingKind::kUniform, 6, 1);
    RoundRun first(all_to_all, plan);
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine();
    const auto dispatch_along = [&](AllToAll& exchange, const Routing& along) {
      RoundRun round(exchange, plan);
      DispatchInputs inputs;
      inputs.payloads = round.inputs.payloads;
      inputs.routing = along;
      exchange.release(exchange.dispatch(inputs).handle());
    };
    dispatch_along(all_to_all, routing);
    all_to_all.set_placement(Placement::round_robin());
    expect_error<InvalidArgument>({"routing", "present placement"},
                                  [&] { dispatch_along(all_to_all, routing); });
    // Back to the same tables: still another time.
    all_to_all.set_placement(Placement::linear());
    expect_error<InvalidArgument>({"routing", "present placement"},
                                  [&] { dispatch_along(all_to_all, routing); });

    // Equally often changed, but to something else.
    AllToAll other(communicator, small_config());
    other.set_placement(Placement::round_robin());
    other.set_placement(Placement::round_robin());
    RoundRun theirs(other, testing::make_round(other.config(), 2, RoutingKind::kUniform, 6, 2));
    theirs.dispatch();
    const Routing foreign = theirs.received().routing();
    theirs.combine();
    expect_error<InvalidArgument>({"routing", "another configuration"},
                                  [&] { dispatch_along(all_to_all, foreign); });
    all_to_all.close();
    other.close();
  });
}

TEST(SetPlacementTest, ARankThatDoesNotComeIsWaitedForNoLongerThanTheDeadline) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, small_config());
    if (communicator.rank() == 0) {
      expect_error<PeerTimeout>({"set_placement", "rank 1"}, [&] {
        all_to_all.set_placement(Placement::round_robin(), milliseconds(40));
      });
      EXPECT_FALSE(all_to_all.is_failed());
    } else {
      std::this_thread::sleep_for(milliseconds(100));
    }
    communicator.reset();
    run_round(all_to_all, RoutingKind::kUniform, 1);
    all_to_all.set_placement(Placement::round_robin());
    run_round(all_to_all, RoutingKind::kUniform, 2);
    all_to_all.close();
  });
}

TEST(ReplicaTest, AnIdBeyondTheLogicalExpertsIsNamedOrDropped) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAllConfig config = small_config();
    config.placement = Placement::from_replicas({0, 1, 0, 1, 0, 1}, {0, 0, 1, 1, 2, 2});
    for (const CheckIds check : {CheckIds::kRaise, CheckIds::kDrop}) {
      config.check_ids = check;
      AllToAll all_to_all(communicator, config);
      testing::RoundPlan plan =
          testing::make_round(all_to_all.config(), 2, RoutingKind::kUniform, 6, 1);
      plan.exchange.ranks[0].topk_ids[4] = 3;  // an expert, but no logical one
      RoundRun round(all_to_all, plan);
      if (check == CheckIds::kDrop) {
        round.dispatch();
        round.combine();
        EXPECT_EQ(all_to_all.num_dropped_ids(), communicator.rank() == 0 ? 1 : 0);
      } else if (communicator.rank() == 0) {
        expect_error<InvalidArgument>(
            {"topk_ids", "below 3", "logical experts", "got 3 at row 1, column 1"},
            [&] { round.dispatch(); });
      }
      all_to_all.close();
    }
  });
}

TEST(ReplicaTest, TablesThatDifferAreNamedAtCreation) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAllConfig config = small_config();
    const int last = communicator.rank();
    config.placement = Placement::from_replicas({0, 1, 0, 1, 0, 1}, {0, 1, 0, 1, 1, last});
    expect_error<InvalidArgument>(
        {"placement.logical_of_expert differs", "0 1 0 1 1 0", "0 1 0 1 1 1"},
        [&] { AllToAll refused(communicator, config); });
    config.placement.logical_of_expert = {0, 2, 2, 0, 0, 0};
    expect_error<InvalidArgument>({"placement.logical_of_expert", "none of 1"},
                                  [&] { AllToAll refused(communicator, config); });
  });
}

}  // namespace
}  // namespace fanfold
