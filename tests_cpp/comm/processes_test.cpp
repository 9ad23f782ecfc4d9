// SPDX-License-Identifier: Apache-2.0

// Ranks as processes (see process_scenarios.cpp): that they work together, and what the others see
// when one is killed or frozen.

#include <dirent.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/eventually.h"
#include "support/spawn_processes.h"
#include "support/test_directory.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using testing::eventually;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Process;
using testing::RankArguments;
using testing::spawn_processes;
using testing::TestDirectory;

/// Files in /dev/shm that could be ours.
std::vector<std::string> entries_of_shm() {
  std::vector<std::string> names;
  DIR* const directory = ::opendir("/dev/shm");
  if (directory == nullptr) return names;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.find("fanfold") != std::string::npos) names.push_back(name);
  }
  ::closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

/// Whether rank 0 listens at `path` and has one connection.
bool has_one_connection(const std::string& path) {
  std::ifstream sockets("/proc/net/unix");
  int num = 0;
  for (std::string line; std::getline(sockets, line);) {
    if (line.find(path) != std::string::npos) ++num;
  }
  return num == 2;
}

TEST(ProcessesTest, RanksWorkTogetherAndLeaveNothing) {
  for (const int num_ranks : {1, 2, 4}) {
    const TestDirectory directory;
    auto ranks = spawn_processes("work", num_ranks, directory.path() + "/socket");
    for (Process& rank : ranks) {
      EXPECT_EQ(rank.read_line(), "done");
      EXPECT_EQ(rank.wait(), 0);
    }
    EXPECT_THAT(directory.entries(), IsEmpty());
  }
}

void expect_lost_within_a_second(const std::string& extra, std::size_t victim) {
  const TestDirectory directory;
  auto ranks = spawn_processes("wait_for_victim", 3, directory.path() + "/socket",
                               std::to_string(victim) + extra);
  for (Process& rank : ranks) ASSERT_EQ(rank.read_line(), "ready");
  const std::int64_t killed_at = base::now_ns();
  ranks[victim].send_signal(SIGKILL);  // and nobody waits for it: a zombie
  for (std::size_t rank = 0; rank < 3; ++rank) {
    if (rank == victim) continue;
    const std::string line = ranks[rank].read_line();
    EXPECT_THAT(line, HasSubstr("lost " + std::to_string(victim) + " at "));
    EXPECT_THAT(line, HasSubstr("its process ended"));
    EXPECT_LT(std::stoll(line.substr(line.find("at ") + 3)) - killed_at, 1'000'000'000);
    EXPECT_THAT(ranks[rank].read_line(), HasSubstr("lost " + std::to_string(victim)));
    EXPECT_EQ(ranks[rank].read_line(), "split lost " + std::to_string(victim));
    EXPECT_EQ(ranks[rank].wait(), 0);
  }
}

TEST(ProcessesTest, AKilledRankIsLostWithinASecond) { expect_lost_within_a_second("", 2); }

TEST(ProcessesTest, AKilledRankZeroIsLostWithinASecond) { expect_lost_within_a_second("", 0); }

TEST(ProcessesTest, AKilledRankIsLostEvenIfItsForkedChildLives) {
  expect_lost_within_a_second(" fork", 1);
}

TEST(ProcessesTest, AFrozenRankIsATimeoutAndTheGroupGoesOnAfterAReset) {
  const TestDirectory directory;
  auto ranks = spawn_processes("reset_after_freeze", 3, directory.path() + "/socket");
  ASSERT_EQ(ranks[1].read_line(), "ready");
  ranks[1].send_signal(SIGSTOP);
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    ASSERT_EQ(ranks[rank].read_line(), "ready");
    EXPECT_EQ(ranks[rank].read_line(), "timeout 1");
  }
  // They wait in the reset for the frozen rank.
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) ranks[rank].write_line("go");
  ranks[1].send_signal(SIGCONT);
  ranks[1].write_line("go");
  for (Process& rank : ranks) {
    EXPECT_EQ(rank.read_line(), "done");
    EXPECT_EQ(rank.wait(), 0);
  }
}

TEST(ProcessesTest, AForkedChildMayNotUseTheGroupAndDoesNotDisturbIt) {
  const TestDirectory directory;
  auto ranks = spawn_processes("use_in_forked_child", 2, directory.path() + "/socket");
  for (Process& rank : ranks) {
    EXPECT_EQ(rank.read_line(), "done");
    EXPECT_EQ(rank.wait(), 0);
  }
}

TEST(ProcessesTest, TorchrunsVariablesNameTheGroup) {
  const TestDirectory directory;
  std::vector<Process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back("join_from_env", RankArguments{},
                       std::vector<std::string>{"RANK=" + std::to_string(rank), "WORLD_SIZE=3",
                                                "MASTER_ADDR=localhost", "MASTER_PORT=29500",
                                                "TORCHELASTIC_RUN_ID=" + directory.path(),
                                                "XDG_RUNTIME_DIR=" + directory.path()});
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ranks[static_cast<std::size_t>(rank)].read_line(),
              "rank " + std::to_string(rank) + " of 3");
  }
  EXPECT_THAT(directory.entries(), IsEmpty());
}

TEST(ProcessesTest, AMissingOrMalformedVariableIsNamed) {
  const auto text = [](const std::vector<std::string>& environment) {
    return Process("join_from_env", RankArguments{}, environment).read_line();
  };
  EXPECT_THAT(text({"WORLD_SIZE="}),
              HasSubstr("WORLD_SIZE: expected this environment variable, as torchrun sets it"));
  EXPECT_EQ(text({"WORLD_SIZE=two"}), "error: WORLD_SIZE: expected a whole number, got 'two'");
  EXPECT_EQ(text({"WORLD_SIZE=2", "RANK=2"}), "error: RANK: expected 0 to 1, got 2");
}

TEST(ProcessesTest, ARankThatDiesBeforeTheGroupIsCompleteMayBeStartedAgain) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/socket";
  Process host("only_join", {0, 3, path, ""});
  ASSERT_EQ(host.read_line(), "start");
  {
    Process first("only_join", {1, 3, path, ""});
    ASSERT_EQ(first.read_line(), "start");
    ASSERT_TRUE(eventually([&] { return has_one_connection(path); }));
  }  // it is killed here
  Process again("only_join", {1, 3, path, ""});
  Process last("only_join", {2, 3, path, ""});
  for (Process* rank : {&again, &last}) ASSERT_EQ(rank->read_line(), "start");
  for (Process* rank : {&host, &again, &last}) EXPECT_EQ(rank->read_line(), "done");
}

TEST(ProcessesTest, ARankZeroThatDiesBeforeTheGroupIsCompleteIsLostAndItsSocketRemoved) {
  const TestDirectory directory;
  const std::string path = directory.path() + "/socket";
  Process host("only_join", {0, 3, path, ""});
  Process peer("only_join", {1, 3, path, ""});
  ASSERT_EQ(host.read_line(), "start");
  ASSERT_EQ(peer.read_line(), "start");
  ASSERT_TRUE(eventually([&] { return has_one_connection(path); }));
  host.send_signal(SIGKILL);
  EXPECT_THAT(peer.read_line(), HasSubstr("rank 0 is gone"));
  EXPECT_EQ(peer.wait(), 1);
  EXPECT_THAT(directory.entries(), IsEmpty());
}

TEST(ProcessesTest, KilledRanksLeaveNoFiles) {
  const std::vector<std::string> shm = entries_of_shm();
  const TestDirectory directory;
  auto ranks = spawn_processes("leave_on_command", 3, directory.path() + "/socket");
  for (Process& rank : ranks) ASSERT_EQ(rank.read_line(), "ready");
  for (Process& rank : ranks) rank.send_signal(SIGKILL);
  for (Process& rank : ranks) EXPECT_EQ(rank.wait(), -SIGKILL);
  EXPECT_THAT(directory.entries(), IsEmpty());
  EXPECT_EQ(entries_of_shm(), shm);
}

TEST(ProcessesTest, RanksMayEndInAnyOrderWithoutClosing) {
  for (const std::vector<std::size_t>& order :
       {std::vector<std::size_t>{0, 1, 2}, {2, 1, 0}, {1, 0, 2}}) {
    const TestDirectory directory;
    auto ranks = spawn_processes("leave_on_command", 3, directory.path() + "/socket");
    for (Process& rank : ranks) ASSERT_EQ(rank.read_line(), "ready");
    for (const std::size_t rank : order) {
      ranks[rank].write_line("leave");
      EXPECT_EQ(ranks[rank].read_line(), "done");
      EXPECT_EQ(ranks[rank].wait(), 0);
    }
  }
}

}  // namespace

}  // namespace fanfold
