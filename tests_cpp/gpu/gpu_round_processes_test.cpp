// SPDX-License-Identifier: Apache-2.0

// Rounds on GPUs between processes (see gpu_round_process_scenarios.cpp and
// gpu_loss_scenarios.cpp): that they give what they should, and what the others see of a rank that
// is late, differs, aborts, fails or is killed.

#include <signal.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "base/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/spawn_processes.h"
#include "support/test_directory.h"

namespace fanfold {
namespace {

using namespace std::chrono_literals;
using base::str;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Process;
using testing::spawn_processes;
using ::testing::StartsWith;
using testing::TestDirectory;

constexpr std::int64_t kSecond = 1'000'000'000;

/// Ranks of one scenario.
class Ranks {
 public:
  Ranks(const std::string& scenario, int num_ranks, const std::string& extra = "")
      : ranks_(spawn_processes(scenario, num_ranks, directory_.path() + "/socket", extra)) {}

  Process& operator[](std::size_t rank) { return ranks_[rank]; }
  std::size_t size() const { return ranks_.size(); }

  void expect_line(std::size_t rank, const std::string& expected) {
    const std::string line = ranks_[rank].read_line();
    if (line == expected) return;
    ADD_FAILURE() << "rank " << rank << ": expected '" << expected << "', got '" << line << "'"
                  << rest_of(rank);
  }
  void expect_line(const std::string& expected) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) expect_line(rank, expected);
  }
  void expect_done(std::size_t rank) {
    expect_line(rank, "done");
    EXPECT_EQ(ranks_[rank].wait(), 0) << "rank " << rank;
  }
  void expect_done() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) expect_done(rank);
  }
  void tell_all_but(std::size_t one) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (rank != one) ranks_[rank].write_line("go");
    }
  }

 private:
  /// A comparison that failed prints more than a line.
  std::string rest_of(std::size_t rank) {
    std::string text;
    for (int i = 0; i < 40; ++i) text += "\n" + ranks_[rank].read_line(20ms);
    return text;
  }

  TestDirectory directory_;
  std::vector<Process> ranks_;
};

using RoundsCase = std::tuple<int, std::string, std::string>;
class GpuProcessRoundsTest : public ::testing::TestWithParam<RoundsCase> {};

TEST_P(GpuProcessRoundsTest, AllWaysGiveWhatTheOracleSays) {
  const auto& [num_ranks, kind, layout] = GetParam();
  Ranks ranks("make_rounds", num_ranks, kind + " " + layout);
  ranks.expect_done();
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuProcessRoundsTest,
                         ::testing::Values(RoundsCase(2, "fabric", "rank_major"),
                                           RoundsCase(3, "file_descriptor", "rank_major"),
                                           RoundsCase(2, "file_descriptor", "expert_major"),
                                           RoundsCase(3, "fabric", "expert_major")),
                         [](const auto& one) {
                           return str(std::get<0>(one.param), "_", std::get<1>(one.param), "_",
                                      std::get<2>(one.param));
                         });

TEST(GpuRoundProcessesTest, ARankThatStopsForAWhileIsWaitedForAndOneThatStaysAwayIsNamed) {
  Ranks ranks("meet_a_late_rank", 3);
  ranks.expect_line("ready");
  ranks[1].write_line("go");
  std::this_thread::sleep_for(30ms);
  ranks[1].send_signal(SIGSTOP);  // its kernel waits for the others
  ranks.tell_all_but(1);
  EXPECT_EQ(ranks[0].read_line(100ms), "");
  ranks[1].send_signal(SIGCONT);
  ranks.expect_line("met");
  const std::int64_t start = base::now_ns();
  ranks.tell_all_but(1);
  for (const std::size_t rank : {0U, 2U}) {
    ranks.expect_line(rank,
                      "AllToAll: dispatch of round 2: rank 1 did not arrive within 150 ms; it is "
                      "late or frozen; call reset() on every rank");
  }
  EXPECT_LT(base::now_ns() - start, 4 * kSecond);
  ranks[1].write_line("go");
  ranks.tell_all_but(1);
  ranks.expect_line("reset");
  ranks[1].write_line("go");
  std::this_thread::sleep_for(30ms);
  ranks[1].send_signal(SIGSTOP);
  ranks.tell_all_but(1);
  std::this_thread::sleep_for(50ms);
  ranks[1].send_signal(SIGCONT);
  ranks.expect_done();
}

TEST(GpuRoundProcessesTest, AnAbortEndsTheKernelsOfTheOthers) {
  Ranks ranks("abort_a_round", 3);
  for (const std::size_t rank : {0U, 2U}) ranks.expect_line(rank, "waits");
  std::this_thread::sleep_for(30ms);
  ranks[1].write_line("go");
  const std::int64_t aborted_at = std::stoll(ranks[1].read_line());
  for (const std::size_t rank : {0U, 2U}) {
    // Milliseconds where cores are free; the round's own time-out is a minute.
    EXPECT_LT(std::stoll(ranks[rank].read_line()) - aborted_at, kSecond);
    ranks.expect_line(rank,
                      "1 AllToAll: dispatch of round 1: rank 1 aborted: no more of this; call "
                      "reset() on every rank");
  }
  ranks.expect_done();
}

TEST(GpuRoundProcessesTest, AResetEndsTheKernelsOfRanksThatAllWait) {
  Ranks ranks("reset_while_all_wait", 2);
  ranks.expect_done();
}

TEST(GpuRoundProcessesTest, CallsThatDifferAreToldOnAllRanksInTheWordsOfTheCpu) {
  Ranks ranks("differ_in_a_call", 2, "m payloads weights hidden release");
  const std::vector<std::string> parts = {
      "dispatch of round 1 differs between ranks: round_max_tokens: rank ",
      "differs between ranks: number of payloads: rank ",
      "differs between ranks: digest of the payload set (row bytes, dtypes, weights): rank ",
      "differs between ranks: hidden of the combine: rank ",
      "differs between ranks: call: rank ",
  };
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (const std::string& part : parts) {
      EXPECT_THAT(ranks[rank].read_line(),
                  AllOf(HasSubstr(part), HasSubstr(str(part.substr(part.size() - 5), rank))));
    }
  }
  ranks.expect_done();
}

/// Victim, when it is killed, how the others find out.
using LossCase = std::tuple<int, std::string, std::string>;
class GpuLostRankTest : public ::testing::TestWithParam<LossCase> {};

TEST_P(GpuLostRankTest, IsNamedAndNothingHangsOrIsLeft) {
  const auto& [victim_rank, phase, way] = GetParam();
  const auto victim = static_cast<std::size_t>(victim_rank);
  const bool just_ends = way == "destroy" || way == "close";
  Ranks ranks("lose_a_rank", 3, str(victim_rank, ' ', phase, ' ', way));
  ranks.expect_line("ready");
  if (phase == "kernel") {
    ranks[victim].write_line("go");
    std::this_thread::sleep_for(50ms);
    ranks[victim].send_signal(SIGKILL);
  }
  ranks.tell_all_but(victim);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (rank != victim) ranks.expect_line(rank, "waits");
  }
  std::this_thread::sleep_for(30ms);
  const std::size_t last = victim == 2 ? 1 : 2;
  const std::int64_t start = base::now_ns();
  if (phase != "kernel") ranks[victim].send_signal(SIGKILL);
  EXPECT_EQ(ranks[victim].wait(), -SIGKILL);
  if (way == "close") ranks.tell_all_but(victim);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (rank == victim) continue;
    // One after the other: the last one is told of the victim, not of who has left since.
    if (way != "close") ranks[rank].write_line(rank == last ? "last" : "go");
    if (just_ends) {
      ranks.expect_line(rank, "ended");
    } else {
      EXPECT_THAT(
          ranks[rank].read_line(),
          AllOf(StartsWith("AllToAll: "), HasSubstr(str("rank ", victim,
                                                        " is gone: its process ended; close the "
                                                        "communicator and all that was made"))));
    }
    EXPECT_LT(base::now_ns() - start, 5 * kSecond);
    ranks.expect_done(rank);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GpuLostRankTest,
    ::testing::Values(LossCase(1, "dispatch", "check"), LossCase(0, "dispatch", "late"),
                      LossCase(2, "dispatch", "destroy"), LossCase(0, "combine", "check"),
                      LossCase(2, "combine", "late"), LossCase(1, "combine", "destroy"),
                      LossCase(0, "combine", "close"), LossCase(1, "dispatch", "close"),
                      LossCase(2, "kernel", "check"), LossCase(1, "kernel", "late"),
                      LossCase(0, "kernel", "destroy")),
    [](const auto& one) {
      return str("rank", std::get<0>(one.param), "_", std::get<1>(one.param), "_",
                 std::get<2>(one.param));
    });

/// Kills rank `victim` of two at every `step`th call, until it lives through all.
void kill_at_calls(int victim, int step) {
  int num_in_creation = 0;
  int num_in_rounds = 0;
  bool was_killed = true;
  for (int call = 1; was_killed; call += step) {
    SCOPED_TRACE(str("killed at call ", call));
    Ranks ranks("die_at_a_call", 2, str(victim, ' ', call));
    const auto other = static_cast<std::size_t>(1 - victim);
    was_killed = ranks[static_cast<std::size_t>(victim)].wait() == -SIGKILL;
    const std::string line = ranks[other].read_line();
    if (line == str("creation lost ", victim)) {
      ++num_in_creation;
    } else if (line == str("round lost ", victim)) {
      ++num_in_rounds;
    } else {
      EXPECT_EQ(line, "through");
    }
    ranks.expect_done(other);
    if (::testing::Test::HasFailure()) return;
    ASSERT_LT(call, 1000);
  }
  EXPECT_GE(num_in_creation, 5);
  EXPECT_GE(num_in_rounds, 5);
}

TEST(GpuRoundProcessesTest, ARankMayDieAtAnyCall) { kill_at_calls(1, 13); }

TEST(GpuRoundProcessesTest, SoMayRank0) { kill_at_calls(0, 17); }

TEST(GpuRoundProcessesTest, ACreationThatFailsOnOneRankFailsOnAllAndLeavesNothing) {
  const std::vector<std::string> calls = {"cuMemHostAlloc 2 1",
                                          "cuMemHostRegister 712 1",
                                          "cuMemHostGetDevicePointer 1 1",
                                          "cuMemHostGetDevicePointer 1 2",
                                          "cuMemAlloc 2 1",
                                          "cuMemcpyHtoDAsync 719 3",
                                          "cuStreamCreate 2 5",
                                          "cuMemCreate 801 1"};
  std::string extra;
  for (const std::string& call : calls) extra += call + " ";
  Ranks ranks("fail_to_create", 3, extra);
  for (const std::string& call : calls) {
    const std::string text = ranks[0].read_line();
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1: "), HasSubstr(call.substr(0, call.find(' ')))));
    for (const std::size_t rank : {1U, 2U}) ranks.expect_line(rank, text);
  }
  ranks.expect_done();
}

TEST(GpuRoundProcessesTest, ALaunchThatIsRefusedFailsTheRoundOnAllRanks) {
  Ranks ranks("fail_to_launch", 2);
  ranks.expect_done();
}

}  // namespace
}  // namespace fanfold
