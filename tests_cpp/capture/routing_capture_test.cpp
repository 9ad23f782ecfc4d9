// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_capture.h"

#include <cstdint>
#include <thread>
#include <vector>

#include "capture/capture_case.h"
#include "capture/test_capture.h"
#include "fanfold/build_info.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using testing::Ids;
using testing::ids_view;
using ::testing::IsEmpty;
using testing::Numbers;
using testing::numbers_of;
using testing::small_capture;
using testing::TestCapture;

// C1
TEST(RoutingCaptureTest, ALayerThatIsNeverRecordedShowsAsSentinelAndIsReportedMissing) {
  TestCapture capture(small_capture());
  capture.begin_step(1);
  const Ids ids = {1, 2, 0, 7};
  capture.record(0, ids_view(ids, 2));
  const RoutingSnapshot snapshot = capture.snapshot(2);
  EXPECT_EQ(snapshot.array().describe(), "int8 [2, 2, 2] on cpu");
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{1, 2, -1, -1, 0, 7, -1, -1}));
  EXPECT_THAT(snapshot.missing_layers(), ElementsAre(1));
  EXPECT_THAT(snapshot.missing_rows(), ElementsAre(0, 2));
  expect_error<InvalidState>({"rows: expected every layer", "layers 1"},
                             [&] { (void)snapshot.rows(0, 1); });
}

TEST(RoutingCaptureTest, RowsThatWereNotRecordedAreCountedPerLayer) {
  TestCapture capture(small_capture());
  capture.begin_step(1);
  const Ids ids = {1, 2, 3, 4, 5, 6};
  capture.record(0, ids_view(ids, 2));
  capture.record(1, ids_view(ids, 2), CaptureLayout::local(2));
  const RoutingSnapshot snapshot = capture.snapshot(4);
  EXPECT_THAT(snapshot.missing_layers(), ElementsAre(0, 1));
  EXPECT_THAT(snapshot.missing_rows(), ElementsAre(1, 2));
  EXPECT_EQ(snapshot.rows(2, 1, 40).first_position, 40);
  EXPECT_EQ(numbers_of(snapshot.rows(2, 1).array()), (Numbers{5, 6, 1, 2}));
  expect_error<InvalidState>({"layers 0"}, [&] { (void)snapshot.rows(2, 2); });
  expect_error<InvalidArgument>({"rows: expected tokens within the 4"},
                                [&] { (void)snapshot.rows(3, 2); });
}

// C2
TEST(RoutingCaptureTest, WhatAnEarlierStepRecordedIsMissingInTheNext) {
  TestCapture capture(small_capture());
  const Ids ids = {1, 2};
  capture.begin_step(1);
  capture.record(0, ids_view(ids, 2));
  capture.record(1, ids_view(ids, 2));
  EXPECT_THAT(capture.snapshot(1).missing_layers(), IsEmpty());
  capture.begin_step(2);
  capture.record(1, ids_view(ids, 2));
  const RoutingSnapshot snapshot = capture.snapshot(1);
  EXPECT_EQ(snapshot.step_id(), 2);
  EXPECT_THAT(snapshot.missing_layers(), ElementsAre(0));
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{-1, -1, 1, 2}));
}

// C3
TEST(RoutingCaptureTest, ADraftModelCannotWriteIntoTheTargetsLayers) {
  TestCapture target(small_capture());
  RoutingCaptureConfig of_draft = small_capture(1);
  of_draft.source = "draft";
  TestCapture draft(of_draft);
  target.begin_step(1);
  draft.begin_step(1);
  const Ids ids = {1, 2};
  RecordOptions options;
  options.source = "draft";
  draft.record(0, ids_view(ids, 2), {}, options);
  expect_error<InvalidArgument>({"source: expected \"target\"", "got \"draft\""},
                                [&] { target.record(0, ids_view(ids, 2), {}, options); });
  EXPECT_THAT(target.snapshot(1).missing_layers(), ElementsAre(0, 1));
  EXPECT_THAT(draft.snapshot(1).missing_layers(), IsEmpty());
}

// C4
TEST(RoutingCaptureTest, PhysicalIdsAreMappedBackToLogicalOnes) {
  RoutingCaptureConfig config = small_capture(1);
  config.num_experts = 3;
  config.logical_of_expert = {0, 1, 2, 1};  // expert 3 is a replica of 1
  TestCapture capture(config);
  capture.begin_step(1);
  const Ids ids = {3, 0, -1, 2};
  capture.record(0, ids_view(ids, 2));
  EXPECT_EQ(numbers_of(capture.snapshot(2).array()), (Numbers{1, 0, -1, 2}));
  const Ids wrong = {3, 4};
  expect_error<InvalidArgument>({"ids below 4 (physical experts)", "got 4 at row 0, column 1"},
                                [&] { capture.record(0, ids_view(wrong, 2)); });
}

TEST(RoutingCaptureTest, TheMapBackMayChangeBetweenStepsOnly) {
  TestCapture capture(small_capture(1));
  capture.set_logical_of_expert({7, 6, 5});
  capture.begin_step(1);
  const Ids ids = {0, 2};
  capture.record(0, ids_view(ids, 2));
  expect_error<InvalidState>({"between steps", "records of step 1"},
                             [&] { capture.set_logical_of_expert({}); });
  EXPECT_EQ(numbers_of(capture.snapshot(1).array()), (Numbers{7, 5}));
  capture.begin_step(2);
  expect_error<InvalidArgument>({"logical experts 0 to 7", "8 for physical expert 1"},
                                [&] { capture.set_logical_of_expert({0, 8}); });
  capture.set_logical_of_expert({});
  capture.record(0, ids_view(ids, 2));
  EXPECT_EQ(numbers_of(capture.snapshot(1).array()), (Numbers{0, 2}));
}

// C8
TEST(RoutingCaptureTest, AWrongIdIsNamedAndNothingIsRecorded) {
  TestCapture capture(small_capture());
  capture.begin_step(1);
  const Ids ids = {1, 2, 3, 8};
  expect_error<InvalidArgument>({"topk_ids: expected ids below 8 (num_experts) or negative",
                                 "8 at row 1, column 1 of layer 1"},
                                [&] { capture.record(1, ids_view(ids, 2)); });
  if (TestCapture::is_on_gpu()) return;  // where the step is lost: gpu/gpu_capture_test.cpp
  const RoutingSnapshot snapshot = capture.snapshot(1);
  EXPECT_THAT(snapshot.missing_layers(), ElementsAre(0, 1));
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{-1, -1, -1, -1}));
}

// C10
TEST(RoutingCaptureTest, IdsOfSharedExpertsBehindTheRoutedOnesAreLeftOut) {
  RoutingCaptureConfig config = small_capture(1);
  config.num_shared_experts = 1;
  TestCapture capture(config);
  capture.begin_step(1);
  const Ids wide = {1, 2, 999, 3, 4, 999};
  capture.record(0, ids_view(wide, 3));
  EXPECT_EQ(numbers_of(capture.snapshot(2).array()), (Numbers{1, 2, 3, 4}));
  TensorView strided = ids_view(wide, 3);
  strided.shape[1] = 2;  // the same memory, seen without the shared expert
  capture.begin_step(2);
  capture.record(0, strided);
  EXPECT_EQ(numbers_of(capture.snapshot(2).array()), (Numbers{1, 2, 3, 4}));
  expect_error<InvalidArgument>({"[rows, 2] or [rows, 3]", "got int32 [1, 6]"},
                                [&] { capture.record(0, ids_view(wide, 6)); });
}

// C16
TEST(RoutingCaptureTest, ASnapshotDoesNotSeeWhatIsRecordedLater) {
  RoutingCaptureConfig config = small_capture(1);
  config.max_in_flight = 2;
  TestCapture capture(config);
  capture.begin_step(1);
  const Ids first = {1, 2};
  capture.record(0, ids_view(first, 2));
  const RoutingSnapshot before = capture.snapshot(1);
  capture.begin_step(2);
  const Ids second = {3, 4};
  capture.record(0, ids_view(second, 2));
  const RoutingSnapshot after = capture.snapshot(1);
  EXPECT_EQ(numbers_of(before.array()), (Numbers{1, 2}));
  EXPECT_EQ(numbers_of(after.array()), (Numbers{3, 4}));
}

TEST(RoutingCaptureTest, AFullRingIsAnErrorAndNeverOverwritten) {
  TestCapture capture(small_capture(1));
  capture.begin_step(1);
  const Ids ids = {1, 2};
  capture.record(0, ids_view(ids, 2));
  RoutingSnapshot first = capture.snapshot(1);
  const RoutingSnapshot copy = first;
  const RoutingSnapshot second = capture.snapshot(1);
  expect_error<CapacityExceeded>({"at most 2 in flight (max_in_flight)", "back-pressure"},
                                 [&] { (void)capture.snapshot(1); });
  first.release();
  EXPECT_EQ(capture.num_in_flight(), 2) << "a copy holds it";
  expect_error<InvalidState>({"released"}, [&] { (void)first.array(); });
  EXPECT_EQ(numbers_of(copy.array()), (Numbers{1, 2}));
}

TEST(RoutingCaptureTest, APlaceIsFreeOnceItsLastSnapshotIsGone) {
  RoutingCaptureConfig config = small_capture(1);
  config.max_in_flight = 1;
  TestCapture capture(config);
  capture.begin_step(1);
  for (int round = 0; round < 5; ++round) {
    RoutingSnapshot snapshot = capture.snapshot(0);
    EXPECT_EQ(capture.num_in_flight(), 1);
    std::thread([last = std::move(snapshot)]() mutable { last.release(); }).join();
    EXPECT_EQ(capture.num_in_flight(), 0);
  }
}

TEST(RoutingCaptureTest, ASnapshotMayOutliveItsCapture) {
  RoutingSnapshot snapshot;
  {
    TestCapture capture(small_capture(1));
    capture.begin_step(1);
    const Ids ids = {1, 2};
    capture.record(0, ids_view(ids, 2));
    snapshot = capture.snapshot(1);
  }
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{1, 2}));
  EXPECT_THAT(snapshot.expert_histogram(), ElementsAre(0, 1, 1, 0, 0, 0, 0, 0));
}

// C18
TEST(RoutingCaptureTest, AConfigurationThatContradictsItselfIsRefusedUpFront) {
  const auto refused = [](const std::vector<std::string>& words, auto change) {
    RoutingCaptureConfig config = small_capture();
    change(config);
    expect_error<InvalidArgument>(words, [&] { TestCapture capture(config); });
  };
  using Config = RoutingCaptureConfig;
  refused({"num_layers", "got 0"}, [](Config& c) { c.num_layers = 0; });
  refused({"top_k", "got 0"}, [](Config& c) { c.top_k = 0; });
  refused({"num_experts", "got -1"}, [](Config& c) { c.num_experts = -1; });
  refused({"max_tokens", "got 0"}, [](Config& c) { c.max_tokens = 0; });
  refused({"max_tokens", "memory"}, [](Config& c) { c.max_tokens = INT64_MAX / 8; });
  refused({"max_in_flight"}, [](Config& c) { c.max_in_flight = 0; });
  refused({"num_shared_experts"}, [](Config& c) { c.num_shared_experts = -1; });
  refused({"max_sink_rows"}, [](Config& c) { c.max_sink_rows = -1; });
  refused({"max_sink_rows"}, [](Config& c) { c.max_sink_rows = INT64_MAX / 8; });
  refused({"num_shared_experts"}, [](Config& c) { c.num_shared_experts = INT32_MAX; });
  refused({"ids per token"}, [](Config& c) { c.top_k = INT32_MAX; });
  refused({"source"}, [](Config& c) { c.source = ""; });
  refused({"layers: expected 2 numbers", "got 1"}, [](Config& c) { c.layers = {3}; });
  refused({"layers: expected different numbers", "3 twice"}, [](Config& c) { c.layers = {3, 3}; });
  refused({"logical_of_expert"}, [](Config& c) { c.logical_of_expert = {0, -1}; });
  refused({"dtype", "got float32"}, [](Config& c) { c.dtype = DType::kFloat32; });
  refused({"dtype: expected a type for ids 0 to 128", "int8, which holds ids up to 127"},
          [](Config& c) {
            c.num_experts = 129;
            c.dtype = DType::kInt8;
          });
}

// C19
TEST(RoutingCaptureTest, LayersHaveTheNumbersOfTheModel) {
  RoutingCaptureConfig config = small_capture(3);
  config.layers = {1, 2, 3};  // layer 0 is dense
  TestCapture capture(config);
  capture.begin_step(1);
  const Ids ids = {1, 2};
  capture.record(3, ids_view(ids, 2));
  expect_error<InvalidArgument>({"layer: expected one of the recorded layers 1, 2, 3, got 0"},
                                [&] { capture.record(0, ids_view(ids, 2)); });
  const RoutingSnapshot snapshot = capture.snapshot(1);
  EXPECT_THAT(snapshot.missing_layers(), ElementsAre(1, 2));
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{-1, -1, -1, -1, 1, 2}));
}

TEST(RoutingCaptureTest, ARecomputedLayerMayBeRecordedAgainWithEqualIds) {
  TestCapture capture(small_capture(1));
  capture.begin_step(4);
  const Ids ids = {1, 2, 3, 4};
  capture.record(0, ids_view(ids, 2));
  capture.record(0, ids_view(ids, 2));
  const Ids other = {1, 2, 3, 5, 6, 7};
  expect_error<InvalidState>({"token 1 of layer 0", "step 4 recorded before", "row 1"},
                             [&] { capture.record(0, ids_view(other, 2)); });
  if (TestCapture::is_on_gpu()) return;  // where the step is lost: gpu/gpu_capture_test.cpp
  EXPECT_THAT(capture.snapshot(3).missing_rows(), ElementsAre(1)) << "nothing was written";
  RecordOptions options;
  options.overwrite = true;
  capture.record(0, ids_view(other, 2), {}, options);
  EXPECT_EQ(numbers_of(capture.snapshot(3).array()), (Numbers{1, 2, 3, 5, 6, 7}));
  const Ids wrong = {1, 9};
  expect_error<InvalidArgument>({"got 9"},
                                [&] { capture.record(0, ids_view(wrong, 2), {}, options); });
  EXPECT_EQ(numbers_of(capture.snapshot(1).array()), (Numbers{1, 2}));
}

TEST(RoutingCaptureTest, ABuildWithoutGpusSaysSo) {
  if (build_info().cuda[0] != '\0') GTEST_SKIP() << "this build has them";
  RoutingCaptureConfig config = small_capture(1);
  config.device = DeviceType::kGpu;
  expect_error<Unsupported>({"a build with the GPU backend"},
                            [&] { const RoutingCapture capture(config); });
  config.num_layers = 0;
  expect_error<InvalidArgument>({"num_layers"}, [&] { const RoutingCapture capture(config); });
}

TEST(RoutingCaptureTest, CallsBeforeTheFirstStepAreRefused) {
  TestCapture capture(small_capture(1));
  const Ids ids = {1, 2};
  expect_error<InvalidState>({"record: expected begin_step"},
                             [&] { capture.record(0, ids_view(ids, 2)); });
  expect_error<InvalidState>({"snapshot: expected begin_step"}, [&] { (void)capture.snapshot(0); });
}

TEST(RoutingCaptureTest, ArgumentsThatDoNotFitAreRefusedInWords) {
  TestCapture capture(small_capture(1));
  capture.begin_step(1);
  const Ids ids = {1, 2, 3, 4};
  const auto refused = [&](const std::vector<std::string>& words, const TensorView& view,
                           const RecordOptions& options = {}) {
    expect_error<InvalidArgument>(words, [&] { capture.record(0, view, {}, options); });
  };
  TensorView view = ids_view(ids, 2);
  view.device = DeviceType::kGpu;
  view.device_index = 1;
  const bool is_on_gpu = TestCapture::is_on_gpu();
  refused({"topk_ids: expected a tensor on", is_on_gpu ? "cuda:0" : "cpu", "cuda:1"}, view);
  view = ids_view(ids, 2);
  view.strides = {1, 2};
  refused({"elements are contiguous"}, view);
  view = ids_view(ids, 2);
  view.data = nullptr;
  refused({"null pointer"}, view);
  view.dtype = DType::kFloat32;
  refused({"int8, int16, int32, int64", "got float32"}, view);
  view = ids_view(ids, 2);
  view.data = reinterpret_cast<std::byte*>(view.data) + 1;
  view.shape[0] = 1;
  refused({"aligned"}, view);
  RecordOptions options;
  options.rows = 3;
  refused({"rows: expected 0 to 2", "got 3"}, ids_view(ids, 2), options);
  expect_error<InvalidArgument>({"num_tokens: expected 0 to 8", "got 9"},
                                [&] { (void)capture.snapshot(9); });
}

TEST(RoutingCaptureTest, OnlyTheRowsThatAreSaidAreTaken) {
  TestCapture capture(small_capture(1));
  capture.begin_step(1);
  const Ids padded = {1, 2, 3, 4, 99, 99};
  RecordOptions options;
  options.rows = 2;
  capture.record(0, ids_view(padded, 2), {}, options);
  EXPECT_THAT(capture.snapshot(3).missing_rows(), ElementsAre(1));
}

TEST(RoutingCaptureTest, NoTokensAndNoExpertsAreOrdinary) {
  TestCapture capture(small_capture(1));
  capture.begin_step(1);
  const Ids none;
  capture.record(0, ids_view(none, 2));
  EXPECT_THAT(capture.snapshot(0).missing_layers(), IsEmpty());
  const Ids all_negative = {-1, -7, INT32_MIN, -1};
  capture.record(0, ids_view(all_negative, 2));
  const RoutingSnapshot snapshot = capture.snapshot(2);
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{-1, -1, -1, -1}));
  EXPECT_THAT(snapshot.missing_layers(), IsEmpty()) << "recorded, with no expert";
  EXPECT_THAT(snapshot.expert_histogram(), ElementsAre(0, 0, 0, 0, 0, 0, 0, 0));
}

TEST(RoutingCaptureTest, HistogramsCountTokensPerExpertAndLayer) {
  RoutingCaptureConfig config = small_capture();
  config.num_experts = 3;
  TestCapture capture(config);
  capture.begin_step(1);
  const Ids first = {0, 2, 0, -1};
  const Ids second = {1, 2, 1, 2};
  capture.record(0, ids_view(first, 2));
  capture.record(1, ids_view(second, 2));
  EXPECT_THAT(capture.snapshot(2).expert_histogram(), ElementsAre(2, 0, 1, 0, 2, 2));
}

TEST(RoutingCaptureTest, CapturesOfSeveralThreadsAreIndependent) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([i] {
      TestCapture capture(small_capture(1));
      for (int step = 0; step < 50; ++step) {
        capture.begin_step(step);
        const Ids ids = {i, (i + step) % 8};
        capture.record(0, ids_view(ids, 2));
        EXPECT_EQ(numbers_of(capture.snapshot(1).array()), (Numbers{i, (i + step) % 8}));
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(RoutingCaptureTest, PlacesComeBackFromOtherThreadsWhileTheCaptureRecords) {
  TestCapture capture(small_capture(1));
  std::vector<std::thread> readers;
  for (int step = 0; step < 40; ++step) {
    capture.begin_step(step);
    const Ids ids = {step % 8, 7};
    capture.record(0, ids_view(ids, 2));
    while (capture.num_in_flight() == 2) std::this_thread::yield();
    RoutingSnapshot snapshot = capture.snapshot(1);
    readers.emplace_back([copy = snapshot, step]() mutable {
      EXPECT_EQ(numbers_of(copy.rows(0, 1).array()), (Numbers{step % 8, 7}));
      copy.release();
    });
    snapshot.release();  // the copy holds the place while it is read
  }
  for (auto& reader : readers) reader.join();
}

}  // namespace
}  // namespace fanfold
