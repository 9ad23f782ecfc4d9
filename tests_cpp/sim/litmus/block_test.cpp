// SPDX-License-Identifier: Apache-2.0

// What the threads of one block may do with each other and with memory.

#include <gmock/gmock.h>

#include "litmus.h"

namespace fanfold::gpu::litmus {
namespace {

using testing::HasSubstr;

class BlockLitmus : public LitmusTest {
 protected:
  /// Words whose payload is written, so that reading it is no finding of its own.
  Words written_words(int mode) {
    const Words parts = words(mode);
    clear(parts.data);
    return parts;
  }

  std::string access_by(int mode) {
    access(written_words(mode), stream(0));
    sync();
    return kinds();
  }
};

using BlockFaults = WithAccessChecks<BlockLitmus>;

TEST_F(BlockLitmus, LanesExchangeThroughSharedMemoryWithSyncWarp) {
  EXPECT_EQ(single(warp_exchange, kSyncWarp), "") << all_texts();
}

TEST_F(BlockFaults, AShuffleOrdersNoMemory) {
  EXPECT_EQ(single(warp_exchange, kShuffleOnly), "race");
  EXPECT_THAT(text_of("race"), HasSubstr("shared"));
}

TEST_F(BlockFaults, LanesDoNotRunInStep) {
  EXPECT_THAT(single(warp_exchange, kNothing), HasSubstr("race"));
}

TEST_F(BlockLitmus, TheLastElementOfASharedArrayIsInside) {
  EXPECT_EQ(access_by(kInside), "") << all_texts();
}

TEST_F(BlockFaults, OnePastASharedArrayIsFound) {
  EXPECT_EQ(access_by(kSharedPastEnd), "oob");
  const std::string text = text_of("oob");
  EXPECT_THAT(text, HasSubstr("write of 4 bytes"));
  EXPECT_THAT(text, HasSubstr("rank 0 kernel access block 0 thread 0 at block.cu:"));
  ASSERT_EQ(named_lines(text).size(), 1U);
  EXPECT_THAT(named_lines(text)[0], HasSubstr("// past the shared end"));
}

TEST_F(BlockFaults, OnePastDynamicSharedMemoryIsFound) {
  EXPECT_EQ(access_by(kDynamicPastEnd), "oob");
}

TEST_F(BlockFaults, OnePastGlobalMemoryIsFound) {
  EXPECT_EQ(access_by(kGlobalPastEnd), "oob");
  EXPECT_THAT(text_of("oob"), HasSubstr("block.cu:"));
  ASSERT_EQ(named_lines(text_of("oob")).size(), 1U);
  EXPECT_THAT(named_lines(text_of("oob"))[0], HasSubstr("// past the global end"));
}

TEST_F(BlockFaults, AVectorThatIsNotAlignedIsFound) {
  EXPECT_EQ(access_by(kMisalignedVector), "align");
}

TEST_F(BlockFaults, AWordThatIsNotAlignedIsFound) {
  EXPECT_EQ(access_by(kMisalignedWord), "align");
}

TEST_F(BlockFaults, AWildAddressIsFoundAndStopsTheDevice) {
  const Words parts = written_words(kWildAddress);
  access(parts, stream(0));
  EXPECT_EQ(cudaStreamSynchronize(stream(0)), cudaErrorIllegalAddress);
  EXPECT_EQ(kinds(), "oob");
}

TEST_F(BlockFaults, MemoryThatWasFreedIsFound) {
  const Words parts = words(0);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 4096), cudaSuccess);
  Words freed = parts;
  freed.data = static_cast<int*>(memory);
  put(freed, stream(0));
  ASSERT_EQ(sync(), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  put(freed, stream(0));
  sync();
  EXPECT_EQ(kinds(), "oob");
}

TEST_F(BlockFaults, MemoryThatNobodyWroteIsFound) {
  EXPECT_EQ(single(get, 0), "uninit");
  EXPECT_THAT(text_of("uninit"), HasSubstr("rank 0 kernel get block 0 thread "));
}

TEST_F(BlockLitmus, TheSameIsLeftAloneWhereTheCheckIsOff) {
  config_.init = false;
  start(config_);
  EXPECT_EQ(single(get, 0), "");
}

TEST_F(BlockFaults, WhoeverDoesNotOwnAPartMayNotWriteIt) {
  const Words parts = words(0);
  cudasim::annotate(parts.data, 64, "slots", 0b010, 0b011);
  store_at(parts, 3, stream(1));
  ASSERT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  store_at(parts, 3, stream(0));
  sync();
  EXPECT_EQ(kinds(), "owner");
  const std::string text = text_of("owner");
  EXPECT_THAT(text, HasSubstr("write not allowed here: slots+12 of rank 0 by rank 0"));
}

TEST_F(BlockFaults, WhoeverIsNoReaderOfAPartMayNotReadIt) {
  const Words parts = written_words(0);
  cudasim::annotate(parts.data, 64, "slots", 0b010, 0b011);
  load_at(parts, 3, stream(1));
  ASSERT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  load_at(parts, 4, stream(2));
  sync();
  EXPECT_THAT(kinds(), HasSubstr("owner"));
}

TEST_F(BlockFaults, WhatLiesInNoNamedPartIsARedZone) {
  const Words parts = words(0);
  cudasim::annotate(parts.data, 64, "slots");
  cudasim::annotate(parts.data + 32, 64, "counts");
  store_at(parts, 32, stream(0));
  ASSERT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  store_at(parts, 20, stream(0));
  sync();
  EXPECT_EQ(kinds(), "oob");
}

TEST_F(BlockLitmus, ProducersArriveAndAConsumerWaitsInANamedBarrier) {
  const Words parts = words(kRight);
  named_barrier(parts, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts, 5), 5 + 37);
}

TEST_F(BlockLitmus, ACountThatIsTooSmallInOnePlaceIsFound) {
  named_barrier(words(kWrongCount), stream(0));
  sync();
  EXPECT_THAT(kinds(), HasSubstr("barrier")) << all_texts();
}

TEST_F(BlockLitmus, AWarpThatNeverArrivesIsADeadlock) {
  named_barrier(words(kMissingArrive), stream(0));
  EXPECT_NE(sync(), cudaSuccess);
  EXPECT_THAT(kinds(), HasSubstr("deadlock")) << all_texts();
  EXPECT_THAT(text_of("deadlock"), HasSubstr("named_barrier"));
  EXPECT_THAT(text_of("deadlock"), HasSubstr("block.cu:"));
}

TEST_F(BlockLitmus, ACountThatIsNoMultipleOfAWarpIsFound) {
  named_barrier(words(kOddCount), stream(0));
  sync();
  EXPECT_THAT(kinds(), HasSubstr("barrier")) << all_texts();
}

TEST_F(BlockLitmus, ThreadsThatMeetInOneBarrierAreFine) {
  EXPECT_EQ(single(block_barrier, kSamePlace), "") << all_texts();
}

TEST_F(BlockLitmus, ABarrierInTwoBranchesIsFound) {
  EXPECT_EQ(single(block_barrier, kTwoPlaces), "barrier");
  EXPECT_EQ(named_lines(text_of("barrier")),
            (std::vector<std::string>{"__syncthreads();", "__syncthreads();"}));
}

TEST_F(BlockLitmus, ThreadsThatLeaveBeforeABarrierAreFound) {
  EXPECT_EQ(single(block_barrier, kLeaveBefore), "barrier");
}

TEST_F(BlockLitmus, AShuffleOfAllLanesGivesTheirValues) {
  const Words parts = words(kFullMask);
  shuffle(parts, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts, 7), 24);
}

TEST_F(BlockLitmus, LanesThatAreNotNamedNeedNotCome) {
  const Words parts = words(kHalfMask);
  shuffle(parts, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts, 7), 8);
}

TEST_F(BlockLitmus, ALaneThatIsNotInItsOwnMaskIsFound) {
  EXPECT_THAT(single(shuffle, kNotInMask), HasSubstr("warp")) << all_texts();
}

TEST_F(BlockLitmus, AFullMaskInADivergentBranchIsFound) {
  // The lanes outside have left, or the ones inside wait for them for ever: both are told.
  EXPECT_NE(single(shuffle, kDivergent), "");
}

TEST_F(BlockLitmus, ALaneThatHasLeftAndIsNamedIsFound) {
  EXPECT_THAT(single(shuffle, kLeftLane), HasSubstr("warp")) << all_texts();
}

TEST_F(BlockLitmus, RightKernelsGiveNoReportOverManySeeds) {
  for (unsigned seed = 1; seed <= 24; ++seed) {
    config_.seed = seed;
    config_.preempt = seed % 2 == 0 ? 0.5 : 0;
    config_.random_schedule = seed % 3 != 0;
    start(config_);
    EXPECT_EQ(single(warp_exchange, kSyncWarp), "") << "seed " << seed << "\n" << all_texts();
    EXPECT_EQ(single(named_barrier, kRight), "") << "seed " << seed << "\n" << all_texts();
    EXPECT_EQ(single(block_barrier, kSamePlace), "") << "seed " << seed << "\n" << all_texts();
    EXPECT_EQ(single(shuffle, kFullMask), "") << "seed " << seed << "\n" << all_texts();
    EXPECT_EQ(single(shuffle, kHalfMask), "") << "seed " << seed << "\n" << all_texts();
  }
}

}  // namespace
}  // namespace fanfold::gpu::litmus
