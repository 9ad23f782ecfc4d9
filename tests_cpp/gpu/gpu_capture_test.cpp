// SPDX-License-Identifier: Apache-2.0

// What a capture on a GPU adds to one on the CPU, whose tests run here as well.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "capture/capture_case.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_capture_case.h"
#include "gpu/gpu_case.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"

namespace fanfold {
namespace {

using testing::DeviceIds;
using ::testing::ElementsAre;
using testing::expect_error;
using testing::GpuCaptureTest;
using testing::Ids;
using testing::ids_view;
using testing::Numbers;
using testing::numbers_of;
using testing::on_gpu;
using testing::RandomBits;
using testing::small_capture;

TEST_F(GpuCaptureTest, CallsEnqueueAndReadingWaits) {
  RoutingCapture capture(on_gpu(small_capture()));
  const DeviceIds ids = device_ids({1, 2, 3, 4});
  capture.begin_step(7, stream());
  capture.record(0, ids.view(), {}, options());
  const RoutingSnapshot snapshot = capture.snapshot(2, stream());
  EXPECT_EQ(snapshot.num_tokens(), 2);
  snapshot.wait();
  EXPECT_TRUE(snapshot.is_ready());
  EXPECT_EQ(snapshot.step_id(), 7);
  EXPECT_EQ(snapshot.array().describe(), "int8 [2, 2, 2] on cpu");
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{1, 2, -1, -1, 3, 4, -1, -1}));
  EXPECT_THAT(snapshot.missing_layers(), ElementsAre(1));
  EXPECT_THAT(snapshot.missing_rows(), ElementsAre(0, 2));
  expect_error<InvalidState>({"layers 1"}, [&] { (void)snapshot.rows(0, 1); });
}

TEST_F(GpuCaptureTest, AStepThatWasOnlyCapturedHasRecordedNothing) {
  RoutingCapture capture(on_gpu(small_capture()));
  const auto on_stream = static_cast<cudaStream_t>(stream());
  ASSERT_EQ(cudaStreamBeginCapture(on_stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  capture.begin_step(3, stream());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(on_stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  const RoutingSnapshot snapshot = capture.snapshot(2, stream());
  EXPECT_EQ(numbers_of(snapshot.array()), Numbers(8, -1));
  EXPECT_THAT(snapshot.missing_rows(), ElementsAre(2, 2));
}

// --- Errors, which come late ------------------------------------------------------------------

TEST_F(GpuCaptureTest, AWrongIdIsToldByTheNextLook) {
  RoutingCapture capture(on_gpu(small_capture()));
  const DeviceIds wrong = device_ids({1, 2, 3, 8});
  const DeviceIds right = device_ids({1, 2, 3, 4});
  capture.begin_step(1, stream());
  capture.record(1, wrong.view(), {}, options());
  capture.record(0, right.view(), {}, options());  // does not look
  synchronize();
  const std::vector<std::string> words = {"topk_ids: expected ids below 8 (num_experts)",
                                          "8 at row 1, column 1 of layer 1"};
  expect_error<InvalidArgument>(words, [&] { capture.check(); });
  capture.check();  // told once
  const RoutingSnapshot lost = capture.snapshot(1, stream());
  expect_error<InvalidArgument>(words, [&] { (void)lost.array(); });
  expect_error<InvalidArgument>(words, [&] { (void)lost.missing_layers(); });
  expect_error<InvalidArgument>(words, [&] { (void)lost.rows(0, 1); });
  capture.begin_step(2, stream());
  capture.record(0, right.view(), {}, options());
  const RoutingSnapshot next = capture.snapshot(2, stream());
  EXPECT_THAT(next.missing_layers(), ElementsAre(1));
  EXPECT_EQ(numbers_of(next.array()), (Numbers{1, 2, -1, -1, 3, 4, -1, -1}));
}

TEST_F(GpuCaptureTest, ASnapshotLooksBeforeItTakesAPlace) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  const DeviceIds wrong = device_ids({9, 2});
  capture.begin_step(1, stream());
  capture.record(0, wrong.view(), {}, options());
  synchronize();
  expect_error<InvalidArgument>({"9 at row 0, column 0"},
                                [&] { (void)capture.snapshot(1, stream()); });
  EXPECT_EQ(capture.num_in_flight(), 0);
}

TEST_F(GpuCaptureTest, WhatASnapshotToldIsNotToldAgain) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  const DeviceIds wrong = device_ids({9, 2});
  const DeviceIds right = device_ids({1, 2});
  capture.begin_step(1, stream());
  const RoutingSnapshot before = capture.snapshot(1, stream());
  capture.record(0, wrong.view(), {}, options());
  const RoutingSnapshot lost = capture.snapshot(1, stream());
  capture.begin_step(2, stream());
  capture.record(0, right.view(), {}, options());
  const RoutingSnapshot after = [&] {
    expect_error<InvalidArgument>({"got 9"}, [&] { lost.wait(); });
    EXPECT_THAT(before.missing_rows(), ElementsAre(1)) << "made before the error";
    RoutingSnapshot first = before;
    capture.check();
    const_cast<RoutingSnapshot&>(before).release();
    first.release();
    return capture.snapshot(1, stream());
  }();
  EXPECT_EQ(numbers_of(after.array()), (Numbers{1, 2}));
  expect_error<InvalidArgument>({"got 9"}, [&] { (void)lost.array(); });
}

TEST_F(GpuCaptureTest, ErrorsOfLaterStepsAreToldOnceTheFirstOneWas) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  const DeviceIds ids[] = {device_ids({9, 2}), device_ids({1, 10}), device_ids({11, 2})};
  const auto run = [&](std::int64_t step) {
    capture.begin_step(step, stream());
    capture.record(0, ids[step].view(), {}, options());
    synchronize();
  };
  run(0);
  run(1);  // nobody has looked: the first error stays
  expect_error<InvalidArgument>({"9 at row 0, column 0"}, [&] { capture.check(); });
  capture.check();
  run(2);
  expect_error<InvalidArgument>({"11 at row 0, column 0"}, [&] { capture.check(); });
}

TEST_F(GpuCaptureTest, ARowWithOtherIdsIsToldAndOverwriteReplacesIt) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  const DeviceIds ids = device_ids({1, 2, 3, 4});
  const DeviceIds other = device_ids({1, 2, 3, 5, 6, 7});
  capture.begin_step(4, stream());
  capture.record(0, ids.view(), {}, options());
  capture.record(0, ids.view(), {}, options());
  capture.record(0, other.view(), {}, options());
  const RoutingSnapshot lost = capture.snapshot(3, stream());
  expect_error<InvalidState>({"token 1 of layer 0", "step 4 recorded before", "row 1"},
                             [&] { lost.wait(); });
  capture.begin_step(5, stream());
  capture.record(0, ids.view(), {}, options());
  capture.record(0, other.view(), {}, options(true));
  EXPECT_EQ(numbers_of(capture.snapshot(3, stream()).array()), (Numbers{1, 2, 3, 5, 6, 7}));
}

TEST_F(GpuCaptureTest, OfManyWrongIdsTheFirstIsNamed) {
  constexpr int kRows = 900;  // several blocks, each of which has wrong ones
  RoutingCapture capture(on_gpu(small_capture(1, kRows)));
  RandomBits random(3);
  for (int round = 0; round < 4; ++round) {
    Ids ids(2 * kRows, 1);
    const auto first = static_cast<std::size_t>(random.below(kRows));
    for (std::size_t i = first; i < ids.size(); i += 7) ids[i] = 100 + static_cast<int>(i);
    const DeviceIds wrong = device_ids(ids);
    capture.begin_step(round, stream());
    capture.record(0, wrong.view(), {}, options());
    synchronize();
    expect_error<InvalidArgument>(
        {"got " + std::to_string(100 + first) + " at row " + std::to_string(first / 2) +
         ", column " + std::to_string(first % 2) + " of layer 0"},
        [&] { capture.check(); });
  }
}

TEST_F(GpuCaptureTest, RowsOfALayoutAreNamedAsTheyLieInTheTensor) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  const DeviceIds ids = device_ids({50, 50, 1, 2, 3, 8, 50, 50});
  capture.begin_step(1, stream());
  capture.record(0, ids.view(), CaptureLayout::concatenated({1, 2, 1}, 1), options());
  synchronize();
  expect_error<InvalidArgument>({"8 at row 2, column 1"}, [&] { capture.check(); });
  const DeviceIds right = device_ids({1, 2, 3, 4});
  const DeviceIds other = device_ids({3, 4, 9, 9, 0, 2});
  capture.begin_step(2, stream());
  capture.record(0, right.view(), {}, options());
  capture.record(0, other.view(), CaptureLayout::row_map({1, -1, 0}), options());
  synchronize();
  expect_error<InvalidState>({"token 0 of layer 0", "other ids at row 2"},
                             [&] { capture.check(); });
}

// --- Graphs -----------------------------------------------------------------------------------

TEST_F(GpuCaptureTest, CapturedRecordsReplayInTheStepThatRuns) {
  RoutingCapture capture(on_gpu(small_capture()));
  DeviceIds ids = device_ids({0, 0, 0, 0});
  capture.begin_step(0, stream());
  testing::Capture graph(0, stream());
  graph.begin();
  capture.record(0, ids.view(), {}, options());
  capture.record(1, ids.view(), CaptureLayout::row_map({1, 0}), options());
  graph.end();
  for (int step = 1; step < 5; ++step) {
    ids.set({step, 7, 6, step});
    capture.begin_step(step, stream());
    if (step != 3) graph.replay();
    const RoutingSnapshot snapshot = capture.snapshot(2, stream());
    EXPECT_EQ(snapshot.step_id(), step);
    if (step == 3) {
      EXPECT_THAT(snapshot.missing_rows(), ElementsAre(2, 2));
    } else {
      EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{step, 7, 6, step, 6, step, step, 7}));
    }
  }
}

TEST_F(GpuCaptureTest, AStepMayBeginInAGraph) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  DeviceIds ids = device_ids({1, 2});
  testing::Capture graph(0, stream());
  graph.begin();
  capture.begin_step(30, stream());
  capture.record(0, ids.view(), {}, options());
  expect_error<InvalidState>({"outside of a graph capture"},
                             [&] { (void)capture.snapshot(1, stream()); });
  graph.end();
  for (int i = 0; i < 3; ++i) {
    ids.set({i, 8 - (i % 2)});  // other ids, every second one wrong
    graph.replay();
    synchronize();
    if (i % 2 == 0) {
      expect_error<InvalidArgument>({"8 at row 0, column 1"}, [&] { capture.check(); });
      continue;
    }
    const RoutingSnapshot snapshot = capture.snapshot(1, stream());
    EXPECT_EQ(snapshot.step_id(), 30);
    EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{1, 7}));
  }
}

TEST_F(GpuCaptureTest, AGraphUsesTheMapOfThatTime) {
  RoutingCaptureConfig config = on_gpu(small_capture(1));
  config.logical_of_expert = {3, 2};
  RoutingCapture capture(config);
  DeviceIds ids = device_ids({0, 1});
  testing::Capture graph(0, stream());
  graph.begin();
  capture.begin_step(1, stream());
  capture.record(0, ids.view(), {}, options());
  graph.end();
  const auto replayed = [&] {
    graph.replay();
    return numbers_of(capture.snapshot(1, stream()).array());
  };
  EXPECT_EQ(replayed(), (Numbers{3, 2}));
  capture.begin_step(2, stream());
  capture.set_logical_of_expert({7, 5, 4, 4, 4});  // longer than the first
  EXPECT_EQ(replayed(), (Numbers{7, 5}));
  capture.set_logical_of_expert({});
  EXPECT_EQ(replayed(), (Numbers{0, 1}));
}

// --- Arguments --------------------------------------------------------------------------------

TEST_F(GpuCaptureTest, ArgumentsOfTheWrongPlaceAreRefused) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  const DeviceIds ids = device_ids({1, 2});
  expect_error<InvalidArgument>({"stream: expected a CUDA stream", "none"},
                                [&] { capture.begin_step(1); });
  expect_error<InvalidState>({"expected begin_step"}, [&] { (void)capture.snapshot(0, stream()); });
  capture.begin_step(1, stream());
  expect_error<InvalidArgument>({"stream"}, [&] { capture.record(0, ids.view()); });
  expect_error<InvalidArgument>({"stream"}, [&] { (void)capture.snapshot(1); });
  const Ids host = {1, 2};
  expect_error<InvalidArgument>({"topk_ids: expected a tensor on cuda:0", "on cpu"},
                                [&] { capture.record(0, ids_view(host, 2), {}, options()); });
  RecordOptions elsewhere;
  const std::shared_ptr<void> other = testing::test_device()->make_stream(1);
  elsewhere.stream = other.get();
  expect_error<InvalidArgument>({"stream: expected a CUDA stream of device 0"},
                                [&] { capture.record(0, ids.view(), {}, elsewhere); });
  expect_error<InvalidState>({"a gather callback"}, [&] {
    capture.record(0, ids.view(), CaptureLayout::sharded({1}, 0, 1), options());
  });
  RoutingCaptureConfig config = on_gpu(small_capture(1));
  config.device_index = -1;
  expect_error<InvalidArgument>({"device_index", "-1"}, [&] { RoutingCapture refused(config); });
  config.device_index = 99;
  expect_error<Unsupported>({"99"}, [&] { RoutingCapture refused(config); });
}

TEST_F(GpuCaptureTest, SinksLieOnTheDevice) {
  RoutingCaptureConfig config = on_gpu(small_capture());
  config.num_shared_experts = 1;
  RoutingCapture capture(config);
  const TensorView sink = capture.sink(1, DType::kInt16);
  EXPECT_EQ(sink.describe(), "int16 [8, 3] on cuda:0");
  EXPECT_EQ(capture.sink(1, DType::kInt16).data, sink.data);
  capture.begin_step(1, stream());
  expect_error<InvalidArgument>({"the sink of layer 1"},
                                [&] { capture.record(0, sink, {}, options()); });
  const std::vector<std::int16_t> ids = {5, -1, 99, 6, -32768, 99};
  testing::test_device()->upload(0, sink.data, ids.data(), 12, stream());
  capture.import_sink(1, 2, {}, options());
  synchronize();
  expect_error<InvalidArgument>({"sink: expected all 2 ids", "column 1 of row 1 not written"},
                                [&] { capture.check(); });
}

TEST_F(GpuCaptureTest, ACaptureGivesAllItsMemoryBack) {
  const cudasim::Stats before = cudasim::stats();
  RoutingSnapshot snapshot;
  {
    RoutingCapture capture(on_gpu(small_capture(1)));
    (void)capture.sink(0);
    capture.begin_step(1, stream());
    snapshot = capture.snapshot(3, stream());
  }
  EXPECT_THAT(snapshot.missing_rows(), ElementsAre(3)) << "outlives its capture";
  snapshot.release();
  EXPECT_EQ(cudasim::stats().allocations, before.allocations);
  cudasim::fail_call("cuMemHostAlloc", cudaErrorMemoryAllocation, 3);
  EXPECT_THROW(RoutingCapture(on_gpu(small_capture(1))), OutOfMemory);
  cudasim::clear_faults();
  EXPECT_EQ(cudasim::stats().allocations, before.allocations);
}

TEST_F(GpuCaptureTest, ALaunchThatIsRefusedChangesNothing) {
  RoutingCapture capture(on_gpu(small_capture(1)));
  const DeviceIds ids = device_ids({1, 2});
  capture.begin_step(1, stream());
  capture.record(0, ids.view(), {}, options());
  const auto failing = [&](auto call) {
    cudasim::fail_call("launch", cudaErrorLaunchOutOfResources);
    expect_error<CudaFailure>({"launch of"}, call);
    cudasim::clear_faults();
  };
  failing([&] { capture.begin_step(2, stream()); });
  failing([&] { capture.record(0, ids.view(), {}, options()); });
  failing([&] { (void)capture.snapshot(1, stream()); });
  EXPECT_EQ(capture.num_in_flight(), 0);
  const RoutingSnapshot snapshot = capture.snapshot(1, stream());
  EXPECT_EQ(snapshot.step_id(), 1);
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{1, 2}));
}

}  // namespace
}  // namespace fanfold
