// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_store.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "capture/capture_case.h"
#include "capture/failing_new.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::IsEmpty;
using testing::Numbers;
using testing::numbers_of;
using testing::rows_of;

constexpr std::int64_t kBlock = 4;

/// One layer, one int16 id per token, blocks of four; room for `max_blocks` of them.
RoutingStore make_store(std::int64_t max_blocks = 100) {
  RoutingStoreConfig config;
  config.spec = make_routing_spec(1, 1000, 1);
  config.block_tokens = kBlock;
  config.max_bytes = max_blocks * kBlock * 2;
  return RoutingStore(config);
}

std::string key(char name) { return std::string(16, name); }

/// Appends one token per id.
void append(RoutingStore& store, const std::string& request, std::int64_t position,
            const Numbers& ids) {
  store.append(request, position, rows_of(store.config().spec, ids).array());
}

Numbers assembled(RoutingStore& store, const std::string& request, std::int64_t first,
                  std::int64_t last) {
  return numbers_of(store.assemble(request, first, last).rows.array());
}

bool operator==(const TokenRange& a, const TokenRange& b) {
  return a.first == b.first && a.last == b.last;
}
}  // namespace

void PrintTo(const TokenRange& range, std::ostream* out) {
  *out << "[" << range.first << ", " << range.last << ")";
}

namespace {

auto is_range(std::int64_t first, std::int64_t last) {
  return ::testing::Truly(
      [=](const TokenRange& range) { return range == TokenRange{first, last}; });
}

TEST(RoutingStoreTest, RowsFollowEachOtherAtTheCursor) {
  RoutingStore store = make_store();
  store.begin("a");
  append(store, "a", 0, {0, 1, 2});
  append(store, "a", 3, {3, 4, 5, 6, 7, 8});
  EXPECT_EQ(store.range("a").last, 9);
  EXPECT_EQ(assembled(store, "a", 0, 9), (Numbers{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(assembled(store, "a", 3, 5), (Numbers{3, 4}));
  for (const std::int64_t wrong : {8, 10}) {
    expect_error<InvalidArgument>({"position: expected 9 (where the rows of \"a\" end)"},
                                  [&] { append(store, "a", wrong, {1}); });
  }
}

TEST(RoutingStoreTest, RejectedDraftsAreTruncatedAndTheCursorReattaches) {
  RoutingStore store = make_store();
  store.begin("a", 2);
  append(store, "a", 2, {2, 3, 4, 90, 91});
  store.truncate("a", 5);
  append(store, "a", 5, {5, 6, 7, 8});
  EXPECT_EQ(assembled(store, "a", 2, 9), (Numbers{2, 3, 4, 5, 6, 7, 8}));
  store.truncate("a", 4);
  EXPECT_EQ(assembled(store, "a", 2, 4), (Numbers{2, 3}));
  store.truncate("a", 2);
  EXPECT_EQ(store.stats().num_bytes, 0);
  append(store, "a", 2, {7});
  EXPECT_EQ(assembled(store, "a", 2, 3), (Numbers{7}));
  expect_error<InvalidArgument>({"position: expected one in [2, 3]", "got 1"},
                                [&] { store.truncate("a", 1); });
}

TEST(RoutingStoreTest, ForksShareRowsAndGoTheirOwnWays) {
  RoutingStore store = make_store();
  store.begin("a");
  append(store, "a", 0, {0, 1, 2, 3, 4});
  store.fork("a", "b");
  EXPECT_EQ(store.stats().num_bytes, 2 * kBlock * 2);
  append(store, "b", 5, {50, 51});
  append(store, "a", 5, {60});
  store.truncate("b", 3);
  append(store, "b", 3, {70});
  EXPECT_EQ(assembled(store, "a", 0, 6), (Numbers{0, 1, 2, 3, 4, 60}));
  EXPECT_EQ(assembled(store, "b", 0, 4), (Numbers{0, 1, 2, 70}));
  store.finish("a");
  EXPECT_EQ(assembled(store, "b", 0, 4), (Numbers{0, 1, 2, 70}));
  expect_error<InvalidState>({"a new name", "\"b\" again"}, [&] { store.fork("b", "b"); });
}

TEST(RoutingStoreTest, WhatIsMissingIsNamedAndHoldsTheSentinel) {
  RoutingStore store = make_store();
  store.begin("a", 2);
  append(store, "a", 2, {2, 3});
  const AssembledRouting got = store.assemble("a", 0, 6);
  EXPECT_EQ(numbers_of(got.rows.array()), (Numbers{-1, -1, 2, 3, -1, -1}));
  EXPECT_THAT(got.missing, ElementsAre(is_range(0, 2), is_range(4, 6)));
  EXPECT_FALSE(got.is_complete());
  EXPECT_THAT(store.assemble("a", 7, 9).missing, ElementsAre(is_range(7, 9)));
  EXPECT_TRUE(store.assemble("a", 2, 4).is_complete());
  EXPECT_EQ(store.assemble("a", 3, 4).rows.first_position, 3);
}

TEST(RoutingStoreTest, PublishedBlocksOutliveTheirRequest) {
  RoutingStore store = make_store();
  store.begin("a");
  append(store, "a", 0, {0, 1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_TRUE(store.publish("a", 0, key('x')));
  EXPECT_TRUE(store.publish("a", 4, key('y')));
  store.truncate("a", 6);
  append(store, "a", 6, {60, 61});
  EXPECT_EQ(assembled(store, "a", 4, 8), (Numbers{4, 5, 60, 61}));
  store.finish("a");
  store.begin("b", 8);
  append(store, "b", 8, {80, 81});
  const AssembledRouting got = store.assemble_keys({key('x'), key('y')}, "b");
  EXPECT_TRUE(got.is_complete());
  EXPECT_EQ(numbers_of(got.rows.array()), (Numbers{0, 1, 2, 3, 4, 5, 6, 7, 80, 81}));
}

TEST(RoutingStoreTest, AKeyKeepsItsFirstBlock) {
  RoutingStore store = make_store();
  store.begin("a");
  append(store, "a", 0, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_TRUE(store.publish("a", 0, key('x')));
  EXPECT_FALSE(store.publish("a", 4, key('x')));
  EXPECT_EQ(numbers_of(store.assemble_keys({key('x')}).rows.array()), (Numbers{0, 1, 2, 3}));
}

TEST(RoutingStoreTest, MissingKeysAreNamed) {
  RoutingStore store = make_store();
  store.begin("a", 2);
  append(store, "a", 2, {2, 3, 4, 5, 6, 7, 8});
  store.publish("a", 4, key('y'));
  const AssembledRouting got = store.assemble_keys({key('x'), key('y'), key('z')}, "a");
  EXPECT_EQ(numbers_of(got.rows.array()), (Numbers{-1, -1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1}));
  EXPECT_THAT(got.missing_keys, ElementsAre(0, 2));
  EXPECT_THAT(got.missing, ElementsAre(is_range(0, 2), is_range(9, 12)));
  EXPECT_THAT(store.assemble_keys({key('x'), key('z')}).missing, ElementsAre(is_range(0, 8)));
  EXPECT_TRUE(store.assemble_keys({}).is_complete());
  EXPECT_EQ(store.stats().num_hits, 1);
  EXPECT_EQ(store.stats().num_misses, 4);
}

TEST(RoutingStoreTest, TheLeastRecentlyUsedBlockMakesRoom) {
  RoutingStore store = make_store(3);
  for (const char name : {'x', 'y', 'z'}) {
    store.begin("a");
    append(store, "a", 0, {name, 1, 2, 3});
    store.publish("a", 0, key(name));
    store.finish("a");
  }
  EXPECT_TRUE(store.assemble_keys({key('x')}).is_complete());  // now y is the oldest
  store.begin("b");
  append(store, "b", 0, {1, 2});
  EXPECT_TRUE(store.has_key(key('x')));
  EXPECT_FALSE(store.has_key(key('y')));
  EXPECT_TRUE(store.has_key(key('z')));
  EXPECT_EQ(store.stats().num_evictions, 1);
  EXPECT_LE(store.stats().num_bytes, store.stats().max_bytes);
}

TEST(RoutingStoreTest, ABlockUnderSeveralKeysMakesRoomWithAllOfThem) {
  RoutingStore store = make_store(2);
  store.begin("a");
  append(store, "a", 0, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_TRUE(store.publish("a", 0, key('x')));
  EXPECT_TRUE(store.publish("a", 4, key('y')));
  EXPECT_TRUE(store.publish("a", 0, key('z')));  // the first block is now the latest used
  EXPECT_EQ(store.stats().num_keys, 3);
  store.finish("a");
  store.begin("b");
  append(store, "b", 0, {1});
  EXPECT_FALSE(store.has_key(key('y')));
  EXPECT_TRUE(store.has_key(key('x')));
  append(store, "b", 1, {2, 3, 4, 5});
  EXPECT_FALSE(store.has_key(key('x')));
  EXPECT_FALSE(store.has_key(key('z')));
  EXPECT_EQ(store.stats().num_evictions, 2);
  EXPECT_EQ(store.stats().num_keys, 0);
}

TEST(RoutingStoreTest, MemoryThatRunsOutAnywhereLeavesTheStoreAsItWas) {
  for (int num_good = 0, failed = 1; failed != 0; ++num_good) {
    RoutingStore store = make_store(3);
    store.begin("a");
    append(store, "a", 0, {0, 1, 2, 3, 4, 5});
    store.fork("a", "b");
    store.truncate("a", 4);
    store.publish("a", 0, key('x'));
    append(store, "a", 4, {6, 7, 8, 9});
    store.publish("a", 4, key('y'));
    store.truncate("a", 4);  // only the key has the second block: it makes room below
    const RoutingRows rows = rows_of(store.config().spec, {60, 61, 62});
    failed = 0;
    testing::news_until_failure = num_good;
    try {
      store.append("b", 6, rows);
      store.fork("b", "a-new-name-that-is-too-long-to-be-kept-in-place");
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
    testing::news_until_failure = -1;
    const bool appended = store.range("b").last == 9;
    EXPECT_EQ(store.has_key(key('y')), !appended) << num_good;
    EXPECT_EQ(store.stats().num_requests, failed != 0 ? 2 : 3) << num_good;
    EXPECT_EQ(store.stats().num_bytes, 3 * kBlock * 2) << num_good;
  }
}

TEST(RoutingStoreTest, IdsAreChecked) {
  RoutingStore store = make_store();
  store.begin("a");
  const RoutingSpec& spec = store.config().spec;
  for (const std::int64_t wrong : {1000, -2}) {
    const RoutingRows rows = rows_of(spec, {5, wrong});
    const std::vector<std::string> words = {"rows: expected ids below 1000",
                                            std::to_string(wrong) + " at token 1, layer 0"};
    expect_error<InvalidArgument>(words, [&] { store.append("a", 0, rows); });
    expect_error<InvalidArgument>(words, [&] { store.append("a", 0, rows.array()); });
  }
  const RoutingRows physical =
      rows_of(make_routing_spec(1, 1000, 1, DType::kInt16, IdSpace::kPhysical), {5});
  expect_error<InvalidArgument>({"logical experts", "physical experts"},
                                [&] { store.append("a", 0, physical); });
  EXPECT_EQ(store.range("a").last, 0);
}

TEST(RoutingStoreTest, ArraysWithoutAnyExpertAreTakenOnlyOnRequest) {
  RoutingStore store = make_store();
  store.begin("a", 7);
  const RoutingRows rows = rows_of(store.config().spec, {5, -1});
  expect_error<InvalidState>({"allow_unrouted", "position 8, layer 0"},
                             [&] { store.append("a", 7, rows.array()); });
  EXPECT_EQ(store.range("a").last, 7);
  store.append("a", 7, rows.array(), true);
  store.append("a", 9, rows);
  EXPECT_EQ(assembled(store, "a", 7, 11), (Numbers{5, -1, 5, -1}));
  EXPECT_TRUE(store.assemble("a", 7, 11).is_complete());
}

TEST(RoutingStoreTest, RowsOfRequestsAreNeverDropped) {
  RoutingStore store = make_store(2);
  store.begin("a");
  append(store, "a", 0, {0, 1, 2, 3, 4, 5});
  store.publish("a", 0, key('x'));
  expect_error<CapacityExceeded>({"room for 1 blocks of 8 bytes within 16 (max_bytes)", "got 16"},
                                 [&] { append(store, "a", 6, {6, 7, 8}); });
  EXPECT_EQ(store.range("a").last, 6) << "unchanged";
  EXPECT_TRUE(store.has_key(key('x')));
  append(store, "a", 6, {6, 7});
  store.truncate("a", 4);
  append(store, "a", 4, {14, 15, 16, 17});
  EXPECT_EQ(assembled(store, "a", 0, 8), (Numbers{0, 1, 2, 3, 14, 15, 16, 17}));
}

TEST(RoutingStoreTest, RowsThatForksShareNeedRoomOnceTheyDiffer) {
  RoutingStore store = make_store(1);
  store.begin("a");
  append(store, "a", 0, {0, 1});
  store.fork("a", "b");
  expect_error<CapacityExceeded>({"room for 1 blocks"}, [&] { append(store, "b", 2, {2}); });
  store.finish("a");
  append(store, "b", 2, {2});
  EXPECT_EQ(assembled(store, "b", 0, 3), (Numbers{0, 1, 2}));
}

TEST(RoutingStoreTest, PublishingAKnownKeyIsAUseOfItsBlock) {
  RoutingStore store = make_store(3);
  for (const char name : {'x', 'y', 'x'}) {
    store.begin("a");
    append(store, "a", 0, {0, 1, 2, 3});
    store.publish("a", 0, key(name));
    store.finish("a");
  }
  store.begin("b");
  append(store, "b", 0, {0, 1, 2, 3, 4, 5});
  EXPECT_TRUE(store.has_key(key('x')));
  EXPECT_FALSE(store.has_key(key('y')));
}

TEST(RoutingStoreTest, AResetForgetsKeysAndRefusesThoseOfBefore) {
  RoutingStore store = make_store(1);
  store.begin("a");
  append(store, "a", 0, {0, 1, 2, 3});
  store.publish("a", 0, key('x'), 0);
  EXPECT_EQ(store.reset(), 1U);
  EXPECT_FALSE(store.has_key(key('x')));
  EXPECT_EQ(assembled(store, "a", 0, 4), (Numbers{0, 1, 2, 3}));
  expect_error<InvalidState>({"a key of generation 1, got one of 0"},
                             [&] { store.publish("a", 0, key('x'), 0); });
  EXPECT_TRUE(store.publish("a", 0, key('x'), 1));
  EXPECT_EQ(store.stats().generation, 1U);
  store.finish("a");
  store.begin("b");
  append(store, "b", 0, {1});
  EXPECT_FALSE(store.has_key(key('x'))) << "the key of before no longer counts";
}

TEST(RoutingStoreTest, WrongCallsAreRefusedInWords) {
  RoutingStore store = make_store();
  store.begin("a", 1);
  append(store, "a", 1, {1, 2, 3, 4, 5});
  const auto refused = [](const std::vector<std::string>& words, auto call) {
    expect_error<InvalidArgument>(words, call);
  };
  refused({"request: expected one that has begun, got \"b\""}, [&] { append(store, "b", 0, {1}); });
  refused({"request"}, [&] { store.finish("b"); });
  refused({"request"}, [&] { (void)store.assemble_keys({}, "b"); });
  refused({"first_position", "got -1"}, [&] { store.begin("b", -1); });
  refused({"first_position"}, [&] { store.begin("b", INT64_MAX); });
  refused({"request: expected a name"}, [&] { store.begin(""); });
  refused({"key: expected 16 to 32 bytes, got 15"},
          [&] { store.publish("a", 4, std::string(15, 'x')); });
  refused({"got 33"}, [&] { (void)store.assemble_keys({std::string(33, 'x')}); });
  refused({"a multiple of 4 (block_tokens), got 1"}, [&] { store.publish("a", 1, key('x')); });
  refused({"a full block within [1, 6)", "got 4"}, [&] { store.publish("a", 4, key('x')); });
  refused({"a full block within [1, 6)", "got 0"}, [&] { store.publish("a", 0, key('x')); });
  refused({"assemble", "[3, 2)"}, [&] { (void)store.assemble("a", 3, 2); });
  const RoutingSpec other = make_routing_spec(1, 1000, 2);
  refused({"rows: expected int16 [tokens, 1, 1]", "got int16 [1, 1, 2]"},
          [&] { store.append("a", 6, rows_of(other, {1, 2}).array()); });
  const RoutingSpec wider = make_routing_spec(1, 1000, 1, DType::kInt32);
  refused({"got int32 [1, 1, 1]"}, [&] { store.append("a", 6, rows_of(wider, {1}).array()); });
  expect_error<InvalidState>({"\"a\" again"}, [&] { store.begin("a"); });
  RoutingStoreConfig config;
  config.spec = other;
  config.block_tokens = 0;
  refused({"block_tokens"}, [&] { RoutingStore refused_store(config); });
  config.block_tokens = 4;
  config.max_bytes = 15;
  refused({"max_bytes: expected 16 or more", "got 15"},
          [&] { RoutingStore refused_store(config); });
}

TEST(RoutingStoreTest, ManyThreadsWriteForkPublishAndRead) {
  RoutingStore store = make_store(64);
  std::atomic<bool> done{false};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 3; ++writer) {
    writers.emplace_back([&store, writer] {
      const std::string name = std::to_string(writer);
      for (int round = 0; round < 60; ++round) {
        store.begin(name);
        append(store, name, 0, {writer, 1, 2, 3, 4});
        store.fork(name, name + "f");
        store.publish(name, 0, key(static_cast<char>('a' + (writer * 60 + round) % 26)));
        store.truncate(name, 2);
        append(store, name, 2, {9, 9, 9});
        EXPECT_EQ(assembled(store, name, 0, 5), (Numbers{writer, 1, 9, 9, 9}));
        EXPECT_EQ(assembled(store, name + "f", 0, 5), (Numbers{writer, 1, 2, 3, 4}));
        store.finish(name + "f");
        store.finish(name);
      }
    });
  }
  std::thread reader([&] {
    while (!done.load()) {
      const AssembledRouting got = store.assemble_keys({key('a'), key('m')});
      const Numbers ids = numbers_of(got.rows.array());
      for (std::size_t i = 0; i < 2; ++i) {
        if (ids[4 * i] < 0) continue;
        EXPECT_EQ(ids[4 * i + 3], 3);
      }
      if (got.is_complete()) store.reset();
      EXPECT_LE(store.stats().num_bytes, store.stats().max_bytes);
    }
  });
  for (auto& writer : writers) writer.join();
  done = true;
  reader.join();
  EXPECT_EQ(store.stats().num_requests, 0);
}

}  // namespace
}  // namespace fanfold
