// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_rows.h"

#include <cstdint>
#include <vector>

#include "capture/capture_case.h"
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
using testing::Numbers;
using testing::numbers_of;
using testing::rows_of;

/// Tokens from `first` on whose ids say where they are: 10 * position + layer, one id each.
RoutingRows told_rows(std::int64_t first, std::int64_t num_tokens, int num_layers = 4) {
  Numbers ids;
  for (std::int64_t position = first; position < first + num_tokens; ++position) {
    for (int layer = 0; layer < num_layers; ++layer) ids.push_back(10 * position + layer);
  }
  return rows_of(make_routing_spec(num_layers, 1000, 1), ids, first);
}

// C21
TEST(RoutingRowsTest, PipelineStagesGetTheirLayersAndJoinThemAgain) {
  const RoutingRows rows = told_rows(0, 2);
  const RoutingRows first = slice_layers(rows, 0, 2);
  const RoutingRows second = slice_layers(rows, 2, 4);
  EXPECT_EQ(numbers_of(first.array()), (Numbers{0, 1, 10, 11}));
  EXPECT_EQ(numbers_of(second.array()), (Numbers{2, 3, 12, 13}));
  const RoutingRows joined = concat_layers({first, second});
  EXPECT_EQ(joined.spec, rows.spec);
  EXPECT_EQ(joined.data, rows.data);
  expect_error<InvalidArgument>({"slice_layers: expected layers within [0, 4)", "got [2, 5)"},
                                [&] { slice_layers(rows, 2, 5); });
  expect_error<InvalidArgument>({"2 tokens from position 0 on", "1 from position 0 on in part 1"},
                                [&] { concat_layers({first, told_rows(0, 1)}); });
}

// C21
TEST(RoutingRowsTest, PrefillAndDecodeJoinWhereTheyMeet) {
  const RoutingRows prefill = told_rows(0, 3);
  const RoutingRows decode = told_rows(3, 2);
  const RoutingRows joined = concat_tokens({prefill, decode});
  EXPECT_EQ(joined.num_tokens, 5);
  EXPECT_EQ(joined.data, told_rows(0, 5).data);
  expect_error<InvalidArgument>({"part 1 to begin at position 3", "got position 4"},
                                [&] { concat_tokens({prefill, told_rows(4, 1)}); });
  expect_error<InvalidArgument>({"int16 [tokens, 4, 1] of 1000 logical experts", "[tokens, 3, 1]"},
                                [&] { concat_tokens({prefill, told_rows(3, 1, 3)}); });
  expect_error<InvalidArgument>({"one or more", "none"}, [] { concat_tokens({}); });
}

// C15
TEST(RoutingRowsTest, AKnownPrefixIsOmittedAndJoinedAgain) {
  const RoutingRows rows = told_rows(0, 5);
  const RoutingRows rest = slice_tokens(rows, 4, 5);
  EXPECT_EQ(rest.first_position, 4);
  EXPECT_EQ(numbers_of(rest.array()), (Numbers{40, 41, 42, 43}));
  EXPECT_EQ(concat_tokens({slice_tokens(rows, 0, 4), rest}).data, rows.data);
  EXPECT_EQ(slice_tokens(rest, 5, 5).num_tokens, 0);
  expect_error<InvalidArgument>({"slice_tokens: expected positions within [4, 5)", "got [3, 5)"},
                                [&] { slice_tokens(rest, 3, 5); });
}

// C11
TEST(RoutingRowsTest, ThereIsARowForEveryTokenThatWasFed) {
  EXPECT_EQ(num_tokens_fed(5, 0), 5) << "the last prompt token has a row";
  EXPECT_EQ(num_tokens_fed(5, 1), 5) << "the generated one was not fed";
  EXPECT_EQ(num_tokens_fed(5, 3), 7);
  EXPECT_EQ(num_tokens_fed(0, 0), 0);
}

// C14
TEST(RoutingRowsTest, LengthsOffByOneAreRefused) {
  check_num_tokens(told_rows(0, 7), 5, 3);
  for (const std::int64_t wrong : {8, 6}) {
    expect_error<InvalidArgument>({"rows: expected 7 tokens from position 0 on", "got"},
                                  [&] { check_num_tokens(told_rows(0, wrong), 5, 3); });
  }
  expect_error<InvalidArgument>({"7 from position 1"},
                                [] { check_num_tokens(told_rows(1, 7), 5, 3); });
  expect_error<InvalidArgument>({"num_generated"}, [] { num_tokens_fed(5, -1); });
  expect_error<InvalidArgument>({"num_tokens_fed"}, [] { num_tokens_fed(INT64_MAX, INT64_MAX); });
}

TEST(RoutingRowsTest, TypesChangeAndSentinelsStay) {
  const RoutingRows rows = rows_of(make_routing_spec(1, 200, 2), {199, -1, 0, 5}, 3);
  EXPECT_EQ(rows.spec.dtype, DType::kInt16);
  const RoutingRows narrow = astype(rows, DType::kUInt8);
  EXPECT_EQ(numbers_of(narrow.array()), (Numbers{199, 255, 0, 5}));
  EXPECT_EQ(narrow.first_position, 3);
  EXPECT_EQ(astype(narrow, DType::kInt16).data, rows.data);
  EXPECT_EQ(numbers_of(astype(narrow, DType::kInt32).array()), (Numbers{199, -1, 0, 5}));
  expect_error<InvalidArgument>({"int8, which holds"}, [&] { astype(rows, DType::kInt8); });
}

TEST(RoutingRowsTest, IdsOutOfRangeAreFoundAndNamed) {
  const RoutingSpec spec = make_routing_spec(2, 8, 2);
  check_rows(rows_of(spec, {0, 1, 2, 3, -1, -1, 6, 7}));
  expect_error<InvalidArgument>({"8 at token 1, layer 1, column 0"},
                                [&] { check_rows(rows_of(spec, {0, 1, 2, 3, 4, 5, 8, 7})); });
  expect_error<InvalidArgument>({"got -2"}, [&] { check_rows(rows_of(spec, {0, 1, -2, 3})); });
  RoutingRows cut = rows_of(spec, {0, 1, 2, 3});
  cut.data.pop_back();
  expect_error<InvalidArgument>({"1 tokens of 4 bytes", "3 bytes"}, [&] { check_rows(cut); });
}

TEST(RoutingRowsTest, SizesThatContradictEachOtherAreFoundBeforeAnythingIsRead) {
  RoutingRows cut = told_rows(0, 2);
  cut.data.pop_back();
  RoutingRows shallow = told_rows(0, 2);
  shallow.spec.num_layers = 0;
  RoutingRows far = told_rows(0, 2);
  far.first_position = INT64_MAX;
  for (const RoutingRows& rows : {cut, shallow, far}) {
    EXPECT_THROW(slice_tokens(rows, rows.first_position, rows.first_position), InvalidArgument);
    EXPECT_THROW(slice_layers(rows, 0, 1), InvalidArgument);
    EXPECT_THROW(concat_tokens({rows}), InvalidArgument);
    EXPECT_THROW(concat_layers({rows}), InvalidArgument);
  }
  const RoutingRows wide{make_routing_spec(INT32_MAX / 2, 8, 2), 0, 0, {}};
  expect_error<InvalidArgument>({"ids per token"}, [&] { concat_layers({wide, wide, wide}); });
}

TEST(RoutingRowsTest, RowsAreCopiedFromAnyTokenStride) {
  const RoutingSpec spec = make_routing_spec(1, 8, 2, DType::kInt32);
  const Ids ids = {1, 2, 9, 3, 4, 9};
  TensorView view(static_cast<const void*>(ids.data()), DType::kInt32, {2, 1, 2});
  view.strides = {3, 2, 1};
  const RoutingRows rows = copy_rows(spec, view, 6);
  EXPECT_EQ(numbers_of(rows.array()), (Numbers{1, 2, 3, 4}));
  EXPECT_THAT(expert_histogram(rows), ElementsAre(0, 1, 1, 1, 1, 0, 0, 0));
  view.dtype = DType::kInt64;
  expect_error<InvalidArgument>({"int32 [tokens, 1, 2]", "int64 [2, 1, 2]"},
                                [&] { copy_rows(spec, view); });
}

TEST(RoutingShardsTest, CutAndJoinedShardsAreTheRowsAgain) {
  for (const int num_rows : {0, 1, 4, 5, 7, 8}) {
    Ids ids;
    for (int i = 0; i < 2 * num_rows; ++i) ids.push_back(i);
    const TensorView rows = ids_view(ids, 2);
    for (const int num_shards : {1, 2, 3, 4}) {
      std::vector<TensorView> shards;
      for (int shard = 0; shard < num_shards; ++shard) {
        shards.push_back(shard_of(rows, num_shards, shard));
        EXPECT_LE(shards.back().shape[0], shard_counts(num_rows, num_shards)[0]);
      }
      Ids again(ids.size(), -5);
      join_shards(shards, ids_view(again, 2));
      EXPECT_EQ(again, ids) << num_rows << " rows in " << num_shards << " shards";
    }
  }
}

TEST(RoutingShardsTest, CountsAreThoseOfTheShards) {
  EXPECT_THAT(shard_counts(5, 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(shard_counts(0, 2), ElementsAre(0, 0));
  const Ids ids = {0, 1, 2, 3, 4};
  for (int shard = 0; shard < 4; ++shard) {
    EXPECT_EQ(shard_of(ids_view(ids, 1), 4, shard).shape[0],
              shard_counts(5, 4)[static_cast<std::size_t>(shard)]);
  }
}

TEST(RoutingShardsTest, PaddingIsLeftOutAndMayNotBeAShard) {
  const Ids first = {1, 2};
  const Ids second = {3, 9};
  Ids out(3);
  join_shards({ids_view(first, 1), ids_view(second, 1)}, ids_view(out, 1));
  EXPECT_THAT(out, ElementsAre(1, 2, 3));
  Ids short_of_a_shard(2);
  expect_error<InvalidArgument>({"room for the 4 rows of 2 shards", "got 2 rows"}, [&] {
    join_shards({ids_view(first, 1), ids_view(second, 1)}, ids_view(short_of_a_shard, 1));
  });
  Ids too_long(5);
  expect_error<InvalidArgument>({"got 5 rows"}, [&] {
    join_shards({ids_view(first, 1), ids_view(second, 1)}, ids_view(too_long, 1));
  });
  expect_error<InvalidArgument>({"rows as those of out"},
                                [&] { join_shards({ids_view(first, 2)}, ids_view(out, 1)); });
  expect_error<InvalidArgument>({"shard: expected 0 to 1", "got 2"},
                                [&] { shard_of(ids_view(first, 1), 2, 2); });
  expect_error<InvalidArgument>({"num_shards"}, [] { shard_counts(3, 0); });
}

}  // namespace
}  // namespace fanfold
