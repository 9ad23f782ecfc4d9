// SPDX-License-Identifier: Apache-2.0
// The conformance suites where rows lie on GPUs: one for each rank, or one that all share.

#include <memory>
#include <string>
#include <vector>

#include "api/all_to_all_conformance.h"
#include "api/all_to_all_rounds_conformance.h"
#include "gpu/gpu_ranks.h"

namespace fanfold {
namespace {

using ::testing::ValuesIn;

void spawn_threads(int num_ranks, const std::function<void(Communicator&)>& rank_body) {
  testing::spawn_ranks(num_ranks, rank_body);
}

/// The devices of the test that runs.
std::unique_ptr<testing::GpuRanks>& devices() {
  static std::unique_ptr<testing::GpuRanks> current;
  return current;
}
void begin(const ConformanceCase& c) {
  devices() = std::make_unique<testing::GpuRanks>(c.num_ranks, c.num_gpus);
}
void end() { devices().reset(); }

std::vector<ConformanceCase> all_cases() {
  std::vector<ConformanceCase> cases;
  const auto add = [&](Strategy strategy, Layout layout, int num_ranks, int num_gpus) {
    for (ConformanceCase& c : conformance_cases(strategy, layout, {num_ranks}, spawn_threads)) {
      c.num_gpus = num_gpus;
      c.begin = &begin;
      c.end = &end;
      cases.push_back(c);
    }
  };
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    for (const int num_ranks : {1, 2, 3}) add(Strategy::kOneSided, layout, num_ranks, num_ranks);
    add(Strategy::kOneSided, layout, 3, 1);
  }
  add(Strategy::kOneSided, Layout::kRankMajor, 5, 5);
  add(Strategy::kLowLatency, Layout::kExpertMajor, 2, 1);
  return cases;
}

bool is_applied(const ConformanceCase& c) { return c.weighting == Weighting::kApplied; }
bool is_origin(const ConformanceCase& c) { return c.weighting == Weighting::kOrigin; }
bool can_mask(const ConformanceCase& c) { return c.num_ranks > 1; }

INSTANTIATE_TEST_SUITE_P(Gpus, AllToAllConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, RoundsConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, AppliedConformance, ValuesIn(select(all_cases(), is_applied)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, OriginConformance, ValuesIn(select(all_cases(), is_origin)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, MaskConformance, ValuesIn(select(all_cases(), can_mask)),
                         name_of_case);

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KernelConformance);   // of the CPU
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GatheredConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FlatConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GroupConformance);

}  // namespace
}  // namespace fanfold
