// SPDX-License-Identifier: Apache-2.0
// The conformance suites where rows lie on GPUs: one for each rank, or one that all share.

#include <memory>
#include <string>
#include <vector>

#include "api/all_to_all_conformance.h"
#include "api/all_to_all_rounds_conformance.h"
#include "gpu/gpu_ranks.h"
#include "gpu/nccl_ranks.h"

namespace fanfold {
namespace {

using ::testing::ValuesIn;

void spawn_threads(int num_ranks, const std::function<void(Communicator&)>& rank_body) {
  testing::spawn_ranks(num_ranks, rank_body);
}

/// Ranks whose communicators have collectives on GPUs.
void spawn_with_collectives(int num_ranks, const std::function<void(Communicator&)>& rank_body) {
  testing::spawn_nccl_ranks(num_ranks, num_ranks, rank_body);
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

/// A simulated kernel takes a thousand times as long as a real one: each layout and weighting once,
/// with one rank, one GPU for all, and one for each.
std::vector<ConformanceCase> all_cases() {
  const auto on_gpus = [](Strategy strategy, Layout layout, Weighting weighting, int num_ranks,
                          int num_gpus) {
    return ConformanceCase{strategy,      layout,   weighting, num_ranks,
                           spawn_threads, num_gpus, &begin,    &end};
  };
  const auto collective = [&](Strategy strategy, Layout layout, Weighting weighting,
                              int num_ranks) {
    ConformanceCase c = on_gpus(strategy, layout, weighting, num_ranks, num_ranks);
    c.spawn = spawn_with_collectives;
    return c;
  };
  if (testing::kIsSanitizer) {  // which makes the simulated device eight times as slow
    return {on_gpus(Strategy::kOneSided, Layout::kExpertMajor, Weighting::kOrigin, 2, 2)};
  }
  return {
      on_gpus(Strategy::kOneSided, Layout::kRankMajor, Weighting::kApplied, 1, 1),
      on_gpus(Strategy::kOneSided, Layout::kRankMajor, Weighting::kApplied, 3, 3),
      on_gpus(Strategy::kOneSided, Layout::kExpertMajor, Weighting::kApplied, 2, 1),
      on_gpus(Strategy::kOneSided, Layout::kExpertMajor, Weighting::kOrigin, 2, 2),
      on_gpus(Strategy::kLowLatency, Layout::kExpertMajor, Weighting::kCarried, 3, 1),
      collective(Strategy::kBatched, Layout::kRankMajor, Weighting::kApplied, 2),
      collective(Strategy::kGatherScatter, Layout::kExpertMajor, Weighting::kCarried, 3),
      collective(Strategy::kBroadcast, Layout::kRankMajor, Weighting::kApplied, 2),
  };
}

bool is_applied(const ConformanceCase& c) { return c.weighting == Weighting::kApplied; }
bool is_origin(const ConformanceCase& c) { return c.weighting == Weighting::kOrigin; }
/// A rank that sets its mask waits for its GPU, on which another's next round may wait for it.
bool can_mask(const ConformanceCase& c) {
  return c.spawn == spawn_threads && c.num_ranks > 1 && c.num_gpus == c.num_ranks;
}

INSTANTIATE_TEST_SUITE_P(Gpus, AllToAllConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, RoundsConformance, ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, AppliedConformance, ValuesIn(select(all_cases(), is_applied)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, OriginConformance, ValuesIn(select(all_cases(), is_origin)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Gpus, MaskConformance, ValuesIn(select(all_cases(), can_mask)),
                         name_of_case);

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AppliedConformance);  // under a sanitizer
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KernelConformance);   // of the CPU
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GatheredConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FlatConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GroupConformance);

}  // namespace
}  // namespace fanfold
