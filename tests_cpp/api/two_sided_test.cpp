// SPDX-License-Identifier: Apache-2.0
// What only strategy two_sided has: channels smaller than what goes through them, and the records
// that keep all streams in step.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/random_bits.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/schedule.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using testing::expect_error;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;

constexpr std::int64_t kSmallestChannel = 4096;

AllToAllConfig small_config(int num_ranks) {
  AllToAllConfig config;
  config.num_experts = 2 * num_ranks + 1;
  config.top_k = 3;
  config.max_tokens_per_rank = 7;
  config.hidden = 37;
  config.dtype = DType::kFloat32;
  config.extra_bytes_per_token = 1;
  config.strategy = Strategy::kTwoSided;
  config.channel_bytes = kSmallestChannel;
  config.name = "moe";
  return config;
}

testing::RoundPlan plan_of(const AllToAll& all_to_all, RoutingKind kind, std::uint64_t seed = 1) {
  return testing::make_round(all_to_all.config(), all_to_all.num_ranks(), kind,
                             all_to_all.config().max_tokens_per_rank, seed);
}

testing::RoundPlan plan_of(const AllToAll& all_to_all, std::uint64_t seed = 1) {
  return plan_of(all_to_all, RoutingKind::kUniform, seed);
}

void run_round(AllToAll& all_to_all, const testing::RoundPlan& plan) {
  RoundRun round(all_to_all, plan);
  round.dispatch();
  round.combine();
}

void run_on_ranks(int num_ranks, const AllToAllConfig& config,
                  const std::function<void(AllToAll&, Communicator&)>& body) {
  spawn_ranks(num_ranks, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config);
    body(all_to_all, communicator);
    all_to_all.close();
  });
}

void run_on_ranks(int num_ranks, const AllToAllConfig& config,
                  const std::function<void(AllToAll&)>& body) {
  run_on_ranks(num_ranks, config, [&](AllToAll& all_to_all, Communicator&) { body(all_to_all); });
}

/// All ranks reset, and rounds work again.
void heal(AllToAll& all_to_all) {
  all_to_all.reset();
  EXPECT_FALSE(all_to_all.is_failed());
  all_to_all.check();
  for (std::uint64_t seed = 5; seed < 8; ++seed) run_round(all_to_all, plan_of(all_to_all, seed));
}

/// A reset ends the calls that peers are in, so it waits for theirs to end, before and after.
void expect_healed(AllToAll& all_to_all, Communicator& communicator) {
  communicator.barrier();
  heal(all_to_all);
  communicator.barrier();
}

// --- Every layout and number of ranks -----------------------------------------------------------

class TwoSidedTest : public ::testing::TestWithParam<std::tuple<Layout, int>> {
 protected:
  static Layout layout() { return std::get<0>(GetParam()); }
  static int num_ranks() { return std::get<1>(GetParam()); }
  static AllToAllConfig config() {
    AllToAllConfig config = small_config(num_ranks());
    config.layout = layout();
    if (layout() == Layout::kFlatByExpert) config.expert_alignment = 4;
    return config;
  }
};

INSTANTIATE_TEST_SUITE_P(Threads, TwoSidedTest,
                         ::testing::Combine(::testing::Values(Layout::kRankMajor, Layout::kFlat,
                                                              Layout::kExpertMajor,
                                                              Layout::kFlatByExpert),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& param) {
                           return std::string(name_of(std::get<0>(param.param))) + "_" +
                                  std::to_string(std::get<1>(param.param)) + "_ranks";
                         });

TEST_P(TwoSidedTest, EveryRoutingGivesTheOraclesAnswer) {
  run_on_ranks(num_ranks(), config(), [](AllToAll& all_to_all) {
    std::uint64_t seed = 0;
    for (const RoutingKind kind : testing::all_routings()) {
      run_round(all_to_all, plan_of(all_to_all, kind, ++seed));
    }
  });
}

TEST_P(TwoSidedTest, RowsMayBeManyTimesLargerThanAChannel) {
  AllToAllConfig big = config();
  big.hidden = testing::kIsSanitizer ? 3001 : 25001;
  big.max_tokens_per_rank = 3;
  run_on_ranks(num_ranks(), big, [](AllToAll& all_to_all) {
    for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kUneven,
                                   RoutingKind::kAllToOne, RoutingKind::kZeroTokens}) {
      run_round(all_to_all, plan_of(all_to_all, kind, 3));
    }
  });
}

TEST_P(TwoSidedTest, RowsOfOneByteTravel) {
  AllToAllConfig config = TwoSidedTest::config();
  config.dtype = DType::kUInt8;
  config.combine_dtype = DType::kBFloat16;
  config.hidden = 1;
  config.extra_bytes_per_token = 0;
  config.max_tokens_per_rank = 61;
  run_on_ranks(num_ranks(), config, [](AllToAll& all_to_all) {
    for (std::uint64_t seed = 1; seed < 4; ++seed) {
      testing::RoundPlan plan = plan_of(all_to_all, RoutingKind::kSkewed, seed);
      run_round(all_to_all, plan);
    }
  });
}

TEST_P(TwoSidedTest, GuardsBetweenRowsAndLateEpochsChangeNothing) {
  AllToAllConfig config = TwoSidedTest::config();
  config.test_knobs.row_guard_bytes = 48;
  config.test_knobs.first_epoch = (std::uint64_t{1} << 47) - 1;
  config.debug_poison = true;
  run_on_ranks(num_ranks(), config, [](AllToAll& all_to_all) {
    for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kDuplicates}) {
      run_round(all_to_all, plan_of(all_to_all, kind));
    }
  });
}

TEST_P(TwoSidedTest, NoDelayAndNoOrderOfCallsSpoilsARound) {
  for (std::uint64_t seed = 1; seed <= (testing::kIsSanitizer ? 1 : 3); ++seed) {
    AllToAllConfig config = TwoSidedTest::config();
    config.max_in_flight = 3;
    config.test_knobs.delay_seed = seed;
    run_on_ranks(num_ranks(), config, [&](AllToAll& all_to_all) {
      testing::ScheduleSpec spec;
      spec.num_rounds = 20;
      spec.max_in_flight = 3;
      spec.two_phase = false;
      spec.combines_more_than_once = true;
      spec.seed = seed;
      std::vector<std::unique_ptr<RoundRun>> rounds;
      for (int round = 0; round < spec.num_rounds; ++round) {
        const auto& kinds = testing::all_routings();
        rounds.push_back(std::make_unique<RoundRun>(
            all_to_all, plan_of(all_to_all, kinds[static_cast<std::size_t>(round) % kinds.size()],
                                testing::mix(seed, static_cast<std::uint64_t>(round)))));
      }
      for (const testing::Step& step : testing::random_schedule(spec)) {
        RoundRun& round = *rounds[static_cast<std::size_t>(step.round)];
        if (step.phase == testing::Phase::kDispatch) round.dispatch();
        if (step.phase == testing::Phase::kCombine) round.combine();
        if (step.phase == testing::Phase::kCombineKeep) round.combine(/*release=*/false);
        if (step.phase == testing::Phase::kRelease) round.release();
      }
    });
  }
}

TEST_P(TwoSidedTest, ARoutingIsReusedWithNewRows) {
  run_on_ranks(num_ranks(), config(), [](AllToAll& all_to_all) {
    for (const RoutingKind kind : {RoutingKind::kUneven, RoutingKind::kSkewed}) {
      RoundRun first(all_to_all, plan_of(all_to_all, kind, 1));
      first.dispatch();
      const Routing routing = first.received().routing();
      first.combine();
      run_round(all_to_all, plan_of(all_to_all, RoutingKind::kAllToOne, 9));
      for (int i = 0; i < 2; ++i) {
        RoundRun again(all_to_all, plan_of(all_to_all, kind, 1));
        again.inputs.topk_ids = TensorView();
        again.inputs.topk_weights = TensorView();
        again.inputs.routing = routing;
        again.dispatch();
        again.combine();
      }
    }
  });
}

TEST_P(TwoSidedTest, DispatchOnlyRoundsFollowEachOther) {
  for (const int in_flight : {1, 3, 64}) {
    AllToAllConfig config = TwoSidedTest::config();
    config.max_in_flight = in_flight;
    run_on_ranks(num_ranks(), config, [&](AllToAll& all_to_all) {
      for (std::uint64_t turn = 0; turn < 3; ++turn) {
        std::vector<std::unique_ptr<RoundRun>> open;
        for (int i = 0; i < in_flight; ++i) {
          const std::uint64_t seed = testing::mix(turn, static_cast<std::uint64_t>(i));
          open.push_back(std::make_unique<RoundRun>(
              all_to_all, plan_of(all_to_all, RoutingKind::kUneven, seed)));
          open.back()->dispatch();
        }
        for (const auto& round : open) round->release();
      }
      run_round(all_to_all, plan_of(all_to_all));
    });
  }
}

// --- Memory -------------------------------------------------------------------------------------

TEST(TwoSidedMemoryTest, SymmetricBytesDoNotDependOnTokens) {
  std::vector<std::int64_t> symmetric;
  for (const std::int64_t tokens : {8, 4096}) {
    AllToAllConfig config = small_config(2);
    config.max_tokens_per_rank = tokens;
    run_on_ranks(2, config, [&](AllToAll& all_to_all) {
      EXPECT_EQ(AllToAll::required_bytes(2, config), all_to_all.workspace_bytes());
      if (all_to_all.rank() == 0) {
        symmetric.push_back(all_to_all.metainfo().at("symmetric_bytes"));
      }
    });
  }
  EXPECT_EQ(symmetric.at(0), symmetric.at(1));
  EXPECT_LT(symmetric.at(0), kSmallestChannel + 4096);
}

TEST(TwoSidedMemoryTest, AnAllocatorsWindowIsUsedAgain) {
  spawn_ranks(2, [](Communicator& communicator) {
    Allocator allocator(communicator);
    for (std::uint64_t i = 0; i < 4; ++i) {
      AllToAll all_to_all(communicator, small_config(2), &allocator);
      for (std::uint64_t seed = 0; seed <= i; ++seed) {
        run_round(all_to_all, plan_of(all_to_all, seed));
      }
      all_to_all.close();
    }
    EXPECT_EQ(allocator.stats().num_blocks, 1);
    EXPECT_EQ(allocator.stats().num_reused, 3);
  });
}

// --- Failures -----------------------------------------------------------------------------------

/// More than the channels take, so that ranks block in the middle of their rows.
AllToAllConfig blocking_config(int num_ranks) {
  AllToAllConfig config = small_config(num_ranks);
  config.hidden = 5003;
  return config;
}

TEST(TwoSidedFailureTest, ALateRankIsNamedWithPhaseAndRound) {
  for (const bool in_combine : {false, true}) {
    std::atomic<int> num_ready{0};  // of the two that wait, so that neither is late for the other
    run_on_ranks(3, blocking_config(3), [&](AllToAll& all_to_all, Communicator& communicator) {
      run_round(all_to_all, plan_of(all_to_all));
      RoundRun round(all_to_all, plan_of(all_to_all));
      if (in_combine) round.dispatch();
      if (all_to_all.rank() != 1) {
        CombineInputs inputs;
        if (in_combine) inputs = round.prepare_combine();
        inputs.timeout = round.inputs.timeout = milliseconds(300);
        ++num_ready;
        EXPECT_TRUE(testing::eventually([&] { return num_ready == 2; }));
        const char* phase = in_combine ? "combine of round 1" : "dispatch of round 1";
        expect_error<PeerTimeout>({"moe", phase, "rank 1", "300", "reset"}, [&] {
          if (in_combine) {
            all_to_all.combine(inputs, round.handle());
          } else {
            round.dispatch();
          }
        });
        EXPECT_TRUE(all_to_all.is_failed());
      }
      expect_healed(all_to_all, communicator);
    });
  }
}

TEST(TwoSidedFailureTest, AbortEndsABlockedDispatch) {
  run_on_ranks(3, blocking_config(3), [&](AllToAll& all_to_all, Communicator& communicator) {
    RoundRun round(all_to_all, plan_of(all_to_all));
    if (all_to_all.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(20));
      all_to_all.abort("out of memory");
    } else {
      expect_error<PeerAborted>({"moe", "dispatch of round 0", "rank 2", "out of memory"},
                                [&] { round.dispatch(); });
    }
    expect_healed(all_to_all, communicator);
  });
}

// Each rank gives up after another time, some of them while rows are under way.
TEST(TwoSidedFailureTest, ResetFindsTheStreamsInAnyState) {
  for (std::uint64_t seed = 0; seed < (testing::kIsSanitizer ? 8 : 40); ++seed) {
    AllToAllConfig config = blocking_config(3);
    config.max_in_flight = 2;
    config.layout = seed % 2 == 0 ? Layout::kRankMajor : Layout::kFlat;
    run_on_ranks(3, config, [&](AllToAll& all_to_all, Communicator& communicator) {
      testing::RandomBits random(testing::mix(seed, static_cast<std::uint64_t>(all_to_all.rank())));
      for (int turn = 0; turn < 2; ++turn) {
        int num_failed = 0;
        try {
          for (std::int64_t rounds = random.below(3); rounds > 0; --rounds) {
            RoundRun round(all_to_all, plan_of(all_to_all, seed));
            round.inputs.timeout = microseconds(1 + random.below(3000));
            round.dispatch();
            if (random.below(2) == 0) {
              round.release();
              continue;
            }
            CombineInputs inputs = round.prepare_combine();
            inputs.timeout = microseconds(1 + random.below(3000));
            all_to_all.combine(inputs, round.handle());
          }
        } catch (const PeerTimeout&) {
          ++num_failed;
        } catch (const PeerAborted&) {
          ++num_failed;
        } catch (const InvalidArgument&) {  // one released where another combined
          ++num_failed;
        }
        EXPECT_LE(num_failed, 1);
        if (turn == 0) communicator.barrier();  // else some reset while others are in a call
        heal(all_to_all);
        communicator.barrier();
      }
    });
  }
}

/// Rank 2 of three does something else than the others. Every rank must say so.
void expect_difference(const std::vector<std::string>& words, const AllToAllConfig& config,
                       const std::function<void(AllToAll&, bool is_odd)>& call) {
  run_on_ranks(3, config, [&](AllToAll& all_to_all, Communicator& communicator) {
    run_round(all_to_all, plan_of(all_to_all));
    std::vector<std::string> all_words = words;
    all_words.insert(all_words.end(), {"moe", "differs between ranks", "rank 2",
                                       "rank " + std::to_string(all_to_all.rank()), "reset"});
    expect_error<InvalidArgument>(all_words, [&] { call(all_to_all, all_to_all.rank() == 2); });
    expect_healed(all_to_all, communicator);
  });
}

TEST(TwoSidedFailureTest, AnotherNumberOfTokensOrRowSizeIsNamedOnEveryRank) {
  expect_difference(
      {"dispatch of round 1", "round_max_tokens", "7", "8"},
      [] {
        AllToAllConfig config = blocking_config(3);
        config.max_tokens_per_rank = 8;
        return config;
      }(),
      [](AllToAll& all_to_all, bool is_odd) {
        RoundRun round(all_to_all, testing::make_round(all_to_all.config(), 3,
                                                       RoutingKind::kUniform, is_odd ? 7 : 8, 1));
        round.dispatch();
      });
  expect_difference({"dispatch of round 1", "number of payloads", "1", "2"}, blocking_config(3),
                    [](AllToAll& all_to_all, bool is_odd) {
                      testing::RoundPlan plan = plan_of(all_to_all);
                      if (is_odd) plan.payloads.pop_back();
                      RoundRun round(all_to_all, plan);
                      round.dispatch();
                    });
}

TEST(TwoSidedFailureTest, AnotherHiddenSizeOfTheCombineIsNamedOnEveryRank) {
  expect_difference({"combine of round 1", "hidden of the combine", "100", "101"},
                    blocking_config(3), [](AllToAll& all_to_all, bool is_odd) {
                      testing::RoundPlan plan = plan_of(all_to_all);
                      plan.hidden = is_odd ? 101 : 100;
                      RoundRun round(all_to_all, plan);
                      round.dispatch();
                      round.combine();
                    });
}

TEST(TwoSidedFailureTest, ACombineThatKeepsTheRoundIsNamedOnEveryRank) {
  expect_difference({"combine of round 1", "call", "release=False"}, blocking_config(3),
                    [](AllToAll& all_to_all, bool is_odd) {
                      RoundRun round(all_to_all, plan_of(all_to_all));
                      round.dispatch();
                      round.combine(/*release=*/!is_odd);
                    });
}

TEST(TwoSidedFailureTest, ARankThatReleasesWhereOthersCombineIsNamedOnEveryRank) {
  for (const bool odd_releases : {true, false}) {
    expect_difference({"of round 1", "call", "combine", "release"}, blocking_config(3),
                      [&](AllToAll& all_to_all, bool is_odd) {
                        RoundRun round(all_to_all, plan_of(all_to_all));
                        round.dispatch();
                        if (is_odd == odd_releases) {
                          round.release();
                          run_round(all_to_all, plan_of(all_to_all));
                        } else {
                          round.combine();
                        }
                      });
  }
}

TEST(TwoSidedFailureTest, ARankThatCombinesAnotherRoundIsNamedOnEveryRank) {
  AllToAllConfig config = blocking_config(3);
  config.max_in_flight = 2;
  expect_difference({"combine of round", "round: rank", "has 1", "has 2"}, config,
                    [](AllToAll& all_to_all, bool is_odd) {
                      RoundRun first(all_to_all, plan_of(all_to_all));
                      RoundRun second(all_to_all, plan_of(all_to_all));
                      first.dispatch();
                      second.dispatch();
                      (is_odd ? second : first).combine();
                    });
}

TEST(TwoSidedFailureTest, ARankThatDispatchesWhereOthersCombineIsNamedOnEveryRank) {
  AllToAllConfig config = blocking_config(3);
  config.max_in_flight = 2;
  expect_difference({"call", "dispatch", "combine"}, config, [](AllToAll& all_to_all, bool is_odd) {
    RoundRun first(all_to_all, plan_of(all_to_all));
    RoundRun second(all_to_all, plan_of(all_to_all));
    first.dispatch();
    if (is_odd) {
      second.dispatch();
    } else {
      first.combine();
    }
  });
}

TEST(TwoSidedFailureTest, SplitCallsAreUnsupported) {
  run_on_ranks(2, small_config(2), [](AllToAll& all_to_all) {
    EXPECT_FALSE(all_to_all.capabilities().two_phase);
    RoundRun round(all_to_all, plan_of(all_to_all));
    expect_error<Unsupported>({"moe", "two_sided", "dispatch_send"},
                              [&] { round.dispatch_send(); });
    round.dispatch();
    expect_error<Unsupported>({"moe", "two_sided", "combine_send"}, [&] { round.combine_send(); });
    round.release();
  });
}

}  // namespace
}  // namespace fanfold
