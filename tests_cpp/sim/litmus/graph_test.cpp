// SPDX-License-Identifier: Apache-2.0

// Captures: their branches, their replays, and what ends them.

#include <gmock/gmock.h>

#include "litmus.h"

namespace fanfold::gpu::litmus {
namespace {

class GraphLitmus : public LitmusTest {
 protected:
  void SetUp() override {
    LitmusTest::SetUp();
    ASSERT_EQ(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaEventDestroy(fork_), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(join_), cudaSuccess);
    LitmusTest::TearDown();
  }

  void begin() {
    ASSERT_EQ(cudaStreamBeginCapture(stream(0), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  }
  void fork() {
    ASSERT_EQ(cudaEventRecord(fork_, stream(0)), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(other_stream(), fork_, 0), cudaSuccess);
  }
  void join() {
    ASSERT_EQ(cudaEventRecord(join_, other_stream()), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream(0), join_, 0), cudaSuccess);
  }

  /// Ends the capture and replays it so often, each time to its end.
  void replay(int times) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream(0), &graph), cudaSuccess);
    cudaGraphExec_t instance = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&instance, graph, 0), cudaSuccess);
    for (int i = 0; i < times; ++i) {
      ASSERT_EQ(cudaGraphLaunch(instance, stream(0)), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream(0)), cudaSuccess);
    }
    EXPECT_EQ(cudaGraphExecDestroy(instance), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }

  cudaEvent_t fork_ = nullptr;
  cudaEvent_t join_ = nullptr;
};

using GraphFaults = WithAccessChecks<GraphLitmus>;

TEST_F(GraphLitmus, ACaptureRunsNothingUntilItsGraphIsLaunched) {
  const Words parts = words(1);
  begin();
  add_one(parts, stream(0));
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(0), &graph), cudaSuccess);
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(result(parts), 0);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(GraphLitmus, AGraphReplaysThreeTimes) {
  const Words parts = words(1);
  begin();
  put(parts, stream(0));
  get(parts, stream(0));
  add_one(parts, stream(0));
  replay(3);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts), 1 + 32);  // get writes 1 first in each replay
}

TEST_F(GraphFaults, UnorderedBranchesRace) {
  const Words parts = words(0);
  clear(parts.data);
  begin();
  fork();
  put(parts, stream(0));
  get(parts, other_stream());
  join();
  replay(1);
  EXPECT_EQ(kinds(), "race");
}

TEST_F(GraphLitmus, AJoinOrdersWhatFollows) {
  const Words parts = words(0);
  begin();
  fork();
  put(parts, other_stream());
  join();
  get(parts, stream(0));
  replay(3);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(GraphLitmus, AForkOrdersWhatWasBefore) {
  const Words parts = words(0);
  begin();
  put(parts, stream(0));
  fork();
  get(parts, other_stream());
  join();
  replay(2);
  EXPECT_EQ(kinds(), "") << all_texts();
}

TEST_F(GraphLitmus, ABranchThatIsNotJoinedIsAnError) {
  const Words parts = words(0);
  begin();
  fork();
  put(parts, other_stream());
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream(0), &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
}

TEST_F(GraphLitmus, WaitingForACapturingStreamEndsTheCapture) {
  const Words parts = words(0);
  begin();
  put(parts, other_stream());  // not part of the capture
  EXPECT_EQ(cudaStreamSynchronize(stream(0)), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream(0), &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_F(GraphLitmus, AGraphThatWaitsForPeersReplaysAsOne) {
  const Words parts = words(kReleaseAcquire);
  begin();
  message_passing(parts, 0, stream(0));
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(0), &graph), cudaSuccess);
  cudaGraphExec_t instance = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&instance, graph, 0), cudaSuccess);
  message_passing(parts, 1, stream(1));  // an ordinary launch, on the other side
  ASSERT_EQ(cudaGraphLaunch(instance, stream(0)), cudaSuccess);
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(kinds(), "") << all_texts();
  EXPECT_EQ(result(parts), 42);
  EXPECT_EQ(cudaGraphExecDestroy(instance), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace fanfold::gpu::litmus
