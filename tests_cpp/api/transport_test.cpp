// SPDX-License-Identifier: Apache-2.0
// The strategies over collectives where ranks share no memory: the conformance suites over a
// loopback transport, what is refused there, and what `auto` picks.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "api/all_to_all_conformance.h"
#include "api/all_to_all_rounds_conformance.h"
#include "exchange/exchange.h"
#include "fanfold/allocator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/loopback_transport.h"
#include "support/random_bits.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::GroupKind;
using ::testing::HasSubstr;
using ::testing::ValuesIn;

constexpr Strategy kOverTransports[] = {Strategy::kBroadcast, Strategy::kGatherScatter,
                                        Strategy::kBatched};

void spawn_loopback(int num_ranks, const std::function<void(Communicator&)>& rank_body) {
  testing::spawn_ranks(GroupKind::kLoopback, num_ranks, rank_body);
}

/// Layouts that rows reach in different ways; those made from them by a local copy are left out.
std::vector<ConformanceCase> all_cases() {
  std::vector<ConformanceCase> cases;
  for (const Strategy strategy : kOverTransports) {
    const Capabilities record = exchange::capabilities_of(strategy);
    for (const Layout layout : record.layouts) {
      if (layout == Layout::kFlat || layout == Layout::kFlatByExpert) continue;
      // Under a sanitizer one strategy stands for both that gather, and one layout for each.
      const bool is_first = strategy != Strategy::kBroadcast && layout != Layout::kRankMajor &&
                            (layout == Layout::kGathered) == (strategy != Strategy::kBatched);
      if (testing::kIsSanitizer && !is_first) continue;
      std::vector<int> rank_counts = {3};
      if (layout == Layout::kGathered && !testing::kIsSanitizer) rank_counts.push_back(1);
      for (const ConformanceCase& c :
           conformance_cases(strategy, layout, rank_counts, spawn_loopback)) {
        const bool is_representative = !is_per_expert(layout) || c.weighting == Weighting::kCarried;
        if (is_representative) cases.push_back(c);
      }
    }
  }
  return cases;
}

bool is_applied(const ConformanceCase& c) { return c.weighting == Weighting::kApplied; }
bool is_gathered(const ConformanceCase& c) { return c.layout == Layout::kGathered; }

INSTANTIATE_TEST_SUITE_P(Loopback, AllToAllConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Loopback, RoundsConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Loopback, AppliedConformance, ValuesIn(select(all_cases(), is_applied)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Loopback, GatheredConformance, ValuesIn(select(all_cases(), is_gathered)),
                         name_of_case);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KernelConformance);  // these sum as the others do
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OriginConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FlatConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GroupConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MaskConformance);

AllToAllConfig small_config(Strategy strategy, Layout layout = Layout::kRankMajor) {
  AllToAllConfig config;
  config.num_experts = 6;
  config.top_k = 2;
  config.max_tokens_per_rank = 5;
  config.hidden = 8;
  config.dtype = DType::kFloat32;
  config.strategy = strategy;
  config.layout = layout;
  return config;
}

void run_round(AllToAll& all_to_all, std::uint64_t seed = 1) {
  testing::RoundRun round(all_to_all,
                          testing::make_round(all_to_all.config(), all_to_all.num_ranks(),
                                              testing::RoutingKind::kUniform,
                                              all_to_all.config().max_tokens_per_rank, seed));
  round.dispatch();
  round.combine();
}

class OverTransportTest : public ::testing::TestWithParam<Strategy> {};
INSTANTIATE_TEST_SUITE_P(Strategies, OverTransportTest, ValuesIn(kOverTransports),
                         [](const auto& param) { return std::string(name_of(param.param)); });

TEST_P(OverTransportTest, RoundsLargerThanAStepOfTheChannelAreExact) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kFlat}) {
    if (GetParam() == Strategy::kBatched && layout == Layout::kGathered) continue;
    spawn_loopback(3, [&](Communicator& communicator) {
      AllToAllConfig config = small_config(GetParam(), layout);
      config.hidden = 5000;
      config.max_tokens_per_rank = 40;  // 800 kB on each rank
      AllToAll all_to_all(communicator, config);
      for (std::uint64_t seed = 1; seed < 3; ++seed) run_round(all_to_all, seed);
      all_to_all.close();
    });
  }
}

TEST_P(OverTransportTest, TheTransportsOwnSumsAreAsGood) {
  spawn_loopback(3, [](Communicator& communicator) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kGathered}) {
      if (GetParam() == Strategy::kBatched) continue;
      AllToAllConfig config = small_config(GetParam(), layout);
      config.deterministic = false;
      AllToAll all_to_all(communicator, config);
      run_round(all_to_all);
      all_to_all.close();
    }
  });
}

TEST_P(OverTransportTest, AWorkspaceIsShared) {
  spawn_loopback(3, [](Communicator& communicator) {
    const bool is_batched = GetParam() == Strategy::kBatched;
    const Layout layout = is_batched ? Layout::kExpertMajor : Layout::kGathered;
    AllToAll first(communicator, small_config(GetParam(), layout));
    AllToAll second(communicator, small_config(GetParam(), layout), nullptr, &first);
    AllToAll third(communicator, small_config(GetParam(), layout), nullptr, &first);
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      run_round(first, seed);
      run_round(second, seed);
      run_round(third, seed);
    }
    second.close();
    run_round(third);
    third.close();
    first.close();
  });
}

TEST_P(OverTransportTest, ObjectsOfOneGroupWorkOnThreadsOfTheirOwn) {
  constexpr int kObjects = 3;
  const int num_rounds = testing::kIsSanitizer ? 8 : 20;
  spawn_loopback(3, [&](Communicator& communicator) {
    std::vector<std::unique_ptr<AllToAll>> objects;
    for (int i = 0; i < kObjects; ++i) {
      objects.push_back(std::make_unique<AllToAll>(communicator, small_config(GetParam())));
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < kObjects; ++i) {
      threads.emplace_back([&, i] {
        try {
          for (int round = 0; round < num_rounds; ++round) {
            run_round(*objects[static_cast<std::size_t>(i)],
                      static_cast<std::uint64_t>(round) * kObjects + static_cast<std::uint64_t>(i));
          }
        } catch (const Error& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    for (int i = 0; i < 30; ++i) communicator.barrier();
    for (std::thread& thread : threads) thread.join();
    for (const auto& object : objects) object->close();
    communicator.close();
  });
}

// --- What it cannot do
// ----------------------------------------------------------------------------

TEST(WithoutSharedMemoryTest, StrategiesThatNeedItAreRefusedInWords) {
  spawn_loopback(2, [](Communicator& communicator) {
    EXPECT_FALSE(communicator.shares_memory());
    for (const Strategy strategy : {Strategy::kOneSided, Strategy::kTwoSided,
                                    Strategy::kHighThroughput, Strategy::kLowLatency}) {
      AllToAllConfig config = small_config(strategy);
      if (strategy == Strategy::kHighThroughput) config.layout = Layout::kFlat;
      expect_error<Unsupported>({name_of(strategy), "memory that all ranks share", "gather_scatter",
                                 "all 2 ranks are on one host", "'loopback' transport"},
                                [&] { AllToAll refused(communicator, config); });
    }
    AllToAllConfig packed = small_config(Strategy::kAuto, Layout::kExpertMajor);
    packed.dispatch_wire = Wire::kFp8E4M3;
    packed.dtype = DType::kBFloat16;
    expect_error<Unsupported>({"dispatch_wire", "low_latency"},
                              [&] { AllToAll refused(communicator, packed); });
    AllToAllConfig on_gpu = small_config(Strategy::kAuto);
    on_gpu.device = DeviceType::kGpu;
    expect_error<Unsupported>({"device 'cuda'", "from_nccl"},
                              [&] { AllToAll refused(communicator, on_gpu); });
    expect_error<Unsupported>({"allocator", "share memory", "transport"},
                              [&] { Allocator refused(communicator); });
    communicator.barrier();  // nothing was sent
  });
}

TEST(WithoutSharedMemoryTest, AutoPicksAStrategyThatWorksAndSaysWhy) {
  spawn_loopback(2, [](Communicator& communicator) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor,
                                Layout::kFlat, Layout::kFlatByExpert}) {
      AllToAll all_to_all(communicator, small_config(Strategy::kAuto, layout));
      EXPECT_EQ(all_to_all.config().strategy, Strategy::kGatherScatter);
      EXPECT_THAT(all_to_all.choice(), HasSubstr("gather_scatter: the ranks share no memory"));
      run_round(all_to_all);
      all_to_all.close();
    }
  });
}

TEST(WithoutSharedMemoryTest, AFailedRankEndsTheRoundsOfAllAndAResetBringsThemBack) {
  for (std::uint64_t seed = 0; seed < (testing::kIsSanitizer ? 4 : 12); ++seed) {
    testing::LoopbackNetwork::Options options;
    options.max_delay = std::chrono::microseconds(100);
    testing::LoopbackNetwork network(3, options);
    testing::spawn_on(network, 3, [&](int rank, std::shared_ptr<Transport> transport) {
      Communicator communicator =
          Communicator::from_transport(std::move(transport), TransportUse::kAlways);
      AllToAll all_to_all(communicator, small_config(Strategy::kGatherScatter));
      testing::RandomBits random(testing::mix(seed, 1));
      const int victim = static_cast<int>(random.below(3));
      const int after = static_cast<int>(random.below(12));
      communicator.barrier();
      if (rank == victim) network.fail_send(rank, after);
      try {
        for (int i = 0; i < 20; ++i) run_round(all_to_all);
        ADD_FAILURE() << "expected an error";
      } catch (const SystemFailure& error) {
        EXPECT_EQ(rank, victim);
        EXPECT_THAT(error.what(), HasSubstr("the wire broke"));
      } catch (const PeerAborted& error) {
        EXPECT_NE(rank, victim);
        EXPECT_EQ(error.rank(), victim);
        EXPECT_THAT(error.what(), HasSubstr("the wire broke"));
      }
      all_to_all.reset();
      for (int i = 0; i < 3; ++i) run_round(all_to_all);
      all_to_all.close();
      communicator.close();
    });
    EXPECT_EQ(network.num_breaches(), 0);
  }
}

}  // namespace
}  // namespace fanfold
