// SPDX-License-Identifier: Apache-2.0

// Shards of a sequence, gathered from peers.

#include <cstdint>
#include <string>
#include <vector>

#include "capture/capture_case.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "fanfold/routing_capture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using testing::Ids;
using testing::ids_view;
using testing::numbered_rows;
using testing::Numbers;
using testing::numbers_of;
using testing::small_capture;
using testing::spawn_ranks;

class CaptureShardsOverTest : public ::testing::TestWithParam<testing::GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Groups, CaptureShardsOverTest, ::testing::ValuesIn(testing::kGroupKinds));

TEST_P(CaptureShardsOverTest, ShardsOfASequenceAreGatheredAndTrimmed) {
  // One token, two shards: the second rank's row is padding, whatever it holds.
  for (const std::int64_t num_tokens : {1, 5, 6}) {
    spawn_ranks(GetParam(), 2, [num_tokens](Communicator& communicator) {
      RoutingCaptureConfig config = small_capture(1);
      config.gather = [&](const TensorView& send, const TensorView& recv,
                          const CaptureLayout& shards, void*) -> const std::int32_t* {
        communicator.all_gather_v(send, recv, shards.counts);
        return nullptr;
      };
      RoutingCapture capture(config);
      capture.begin_step(1);
      const std::vector<std::int64_t> counts(2, shard_counts(num_tokens, 2)[0]);
      const Ids all = numbered_rows(static_cast<int>(2 * counts[0]));
      const Ids mine(all.begin() + 2 * counts[0] * communicator.rank(),
                     all.begin() + 2 * counts[0] * (communicator.rank() + 1));
      capture.record(0, ids_view(mine, 2),
                     CaptureLayout::sharded(counts, communicator.rank(), num_tokens));
      const RoutingSnapshot snapshot = capture.snapshot(num_tokens + 1);
      EXPECT_THAT(snapshot.missing_rows(), ElementsAre(1));
      Numbers expected(all.begin(), all.begin() + 2 * num_tokens);
      expected.insert(expected.end(), {-1, -1});
      EXPECT_EQ(numbers_of(snapshot.array()), expected);
    });
  }
}

TEST(CaptureShardsTest, ShardsWithoutPaddingAreTheCountsAsTheyAre) {
  spawn_ranks(4, [](Communicator& communicator) {
    RoutingCaptureConfig config = small_capture(1);
    config.gather = [&](const TensorView& send, const TensorView& recv, const CaptureLayout& shards,
                        void*) -> const std::int32_t* {
      communicator.all_gather_v(send, recv, shards.counts);
      return nullptr;
    };
    RoutingCapture capture(config);
    capture.begin_step(1);
    const Ids all = numbered_rows(5);
    capture.record(0, shard_of(ids_view(all, 2), 4, communicator.rank()),
                   CaptureLayout::sharded(shard_counts(5, 4), communicator.rank(), 5));
    EXPECT_EQ(numbers_of(capture.snapshot(5).array()), Numbers(all.begin(), all.end()));
  });
}

TEST(CaptureShardsTest, AWrongIdInAShardIsAnErrorOnEveryRank) {
  spawn_ranks(2, [](Communicator& communicator) {
    RoutingCaptureConfig config = small_capture(1);
    config.gather = [&](const TensorView& send, const TensorView& recv, const CaptureLayout& shards,
                        void*) -> const std::int32_t* {
      communicator.all_gather_v(send, recv, shards.counts);
      return nullptr;
    };
    RoutingCapture capture(config);
    capture.begin_step(1);
    const Ids mine = {1, communicator.rank() == 1 ? 8 : 2};
    expect_error<InvalidArgument>({"8 at row 1, column 1"}, [&] {
      capture.record(0, ids_view(mine, 2), CaptureLayout::sharded({1, 1}, communicator.rank(), 2));
    });
  });
}

TEST(CaptureShardsTest, ShardsThatDoNotFitAreRefusedBeforeAnyoneWaits) {
  RoutingCaptureConfig config = small_capture(1);
  config.gather = [](const TensorView&, const TensorView&, const CaptureLayout&,
                     void*) -> const std::int32_t* {
    ADD_FAILURE() << "gathered";
    return nullptr;
  };
  RoutingCapture capture(config);
  capture.begin_step(1);
  const Ids ids = numbered_rows(2);
  const auto refused = [&](const std::vector<std::string>& words, const CaptureLayout& layout) {
    expect_error<InvalidArgument>(words, [&] { capture.record(0, ids_view(ids, 2), layout); });
  };
  refused({"expected 3 rows (layout.counts of rank 0)", "got 2"},
          CaptureLayout::sharded({3, 3}, 0, 6));
  refused({"layout.num_tokens: expected 0 to 4", "got 5"}, CaptureLayout::sharded({2, 2}, 0, 5));
  refused({"layout.num_tokens", "fewer than 2 rows of padding", "got 2 rows"},
          CaptureLayout::sharded({2, 2}, 0, 2));
  refused({"layout.counts: expected numbers of rows"},
          CaptureLayout::sharded({2, INT64_MAX}, 0, INT64_MAX));
  refused({"layout.counts: expected rows that memory can hold"},
          CaptureLayout::sharded({2, INT64_MAX - 2}, 0, INT64_MAX));
  refused({"at most 3 tokens"}, CaptureLayout::sharded({2, 2}, 0, 4, 5));
  RoutingCapture alone(small_capture(1));
  alone.begin_step(1);
  expect_error<InvalidState>({"a gather callback"}, [&] {
    alone.record(0, ids_view(ids, 2), CaptureLayout::sharded({2, 2}, 0, 4));
  });
}

}  // namespace
}  // namespace fanfold
