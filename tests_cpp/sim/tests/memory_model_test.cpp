// SPDX-License-Identifier: Apache-2.0
#include "memory_model.h"
#include "simple.h"
#include "simulated_test.h"

namespace cudasim {
namespace {

using ::testing::ContainsRegex;

class MemoryModelTest : public SimulatedTest {
 protected:
  std::string run(Pattern pattern, int num_roles = 2, const Config& config = {}) {
    restart(config);
    const Exchange x{unwritten<int>(1), zeros<unsigned>(4), unwritten<int>(1)};
    for (int role = 0; role < num_roles; ++role) exchange(stream_on(role), x, pattern, role);
    return finish();
  }
};

TEST_F(MemoryModelTest, WhatOrdersIsCleanUnderManySeeds) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Config config;
    config.seed = seed;
    config.stale = seed % 2 == 0 ? 0.5 : 0;
    EXPECT_EQ(run(Pattern::kReleaseThenRelaxed, 2, config), "clean");
    EXPECT_EQ(run(Pattern::kRelaxedThenAcquire, 2, config), "clean");
    EXPECT_EQ(run(Pattern::kSmallFenceThenLarge, 2, config), "clean");
    EXPECT_EQ(run(Pattern::kChainOfAdds, 3, config), "clean");
  }
}

TEST_F(MemoryModelTest, PollsThatSeeThousandsOfReleasesLoseNone) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Config config;
    config.seed = seed;
    EXPECT_EQ(run(Pattern::kLongPoll, 3, config), "clean");
  }
}

TEST_F(MemoryModelTest, StrongAccessesOfDifferentSizesRace) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  EXPECT_EQ(run(Pattern::kMixedSizes), "race");
}

TEST_F(MemoryModelTest, AFailedCompareAndSwapPublishesNothing) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  EXPECT_EQ(run(Pattern::kFailedCompareIsALoad), "race");
}

TEST_F(MemoryModelTest, APlainWriteIsNotHiddenByAStrongOne) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  EXPECT_EQ(run(Pattern::kStrongAfterPlainInit), "race");
}

TEST_F(MemoryModelTest, BlockScopeHoldsInOneBlockOnly) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  auto* const word = zeros<unsigned>(1);
  block_scope(stream_on(0), word, 1, 64);
  EXPECT_EQ(finish(), "clean");
  block_scope(stream_on(0), word, 2, 32);
  EXPECT_EQ(finish(), "race");
}

TEST_F(MemoryModelTest, ARaceNamesBothThreadsAndBothLines) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  int* const data = zeros<int>(64);
  put(stream_on(0), data, 64, 1);
  cudaDeviceSynchronize();
  put(stream_on(0), data, 64, 1);
  increment(stream_on(1), data, 64);
  const auto found = finish_with_reports();
  ASSERT_FALSE(found.empty());
  EXPECT_THAT(found[0].text,
              ContainsRegex("(read|write) of cudaMalloc memory\\+[0-9]+ of rank 0 by rank [01] "
                            "kernel (put|increment) block 0 thread [0-9]+ at simple.cu:[0-9]+ is "
                            "unordered with the (read|write) by rank [01] kernel (put|increment) "
                            "block 0 thread [0-9]+ at simple.cu:[0-9]+"));
}

TEST_F(MemoryModelTest, ThreadsOfEarlierLaunchesKeepTheirNames) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  int* const first = zeros<int>(64);
  int* const other = zeros<int>(64);
  put(stream_on(0), first, 64, 1);
  for (int i = 0; i < 50; ++i) increment(stream_on(0), other, 64);
  cudaStreamSynchronize(stream_on(2));
  increment(stream_on(1), first, 64);
  const auto found = finish_with_reports();
  ASSERT_FALSE(found.empty());
  EXPECT_THAT(found[0].text, ::testing::HasSubstr("kernel put block 0 thread"));
}

TEST_F(MemoryModelTest, ManyLaunchesInManyStreamsStayClean) {
  int* const data = zeros<int>(32 * 8);
  std::vector<cudaStream_t> streams;
  for (int i = 0; i < 8; ++i) streams.push_back(other_stream());
  for (int round = 0; round < 40; ++round) {
    for (std::size_t i = 0; i < streams.size(); ++i) {
      increment(streams[i], data + 32 * i, 8 * (1 + round % 4));
    }
  }
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(data), 40);
}

}  // namespace
}  // namespace cudasim
