// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the conformance suites of AllToAll run on: a strategy, a layout, a number of ranks.

#include <algorithm>
#include <functional>
#include <iterator>
#include <ostream>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"
#include "support/round_run.h"
#include "support/sanitizer.h"
#include "support/spawn_ranks.h"

namespace fanfold {

/// Starts the ranks of a test: calls the function once per rank, at the same time.
using SpawnRanks = void (*)(int num_ranks, const std::function<void(Communicator&)>& rank_body);

struct ConformanceCase {
  Strategy strategy = Strategy::kAuto;
  Layout layout = Layout::kRankMajor;
  Weighting weighting = Weighting::kApplied;
  int num_ranks = 1;
  SpawnRanks spawn = nullptr;
  int num_gpus = 0;  // that the ranks share in turn; 0: they run on the CPU
  // Around each test, where not null.
  void (*begin)(const ConformanceCase&) = nullptr;
  void (*end)() = nullptr;
};

inline std::string name_of_case(const ::testing::TestParamInfo<ConformanceCase>& info) {
  const ConformanceCase& c = info.param;
  return std::string(name_of(c.strategy)) + "_" + name_of(c.layout) + "_" + name_of(c.weighting) +
         "_" + std::to_string(c.num_ranks) + "_ranks" +
         (c.num_gpus == 0 ? "" : "_" + std::to_string(c.num_gpus) + "_gpus");
}

inline void PrintTo(const ConformanceCase& c, std::ostream* out) {
  *out << name_of(c.strategy) << ' ' << name_of(c.layout) << ' ' << name_of(c.weighting) << ' '
       << c.num_ranks << " ranks " << c.num_gpus << " GPUs";
}

/// Cases of one strategy and layout: every weighting that the contract pairs with it.
inline std::vector<ConformanceCase> conformance_cases(Strategy strategy, Layout layout,
                                                      const std::vector<int>& rank_counts,
                                                      SpawnRanks spawn) {
  std::vector<ConformanceCase> cases;
  for (const Weighting weighting : {Weighting::kApplied, Weighting::kCarried, Weighting::kOrigin}) {
    if (!is_per_expert(layout) && weighting != Weighting::kApplied) continue;
    for (const int num_ranks : rank_counts) {
      cases.push_back({strategy, layout, weighting, num_ranks, spawn});
    }
  }
  return cases;
}

constexpr Strategy kStrategies[] = {
    Strategy::kBroadcast, Strategy::kGatherScatter,  Strategy::kBatched,   Strategy::kOneSided,
    Strategy::kTwoSided,  Strategy::kHighThroughput, Strategy::kLowLatency};

inline std::vector<ConformanceCase> select(const std::vector<ConformanceCase>& cases,
                                           bool (*is_wanted)(const ConformanceCase&)) {
  std::vector<ConformanceCase> selected;
  std::copy_if(cases.begin(), cases.end(), std::back_inserter(selected), is_wanted);
  return selected;
}

class AllToAllConformance : public ::testing::TestWithParam<ConformanceCase> {
 protected:
  void SetUp() override {
    if (GetParam().begin != nullptr) GetParam().begin(GetParam());
  }
  void TearDown() override {
    if (GetParam().end != nullptr) GetParam().end();
  }

  static int num_ranks() { return GetParam().num_ranks; }

  /// Sizes that are no multiple of anything: uneven experts, an odd row.
  static AllToAllConfig config() {
    AllToAllConfig config;
    config.num_experts = 2 * num_ranks() + 1;
    config.top_k = 3;
    config.max_tokens_per_rank = 7;
    config.hidden = 37;
    config.dtype = DType::kBFloat16;
    config.extra_bytes_per_token = 1;
    config.strategy = GetParam().strategy;
    config.layout = GetParam().layout;
    config.weighting = GetParam().weighting;
    if (GetParam().num_gpus > 0) config.device = DeviceType::kGpu;
    return config;
  }

  /// `config` as rank `rank` gives it.
  static AllToAllConfig of_rank(AllToAllConfig config, int rank) {
    if (GetParam().num_gpus > 0) config.device_index = rank % GetParam().num_gpus;
    return config;
  }

  /// Calls `body` on every rank with an AllToAll of `config`, and closes it.
  static void run(const AllToAllConfig& config, const std::function<void(AllToAll&)>& body) {
    GetParam().spawn(num_ranks(), [&, config](Communicator& communicator) {
      AllToAllConfig own =
          of_rank(config, communicator.rank());  // ranks may differ in how their results go home
      if (communicator.rank() % 2 == 0) own.test_knobs.min_pull_bytes = 0;
      AllToAll all_to_all(communicator, own);
      body(all_to_all);
      all_to_all.close();
    });
  }

  /// Dispatches and combines each plan in turn, without any other synchronisation.
  static void run_rounds(const AllToAllConfig& config,
                         const std::vector<testing::RoundPlan>& plans) {
    run(config, [&](AllToAll& all_to_all) {
      for (const testing::RoundPlan& plan : plans) {
        testing::RoundRun round(all_to_all, plan);
        round.dispatch();
        round.combine();
      }
    });
  }

  static testing::RoundPlan plan_of(const AllToAllConfig& config, testing::RoutingKind kind,
                                    std::uint64_t seed = 1) {
    return testing::make_round(config, num_ranks(), kind, config.max_tokens_per_rank, seed);
  }

  /// A few rounds of one kind, with different seeds.
  static void run_kind(const AllToAllConfig& config, testing::RoutingKind kind) {
    run_rounds(config, {plan_of(config, kind, 1), plan_of(config, kind, 2)});
  }
};

// Suites that only some cases can run.
class AppliedConformance : public AllToAllConformance {};
class KernelConformance : public AllToAllConformance {};  // what all strategies share
class OriginConformance : public AllToAllConformance {};
class GatheredConformance : public AllToAllConformance {};
class FlatConformance : public AllToAllConformance {};   // flat and flat_by_expert
class GroupConformance : public AllToAllConformance {};  // flat_by_expert
class MaskConformance : public AllToAllConformance {};

}  // namespace fanfold
