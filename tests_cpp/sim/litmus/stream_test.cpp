// SPDX-License-Identifier: Apache-2.0

// What orders work of different streams, of copies and of overlapping kernels.

#include <gmock/gmock.h>

#include <array>

#include "litmus.h"

namespace fanfold::gpu::litmus {
namespace {

using testing::HasSubstr;

class StreamLitmus : public LitmusTest {
 protected:
  void SetUp() override {
    LitmusTest::SetUp();
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaEventDestroy(event_), cudaSuccess);
    LitmusTest::TearDown();
  }

  /// Primary and dependent on one stream.
  std::string overlap(int primary_mode, int dependent_mode, bool is_programmatic) {
    Words parts = words(primary_mode);
    clear(parts.data);
    primary(parts, stream(0));
    parts.mode = dependent_mode;
    dependent(parts, is_programmatic, stream(0));
    sync();
    return kinds();
  }

  cudaEvent_t event_ = nullptr;
};

using StreamFaults = WithAccessChecks<StreamLitmus>;

TEST_F(StreamLitmus, OneStreamOrdersItsKernels) {
  const Words parts = words(0);
  put(parts, stream(0));
  get(parts, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(StreamFaults, TwoStreamsDoNot) {
  const Words parts = words(0);
  clear(parts.data);
  put(parts, stream(0));
  get(parts, other_stream());
  sync();
  EXPECT_EQ(kinds(), "race");
  EXPECT_THAT(text_of("race"), HasSubstr("kernel put block 0 thread "));
  EXPECT_THAT(text_of("race"), HasSubstr("kernel get block 0 thread "));
}

TEST_F(StreamLitmus, AnEventOrdersTwoStreams) {
  const Words parts = words(0);
  put(parts, stream(0));
  ASSERT_EQ(cudaEventRecord(event_, stream(0)), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other_stream(), event_, 0), cudaSuccess);
  get(parts, other_stream());
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(StreamFaults, AnEventRecordedTooEarlyDoesNot) {
  const Words parts = words(0);
  clear(parts.data);
  ASSERT_EQ(cudaEventRecord(event_, stream(0)), cudaSuccess);
  put(parts, stream(0));
  ASSERT_EQ(cudaStreamWaitEvent(other_stream(), event_, 0), cudaSuccess);
  get(parts, other_stream());
  sync();
  EXPECT_EQ(kinds(), "race");
}

TEST_F(StreamLitmus, AWaitOfTheHostOrdersTwoStreams) {
  const Words parts = words(0);
  put(parts, stream(0));
  ASSERT_EQ(cudaStreamSynchronize(stream(0)), cudaSuccess);
  get(parts, other_stream());
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(StreamLitmus, AWaitForAnEventOrdersTheHost) {
  const Words parts = words(0);
  put(parts, stream(0));
  ASSERT_EQ(cudaEventRecord(event_, stream(0)), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  get(parts, stream(1));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(StreamFaults, ACopyOnAnotherStreamRaces) {
  const Words parts = words(0);
  std::array<int, 32> host = {};
  put(parts, stream(0));
  cudaMemcpyAsync(host.data(), parts.data, sizeof(host), cudaMemcpyDeviceToHost, other_stream());
  sync();
  EXPECT_EQ(kinds(), "race");
  EXPECT_THAT(text_of("race"), HasSubstr("copy on rank 0"));
}

TEST_F(StreamLitmus, ACopyOnTheSameStreamDoesNot) {
  const Words parts = words(0);
  std::array<int, 32> host = {};
  put(parts, stream(0));
  ASSERT_EQ(
      cudaMemcpyAsync(host.data(), parts.data, sizeof(host), cudaMemcpyDeviceToHost, stream(0)),
      cudaSuccess);
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(host[31], 1);
}

TEST_F(StreamLitmus, ADependentThatWaitsSeesAllOfThePrimary) {
  EXPECT_EQ(overlap(1, kReadAfterWait, true), "") << all_texts();
}

TEST_F(StreamFaults, ADependentThatReadsBeforeItWaitsRaces) {
  EXPECT_EQ(overlap(1, kReadBeforeWait, true), "race");
  EXPECT_THAT(text_of("race"), HasSubstr("overlap.cu:"));
}

TEST_F(StreamFaults, ADependentThatNeverWaitsRaces) {
  EXPECT_EQ(overlap(1, kNeverWait, true), "race");
}

TEST_F(StreamFaults, ATriggerAfterTheWritesPublishesNothingEither) {
  EXPECT_EQ(overlap(0, kReadBeforeWait, true), "race");
}

TEST_F(StreamLitmus, AnOrdinaryLaunchNeedsNoWait) {
  EXPECT_EQ(overlap(1, kNeverWait, false), "") << all_texts();
}

TEST_F(StreamLitmus, WhatFollowsADependentThatNeverWaitsIsOrderedAfterThePrimary) {
  Words parts = words(1);
  primary(parts, stream(0));
  parts.out = words(0).out;
  Words apart = words(kNeverWait);  // other memory: the dependent itself does nothing wrong
  clear(apart.data);
  dependent(apart, true, stream(0));
  get(parts, stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(StreamLitmus, OverlappingKernelsGiveNoReportOverManySeeds) {
  for (unsigned seed = 1; seed <= 24; ++seed) {
    config_.seed = seed;
    config_.preempt = seed % 2 == 0 ? 0.3 : 0;
    config_.resident_blocks = seed % 3 == 0 ? 1 : 16;
    start(config_);
    EXPECT_EQ(overlap(1, kReadAfterWait, true), "") << "seed " << seed << "\n" << all_texts();
    EXPECT_EQ(overlap(0, kReadAfterWait, true), "") << "seed " << seed << "\n" << all_texts();
  }
}

}  // namespace
}  // namespace fanfold::gpu::litmus
