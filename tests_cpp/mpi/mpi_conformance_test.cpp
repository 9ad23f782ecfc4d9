// SPDX-License-Identifier: Apache-2.0

// What every strategy over collectives must do, with MPI's processes as ranks that share nothing.

#include <vector>

#include "api/all_to_all_conformance.h"
#include "mpi/mpi_ranks.h"

namespace fanfold {
namespace {

constexpr int kNumRanks = 4;

std::vector<ConformanceCase> cases() {
  const auto of = [](Strategy strategy, Layout layout, Weighting weighting) {
    return ConformanceCase{strategy, layout, weighting, kNumRanks, testing::run_mpi_rank};
  };
  return {of(Strategy::kBroadcast, Layout::kGathered, Weighting::kApplied),
          of(Strategy::kGatherScatter, Layout::kFlat, Weighting::kApplied),
          of(Strategy::kBatched, Layout::kExpertMajor, Weighting::kOrigin)};
}

INSTANTIATE_TEST_SUITE_P(Mpi, AllToAllConformance, ::testing::ValuesIn(cases()), name_of_case);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AppliedConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KernelConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OriginConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GatheredConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FlatConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GroupConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MaskConformance);

}  // namespace
}  // namespace fanfold
