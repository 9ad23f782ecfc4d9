// SPDX-License-Identifier: Apache-2.0

// Which rows of a batch are whose: explicit layouts and sinks.

#include <cstdint>
#include <limits>
#include <vector>

#include "capture/capture_case.h"
#include "capture/test_capture.h"
#include "fanfold/error.h"
#include "fanfold/routing_capture.h"
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
using testing::numbered_rows;
using testing::Numbers;
using testing::numbers_of;
using testing::small_capture;
using testing::TestCapture;

/// What layer 0 holds of the first tokens after `layout` was used for numbered rows.
Numbers recorded(const CaptureLayout& layout, int num_rows, std::int64_t num_tokens) {
  TestCapture capture(small_capture(1));
  capture.begin_step(1);
  const Ids ids = numbered_rows(num_rows);
  capture.record(0, ids_view(ids, 2), layout);
  Numbers first_ids;
  const Numbers all = numbers_of(capture.snapshot(num_tokens).array());
  for (std::size_t i = 0; i < all.size(); i += 2) first_ids.push_back(all[i]);
  return first_ids;
}

void expect_refused(const std::vector<std::string>& words, const CaptureLayout& layout,
                    int num_rows) {
  expect_error<InvalidArgument>(words, [&] { (void)recorded(layout, num_rows, 0); });
}

// C6
TEST(CaptureLayoutTest, ConcatenatedRanksGiveTheirOwnSpan) {
  EXPECT_EQ(recorded(CaptureLayout::concatenated({0, 4}, 0), 4, 2), (Numbers{-1, -1}));
  EXPECT_EQ(recorded(CaptureLayout::concatenated({0, 4}, 1), 4, 4), (Numbers{0, 1, 2, 3}));
  EXPECT_EQ(recorded(CaptureLayout::concatenated({3, 1, 4}, 1), 8, 2), (Numbers{3, -1}));
  EXPECT_EQ(recorded(CaptureLayout::concatenated({4, 4}, 1), 8, 4), (Numbers{4, 5, 6, 7}));
}

TEST(CaptureLayoutTest, PaddedRanksGiveTheirTokensOnly) {
  EXPECT_EQ(recorded(CaptureLayout::padded({0, 4}, 1, 4), 8, 4), (Numbers{4, 5, 6, 7}));
  EXPECT_EQ(recorded(CaptureLayout::padded({2, 4}, 0, 4), 8, 3), (Numbers{0, 1, -1}));
  EXPECT_EQ(recorded(CaptureLayout::padded({0, 0}, 1, 0), 0, 1), (Numbers{-1}));
}

TEST(CaptureLayoutTest, EqualNumbersOfRowsMeanWhatIsSaid) {
  // Eight rows could be this rank's, two ranks' of four, or two padded ones: nothing is guessed.
  EXPECT_EQ(recorded(CaptureLayout::local(), 8, 2), (Numbers{0, 1}));
  EXPECT_EQ(recorded(CaptureLayout::concatenated({2, 6}, 1), 8, 2), (Numbers{2, 3}));
  EXPECT_EQ(recorded(CaptureLayout::padded({2, 2}, 1, 4), 8, 2), (Numbers{4, 5}));
}

TEST(CaptureLayoutTest, ARowMapMovesAndSkipsRows) {
  EXPECT_EQ(recorded(CaptureLayout::row_map({2, -1, 0, 1}), 4, 4), (Numbers{2, 3, 0, -1}));
  EXPECT_EQ(recorded(CaptureLayout::row_map({1, 0}, 2), 2, 4), (Numbers{-1, -1, 1, 0}));
}

TEST(CaptureLayoutTest, MicroBatchesGoToTheirOffsets) {
  TestCapture capture(small_capture(1));
  capture.begin_step(1);
  const Ids ids = numbered_rows(6);
  capture.record(0, ids_view(ids, 2), CaptureLayout::concatenated({2, 4}, 0));
  capture.record(0, ids_view(ids, 2), CaptureLayout::concatenated({2, 4}, 1, 2));
  const RoutingSnapshot snapshot = capture.snapshot(6);
  EXPECT_THAT(snapshot.missing_layers(), IsEmpty());
  EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{0, 7, 1, 7, 2, 7, 3, 7, 4, 7, 5, 7}));
}

TEST(CaptureLayoutTest, CountsThatDoNotFitTheRowsAreRefusedInWords) {
  using L = CaptureLayout;
  expect_refused({"expected 5 rows (the sum of layout.counts)", "got 4"},
                 L::concatenated({1, 4}, 0), 4);
  expect_refused({"layout.rank: expected a rank of the 2", "got 2"}, L::concatenated({1, 3}, 2), 4);
  expect_refused({"layout.rank", "got -1"}, L::concatenated({4}, -1), 4);
  expect_refused({"layout.counts: expected numbers of rows", "-1 of rank 1"},
                 L::concatenated({5, -1}, 0), 4);
  expect_refused({"layout.counts"}, L::concatenated({INT64_MAX, INT64_MAX}, 0), 4);
  expect_refused({"expected 2 x 3 rows", "got 8"}, L::padded({1, 1}, 0, 3), 8);
  expect_refused({"at most 4 tokens (layout.stride)", "5 of rank 1"}, L::padded({1, 5}, 0, 4), 8);
  expect_refused({"layout.stride", "got -1"}, L::padded({0, 0}, 0, -1), 8);
  expect_refused({"2 x 9223372036854775807"}, L::padded({0, 0}, 0, INT64_MAX), 8);
  expect_refused({"layout.row_map: expected 4 entries", "got 3"}, L::row_map({0, 1, 2}), 4);
  expect_refused({"each token once", "1 again at row 2"}, L::row_map({0, 1, 1}), 3);
  expect_refused({"tokens below 8", "8 at row 1"}, L::row_map({0, 8}), 2);
  expect_refused({"tokens below 6", "6 at row 0"}, L::row_map({6}, 2), 1);
}

TEST(CaptureLayoutTest, TokensPastTheBufferAreRefused) {
  expect_refused({"at most 8 tokens from token 0 on (max_tokens)", "got 9"}, CaptureLayout::local(),
                 9);
  expect_refused({"at most 1 tokens from token 7"}, CaptureLayout::local(7), 2);
  expect_refused({"layout.token_offset", "got 9"}, CaptureLayout::local(9), 0);
  expect_refused({"layout.token_offset", "got -1"}, CaptureLayout::local(-1), 0);
}

// C10
TEST(CaptureSinkTest, RowsThatTheKernelDidNotWriteAreMissing) {
  RoutingCaptureConfig config = small_capture(1);
  config.num_shared_experts = 1;
  TestCapture capture(config);
  const TensorView sink = capture.sink(0, DType::kInt16);
  EXPECT_EQ(sink.describe(), "int16 [8, 3] on cpu");
  auto* ids = static_cast<std::int16_t*>(sink.data);
  for (int i = 0; i < 24; ++i) EXPECT_EQ(ids[i], std::numeric_limits<std::int16_t>::min());
  for (int step = 0; step < 2; ++step) {
    capture.begin_step(step);
    ids[0] = 5;
    ids[1] = -1;  // no expert
    ids[6] = 6;
    ids[7] = 4;
    capture.import_sink(0, 4);
    const RoutingSnapshot snapshot = capture.snapshot(4);
    EXPECT_THAT(snapshot.missing_rows(), ElementsAre(2));
    EXPECT_EQ(numbers_of(snapshot.array()), (Numbers{5, -1, -1, -1, 6, 4, -1, -1}));
  }
  EXPECT_EQ(capture.sink(0, DType::kInt16).data, sink.data) << "kernels may keep the address";
}

TEST(CaptureSinkTest, WhatWasNotImportedDoesNotReachTheNextStep) {
  TestCapture capture(small_capture(1));
  const TensorView sink = capture.sink(0);
  capture.begin_step(1);
  static_cast<std::int32_t*>(sink.data)[0] = 1;
  static_cast<std::int32_t*>(sink.data)[1] = 2;
  capture.begin_step(2);
  capture.import_sink(0, 1);
  EXPECT_THAT(capture.snapshot(1).missing_layers(), ElementsAre(0));
}

TEST(CaptureSinkTest, WhatWasImportedDoesNotReachTheNextStep) {
  TestCapture capture(small_capture(1));
  auto* ids = static_cast<std::int32_t*>(capture.sink(0).data);
  capture.begin_step(1);
  for (int i = 0; i < 16; ++i) ids[i] = i % 8;  // more rows than are imported: padding
  capture.import_sink(0, 2);
  capture.begin_step(2);
  ids[0] = 5;
  ids[1] = 6;
  capture.import_sink(0, 8);
  EXPECT_THAT(capture.snapshot(8).missing_rows(), ElementsAre(7));
}

TEST(CaptureSinkTest, WhatIsWrittenBetweenStepsDoesNotReachTheNext) {
  TestCapture capture(small_capture(1));
  auto* ids = static_cast<std::int32_t*>(capture.sink(0).data);
  const auto is_missing = [&](std::int64_t step) {
    capture.begin_step(step);
    capture.import_sink(0, 1);
    return capture.snapshot(1).missing_rows()[0] == 1;
  };
  ids[0] = 1;
  ids[1] = 2;
  EXPECT_TRUE(is_missing(1)) << "written before the first step";
  ids[0] = 3;
  ids[1] = 4;
  EXPECT_TRUE(is_missing(2)) << "written after the import";
}

TEST(CaptureSinkTest, RecordRefusesIdsThatLieInASink) {
  TestCapture capture(small_capture());
  TensorView sink = capture.sink(1);
  capture.begin_step(1);
  sink.data = static_cast<std::byte*>(sink.data) + sink.row_bytes();
  sink.shape[0] = 1;
  for (const int layer : {0, 1}) {
    expect_error<InvalidArgument>({"topk_ids", "the sink of layer 1; use import_sink"},
                                  [&] { capture.record(layer, sink); });
  }
  sink.shape[0] = 0;
  capture.record(1, sink);
}

TEST(CaptureSinkTest, AMapWithMoreIdsThanASinkHoldsIsRefused) {
  TestCapture capture(small_capture(1));
  (void)capture.sink(0, DType::kInt16);
  capture.begin_step(1);
  capture.set_logical_of_expert(std::vector<std::int32_t>(32768, 0));
  expect_error<InvalidArgument>(
      {"logical_of_expert: expected ids up to 32767", "sink of layer 0 is int16", "32768"},
      [&] { capture.set_logical_of_expert(std::vector<std::int32_t>(32769, 0)); });
}

TEST(CaptureSinkTest, ASinkThatIsAskedForAgainMayBeWrittenAgain) {
  TestCapture capture(small_capture(1));
  capture.sink(0);
  capture.begin_step(1);
  capture.import_sink(0, 0);
  auto* ids = static_cast<std::int32_t*>(capture.sink(0).data);
  ids[0] = 5;
  ids[1] = 6;
  capture.begin_step(2);
  capture.import_sink(0, 1);
  EXPECT_THAT(capture.snapshot(1).missing_layers(), ElementsAre(0));
}

TEST(CaptureSinkTest, GatheredBatchesKeepTheirLayout) {
  RoutingCaptureConfig config = small_capture(1);
  config.max_sink_rows = 16;
  TestCapture capture(config);
  const TensorView sink = capture.sink(0);
  EXPECT_EQ(sink.shape[0], 16);
  capture.begin_step(1);
  auto* ids = static_cast<std::int32_t*>(sink.data);
  for (int i = 0; i < 24; ++i) ids[i] = i % 8;
  capture.import_sink(0, 12, CaptureLayout::padded({2, 3, 1}, 1, 4));
  EXPECT_EQ(numbers_of(capture.snapshot(3).array()), (Numbers{0, 1, 2, 3, 4, 5}));
}

TEST(CaptureSinkTest, ErrorsNameWhatIsWrongAndKeepTheSink) {
  TestCapture capture(small_capture(1));
  capture.begin_step(1);
  expect_error<InvalidState>({"import_sink: expected a sink of layer 0"},
                             [&] { capture.import_sink(0, 1); });
  expect_error<InvalidArgument>({"dtype of the sink", "got int64"},
                                [&] { (void)capture.sink(0, DType::kInt64); });
  const TensorView sink = capture.sink(0);
  expect_error<InvalidArgument>({"expected int32, as when it was made", "got int16"},
                                [&] { (void)capture.sink(0, DType::kInt16); });
  expect_error<InvalidArgument>({"num_rows: expected 0 to 8", "got 9"},
                                [&] { capture.import_sink(0, 9); });
  auto* ids = static_cast<std::int32_t*>(sink.data);
  ids[2] = 3;
  expect_error<InvalidArgument>({"column 1 of row 1 not written"},
                                [&] { capture.import_sink(0, 2); });
  if (TestCapture::is_on_gpu()) return;  // where the step is lost: gpu/gpu_capture_test.cpp
  ids[3] = 8;
  expect_error<InvalidArgument>({"8 at row 1, column 1"}, [&] { capture.import_sink(0, 2); });
  ids[3] = 4;
  capture.import_sink(0, 2);
  EXPECT_THAT(capture.snapshot(2).missing_rows(), ElementsAre(1));
}

}  // namespace
}  // namespace fanfold
