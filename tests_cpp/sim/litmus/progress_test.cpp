// SPDX-License-Identifier: Apache-2.0

// Deadlocks, time-outs, and what depends on the order of blocks and threads.

#include <gmock/gmock.h>

#include <chrono>
#include <set>

#include "litmus.h"

namespace fanfold::gpu::litmus {
namespace {

using testing::HasSubstr;

using ProgressLitmus = LitmusTest;
using ProgressFaults = WithAccessChecks<LitmusTest>;

TEST_F(ProgressLitmus, BlocksThatFitTogetherMeet) {
  config_.resident_blocks = 8;
  start(config_);
  const Words parts = words(0);
  grid_barrier(parts, 8, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts, 7), 1);
}

TEST_F(ProgressLitmus, BlocksThatDoNotFitTogetherAreADeadlockFoundAtOnce) {
  config_.resident_blocks = 7;
  start(config_);
  const auto begin = std::chrono::steady_clock::now();
  grid_barrier(words(0), 8, stream(0));
  EXPECT_NE(cudaStreamSynchronize(stream(0)), cudaSuccess);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  ASSERT_EQ(kinds(), "deadlock");
  const std::string text = text_of("deadlock");
  EXPECT_THAT(text, HasSubstr("7 threads: rank 0"));
  EXPECT_THAT(text, HasSubstr("grid_barrier"));
  EXPECT_THAT(text, HasSubstr("polls at progress.cu:"));
  EXPECT_THAT(text, HasSubstr("1 blocks not resident yet"));
  ASSERT_EQ(named_lines(text).size(), 1U) << text;
  EXPECT_THAT(named_lines(text)[0], HasSubstr("// waits for all blocks"));
}

TEST_F(ProgressLitmus, AFlagThatNobodySetsIsADeadlock) {
  wait_for_ever(words(0), stream(0));
  EXPECT_NE(cudaStreamSynchronize(stream(0)), cudaSuccess);
  EXPECT_EQ(kinds(), "deadlock");
}

TEST_F(ProgressLitmus, ATimeOutPassesInVirtualTime) {
  const auto begin = std::chrono::steady_clock::now();
  const std::uint64_t virtual_begin = cudasim::now_ns();
  const Words parts = words(1);
  wait_for_ever(parts, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_GE(cudasim::now_ns() - virtual_begin, 2'000'000'000U);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1900));
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts), 1);
}

TEST_F(ProgressLitmus, APeerThatWaitsForAStoppedOneTimesOutToo) {
  const Words parts = words(1);
  wait_for_ever(parts, stream(0));
  wait_for_ever(parts, stream(1));
  sync();
  EXPECT_EQ(kinds().find("deadlock"), std::string::npos) << all_texts();
}

TEST_F(ProgressLitmus, BlocksStartInRandomOrderIfAsked) {
  config_.shuffle_blocks = true;
  config_.resident_blocks = 1;
  std::set<int> firsts;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    config_.seed = seed;
    start(config_);
    const Words parts = words(0);
    first_block(parts, 16, stream(0));
    ASSERT_EQ(sync(), cudaSuccess);
    firsts.insert(result(parts));
  }
  EXPECT_GT(firsts.size(), 4U);
}

TEST_F(ProgressLitmus, BlocksStartInTheirOrderElse) {
  config_.resident_blocks = 1;
  for (unsigned seed = 1; seed <= 5; ++seed) {
    config_.seed = seed;
    start(config_);
    const Words parts = words(0);
    first_block(parts, 16, stream(0));
    ASSERT_EQ(sync(), cudaSuccess);
    EXPECT_EQ(result(parts), 0);
  }
}

TEST_F(ProgressFaults, PreemptionLosesAnUpdateThatIsNotAtomic) {
  config_.preempt = 0.5;
  config_.resident_blocks = 32;
  bool was_lost = false;
  for (unsigned seed = 1; seed <= 10 && !was_lost; ++seed) {
    config_.seed = seed;
    start(config_);
    const Words parts = words(0);
    add_one(parts, stream(0));
    sync();
    EXPECT_EQ(kinds(), "race");
    was_lost = result(parts) < 32;
  }
  EXPECT_TRUE(was_lost);
}

TEST_F(ProgressLitmus, AnAtomicUpdateIsNeverLost) {
  config_.preempt = 0.5;
  config_.resident_blocks = 32;
  for (unsigned seed = 1; seed <= 10; ++seed) {
    config_.seed = seed;
    start(config_);
    const Words parts = words(1);
    add_one(parts, stream(0));
    ASSERT_EQ(sync(), cudaSuccess);
    EXPECT_EQ(kinds(), "") << all_texts();
    EXPECT_EQ(result(parts), 32);
  }
}

TEST_F(ProgressLitmus, EqualSeedsGiveEqualRuns) {
  config_.seed = 7;
  config_.preempt = 0.5;
  std::set<std::string> texts;
  for (int i = 0; i < 3; ++i) {
    start(config_);
    add_one(words(0), stream(0));
    sync();
    texts.insert(all_texts());
  }
  EXPECT_EQ(texts.size(), 1U);
}

TEST_F(ProgressLitmus, ADeviceThatFailedWorksAgainAfterConfigure) {
  wait_for_ever(words(0), stream(0));
  EXPECT_NE(sync(), cudaSuccess);
  start(config_);
  EXPECT_EQ(single(put, 0), "") << all_texts();
}

}  // namespace
}  // namespace fanfold::gpu::litmus
