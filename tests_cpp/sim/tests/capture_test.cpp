// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include "simple.h"
#include "simulated_test.h"

namespace cudasim {
namespace {

class CaptureTest : public SimulatedTest {
 protected:
  void SetUp() override {
    SimulatedTest::SetUp();
    for (cudaEvent_t& event : events_) cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    main_ = stream_on(0);
    side_ = other_stream();
  }

  void TearDown() override {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    SimulatedTest::TearDown();
  }

  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    ASSERT_EQ(cudaStreamBeginCapture(main_, mode), cudaSuccess);
  }
  cudaError_t end() { return cudaStreamEndCapture(main_, &graph_); }
  /// Orders `to` after what `from` has so far.
  void join(cudaStream_t from, cudaStream_t to, int event = 0) {
    EXPECT_EQ(cudaEventRecord(events_[event], from), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(to, events_[event], 0), cudaSuccess);
  }
  /// Replays the graph, and destroys it.
  void replay(int times) {
    cudaGraphExec_t instance = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&instance, graph_, 0), cudaSuccess);
    for (int i = 0; i < times; ++i) ASSERT_EQ(cudaGraphLaunch(instance, main_), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphExecDestroy(instance), cudaSuccess);
  }

  cudaEvent_t events_[2] = {};
  cudaStream_t main_ = nullptr;
  cudaStream_t side_ = nullptr;
  cudaGraph_t graph_ = nullptr;
};

TEST_F(CaptureTest, NothingRunsBeforeTheReplayAndEachReplayRunsAll) {
  int* const data = zeros<int>(32);
  begin();
  increment(main_, data, 32);
  increment(main_, data, 32);
  ASSERT_EQ(end(), cudaSuccess);
  synchronize_all();
  EXPECT_EQ(value(data), 0);
  std::size_t num_nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph_, nullptr, &num_nodes), cudaSuccess);
  EXPECT_EQ(num_nodes, 2u);
  replay(3);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(data), 6);
}

TEST_F(CaptureTest, AForkThatIsJoinedIsOrderedOnReplay) {
  int* const a = zeros<int>(32);
  int* const b = zeros<int>(32);
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    restart_with_seed(seed);
    begin();
    put(main_, a, 32, 1);
    join(main_, side_, 0);
    increment(side_, a, 32);
    put(main_, b, 32, 5);
    join(side_, main_, 1);
    get(main_, b, a, 32);
    ASSERT_EQ(end(), cudaSuccess);
    replay(3);
    EXPECT_EQ(finish(), "clean");
    EXPECT_EQ(value(b), 2);
  }
}

TEST_F(CaptureTest, BranchesRunTogetherAndRaceWhereNothingOrdersThem) {
  CUDASIM_SKIP_WITHOUT_ACCESSES();
  int* const data = zeros<int>(32);
  auto* const words = zeros<unsigned>(1);
  begin();
  join(main_, side_, 0);
  wait_for_word(main_, words, 1);  // ends only if the other branch runs at the same time
  signal_word(side_, words, 1);
  put(main_, data, 32, 1);
  put(side_, data, 32, 2);
  join(side_, main_, 1);
  ASSERT_EQ(end(), cudaSuccess);
  replay(1);
  const auto found = finish_with_reports();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].kind, "race");
}

TEST_F(CaptureTest, AForkThatIsNotJoinedIsAnError) {
  int* const data = zeros<int>(32);
  begin();
  put(main_, data, 32, 1);
  join(main_, side_);
  put(side_, data, 32, 1);
  EXPECT_EQ(end(), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph_, nullptr);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  EXPECT_EQ(cudaStreamIsCapturing(side_, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_EQ(put(side_, data, 32, 1), cudaSuccess);
  EXPECT_EQ(finish(), "clean");
}

TEST_F(CaptureTest, WaitingForTheStreamInvalidatesItsCapture) {
  begin();
  EXPECT_EQ(cudaStreamSynchronize(main_), cudaErrorStreamCaptureUnsupported);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(main_, &status);
  EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
  EXPECT_EQ(put(main_, zeros<int>(1), 1, 1), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end(), cudaErrorIllegalState);
}

TEST_F(CaptureTest, WorkOutsideTheCaptureCannotBeWaitedFor) {
  begin();
  cudaEventRecord(events_[0], side_);
  EXPECT_EQ(cudaStreamWaitEvent(main_, events_[0], 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(CaptureTest, TwoCapturesCannotBeJoined) {
  const cudaStream_t third = other_stream();
  begin(cudaStreamCaptureModeRelaxed);
  ASSERT_EQ(cudaStreamBeginCapture(third, cudaStreamCaptureModeRelaxed), cudaSuccess);
  cudaEventRecord(events_[0], third);
  EXPECT_EQ(cudaStreamWaitEvent(main_, events_[0], 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamEndCapture(third, &graph_), cudaErrorStreamCaptureInvalidated);
}

TEST_F(CaptureTest, ACaptureEndsWhereItBegan) {
  begin();
  join(main_, side_);
  EXPECT_EQ(cudaStreamEndCapture(side_, &graph_), cudaErrorStreamCaptureUnmatched);
  cudaError_t elsewhere = cudaSuccess;
  std::thread([&] { elsewhere = cudaStreamEndCapture(main_, &graph_); }).join();
  EXPECT_EQ(elsewhere, cudaErrorStreamCaptureWrongThread);
  EXPECT_EQ(end(), cudaSuccess);
  cudaGraphDestroy(graph_);
}

TEST_F(CaptureTest, ACapturedEventCannotBeQueried) {
  begin();
  cudaEventRecord(events_[0], main_);
  EXPECT_EQ(cudaEventQuery(events_[0]), cudaErrorCapturedEvent);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaEventSynchronize(events_[0]), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaEventRecord(events_[0], main_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(events_[0]), cudaSuccess);
}

TEST_F(CaptureTest, TheLegacyStreamCannotBeUsedBesideACapturingBlockingStream) {
  cudaStream_t blocking = nullptr;
  cudaStreamCreate(&blocking);
  int* const data = zeros<int>(32);
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(put(nullptr, data, 32, 1), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph_), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed),
            cudaErrorStreamCaptureUnsupported);
  begin();
  EXPECT_EQ(put(nullptr, data, 32, 1), cudaSuccess);
  EXPECT_EQ(end(), cudaSuccess);
  cudaGraphDestroy(graph_);
  cudaStreamDestroy(blocking);
}

TEST_F(CaptureTest, AllocatingInvalidatesACaptureThatIsNotRelaxed) {
  void* address = nullptr;
  begin(cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(cudaMalloc(&address, 4), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(cudaMalloc(&address, 4), cudaSuccess);
  EXPECT_EQ(cudaFree(address), cudaSuccess);
  EXPECT_EQ(end(), cudaSuccess);
  cudaGraphDestroy(graph_);
}

TEST_F(CaptureTest, AThreadMayRelaxItsOwnMode) {
  void* address = nullptr;
  begin(cudaStreamCaptureModeGlobal);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(cudaMalloc(&address, 4), cudaSuccess);
  EXPECT_EQ(cudaFree(address), cudaSuccess);
  cudaThreadExchangeStreamCaptureMode(&mode);
  EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(end(), cudaSuccess);
  cudaGraphDestroy(graph_);
}

TEST_F(CaptureTest, AGlobalCaptureConcernsOtherThreadsAndALocalOneDoesNot) {
  const auto allocate_elsewhere = [] {
    cudaError_t error = cudaSuccess;
    std::thread([&] {
      void* address = nullptr;
      error = cudaMalloc(&address, 4);
      if (error == cudaSuccess) cudaFree(address);
    }).join();
    return error;
  };
  begin(cudaStreamCaptureModeGlobal);
  EXPECT_EQ(allocate_elsewhere(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  begin(cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(allocate_elsewhere(), cudaSuccess);
  EXPECT_EQ(end(), cudaSuccess);
  cudaGraphDestroy(graph_);
}

TEST_F(CaptureTest, CopiesAndHostFunctionsAreNodesToo) {
  int* const data = zeros<int>(32);
  void* host = nullptr;
  cudaMallocHost(&host, 128);
  int num_calls = 0;
  begin();
  cudaMemsetAsync(data, 0, 128, main_);
  increment(main_, data, 32);
  cudaMemcpyAsync(host, data, 128, cudaMemcpyDeviceToHost, main_);
  cudaLaunchHostFunc(main_, [](void* count) { ++*static_cast<int*>(count); }, &num_calls);
  int pageable[32];
  ASSERT_EQ(end(), cudaSuccess);
  replay(2);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(num_calls, 2);
  EXPECT_EQ(static_cast<int*>(host)[31], 1);
  begin();
  EXPECT_EQ(cudaMemcpyAsync(pageable, data, 128, cudaMemcpyDeviceToHost, main_),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  cudaFreeHost(host);
}

TEST_F(CaptureTest, ACaptureSpreadsOverDevices) {
  int* const data = zeros<int>(32);
  begin();
  put(main_, data, 32, 4);
  cudaEventRecord(events_[0], main_);
  const cudaStream_t peer = stream_on(1);
  cudaStreamWaitEvent(peer, events_[0], 0);
  increment(peer, data, 32);
  cudaEvent_t back = nullptr;
  cudaEventCreate(&back);
  cudaEventRecord(back, peer);
  cudaStreamWaitEvent(main_, back, 0);
  cudaSetDevice(0);
  increment(main_, data, 32);
  ASSERT_EQ(end(), cudaSuccess);
  replay(2);
  EXPECT_EQ(finish(), "clean");
  EXPECT_EQ(value(data), 6);
  cudaEventDestroy(back);
}

}  // namespace
}  // namespace cudasim
