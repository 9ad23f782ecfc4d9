// SPDX-License-Identifier: Apache-2.0
// The strategies over collectives, broadcast, gather_scatter and batched: calls that differ between
// ranks, ranks that are late or abort, what cannot be; and the memory of layout gathered that all
// ranks reach.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::make_round;
using testing::RoundPlan;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;

using Kind = std::pair<Strategy, Layout>;

class CollectiveErrorTest : public ::testing::TestWithParam<Kind> {
 protected:
  static constexpr int kNumRanks = 3;
  static AllToAllConfig config() {
    AllToAllConfig config;
    config.num_experts = 6;
    config.top_k = 2;
    config.max_tokens_per_rank = 4;
    config.hidden = 8;
    config.dtype = DType::kFloat32;
    config.strategy = GetParam().first;
    config.layout = GetParam().second;
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
                         ::testing::Values(Kind{Strategy::kBroadcast, Layout::kRankMajor},
                                           Kind{Strategy::kBroadcast, Layout::kGathered},
                                           Kind{Strategy::kGatherScatter, Layout::kRankMajor},
                                           Kind{Strategy::kGatherScatter, Layout::kGathered},
                                           Kind{Strategy::kBatched, Layout::kRankMajor}),
                         [](const auto& param) {
                           return std::string(name_of(param.param.first)) + "_" +
                                  name_of(param.param.second);
                         });

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
    if (GetParam().first != Strategy::kBatched) return;
    AllToAllConfig gathered = config();
    gathered.layout = Layout::kGathered;
    expect_error<Unsupported>({"gathered"}, [&] { AllToAll(communicator, gathered); });
  });
}

// --- Blocks of layout gathered ------------------------------------------------------------------

class BlockErrorTest : public ::testing::TestWithParam<Strategy> {
 protected:
  static AllToAllConfig config(std::int64_t hidden, Layout layout = Layout::kGathered) {
    AllToAllConfig config;
    config.num_experts = 6;
    config.top_k = 2;
    config.max_tokens_per_rank = 40;
    config.hidden = hidden;
    config.dtype = DType::kFloat32;
    config.strategy = GetParam();
    config.layout = layout;
    config.name = hidden == 600 ? "large" : "small";
    return config;
  }
  static void run_round(AllToAll& all_to_all) {
    RoundRun round(all_to_all, make_round(all_to_all.config(), all_to_all.num_ranks(),
                                          RoutingKind::kUniform, 40, 1));
    round.dispatch();
    round.combine();
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, BlockErrorTest,
                         ::testing::Values(Strategy::kBroadcast, Strategy::kGatherScatter),
                         [](const auto& param) { return std::string(name_of(param.param)); });

TEST_P(BlockErrorTest, WhoNeedsMoreRoomThanTheFirstIsRefusedOnEveryRank) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll small(communicator, config(300));
    const auto refuse = [&](const AllToAllConfig& wanted, const AllToAll& owner) {
      expect_error<InvalidArgument>(
          {"workspace_of: ", "needed", "bytes", owner.config().name, "larger sizes"},
          [&] { AllToAll refused(communicator, wanted, nullptr, &owner); });
    };
    refuse(config(600), small);
    AllToAllConfig guarded = config(300);
    guarded.test_knobs.row_guard_bytes = 64;  // needs more in the block only
    refuse(guarded, small);
    AllToAll rows(communicator, config(600, Layout::kRankMajor));
    refuse(config(300), rows);  // which has no blocks
    AllToAll narrow(communicator, config(20), nullptr, &small);
    AllToAll narrower(communicator, config(10), nullptr, &narrow);
    EXPECT_EQ(narrower.workspace_bytes(), small.workspace_bytes());
    EXPECT_EQ(small.workspace_bytes(), AllToAll::required_bytes(2, config(300)));
    for (AllToAll* one : {&narrow, &small, &narrower, &small}) run_round(*one);
    for (AllToAll* one : {&narrow, &small, &narrower, &rows}) one->close();
  });
}

/// The others fail before, while or after they write into the blocks of the one that aborts.
TEST_P(BlockErrorTest, AnAbortInTheMiddleOfARoundIsHealedByAReset) {
  AllToAllConfig slow = config(300);
  slow.max_in_flight = 2;
  slow.debug_poison = true;
  spawn_ranks(3, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, slow);
    for (int i = 0; i < 6; ++i) {
      RoundRun round(all_to_all, make_round(slow, 3, RoutingKind::kUniform, 40, 7));
      try {
        if (all_to_all.rank() == i % 3) {
          all_to_all.abort("enough");
          throw PeerAborted("own abort", i % 3, "enough");
        }
        round.dispatch();
        round.combine();
      } catch (const PeerAborted& error) {  // of that rank, or of one that resets already
        EXPECT_GE(error.rank(), 0);
      }
      all_to_all.reset();
      run_round(all_to_all);
    }
    all_to_all.close();
  });
}

/// Rounds of every size in flight, at a pace of its own on each rank, results in the buffer, beside
/// it and of another type, rounds that are released, combined again and used again.
TEST(BlockTest, NobodyOverwritesWhatAPeerStillReads) {
  constexpr int kNumRounds = testing::kIsSanitizer ? 12 : 60;
  for (const Strategy strategy : {Strategy::kBroadcast, Strategy::kGatherScatter}) {
    for (const int num_ranks : {1, 2, 4}) {
      AllToAllConfig config;
      config.num_experts = 2 * num_ranks + 1;
      config.top_k = 3;
      config.max_tokens_per_rank = 33;
      config.hidden = 517;
      config.dtype = DType::kBFloat16;
      config.extra_bytes_per_token = 9;
      config.combine_row_bytes = 517 * 4;
      config.strategy = strategy;
      config.layout = Layout::kGathered;
      config.max_in_flight = 2;
      config.debug_poison = true;
      config.test_knobs.delay_seed = 11;
      config.test_knobs.min_worker_bytes = 4096;
      const auto& kinds = testing::all_routings();
      spawn_ranks(num_ranks, [&](Communicator& communicator) {
        AllToAll all_to_all(communicator, config);
        all_to_all.set_num_workers(1 + num_ranks % 3);
        std::vector<std::unique_ptr<RoundRun>> open;
        for (std::uint64_t i = 0; i < kNumRounds && !::testing::Test::HasFailure(); ++i) {
          const std::int64_t m = i % 3 == 0 ? 1 : static_cast<std::int64_t>(1 + i * 7 % 33);
          RoundPlan plan = make_round(config, num_ranks, kinds[i % kinds.size()], m, i);
          plan.zero_copy = i % 4 != 1;
          if (i % 5 == 2) plan.y_dtype = DType::kFloat32;
          plan.row_padding = i % 7 == 3 ? 5 : 0;
          open.push_back(std::make_unique<RoundRun>(all_to_all, plan));
          open.back()->dispatch();
          if (open.size() < 2) continue;
          RoundRun& first = *open.front();
          first.check_received();
          for (std::uint64_t j = 0; j < i % 3; ++j) first.combine(/*release=*/false);
          if (i % 6 == 4) {
            first.release();
          } else {
            first.combine();
          }
          open.erase(open.begin());
        }
        if (!open.empty() && !::testing::Test::HasFailure()) open.front()->combine();
        all_to_all.close();
      });
    }
  }
}

TEST_P(BlockErrorTest, RowsOfTheBlockAreNoInputAndViewsOutliveTheClose) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll all_to_all(communicator, config(300));
    RoundRun round(all_to_all, make_round(all_to_all.config(), 2, RoutingKind::kUniform, 40, 1));
    round.dispatch();
    const TensorView rows = round.received().payloads()[0];
    const TensorView results = all_to_all.combine_buffer(round.handle());
    CombineInputs wrong = round.prepare_combine();
    wrong.y = rows;
    expect_error<InvalidArgument>({"y", "other memory of this AllToAll"},
                                  [&] { all_to_all.combine(wrong, round.handle()); });
    const std::shared_ptr<const void> memory = all_to_all.memory();
    round.combine();
    RoundRun again(all_to_all, make_round(all_to_all.config(), 2, RoutingKind::kUniform, 40, 1));
    again.inputs.payloads[0] = TensorView(rows.data, DType::kFloat32, {40, 300});
    expect_error<InvalidArgument>({"payloads[0]", "outside this AllToAll"},
                                  [&] { again.dispatch(); });
    all_to_all.close();
    // Still mapped.
    for (const TensorView& view : {rows, results}) {
      auto* bytes = static_cast<volatile char*>(const_cast<void*>(view.data));
      bytes[0] = 1;
      bytes[view.num_elements() * 4 - 1] = 2;
    }
  });
}

}  // namespace
}  // namespace fanfold
