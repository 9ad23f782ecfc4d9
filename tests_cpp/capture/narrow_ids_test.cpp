// SPDX-License-Identifier: Apache-2.0
#include "capture/narrow_ids.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "capture/capture_case.h"
#include "capture/test_capture.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"

namespace fanfold::capture {
namespace {

using fanfold::testing::expect_error;
using fanfold::testing::ids_view;
using fanfold::testing::Numbers;
using fanfold::testing::numbers_of;
using fanfold::testing::RandomBits;
using fanfold::testing::small_capture;
using fanfold::testing::TestCapture;

std::vector<const NarrowTable*> all_tables() {
  std::vector<const NarrowTable*> tables = {&portable_narrow_table()};
  if (&narrow_table() != tables[0]) tables.push_back(&narrow_table());
  return tables;
}

template <class In, class Out>
void expect_narrowed(NarrowIds narrow, const std::vector<In>& ids, std::int32_t num_experts) {
  std::vector<Out> out(ids.size() + 1, Out{17});
  bool all_right = true;
  for (const In id : ids) all_right &= id < num_experts;
  EXPECT_EQ(narrow(ids.data(), static_cast<std::int64_t>(ids.size()), num_experts, out.data()),
            all_right);
  EXPECT_EQ(out.back(), Out{17}) << "written behind the end";
  if (!all_right) return;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(out[i], ids[i] < 0 ? static_cast<Out>(-1) : static_cast<Out>(ids[i])) << "at " << i;
  }
}

template <class In>
void expect_all_widths(const NarrowIds* table, const std::vector<In>& ids,
                       std::int32_t num_experts) {
  if (num_experts <= 255) expect_narrowed<In, std::uint8_t>(table[0], ids, num_experts);
  if (num_experts <= 65535) expect_narrowed<In, std::uint16_t>(table[1], ids, num_experts);
  expect_narrowed<In, std::uint32_t>(table[2], ids, num_experts);
}

TEST(NarrowIdsTest, EveryTableStoresWhatFitsAndFindsWhatDoesNot) {
  RandomBits random(7);
  for (const NarrowTable* table : all_tables()) {
    for (const std::int32_t num_experts : {1, 8, 128, 129, 255, 32769, 65535, INT32_MAX}) {
      for (const int length : {0, 1, 7, 31, 32, 33, 64, 100}) {
        std::vector<std::int32_t> ids(static_cast<std::size_t>(length));
        for (std::int32_t& id : ids) {
          id = static_cast<std::int32_t>(random.below(std::int64_t{num_experts} + 1)) - 1;
        }
        const std::vector<std::int64_t> wide(ids.begin(), ids.end());
        expect_all_widths(table->from_4, ids, num_experts);
        expect_all_widths(table->from_8, wide, num_experts);
        if (num_experts >= INT16_MAX) continue;
        const std::vector<std::int16_t> small(ids.begin(), ids.end());
        expect_all_widths(table->from_2, small, num_experts);
      }
    }
  }
}

TEST(NarrowIdsTest, OneExtremeIdAnywhereIsJudgedRight) {
  constexpr std::int64_t kExtremes[] = {INT64_MIN,
                                        INT64_MIN + 1,
                                        -(std::int64_t{1} << 32),
                                        -(std::int64_t{1} << 31) - 1,
                                        INT32_MIN,
                                        INT16_MIN,
                                        -2,
                                        -1,
                                        0,
                                        127,
                                        128,
                                        255,
                                        256,
                                        INT16_MAX,
                                        INT32_MAX,
                                        INT32_MAX + std::int64_t{1},
                                        UINT32_MAX - std::int64_t{1},
                                        UINT32_MAX,
                                        UINT32_MAX + std::int64_t{1},
                                        (std::int64_t{5} << 32) + 3,
                                        INT64_MAX};
  for (const NarrowTable* table : all_tables()) {
    for (const std::int64_t extreme : kExtremes) {
      for (const std::size_t at : {0U, 5U, 31U, 34U}) {
        std::vector<std::int64_t> ids(35, 3);
        ids[at] = extreme;
        expect_all_widths(table->from_8, ids, 128);
        if (extreme < INT32_MIN || extreme > INT32_MAX) continue;
        expect_all_widths(table->from_4, std::vector<std::int32_t>(ids.begin(), ids.end()), 128);
        if (extreme < INT16_MIN || extreme > INT16_MAX) continue;
        const std::vector<std::int16_t> small(ids.begin(), ids.end());
        for (const std::int32_t num_experts : {128, 32768, 65536, INT32_MAX}) {
          expect_all_widths(table->from_2, small, num_experts);
        }
      }
    }
  }
}

template <class Id>
void expect_recorded(const std::vector<Id>& ids, int num_experts, DType dtype,
                     const Numbers& expected) {
  RoutingCaptureConfig config = small_capture(1);
  config.num_experts = num_experts;
  config.dtype = dtype;
  TestCapture capture(config);
  capture.begin_step(1);
  capture.record(0, ids_view(ids, 2));
  const RoutingSnapshot snapshot = capture.snapshot(static_cast<std::int64_t>(ids.size()) / 2);
  EXPECT_EQ(numbers_of(snapshot.array()), expected) << snapshot.array().describe();
}

// C8
TEST(NarrowIdsTest, EveryTypeOfIdsIsStoredInEveryTypeThatHoldsThem) {
  for (const DType dtype :
       {DType::kInt8, DType::kInt16, DType::kInt32, DType::kUInt8, DType::kUInt16}) {
    const std::int64_t none = make_routing_spec(1, 100, 2, dtype).sentinel();
    const Numbers expected = {99, none, 0, 7};
    expect_recorded<std::int8_t>({99, -1, 0, 7}, 100, dtype, expected);
    expect_recorded<std::int16_t>({99, -9, 0, 7}, 100, dtype, expected);
    expect_recorded<std::int32_t>({99, INT32_MIN, 0, 7}, 100, dtype, expected);
    expect_recorded<std::int64_t>({99, INT64_MIN, 0, 7}, 100, dtype, expected);
    expect_recorded<std::uint8_t>({99, 255, 0, 7}, 100, dtype, expected);
    expect_recorded<std::uint16_t>({99, 65535, 0, 7}, 100, dtype, expected);
    expect_recorded<std::uint32_t>({99, UINT32_MAX, 0, 7}, 100, dtype, expected);
  }
}

TEST(NarrowIdsTest, AnUnsignedMaximumIsAnIdWhereAnExpertHasIt) {
  expect_recorded<std::uint8_t>({255, 0}, 256, DType::kInt16, {255, 0});
  expect_recorded<std::uint8_t>({255, 0}, 255, DType::kInt16, {-1, 0});
  expect_recorded<std::uint16_t>({65535, 0}, 65536, DType::kInt32, {65535, 0});
}

// C8
TEST(NarrowIdsTest, TheNarrowestSignedTypeHoldsEveryIdAndTheSentinel) {
  const auto chosen = [](int num_experts) { return make_routing_spec(1, num_experts, 1).dtype; };
  EXPECT_EQ(chosen(1), DType::kInt8);
  EXPECT_EQ(chosen(128), DType::kInt8);
  EXPECT_EQ(chosen(129), DType::kInt16);
  EXPECT_EQ(chosen(256), DType::kInt16);
  EXPECT_EQ(chosen(257), DType::kInt16);
  EXPECT_EQ(chosen(512), DType::kInt16);
  EXPECT_EQ(chosen(32768), DType::kInt16);
  EXPECT_EQ(chosen(32769), DType::kInt32);
  EXPECT_EQ(chosen(65536), DType::kInt32);
  EXPECT_EQ(make_routing_spec(1, 512, 1).sentinel(), -1);
}

// C8
TEST(NarrowIdsTest, UnsignedTypesKeepTheirMaximumForTheSentinel) {
  EXPECT_EQ(make_routing_spec(1, 255, 1, DType::kUInt8).sentinel(), 255);
  EXPECT_EQ(make_routing_spec(1, 65535, 1, DType::kUInt16).sentinel(), 65535);
  expect_error<InvalidArgument>({"ids 0 to 255 and a sentinel", "uint8, which holds ids up to 254"},
                                [] { make_routing_spec(1, 256, 1, DType::kUInt8); });
  expect_error<InvalidArgument>({"uint16"}, [] { make_routing_spec(1, 65536, 1, DType::kUInt16); });
  expect_error<InvalidArgument>({"int16"}, [] { make_routing_spec(1, 32769, 1, DType::kInt16); });
  expect_error<InvalidArgument>({"int8, int16, int32, uint8 or uint16", "got int64"},
                                [] { make_routing_spec(1, 8, 1, DType::kInt64); });
}

TEST(NarrowIdsTest, AnyRowStrideAndLongRowsAreTaken) {
  constexpr int kTopK = 700;  // more than a block
  RoutingCaptureConfig config = small_capture(1);
  config.num_experts = 1000;
  config.top_k = kTopK;
  TestCapture capture(config);
  std::vector<std::int16_t> ids(3 * 800);
  Numbers expected;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int16_t>(i % 1000);
    if (i % 800 < kTopK) expected.push_back(ids[i]);
  }
  TensorView view = ids_view(ids, 800);
  view.shape[1] = kTopK;
  capture.begin_step(1);
  capture.record(0, view);
  EXPECT_EQ(numbers_of(capture.snapshot(3).array()), expected);
  ids[2 * 800 + 699] = 1000;
  capture.begin_step(2);
  expect_error<InvalidArgument>({"1000 at row 2, column 699"}, [&] { capture.record(0, view); });
}

/// Records random ids of one type with a row stride, perhaps by way of a map, and compares.
template <class Id>
void expect_any_rows(int top_k, int gap, std::int64_t num_rows, bool maps, std::uint64_t seed) {
  constexpr int kNumIds = 120;
  RandomBits random(seed);
  RoutingCaptureConfig config = small_capture(1, num_rows);
  config.num_experts = maps ? 300 : kNumIds;
  config.top_k = top_k;
  for (int i = 0; maps && i < kNumIds; ++i) {
    config.logical_of_expert.push_back(static_cast<std::int32_t>(random.below(300)));
  }
  const std::int64_t stride = top_k + gap;
  std::vector<Id> ids(static_cast<std::size_t>(num_rows * stride), std::numeric_limits<Id>::max());
  Numbers expected;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (int k = 0; k < top_k; ++k) {
      const std::int64_t id = random.below(kNumIds + 1) - 1;
      ids[static_cast<std::size_t>(row * stride + k)] = static_cast<Id>(id);
      expected.push_back(id >= 0 && maps ? config.logical_of_expert[static_cast<std::size_t>(id)]
                                         : id);
    }
  }
  TensorView view = ids_view(ids, stride);
  view.shape[1] = top_k;
  TestCapture capture(config);
  capture.begin_step(1);
  capture.record(0, view);
  EXPECT_EQ(numbers_of(capture.snapshot(num_rows).array()), expected) << view.describe();
  const std::int64_t row = random.below(num_rows);
  const std::int64_t column = random.below(top_k);
  ids[static_cast<std::size_t>(row * stride + column)] = static_cast<Id>(kNumIds);
  capture.begin_step(2);
  expect_error<InvalidArgument>({"got 120 at row " + std::to_string(row) + ", column " +
                                 std::to_string(column) + " of layer 0"},
                                [&] { capture.record(0, view); });
  if (TestCapture::is_on_gpu()) return;  // where the step is lost: gpu/gpu_capture_test.cpp
  EXPECT_EQ(capture.snapshot(num_rows).missing_rows()[0], num_rows);
}

TEST(NarrowIdsTest, RowsOfAnyTypeStrideAndMapAreStoredAndChecked) {
  std::uint64_t seed = 0;
  for (const int top_k : {1, 8, 511, 513}) {
    for (const int gap : {0, 3}) {
      for (const std::int64_t num_rows : {1, 5, 131}) {
        if (TestCapture::is_on_gpu() && num_rows > 100 && top_k > 100) continue;  // slow
        for (const bool maps : {false, true}) {
          expect_any_rows<std::int8_t>(top_k, gap, num_rows, maps, ++seed);
          expect_any_rows<std::uint8_t>(top_k, gap, num_rows, maps, ++seed);
          expect_any_rows<std::int16_t>(top_k, gap, num_rows, maps, ++seed);
          expect_any_rows<std::uint16_t>(top_k, gap, num_rows, maps, ++seed);
          expect_any_rows<std::int32_t>(top_k, gap, num_rows, maps, ++seed);
          expect_any_rows<std::uint32_t>(top_k, gap, num_rows, maps, ++seed);
          expect_any_rows<std::int64_t>(top_k, gap, num_rows, maps, ++seed);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fanfold::capture
