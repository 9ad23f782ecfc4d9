// SPDX-License-Identifier: Apache-2.0
// Rounds over collectives on GPUs: what the conformance suites leave out.

#include <chrono>
#include <string>
#include <tuple>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_case.h"
#include "gpu/graphed_round.h"
#include "gpu/nccl_ranks.h"
#include "support/expect_error.h"
#include "support/random_bits.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::GraphedRound;
using testing::of_rank;
using testing::RoundRun;
using testing::RoutingKind;
using testing::spawn_nccl_ranks;

constexpr Strategy kAll[] = {Strategy::kBatched, Strategy::kGatherScatter, Strategy::kBroadcast};

AllToAllConfig config_of(Strategy strategy, Layout layout = Layout::kRankMajor) {
  AllToAllConfig config = testing::gpu_config(layout);
  config.strategy = strategy;
  return config;
}

class GpuCollectiveTest : public ::testing::TestWithParam<std::tuple<Strategy, Layout>> {
 protected:
  static AllToAllConfig config() {
    return config_of(std::get<0>(GetParam()), std::get<1>(GetParam()));
  }
};

/// Rounds of every kind of routing, two of them open at once, some along an earlier routing.
void run_rounds(AllToAll& all_to_all, std::uint64_t seed) {
  const AllToAllConfig& config = all_to_all.config();
  const int num_ranks = all_to_all.num_ranks();
  const std::int64_t m = config.max_tokens_per_rank;
  const auto plan = [&](RoutingKind kind, std::int64_t most, std::uint64_t number) {
    return testing::make_round(config, num_ranks, kind, most, testing::mix(seed, number));
  };
  RoundRun first(all_to_all, plan(RoutingKind::kUneven, m, 1));
  RoundRun second(all_to_all, plan(RoutingKind::kDuplicates, (m + 1) / 2, 2));
  first.dispatch();
  second.dispatch();
  first.combine(/*release=*/false);
  second.combine();
  first.combine();
  RoundRun released(all_to_all, plan(RoutingKind::kUniform, 1, 3));
  released.dispatch();
  released.release();
  RoundRun last(all_to_all, plan(RoutingKind::kUneven, m, 4));
  last.dispatch();
  last.combine();
}

TEST_P(GpuCollectiveTest, NoScheduleOrStaleLoadSpoilsARound) {
  const bool is_stale = is_per_expert(config().layout);  // half of the cases each
  cudasim::Config devices = testing::devices_for(3, 3);
  devices.seed = is_stale ? 2 : 1;
  devices.shuffle_blocks = true;
  devices.stale = is_stale ? 0.3 : 0.0;
  devices.preempt = is_stale ? 0.0 : 0.02;
  devices.resident_blocks = 3;
  const testing::GpuRanks gpus(devices);
  spawn_nccl_ranks(3, 3, [&](Communicator& communicator) {
    AllToAllConfig own = of_rank(config(), communicator);
    own.max_in_flight = 2;
    if (is_per_expert(own.layout)) {
      own.weighting = own.strategy == Strategy::kBatched ? Weighting::kCarried : Weighting::kOrigin;
    }
    AllToAll all_to_all(communicator, own);
    run_rounds(all_to_all, devices.seed);
    all_to_all.close();
  });
}

TEST_P(GpuCollectiveTest, ACapturedRoundReplaysWithOtherTokensAndTokenCounts) {
  const testing::GpuRanks gpus(3, 3);
  spawn_nccl_ranks(3, 3, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(config(), communicator));
    EXPECT_TRUE(all_to_all.capabilities().graph_safe);
    GraphedRound round(all_to_all, 4, 4);
    GraphedRound small(all_to_all, 2, 2);
    round.capture();
    small.capture();
    for (int i = 0; i < 6; ++i) {
      GraphedRound& next = i % 3 == 1 ? small : round;
      next.fill((i * 3 + communicator.rank()) % (i % 3 == 1 ? 3 : 5),
                static_cast<std::uint64_t>(i));
      next.replay();
      next.check_out("replay " + std::to_string(i));
      if (i % 4 != 3) continue;
      RoundRun between(all_to_all,
                       testing::plan_of(all_to_all.config(), 3, static_cast<std::uint64_t>(i)));
      between.dispatch();
      between.combine();
    }
    communicator.barrier();  // `check` below tells of peers that have left
    all_to_all.check();
    communicator.barrier();
    all_to_all.close();
  });
}

TEST_P(GpuCollectiveTest, ManyTokensManyExpertsAndOddRowsGoThroughManyBlocks) {
  cudasim::Config devices = testing::devices_for(2, 2);
  devices.resident_blocks = 6;
  devices.shuffle_blocks = true;
  const testing::GpuRanks gpus(devices);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    AllToAllConfig own = of_rank(config(), communicator);
    own.num_experts = 150;
    own.top_k = 128;
    own.max_tokens_per_rank = 40;
    own.hidden = 3;
    own.extra_bytes_per_token = 1;
    AllToAll all_to_all(communicator, own);
    RoundRun round(all_to_all, testing::make_round(own, 2, RoutingKind::kUneven, 40, 5));
    round.dispatch();
    round.combine();
    all_to_all.close();
  });
}

TEST_P(GpuCollectiveTest, OneRankNeedsNobody) {
  const testing::GpuRanks gpus(1, 1);
  spawn_nccl_ranks(1, 1, [&](Communicator& communicator) {
    AllToAllConfig own = config();
    own.max_in_flight = 2;
    AllToAll all_to_all(communicator, own);
    run_rounds(all_to_all, 3);
    all_to_all.close();
  });
}

TEST_P(GpuCollectiveTest, RanksThatShareNoMemoryExchangeOverCollectives) {
  constexpr int kNumRanks = 3;
  const testing::GpuRanks gpus(kNumRanks, kNumRanks);
  testing::spawn_ranks(
      testing::GroupKind::kLoopback, kNumRanks,
      [](Communicator& bootstrap) {
        Communicator communicator =
            Communicator::from_nccl(bootstrap, testing::nccl_options(bootstrap.rank()));
        EXPECT_FALSE(communicator.shares_memory());
        AllToAllConfig own = of_rank(config(), communicator);
        own.max_in_flight = 2;
        AllToAll all_to_all(communicator, own);
        for (std::uint64_t seed = 1; seed < 3; ++seed) run_rounds(all_to_all, seed);
        all_to_all.close();
        communicator.close();
      },
      std::chrono::seconds(60));
}

INSTANTIATE_TEST_SUITE_P(All, GpuCollectiveTest,
                         ::testing::Combine(::testing::ValuesIn(kAll),
                                            ::testing::Values(Layout::kRankMajor,
                                                              Layout::kExpertMajor)),
                         [](const auto& each) {
                           return std::string(name_of(std::get<0>(each.param))) + "_" +
                                  name_of(std::get<1>(each.param));
                         });

TEST(GpuCollectiveChoiceTest, WhatIsMissingIsSaid) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    for (const Strategy strategy : kAll) {
      expect_error<Unsupported>(
          {std::string("strategy: ") + name_of(strategy) +
           " on device 'cuda' needs a communicator with collectives on GPUs "
           "(Communicator::from_nccl), got one without"},
          [&] { AllToAll(communicator, of_rank(config_of(strategy), communicator)); });
      expect_error<Unsupported>(
          {std::string("layout: strategy ") + name_of(strategy) +
           " gives rank_major, expert_major on device 'cuda'; got "},
          [&] {
            AllToAll(communicator, of_rank(config_of(strategy, strategy == Strategy::kBatched
                                                                   ? Layout::kFlat
                                                                   : Layout::kGathered),
                                           communicator));
          });
    }
    AllToAllConfig chosen = of_rank(testing::gpu_config(), communicator);
    chosen.strategy = Strategy::kAuto;
    Communicator over_nccl =
        Communicator::from_nccl(communicator, testing::nccl_options(communicator.rank()));
    AllToAll all_to_all(over_nccl, chosen);
    EXPECT_EQ(all_to_all.config().strategy, Strategy::kOneSided);
    all_to_all.close();
    AllToAllConfig elsewhere = config_of(Strategy::kBatched);
    elsewhere.device_index = 1 - communicator.rank();
    expect_error<InvalidArgument>(
        {"device_index: expected ", " (that of the communicator's collectives), got "},
        [&] { AllToAll(over_nccl, elsewhere); });
    over_nccl.close();
  });
}

TEST(GpuCollectiveChoiceTest, WhereNoMemoryIsSharedNoStrategyOverMemoryIsChosen) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(
      testing::GroupKind::kLoopback, 2,
      [](Communicator& bootstrap) {
        AllToAllConfig chosen = of_rank(testing::gpu_config(), bootstrap);
        expect_error<Unsupported>({"strategy: one_sided needs memory that all ranks share"},
                                  [&] { AllToAll(bootstrap, chosen); });
        chosen.strategy = Strategy::kAuto;
        expect_error<Unsupported>({"(Communicator::from_nccl), got one without"},
                                  [&] { AllToAll(bootstrap, chosen); });
        Communicator over_nccl =
            Communicator::from_nccl(bootstrap, testing::nccl_options(bootstrap.rank()));
        AllToAll all_to_all(over_nccl, chosen);
        EXPECT_EQ(all_to_all.config().strategy, Strategy::kGatherScatter);
        all_to_all.close();
        over_nccl.close();
      },
      std::chrono::seconds(60));
}

TEST(GpuCollectiveChoiceTest, TheRecordSaysWhatAGpuHas) {
  const testing::GpuRanks gpus(1, 1);
  spawn_nccl_ranks(1, 1, [&](Communicator& communicator) {
    for (const Strategy strategy : kAll) {
      AllToAll all_to_all(communicator, config_of(strategy));
      const Capabilities record = all_to_all.capabilities();
      EXPECT_TRUE(record.graph_safe);
      EXPECT_TRUE(record.deterministic);
      EXPECT_TRUE(record.error_bound.empty());
      EXPECT_FALSE(record.two_phase);
      EXPECT_FALSE(record.rank_mask);
      EXPECT_THAT(record.native_layouts, ::testing::ElementsAre(Layout::kRankMajor));
      EXPECT_EQ(all_to_all.metainfo().at("symmetric_bytes"), 0);
      expect_error<Unsupported>({"has no two phases"}, [&] {
        RoundRun round(all_to_all, testing::plan_of(all_to_all.config(), 1));
        round.dispatch_send();
      });
      all_to_all.close();
    }
  });
}

}  // namespace
}  // namespace fanfold
