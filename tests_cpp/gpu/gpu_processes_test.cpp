// SPDX-License-Identifier: Apache-2.0

// GPU memory between processes (see gpu_process_scenarios.cpp), one of them killed at each step.

#include <signal.h>

#include <string>
#include <vector>

#include "base/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/spawn_processes.h"
#include "support/test_directory.h"

namespace fanfold {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::Process;
using testing::spawn_processes;
using ::testing::StartsWith;
using testing::TestDirectory;

class GpuProcessesTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Kinds, GpuProcessesTest, ::testing::Values("fabric", "file_descriptor"),
                         [](const auto& one) { return one.param; });

TEST_P(GpuProcessesTest, ShareMemoryAndLeaveNothing) {
  const TestDirectory directory;
  auto ranks = spawn_processes("share_and_check", 3, directory.path() + "/socket", GetParam());
  for (Process& rank : ranks) EXPECT_EQ(rank.read_line(), "done");
  for (Process& rank : ranks) EXPECT_EQ(rank.wait(), 0);
}

/// Kills `victim` of three at every `step`th driver call, until it lives through all.
void kill_at_each_call(const std::string& kind, std::size_t victim, int step, int min_kills) {
  bool was_killed = true;
  int num_kills = 0;
  for (int call = 1; was_killed; call += step) {
    SCOPED_TRACE(base::str("killed at driver call ", call));
    const TestDirectory directory;
    auto ranks = spawn_processes("lose_a_rank", 3, directory.path() + "/socket",
                                 base::str(kind, ' ', victim, ' ', call));
    // It may die while it lets go of what is shared.
    const bool has_shared = ranks[victim].read_line() == "shared";
    was_killed = ranks[victim].wait() == -SIGKILL;
    num_kills += was_killed ? 1 : 0;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(ranks[rank].read_line(), has_shared ? "shared" : base::str("lost ", victim));
      EXPECT_EQ(ranks[rank].wait(), 0);
    }
    ASSERT_LT(call, 400);
  }
  EXPECT_GE(num_kills, min_kills);
}

TEST_P(GpuProcessesTest, OneKilledAtAnyDriverCallIsLostToTheOthersWhichKeepNothing) {
  kill_at_each_call(GetParam(), 1, 1, 40);
}

TEST_P(GpuProcessesTest, SoIsTheHubOfTheExchanges) { kill_at_each_call(GetParam(), 0, 4, 10); }

TEST(GpuProcessTest, AnImporterOfAnotherUserIsRefused) {
  const TestDirectory directory;
  auto ranks = spawn_processes("be_another_user", 2, directory.path() + "/socket");
  for (Process& rank : ranks) {
    EXPECT_THAT(rank.read_line(),
                AllOf(HasSubstr("rank 0: cuMemImportFromShareableHandle of rank 1's memory: "),
                      HasSubstr("CUDA_ERROR_")));
    EXPECT_EQ(rank.wait(), 0);
  }
}

TEST(GpuProcessTest, WithoutADriverThereIsOneClearErrorAndTheCpuGoesOn) {
  const TestDirectory directory;
  auto ranks = spawn_processes("have_no_driver", 2, directory.path() + "/socket", "",
                               {"FANFOLD_LIBCUDA=libcuda-that-is-not-there.so.1"});
  for (Process& rank : ranks) {
    EXPECT_THAT(rank.read_line(),
                AllOf(StartsWith("rank 0: GPU: expected the CUDA driver, which is not here: "),
                      HasSubstr("libcuda-that-is-not-there.so.1")));
    EXPECT_EQ(rank.wait(), 0);
  }
}

TEST(GpuProcessTest, ADriverThatIsTooOldIsSaidSo) {
  const TestDirectory directory;
  auto ranks = spawn_processes("have_no_driver", 1, directory.path() + "/socket", "",
                               {"FANFOLD_LIBCUDA=libm.so.6"});  // a library without the functions
  EXPECT_EQ(ranks[0].read_line(),
            "rank 0: GPU: expected a CUDA driver of version 12.0 or later, got an older one");
  EXPECT_EQ(ranks[0].wait(), 0);
}

TEST(GpuProcessTest, ADriverWithoutDevicesIsSaidSoAndTheNextCallLooksAgain) {
  const TestDirectory directory;
  auto ranks = spawn_processes("have_no_device", 1, directory.path() + "/socket");
  EXPECT_THAT(ranks[0].read_line(),
              StartsWith("rank 0: GPU: expected a device, got cuInit: CUDA_ERROR_NO_DEVICE"));
  EXPECT_EQ(ranks[0].read_line(), "shared");
  EXPECT_EQ(ranks[0].wait(), 0);
}

}  // namespace
}  // namespace fanfold
