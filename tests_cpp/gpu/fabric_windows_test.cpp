// SPDX-License-Identifier: Apache-2.0
#include "gpu/fabric_windows.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/fabric_outcome.h"
#include "gpu/simulated_devices.h"
#include "gtest/gtest.h"

namespace fanfold::gpu {
namespace {

using ::testing::IsEmpty;
using testing::SimulatedDevices;

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const RankKind ranks : {RankKind::kThreads, RankKind::kProcesses}) {
    for (const HandleKind kind : all_kinds()) {
      if (ranks == RankKind::kProcesses && kind == HandleKind::kSameProcess) continue;
      for (const int num_ranks : {1, 2, 4}) {
        cases.push_back({ranks, kind, num_ranks, 1});
        if (num_ranks > 1) cases.push_back({ranks, kind, num_ranks, num_ranks});
      }
    }
  }
  return cases;
}

class FabricWindowsTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(All, FabricWindowsTest, ::testing::ValuesIn(all_cases()), &name_of_case);

TEST_P(FabricWindowsTest, EveryRankReachesEveryWindowAtEqualOffsets) {
  const Case one = GetParam();
  const SimulatedDevices devices(one.num_devices);
  on_each_rank(one.ranks, one.num_ranks, [&](comm::Group& group) {
    const auto context = std::make_shared<const DeviceContext>(group.rank() % one.num_devices);
    const SharedWindows shared = share_windows(group, context, kBytes, {one.kind}, soon());
    EXPECT_EQ(shared.kind, one.kind);
    EXPECT_THAT(shared.passed_over, IsEmpty());
    ASSERT_EQ(shared.windows->bytes(), kRounded);
    for (int rank = 0; rank < one.num_ranks; ++rank) {
      std::byte* const data = shared.windows->data(rank);
      EXPECT_EQ(data - shared.windows->data(0), rank * kRounded);
      for (std::int64_t at = 0; at < kRounded; at += 4096) ASSERT_EQ(data[at], std::byte{0});
    }
    (void)group.share_windows(64, soon());  // a barrier: all have looked
    for (int rank = 0; rank < one.num_ranks; ++rank) {
      shared.windows->data(rank)[kRounded - 1 - group.rank()] =
          static_cast<std::byte>(10 * rank + group.rank() + 1);
    }
    (void)group.share_windows(64, soon());
    for (int rank = 0; rank < one.num_ranks; ++rank) {
      for (int writer = 0; writer < one.num_ranks; ++writer) {
        EXPECT_EQ(shared.windows->data(rank)[kRounded - 1 - writer],
                  static_cast<std::byte>(10 * rank + writer + 1));
      }
    }
    (void)group.share_windows(64, soon());
  });
}

TEST_P(FabricWindowsTest, AWindowOutlivesTheRankItBelongsTo) {
  const Case one = GetParam();
  const SimulatedDevices devices(one.num_devices);
  on_each_rank(one.ranks, one.num_ranks, [&](comm::Group& group) {
    const auto context = std::make_shared<const DeviceContext>(group.rank() % one.num_devices);
    SharedWindows shared = share_windows(group, context, kBytes, {one.kind}, soon());
    const int last = one.num_ranks - 1;
    if (group.rank() == last) {
      shared.windows->data(last)[5] = std::byte{77};
      if (last > 0) shared.windows.reset();
    }
    (void)group.share_windows(64, soon());
    if (shared.windows != nullptr) {
      EXPECT_EQ(shared.windows->data(last)[5], std::byte{77});
    }
    (void)group.share_windows(64, soon());
  });
}

}  // namespace
}  // namespace fanfold::gpu
