// SPDX-License-Identifier: Apache-2.0

// NCCL between processes (see nccl_process_scenarios.cpp).

#include <signal.h>

#include "gtest/gtest.h"
#include "support/spawn_processes.h"
#include "support/test_directory.h"

namespace fanfold {
namespace {

using testing::Process;
using testing::spawn_processes;
using testing::TestDirectory;

TEST(NcclProcessesTest, CollectivesAndMemoryWorkAndLeaveNothing) {
  const TestDirectory directory;
  auto ranks = spawn_processes("sum_and_share", 3, directory.path() + "/socket");
  for (Process& rank : ranks) EXPECT_EQ(rank.read_line(), "done");
  for (Process& rank : ranks) EXPECT_EQ(rank.wait(), 0);
}

TEST(NcclProcessesTest, AKilledPeerIsNamedAndAnAbortFreesTheStream) {
  const TestDirectory directory;
  auto ranks = spawn_processes("lose_rank_one", 2, directory.path() + "/socket");
  for (Process& rank : ranks) EXPECT_EQ(rank.read_line(), "ready");
  ranks[1].send_signal(SIGKILL);
  EXPECT_EQ(ranks[0].read_line(), "lost 1");
  EXPECT_EQ(ranks[0].read_line(), "done");
  EXPECT_EQ(ranks[0].wait(), 0);
}

}  // namespace
}  // namespace fanfold
