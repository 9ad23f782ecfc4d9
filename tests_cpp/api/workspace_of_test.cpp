// SPDX-License-Identifier: Apache-2.0
// AllToAlls that share one workspace: whoever makes the next round uses the next slot, and no order
// of their rounds, no delay and no difference in size may spoil any of them.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/schedule.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using testing::expect_error;
using testing::Phase;
using testing::RandomBits;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_ranks;

struct Case {
  Strategy strategy;
  Layout layout;
  int num_ranks;
  int max_in_flight;
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(name_of(c.strategy)) + "_" + name_of(c.layout) + "_" +
         std::to_string(c.num_ranks) + "_ranks_" + std::to_string(c.max_in_flight) + "_in_flight";
}

Weighting weighting_of(Layout layout) {
  return is_per_expert(layout) ? Weighting::kCarried : Weighting::kApplied;
}

/// The first has the room; the others differ from it in every size.
std::vector<AllToAllConfig> configs_of(const Case& c) {
  AllToAllConfig large;
  large.num_experts = 2 * c.num_ranks + 1;
  large.top_k = 3;
  large.max_tokens_per_rank = 7;
  large.hidden = 157;  // far more than the slack of a small workspace
  large.dtype = DType::kFloat32;
  large.extra_bytes_per_token = 1;
  large.max_local_experts = large.num_experts;
  large.strategy = c.strategy;
  large.layout = c.layout;
  large.weighting = weighting_of(c.layout);
  large.max_in_flight = c.max_in_flight;
  large.test_knobs.delay_seed = 99;
  large.name = "large";
  AllToAllConfig wide = large;  // few tokens
  wide.max_tokens_per_rank = 3;
  wide.top_k = 2;
  wide.num_experts = c.num_ranks;
  wide.max_local_experts = c.num_ranks;
  wide.placement = Placement::round_robin();
  wide.debug_poison = true;
  wide.name = "wide";
  AllToAllConfig narrow = large;  // short rows, and results larger than what arrives
  narrow.hidden = 5;
  narrow.dtype = DType::kBFloat16;
  narrow.combine_dtype = DType::kFloat32;
  narrow.strategy = Strategy::kAuto;
  narrow.test_knobs.first_epoch = 77;  // of no consequence
  narrow.name = "narrow";
  return {large, wide, narrow};
}

/// The AllToAlls of one workspace.
std::vector<std::unique_ptr<AllToAll>> make_all(Communicator& communicator,
                                                const std::vector<AllToAllConfig>& configs) {
  std::vector<std::unique_ptr<AllToAll>> all;
  for (const AllToAllConfig& config : configs) {
    all.push_back(std::make_unique<AllToAll>(communicator, config, nullptr,
                                             all.empty() ? nullptr : all.back().get()));
  }
  return all;
}

testing::RoundPlan random_plan(const AllToAll& all_to_all, RandomBits& random) {
  const auto& kinds = testing::all_routings();
  const auto kind =
      kinds[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(kinds.size())))];
  const std::int64_t m = 1 + random.below(all_to_all.config().max_tokens_per_rank);
  testing::RoundPlan plan =
      testing::make_round(all_to_all.config(), all_to_all.num_ranks(), kind, m, random.next());
  if (random.below(4) == 0) plan.payloads = {{DType::kUInt8, {1}}};
  plan.zero_copy = random.below(2) == 0;
  return plan;
}

void take_step(Phase phase, RoundRun& round) {
  switch (phase) {
    case Phase::kDispatch:
      return round.dispatch();
    case Phase::kDispatchSend:
      return round.dispatch_send();
    case Phase::kDispatchRecv:
      return round.dispatch_recv();
    case Phase::kCombine:
      return round.combine();
    case Phase::kCombineKeep:
      return round.combine(/*release=*/false);
    case Phase::kCombineSend:
      return round.combine_send();
    case Phase::kCombineRecv:
      return round.combine_recv();
    case Phase::kRelease:
      return round.release();
  }
}

/// A random order of rounds of random members, the same on all ranks, each at its own pace.
void run_schedule(std::vector<std::unique_ptr<AllToAll>>& all, int num_rounds, std::uint64_t seed) {
  testing::ScheduleSpec spec;
  spec.num_rounds = num_rounds;
  spec.max_in_flight = all[0]->config().max_in_flight;
  spec.two_phase = all[0]->capabilities().two_phase;
  spec.combines_more_than_once = true;
  spec.seed = seed;
  RandomBits pace(testing::mix(seed, static_cast<std::uint64_t>(all[0]->rank())));
  std::vector<std::unique_ptr<RoundRun>> rounds(static_cast<std::size_t>(num_rounds));
  for (const testing::Step& step : testing::random_schedule(spec)) {
    auto& round = rounds[static_cast<std::size_t>(step.round)];
    if (round == nullptr) {
      RandomBits random(
          testing::mix(seed, static_cast<std::uint64_t>(step.round), std::uint64_t{3}));
      AllToAll& member =
          *all[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(all.size())))];
      round = std::make_unique<RoundRun>(member, random_plan(member, random));
    }
    if (pace.below(8) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(pace.below(300)));
    }
    take_step(step.phase, *round);
    if (::testing::Test::HasFailure()) return;
  }
}

void close_all(std::vector<std::unique_ptr<AllToAll>>& all) {
  for (auto& one : all) one->close();
}

class WorkspaceOfTest : public ::testing::TestWithParam<Case> {};

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<std::pair<Strategy, Layout>> kinds = {
      {Strategy::kOneSided, Layout::kRankMajor},
      {Strategy::kOneSided, Layout::kExpertMajor},
      {Strategy::kLowLatency, Layout::kExpertMajor},
      {Strategy::kHighThroughput, Layout::kFlat},
      {Strategy::kHighThroughput, Layout::kFlatByExpert},
      {Strategy::kBroadcast, Layout::kGathered},
      {Strategy::kGatherScatter, Layout::kRankMajor},
      {Strategy::kBatched, Layout::kExpertMajor},
      {Strategy::kTwoSided, Layout::kRankMajor}};
  for (const auto& [strategy, layout] : kinds) {
    all.push_back({strategy, layout, 2, 1});
    all.push_back({strategy, layout, 3, 2});
    all.push_back({strategy, layout, 4, 3});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Threads, WorkspaceOfTest, ::testing::ValuesIn(cases()), name_of_case);

TEST_P(WorkspaceOfTest, RoundsOfAllInAnyOrderStayIntact) {
  constexpr int kNumRounds = testing::kIsSanitizer ? 25 : 90;
  spawn_ranks(GetParam().num_ranks, [&](Communicator& communicator) {
    auto all = make_all(communicator, configs_of(GetParam()));
    for (const auto& one : all) {
      EXPECT_EQ(one->config().strategy, GetParam().strategy);
      EXPECT_EQ(one->metainfo().at("slot_stride"), all[0]->metainfo().at("slot_stride"));
    }
    run_schedule(all, kNumRounds, 41);
    if (::testing::Test::HasFailure()) return;
    close_all(all);
  });
}

TEST_P(WorkspaceOfTest, OthersGoOnWhenOneIsClosedAndNewOnesMayJoin) {
  spawn_ranks(GetParam().num_ranks, [&](Communicator& communicator) {
    const std::vector<AllToAllConfig> configs = configs_of(GetParam());
    auto all = make_all(communicator, configs);
    run_schedule(all, 7, 51);
    all[0]->close();  // the one that made the workspace
    EXPECT_TRUE(all[0]->is_closed());
    EXPECT_FALSE(all[1]->is_closed());
    expect_error<InvalidState>({"large", "is closed"}, [&] { all[0]->check(); });
    std::vector<std::unique_ptr<AllToAll>> rest;
    rest.push_back(std::move(all[1]));
    rest.push_back(std::move(all[2]));
    all.clear();
    run_schedule(rest, 7, 52);
    rest.push_back(std::make_unique<AllToAll>(communicator, configs[0], nullptr, rest[0].get()));
    run_schedule(rest, 7, 53);
    if (::testing::Test::HasFailure()) return;
    close_all(rest);
    expect_error<InvalidState>(
        {"is closed"}, [&] { AllToAll refused(communicator, configs[0], nullptr, rest[0].get()); });
  });
}

TEST_P(WorkspaceOfTest, ResetAndFailureAreShared) {
  spawn_ranks(GetParam().num_ranks, [&](Communicator& communicator) {
    auto all = make_all(communicator, configs_of(GetParam()));
    run_schedule(all, 3, 61);
    RandomBits random(3);
    RoundRun round(*all[1], random_plan(*all[1], random));
    if (communicator.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(2));
      all[2]->abort("no more");
    } else {
      expect_error<PeerAborted>({"no more", "rank 0"}, [&] { round.dispatch(); });
      EXPECT_TRUE(all[0]->is_failed());
      expect_error<InvalidState>({"large", "has failed", "no more", "reset"}, [&] {
        RoundRun(*all[0], random_plan(*all[0], random)).dispatch();
      });
    }
    // Whichever of them each rank resets.
    all[static_cast<std::size_t>(communicator.rank()) % all.size()]->reset();
    for (const auto& one : all) EXPECT_FALSE(one->is_failed());
    run_schedule(all, 9, 62);
    if (::testing::Test::HasFailure()) return;
    close_all(all);
  });
}

// --- Mistakes -----------------------------------------------------------------------------------

AllToAllConfig small_config(const char* name, std::int64_t hidden = 16) {
  AllToAllConfig config;
  config.num_experts = 6;
  config.top_k = 2;
  config.max_tokens_per_rank = 4;
  config.hidden = hidden;
  config.dtype = DType::kFloat32;
  config.strategy = Strategy::kOneSided;
  config.name = name;
  return config;
}

testing::RoundPlan plan_of(const AllToAll& all_to_all, std::uint64_t seed = 1) {
  return testing::make_round(all_to_all.config(), all_to_all.num_ranks(), RoutingKind::kUniform, 4,
                             seed);
}

void run_round(AllToAll& all_to_all, std::uint64_t seed = 1) {
  RoundRun round(all_to_all, plan_of(all_to_all, seed));
  round.dispatch();
  round.combine();
}

TEST(SharedRoundsTest, AnOpenRoundOfOneHoldsTheSlotOfTheOther) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    RoundRun of_a(a, plan_of(a));
    RoundRun of_b(b, plan_of(b));
    of_a.dispatch();
    expect_error<InvalidState>(
        {"'b'", "round 1", "slot of round 0 of AllToAll 'a'", "received", "max_in_flight is 1"},
        [&] { of_b.dispatch(); });
    of_a.check_received();
    of_a.release();
    of_b.dispatch();
    of_b.combine();
    b.close();
    a.close();
  });
}

TEST(SharedRoundsTest, HandlesOfTheOtherAreRefused) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    RoundRun round(a, plan_of(a));
    round.dispatch();
    expect_error<InvalidState>({"'b'", "handle of another AllToAll"},
                               [&] { b.release(round.handle()); });
    round.combine();
    a.close();
    b.close();
  });
}

TEST(SharedRoundsTest, ALateRankIsWaitedForInTheNameOfTheCaller) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    run_round(a);
    if (communicator.rank() == 0) {
      RoundRun round(b, plan_of(b));
      round.inputs.timeout = milliseconds(30);
      expect_error<PeerTimeout>({"AllToAll 'b': dispatch of round 1: rank 1"},
                                [&] { round.dispatch(); });
    }
    communicator.barrier();  // a reset wakes who still waits
    a.reset();
    run_round(b);
    a.close();
    b.close();
  });
}

class MixedUpTest : public ::testing::TestWithParam<Strategy> {};
INSTANTIATE_TEST_SUITE_P(Threads, MixedUpTest,
                         ::testing::Values(Strategy::kOneSided, Strategy::kBroadcast,
                                           Strategy::kGatherScatter, Strategy::kBatched,
                                           Strategy::kTwoSided, Strategy::kLowLatency),
                         [](const auto& param) { return std::string(name_of(param.param)); });

TEST_P(MixedUpTest, RanksThatCallDifferentOnesAreToldSo) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAllConfig config = small_config("a");
    config.strategy = GetParam();
    AllToAll a(communicator, config);
    config.name = "b";
    AllToAll b(communicator, config, nullptr, &a);
    run_round(a);
    AllToAll& chosen = communicator.rank() == 0 ? a : b;
    expect_error<InvalidArgument>(
        {"dispatch of round 1", "AllToAll of the shared workspace", "rank 0", "rank 1"},
        [&] { run_round(chosen); });
    EXPECT_TRUE(a.is_failed());
    EXPECT_TRUE(b.is_failed());
    communicator.barrier();
    chosen.reset();
    run_round(b, 2);
    run_round(a, 3);
    a.close();
    b.close();
  });
}

TEST(SharedRoundsTest, WhatCannotShareIsRefusedOnEveryRank) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    const auto refuse = [&](const std::vector<std::string>& words,
                            const std::function<void(AllToAllConfig&)>& change) {
      AllToAllConfig config = small_config("b");
      change(config);
      expect_error<InvalidArgument>(words,
                                    [&] { AllToAll refused(communicator, config, nullptr, &a); });
    };
    using C = AllToAllConfig;
    refuse({"workspace_of", "strategy", "one_sided", "AllToAll 'a'", "broadcast"},
           [](C& c) { c.strategy = Strategy::kBroadcast; });
    refuse({"workspace_of", "max_in_flight", "expected 1", "got 2"},
           [](C& c) { c.max_in_flight = 2; });
    refuse({"workspace_of", "rows that arrive", "needed", "AllToAll 'a' has"},
           [](C& c) { c.hidden = 17; });
    refuse({"workspace_of", "private memory of a slot", "needed"},
           [](C& c) { c.layout = Layout::kExpertMajor; });
    Allocator allocator(communicator);
    expect_error<InvalidArgument>({"allocator", "workspace_of"}, [&] {
      AllToAll refused(communicator, small_config("b"), &allocator, &a);
    });
    auto other = communicator.split(0, communicator.rank());
    expect_error<InvalidArgument>({"workspace_of", "same communicator"}, [&] {
      AllToAll refused(*other, small_config("b"), nullptr, &a);
    });
    run_round(a);
    a.close();
    other->close();
  });
}

TEST(SharedRoundsTest, WhoSharesWhatIsComparedAtCreation) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll c(communicator, small_config("c"));
    const AllToAll* owner = communicator.rank() == 0 ? nullptr : &a;
    expect_error<InvalidArgument>(
        {"'b'", "workspace differs", "rank 0 has its own", "rank 1 has"},
        [&] { AllToAll refused(communicator, small_config("b"), nullptr, owner); });
    owner = communicator.rank() == 0 ? &a : &c;
    expect_error<InvalidArgument>({"'b'", "workspace differs", "rank 0", "rank 1"}, [&] {
      AllToAll refused(communicator, small_config("b"), nullptr, owner);
    });
    run_round(a);
    run_round(c);
    a.close();
    c.close();
  });
}

TEST(SharedRoundsTest, TheMaskIsSharedAndNewOnesTakeItOver) {
  spawn_ranks(3, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    const std::vector<bool> mask = {true, false, true};
    const auto run_masked = [&](AllToAll& all_to_all) {
      testing::RoundPlan plan = plan_of(all_to_all);
      plan.exchange.active = mask;
      RoundRun round(all_to_all, plan);
      round.dispatch();
      round.combine();
    };
    if (communicator.rank() != 1) b.set_active_mask(mask);
    std::optional<AllToAll> c;
    c.emplace(communicator, small_config("c", 4), nullptr, &a);
    if (communicator.rank() != 1) {
      EXPECT_EQ(a.active_mask(), mask);
      EXPECT_EQ(c->active_mask(), mask);
      run_masked(a);
      run_masked(*c);
      run_masked(b);
      RoundRun round(a, plan_of(a));
      round.inputs.timeout = milliseconds(2000);
    }
    communicator.barrier();
    a.close();
    b.close();
    c->close();
  });
}

TEST(SharedRoundsTest, AnOpenRoundForbidsTheMaskOnAllAndAPlacementOnItsOwn) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAllConfig config = small_config("a");
    config.max_in_flight = 2;
    AllToAll a(communicator, config);
    config.name = "b";
    AllToAll b(communicator, config, nullptr, &a);
    RoundRun round(a, plan_of(a));
    round.dispatch();
    expect_error<InvalidState>({"'a'", "set_active_mask", "round 0"},
                               [&] { b.set_active_mask({true, true}); });
    expect_error<InvalidState>({"'a'", "set_placement", "round 0"},
                               [&] { a.set_placement(Placement::round_robin()); });
    b.set_placement(Placement::round_robin());
    run_round(b);
    round.combine();
    run_round(a);
    EXPECT_EQ(a.config().placement.kind, Placement::Kind::kLinear);
    a.close();
    b.close();
  });
}

TEST(SharedRoundsTest, RoutingsStayWithWhatMadeThem) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    RoundRun first(a, plan_of(a));
    first.dispatch();
    const Routing routing = first.received().routing();
    first.combine();
    run_round(b);
    DispatchInputs along;
    RoundRun again(a, plan_of(a, 4));
    along.payloads = again.inputs.payloads;
    along.routing = routing;
    a.release(a.dispatch(along).handle());
    RoundRun of_b(b, plan_of(b, 4));
    along.payloads = of_b.inputs.payloads;
    expect_error<InvalidArgument>({"routing", "another configuration"},
                                  [&] { (void)b.dispatch(along); });
    a.close();
    b.close();
  });
}

// --- Ends ---------------------------------------------------------------------------------------

TEST(SharedEndTest, CloseWithAnOpenRoundIsRefusedWhileOthersLive) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    RoundRun round(a, plan_of(a));
    round.dispatch();
    expect_error<InvalidState>({"'a'", "close", "round 0", "received"}, [&] { a.close(); });
    EXPECT_FALSE(a.is_closed());
    round.combine();
    a.close();
    run_round(b);
    b.close();
  });
}

TEST(SharedEndTest, ARoundReleasedBeforeTheCloseIsStillWaitedFor) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    for (std::uint64_t i = 0; i < 5; ++i) {
      AllToAll c(communicator, small_config("c"), nullptr, &b);
      RoundRun round(c, plan_of(c, i));
      round.dispatch();
      if (communicator.rank() == static_cast<int>(i % 2)) {
        std::this_thread::sleep_for(milliseconds(3));
      }
      round.check_received();
      round.release();
      c.close();
      run_round(b, i);
    }
    a.close();
    b.close();
  });
}

TEST(SharedEndTest, WithoutCloseTheOthersGoOn) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    for (std::uint64_t i = 0; i < 4; ++i) {
      const AllToAll b(communicator, small_config("b", 8), nullptr, &a);
      run_round(a, i);
    }
    run_round(a, 9);
    a.close();
  });
}

TEST(SharedEndTest, ARoundThatIsDestroyedOpenFailsThePeersInsteadOfKeepingThemWaiting) {
  spawn_ranks(2, [](Communicator& communicator) {
    AllToAll a(communicator, small_config("a"));
    std::optional<AllToAll> b;
    b.emplace(communicator, small_config("b", 8), nullptr, &a);
    RoundRun round(*b, plan_of(*b));
    round.dispatch();
    if (communicator.rank() == 1) {
      b.reset();
      expect_error<InvalidState>({"'a'", "has failed", "'b' was destroyed while round 0", "reset"},
                                 [&] { run_round(a); });
    } else {
      expect_error<PeerAborted>({"rank 1 aborted", "'b' was destroyed while round 0"},
                                [&] { round.combine(); });
    }
    a.reset();
    run_round(a, 2);
    a.close();
    if (b) b->close();
  });
}

TEST(SharedEndTest, TheLastThatIsDestroyedLeaves) {
  spawn_ranks(2, [](Communicator& communicator) {
    auto a = std::make_unique<AllToAll>(communicator, small_config("a"));
    auto b = std::make_unique<AllToAll>(communicator, small_config("b", 8), nullptr, a.get());
    run_round(*a);
    communicator.barrier();
    if (communicator.rank() == 1) {
      a.reset();
      b.reset();
      return;
    }
    expect_error<PeerLost>({"rank 1"}, [&] { run_round(*b); });
  });
}

TEST(SharedEndTest, MemoryGoesBackWhenTheLastIsClosed) {
  spawn_ranks(2, [](Communicator& communicator) {
    Allocator allocator(communicator);
    AllToAll a(communicator, small_config("a"), &allocator);
    AllToAll b(communicator, small_config("b", 8), nullptr, &a);
    EXPECT_EQ(allocator.stats().num_blocks, 1);
    EXPECT_EQ(b.workspace_bytes(), a.workspace_bytes());
    run_round(b);
    a.close();
    EXPECT_GT(allocator.stats().in_use, 0);
    run_round(b);
    b.close();
    EXPECT_EQ(allocator.stats().in_use, 0);
    EXPECT_GT(allocator.stats().reserved, 0);
    allocator.trim();
    EXPECT_EQ(allocator.stats().reserved, 0);
  });
}

}  // namespace
}  // namespace fanfold
