// SPDX-License-Identifier: Apache-2.0

// What publishes one device's writes to another, and what does not.

#include <gmock/gmock.h>

#include "litmus.h"

namespace fanfold::gpu::litmus {
namespace {

using testing::HasSubstr;

using MessagePassing = LitmusTest;
using MessagePassingFaults = WithAccessChecks<LitmusTest>;

TEST_F(MessagePassing, ReleaseAndAcquireOrderThePayload) {
  EXPECT_EQ(pair(message_passing, kReleaseAcquire), "") << all_texts();
}

TEST_F(MessagePassing, FencesAroundRelaxedWordsOrderThePayload) {
  EXPECT_EQ(pair(message_passing, kFences), "") << all_texts();
}

TEST_F(MessagePassingFaults, RelaxedWordsOrderNothing) {
  EXPECT_EQ(pair(message_passing, kRelaxed), "race");
}

TEST_F(MessagePassingFaults, ARelaxedLoadWithoutAFenceDoesNotAcquire) {
  EXPECT_EQ(pair(message_passing, kReleaseRelaxed), "race");
}

TEST_F(MessagePassingFaults, AFenceOfGpuScopeDoesNotReachAnotherDevice) {
  EXPECT_EQ(pair(message_passing, kGpuFence), "race");
}

TEST_F(MessagePassingFaults, AReleaseOfGpuScopeDoesNotReachAnotherDevice) {
  // The flag itself is a race too: a store of gpu scope is no strong access for the other device.
  EXPECT_EQ(pair(message_passing, kGpuRelease), "race");
}

TEST_F(MessagePassingFaults, AnAcquireOfGpuScopeDoesNotReachAnotherDevice) {
  EXPECT_EQ(pair(message_passing, kGpuAcquire), "race");
}

TEST_F(MessagePassing, GpuScopeIsEnoughOnOneDevice) {
  const Words parts = words(kGpuScopeBoth);
  message_passing(parts, 0, stream(0));
  message_passing(parts, 1, other_stream());
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(MessagePassing, AtomicAddsReleaseAndAcquire) {
  EXPECT_EQ(pair(message_passing, kAtomics), "") << all_texts();
}

TEST_F(MessagePassing, CompareExchangesReleaseAndAcquire) {
  EXPECT_EQ(pair(message_passing, kCompareExchange), "") << all_texts();
}

TEST_F(MessagePassingFaults, AnOrdinaryStoreOfTheFlagRaces) {
  EXPECT_EQ(pair(message_passing, kPlainStore), "race");
}

TEST_F(MessagePassing, WordsOfEightBytesReleaseAndAcquire) {
  EXPECT_EQ(pair(message_passing, kWide), "") << all_texts();
}

TEST_F(MessagePassingFaults, ARaceNamesBothLinesRanksBlocksAndThreads) {
  pair(message_passing, kRelaxed);
  const std::string text = text_of("race");
  EXPECT_THAT(text, HasSubstr("read of "));
  EXPECT_THAT(text, HasSubstr("by rank 1 kernel message_passing block 0 thread 0 at "));
  EXPECT_THAT(text, HasSubstr("is unordered with the write by rank 0 kernel message_passing "
                              "block 0 thread 0 at message_passing.cu:"));
  const std::vector<std::string> lines = named_lines(text);
  ASSERT_EQ(lines.size(), 2U) << text;
  EXPECT_THAT(lines[0], HasSubstr("// the payload's reader"));
  EXPECT_THAT(lines[1], HasSubstr("// the payload"));
}

TEST_F(MessagePassing, ABlockBarrierCarriesTheWritesOfAllToTheOneThatReleases) {
  EXPECT_EQ(pair(many_writers, kBlockBarrier), "") << all_texts();
}

TEST_F(MessagePassing, ANamedBarrierCarriesThemToo) {
  EXPECT_EQ(pair(many_writers, kNamedBarrier), "") << all_texts();
}

TEST_F(MessagePassingFaults, AWarpBarrierCarriesTheWritesOfOneWarpOnly) {
  EXPECT_EQ(pair(many_writers, kWarpBarrier), "race");
  // Threads 32 to 63 write what threads 31 down to 0 read.
  EXPECT_THAT(text_of("race"), HasSubstr("block 0 thread"));
}

TEST_F(MessagePassingFaults, WithoutABarrierTheOthersWritesAreNotReleased) {
  EXPECT_EQ(pair(many_writers, kNoBarrier), "race");
}

TEST_F(MessagePassing, AChainOfAtomicAddsCarriesTheWritesOfAllAdders) {
  const Words parts = words(kAcqRelCounter);
  last_block_reads(parts, 12, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts), 12);
}

TEST_F(MessagePassing, ARelaxedCounterBetweenFencesCarriesThemToo) {
  const Words parts = words(kFencedCounter);
  last_block_reads(parts, 12, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(MessagePassingFaults, ARelaxedCounterCarriesNothing) {
  last_block_reads(words(kRelaxedCounter), 12, stream(0));
  sync();
  EXPECT_EQ(kinds(), "race");
}

TEST_F(MessagePassing, AChainOfThreeDevicesIsCumulative) {
  const Words parts = words(0);
  for (int who = 0; who < 3; ++who) {
    chain(parts, who, stream(who));
  }
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts), 42);
}

TEST_F(MessagePassingFaults, AChainWhoseMiddleIsRelaxedBreaks) {
  const Words parts = words(1);
  for (int who = 0; who < 3; ++who) {
    chain(parts, who, stream(who));
  }
  sync();
  EXPECT_EQ(kinds(), "race");
}

TEST_F(MessagePassing, HundredsOfRelaxedPollsBeforeTheFenceAreRemembered) {
  EXPECT_EQ(pair(long_poll, 0), "") << all_texts();
}

TEST_F(MessagePassing, RelaxedFlagsAreSeenOutOfOrderInSomeRuns) {
  if (LITMUS_CHECKS_ACCESSES == 0) {
    GTEST_SKIP() << "under a real sanitizer no load is stale; builds without one run this";
  }
  config_.stale = 0.5;
  int num_swapped = 0;
  for (unsigned seed = 1; seed <= 100; ++seed) {
    config_.seed = seed;
    start(config_);
    const Words parts = words(0);
    two_flags(parts, 0, stream(0));
    two_flags(parts, 1, stream(1));
    ASSERT_EQ(sync(), cudaSuccess);
    num_swapped += result(parts) == 99 ? 1 : 0;
  }
  EXPECT_GT(num_swapped, 0);
  EXPECT_LT(num_swapped, 100);
}

TEST_F(MessagePassing, WithoutStaleReadsTheyNeverAre) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    config_.seed = seed;
    start(config_);
    const Words parts = words(0);
    two_flags(parts, 0, stream(0));
    two_flags(parts, 1, stream(1));
    ASSERT_EQ(sync(), cudaSuccess);
    EXPECT_NE(result(parts), 99);
  }
}

TEST_F(MessagePassingFaults, ARelaxedFlagOfTheNextKernelDoesNotPublishTheOneBefore) {
  const Words parts = words(0);
  put(parts, stream(0));
  announce(parts, stream(0));
  consume(parts, stream(1));
  sync();
  EXPECT_EQ(kinds(), "race");
}

TEST_F(MessagePassing, ItDoesWhereAKernelsStartCountsAsARelease) {
  config_.boundary_release = true;
  start(config_);
  const Words parts = words(0);
  put(parts, stream(0));
  announce(parts, stream(0));
  consume(parts, stream(1));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(MessagePassingFaults, NeverForTheWritesOfTheKernelItself) {
  config_.boundary_release = true;
  start(config_);
  const Words parts = words(1);
  clear(parts.data);
  announce(parts, stream(0));
  consume(parts, stream(1));
  sync();
  EXPECT_EQ(kinds(), "race");
}

TEST_F(MessagePassing, RightProgramsGiveNoReportOverManySeeds) {
  for (unsigned seed = 1; seed <= 24; ++seed) {
    config_.seed = seed;
    config_.stale = seed % 2 == 0 ? 0.4 : 0;
    config_.preempt = seed % 3 == 0 ? 0.3 : 0;
    config_.shuffle_blocks = seed % 4 == 0;
    config_.resident_blocks = seed % 5 == 0 ? 1 : 16;
    start(config_);
    for (const int mode : {kReleaseAcquire, kFences, kAtomics, kCompareExchange, kWide}) {
      EXPECT_EQ(pair(message_passing, mode), "") << "seed " << seed << "\n" << all_texts();
    }
    EXPECT_EQ(pair(many_writers, kBlockBarrier), "") << "seed " << seed << "\n" << all_texts();
    EXPECT_EQ(pair(many_writers, kNamedBarrier), "") << "seed " << seed << "\n" << all_texts();
    EXPECT_EQ(pair(long_poll, 0), "") << "seed " << seed << "\n" << all_texts();
    for (const int mode : {kAcqRelCounter, kFencedCounter}) {
      const Words parts = words(mode);
      last_block_reads(parts, 9, stream(0));
      ASSERT_EQ(sync(), cudaSuccess);
      EXPECT_EQ(kinds(), "") << "seed " << seed << "\n" << all_texts();
      EXPECT_EQ(result(parts), 9);
    }
  }
}

}  // namespace
}  // namespace fanfold::gpu::litmus
