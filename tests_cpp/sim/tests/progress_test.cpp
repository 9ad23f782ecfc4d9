// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include "simple.h"
#include "simulated_test.h"

namespace cudasim {
namespace {

using ::testing::HasSubstr;

constexpr Wait kWaits[] = {Wait::kLoad,        Wait::kTwoWords,    Wait::kSleep,
                           Wait::kCompareSwap, Wait::kBarrierLoop, Wait::kVoteLoop};

class ProgressTest : public SimulatedTest {};

TEST_F(ProgressTest, WaitingInVainIsADeadlockHoweverItIsDone) {
  for (const Wait how : kWaits) {
    restart();
    auto* const words = zeros<unsigned>(4);
    wait_in_vain(stream_on(0), words, zeros<int>(1), how, 0);
    const auto found = finish_with_reports();
    ASSERT_EQ(found.size(), 1u) << static_cast<int>(how);
    EXPECT_EQ(found[0].kind, "deadlock");
    EXPECT_THAT(found[0].text, HasSubstr("rank 0 wait polls at progress.cu:"));
  }
}

TEST_F(ProgressTest, TimeoutsFireOnVirtualTime) {
  for (const Wait how : kWaits) {
    restart();
    auto* const words = zeros<unsigned>(4);
    int* const out = zeros<int>(1);
    const std::uint64_t begin_ns = now_ns();
    wait_in_vain(stream_on(0), words, out, how, 2'000'000'000);
    EXPECT_EQ(finish(), "clean") << static_cast<int>(how);
    EXPECT_EQ(value(out), 1);
    EXPECT_GT(now_ns() - begin_ns, 2'000'000'000u);
    EXPECT_LT(now_ns() - begin_ns, 8'000'000'000u);
  }
}

TEST_F(ProgressTest, WatchingTheClockLetsTimePass) {
  auto* const elapsed_ns = zeros<std::uint64_t>(1);
  watch_clock(stream_on(0), elapsed_ns, 1'000'000'000);
  EXPECT_EQ(finish(), "clean");
  EXPECT_GE(value(elapsed_ns), 1'000'000'000u);
}

TEST_F(ProgressTest, ReadingTheSameOftenIsNoDeadlock) {
  auto* const word = zeros<unsigned>(1);
  int* const out = zeros<int>(1);
  const std::uint64_t begin_ns = now_ns();
  read_repeatedly(stream_on(0), word, 900, out);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(out), 1);
  EXPECT_LT(now_ns() - begin_ns, 2'000'000u);
}

TEST_F(ProgressTest, ASpinLockMakesAPlainCounterRight) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    restart_with_seed(seed);
    int* const counter = zeros<int>(1);
    locked_increment(stream_on(0), zeros<unsigned>(1), counter, 4);
    EXPECT_EQ(finish(), "clean");
    EXPECT_EQ(value(counter), 128);
  }
}

TEST_F(ProgressTest, PreemptionLosesAnUpdate) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  Config config;
  config.preempt = 0.5;
  restart(config);
  int* const counter = zeros<int>(1);
  lossy_increment(stream_on(0), counter, 16);
  EXPECT_EQ(finish(), "race");
  EXPECT_LT(value(counter), 16);
}

TEST_F(ProgressTest, ADeadlockNamesBlocksThatAreNotResident) {
  Config config;
  config.resident_blocks = 1;
  restart(config);
  auto* const word = zeros<unsigned>(1);
  wait_for_word(stream_on(0), word, 1);
  signal_word(other_stream(), word, 1);
  const auto found = finish_with_reports();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].text, HasSubstr("1 threads: rank 0 wait polls at simple.cu:"));
  EXPECT_THAT(found[0].text, HasSubstr("rank 0 signal: 1 blocks not resident yet"));
}

TEST_F(ProgressTest, EqualSeedsGiveEqualRuns) {
  const auto run = [&](std::uint64_t seed) {
    restart_with_seed(seed);
    int* const counter = zeros<int>(1);
    const Stats before = stats();
    locked_increment(stream_on(0), zeros<unsigned>(1), counter, 8);
    finish();
    return stats().switches - before.switches;
  };
  const std::size_t once = run(5);
  EXPECT_EQ(run(5), once);
  EXPECT_NE(run(6), once);
}

TEST_F(ProgressTest, BlocksAreIssuedInRandomOrder) {
  Config config;
  config.shuffle_blocks = true;
  config.resident_blocks = 2;
  config.random_schedule = false;
  restart(config);
  int* const counter = zeros<int>(1);
  count_threads(stream_on(0), counter, 40, 32);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(counter), 40 * 32);
}

}  // namespace
}  // namespace cudasim
