// SPDX-License-Identifier: Apache-2.0
// Rounds whose phases are shared out to workers, compared with the oracle bit for bit.

#include <cstdint>
#include <vector>

#include "api/conformance_case.h"
#include "exchange/exchange.h"
#include "fanfold/all_to_all.h"
#include "gtest/gtest.h"

namespace fanfold {
namespace {

using testing::RoundPlan;
using testing::RoundRun;
using testing::RoutingKind;

constexpr int kNumRanks = 3;

void spawn_threads(int num_ranks, const std::function<void(Communicator&)>& rank_body) {
  testing::spawn_ranks(num_ranks, rank_body);
}

std::vector<ConformanceCase> all_cases() {
  std::vector<ConformanceCase> cases;
  for (const Strategy strategy : kStrategies) {
    for (const Layout layout : exchange::capabilities_of(strategy).layouts) {
      const auto some = conformance_cases(strategy, layout, {kNumRanks}, spawn_threads);
      cases.insert(cases.end(), some.begin(), some.end());
    }
  }
  return cases;
}

class WorkersConformance : public AllToAllConformance {
 protected:
  /// Rows of whole lines and a payload of single bytes; every phase is shared out.
  static AllToAllConfig shared_out() {
    AllToAllConfig config = AllToAllConformance::config();
    config.hidden = 288;
    config.max_tokens_per_rank = 19;
    config.max_in_flight = 2;
    config.test_knobs.min_worker_bytes = 0;
    return config;
  }
};

TEST_P(WorkersConformance, AnyNumberOfThemGivesTheSameResults) {
  const AllToAllConfig config = shared_out();
  std::vector<RoundPlan> plans;
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kUneven,
                                 RoutingKind::kDuplicates, RoutingKind::kAllToOne}) {
    plans.push_back(plan_of(config, kind, 7 + plans.size()));
    plans.back().zero_copy = plans.size() % 2 == 0;
    // Results that have to be rounded for the way home.
    if (plans.size() % 4 == 1) plans.back().y_dtype = DType::kFloat32;
  }
  const std::vector<int> numbers =
      testing::kIsSanitizer ? std::vector<int>{3, 8} : std::vector<int>{1, 2, 3, 8};
  run(config, [&](AllToAll& all_to_all) {
    for (const int num_workers : numbers) {
      for (const RoundPlan& plan : plans) {
        all_to_all.set_num_workers(num_workers);
        RoundRun round(all_to_all, plan);
        round.dispatch();
        round.combine();
      }
    }
  });
}

TEST_P(WorkersConformance, TheirNumberMayChangeBetweenAnyTwoCalls) {
  const AllToAllConfig config = shared_out();
  run(config, [&](AllToAll& all_to_all) {
    // Each rank has its own numbers, raised and lowered in the middle of rounds.
    const std::vector<int> numbers = {4, 1, 2, 3, 1, 8, 2};
    auto at = static_cast<std::size_t>(all_to_all.rank());
    const auto next = [&] {
      const int number = numbers[at++ % numbers.size()];
      all_to_all.set_num_workers(number);
      EXPECT_EQ(all_to_all.num_workers(), number);
    };
    for (std::uint64_t seed = 1; seed <= (testing::kIsSanitizer ? 3 : 8); ++seed) {
      RoundRun round(all_to_all, plan_of(config, RoutingKind::kSomeNone, seed));
      next();
      round.dispatch();
      next();
      round.combine(/*release=*/false);
      next();
      round.combine();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, WorkersConformance, ::testing::ValuesIn(all_cases()),
                         name_of_case);

}  // namespace
}  // namespace fanfold
