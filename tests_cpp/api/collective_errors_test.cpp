// SPDX-License-Identifier: Apache-2.0
// The strategies over collectives, broadcast, gather_scatter and batched: calls that differ between
// ranks, ranks that are late or abort, and what cannot be.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/round_run.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::make_round;
using testing::RoundPlan;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;

class CollectiveErrorTest : public ::testing::TestWithParam<Strategy> {
 protected:
  static constexpr int kNumRanks = 3;
  static AllToAllConfig config() {
    AllToAllConfig config;
    config.num_experts = 6;
    config.top_k = 2;
    config.max_tokens_per_rank = 4;
    config.hidden = 8;
    config.dtype = DType::kFloat32;
    config.strategy = GetParam();
    config.name = "moe";
    return config;
  }
  static RoundPlan plan(std::uint64_t seed = 1) {
    return make_round(config(), kNumRanks, RoutingKind::kUniform, 4, seed);
  }
  static void run_round(AllToAll& all_to_all, std::uint64_t seed) {
    RoundRun round(all_to_all, plan(seed));
    round.dispatch();
    round.combine();
  }
  /// `call` must fail on every rank, with `words`; the last rank is the odd one. A reset heals.
  static void expect_mismatch(const std::vector<std::string>& words,
                              const std::function<void(AllToAll&, bool is_odd)>& call) {
    spawn_ranks(kNumRanks, [&](Communicator& communicator) {
      AllToAll all_to_all(communicator, config());
      run_round(all_to_all, 3);
      expect_error<InvalidArgument>(words,
                                    [&] { call(all_to_all, all_to_all.rank() == kNumRanks - 1); });
      EXPECT_TRUE(all_to_all.is_failed());
      communicator.barrier();  // the communicator is as good as before
      all_to_all.reset();
      for (std::uint64_t seed = 5; seed < 8; ++seed) run_round(all_to_all, seed);
      all_to_all.close();
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, CollectiveErrorTest,
                         ::testing::Values(Strategy::kBroadcast, Strategy::kGatherScatter,
                                           Strategy::kBatched),
                         [](const auto& param) { return std::string(name_of(param.param)); });

/// The heads of both combines agree in all but the round.
TEST_P(CollectiveErrorTest, RoundsCombinedInAnotherOrderAreNamed) {
  AllToAllConfig two = config();
  two.max_in_flight = 2;
  spawn_ranks(kNumRanks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, two);
    const bool is_odd = all_to_all.rank() == kNumRanks - 1;
    {
      RoundRun first(all_to_all, plan(1));
      RoundRun second(all_to_all, plan(2));
      first.dispatch();
      second.dispatch();
      expect_error<InvalidArgument>({"combine of round", "round: rank", "rank 2 has 1"},
                                    [&] { (is_odd ? second : first).combine(); });
    }
    communicator.barrier();
    all_to_all.reset();
    run_round(all_to_all, 3);
    all_to_all.close();
  });
}

TEST_P(CollectiveErrorTest, DispatchesThatDifferAreNamedOnEveryRank) {
  expect_mismatch({"moe", "dispatch of round 1", "round_max_tokens", "rank 2 has 3", "has 4"},
                  [](AllToAll& all_to_all, bool is_odd) {
                    RoundPlan odd = plan();
                    for (auto& tokens : odd.exchange.ranks) tokens.num_tokens = 2;
                    odd.exchange.round_max_tokens = is_odd ? 3 : 4;
                    RoundRun(all_to_all, odd).dispatch();
                  });
  expect_mismatch({"number of payloads", "rank 2 has 2", "has 1"},
                  [](AllToAll& all_to_all, bool is_odd) {
                    RoundPlan odd = plan();
                    if (is_odd) odd.payloads = {{DType::kUInt8, {1}}, {DType::kUInt8, {31}}};
                    RoundRun(all_to_all, odd).dispatch();
                  });
  expect_mismatch({"payload set", "rank 2"}, [](AllToAll& all_to_all, bool is_odd) {
    RoundPlan odd = plan();
    if (is_odd) odd.payloads[0].row_shape = {7};
    RoundRun(all_to_all, odd).dispatch();
  });
  expect_mismatch({"payload set", "rank 2"}, [](AllToAll& all_to_all, bool is_odd) {
    RoundPlan odd = plan();
    odd.exchange.has_weights = !is_odd;
    RoundRun(all_to_all, odd).dispatch();
  });
  expect_mismatch({"dispatch(routing=)", "rank 2"}, [](AllToAll& all_to_all, bool is_odd) {
    RoundRun first(all_to_all, plan());
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine();
    RoundRun second(all_to_all, plan());
    if (is_odd) {
      second.inputs.topk_ids = TensorView();
      second.inputs.topk_weights = TensorView();
      second.inputs.routing = routing;
    }
    second.dispatch();
  });
}

TEST_P(CollectiveErrorTest, CountsThatOneRankGotWrongFailOnEveryRank) {
  expect_mismatch({"num_tokens_per_rank", "4"}, [](AllToAll& all_to_all, bool is_odd) {
    RoundRun round(all_to_all, plan());
    if (is_odd) round.inputs.num_tokens_per_rank = std::vector<std::int64_t>{4, 3, 4};
    round.dispatch();
  });
}

TEST_P(CollectiveErrorTest, CombinesThatDifferAreNamedOnEveryRank) {
  expect_mismatch({"combine of round 1", "hidden", "rank 2 has 7", "has 8"},
                  [](AllToAll& all_to_all, bool is_odd) {
                    RoundPlan odd = plan();
                    if (is_odd) odd.hidden = 7;
                    RoundRun round(all_to_all, odd);
                    round.dispatch();
                    round.combine();
                  });
  expect_mismatch({"combine of round 1", "rank 2 has combine(release=False)"},
                  [](AllToAll& all_to_all, bool is_odd) {
                    RoundRun round(all_to_all, plan());
                    round.dispatch();
                    round.combine(/*release=*/!is_odd);
                  });
  expect_mismatch({"rank 2"}, [](AllToAll& all_to_all, bool is_odd) {
    RoundRun round(all_to_all, plan());
    round.dispatch();
    if (is_odd) {
      round.release();
      RoundRun(all_to_all, plan()).dispatch();
    } else {
      round.combine();
    }
  });
}

TEST_P(CollectiveErrorTest, ALateRankIsNamedAndAnAbortEndsTheWait) {
  spawn_ranks(kNumRanks, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, config());
    run_round(all_to_all, 1);
    if (all_to_all.rank() != 2) {
      RoundRun round(all_to_all, plan());
      round.inputs.timeout = std::chrono::milliseconds(50);
      expect_error<PeerTimeout>({"moe", "round 1", "rank 2"}, [&] { round.dispatch(); });
    }
    communicator.barrier();
    all_to_all.reset();
    run_round(all_to_all, 2);
    if (all_to_all.rank() == 0) {
      all_to_all.abort("enough");
    } else {
      expect_error<PeerAborted>({"rank 0", "enough"}, [&] { run_round(all_to_all, 3); });
    }
    communicator.barrier();
    all_to_all.reset();
    run_round(all_to_all, 4);
    all_to_all.close();
  });
}

TEST_P(CollectiveErrorTest, WhatCannotBeIsRefused) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, config());
    EXPECT_FALSE(all_to_all.capabilities().rank_mask);
    expect_error<Unsupported>({"cannot leave ranks out"},
                              [&] { all_to_all.set_active_mask({true, true}); });
    all_to_all.close();
    if (GetParam() != Strategy::kBatched) return;
    AllToAllConfig gathered = config();
    gathered.layout = Layout::kGathered;
    expect_error<Unsupported>({"gathered"}, [&] { AllToAll(communicator, gathered); });
  });
}

}  // namespace
}  // namespace fanfold
