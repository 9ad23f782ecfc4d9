// SPDX-License-Identifier: Apache-2.0
#include "exec/flag_line.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/random_bits.h"

namespace fanfold::exec {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kSeed = 20240304;
constexpr CallKind kKinds[] = {
    CallKind::kNone,    CallKind::kDispatch,    CallKind::kDispatchRouted,
    CallKind::kCombine, CallKind::kCombineKeep, CallKind::kRelease,
    CallKind::kAck};

FlagFields random_fields(testing::RandomBits& random) {
  const auto word = [&random] { return static_cast<std::uint32_t>(random.next()); };
  FlagFields fields;
  fields.epoch = random.next();
  fields.generation = word();
  fields.kind = kKinds[random.next() % std::size(kKinds)];
  fields.member = static_cast<std::uint16_t>(random.next());
  fields.round_max_tokens = word();
  fields.num_tokens = word();
  fields.num_rows = word();
  fields.num_payloads = word();
  fields.digest = random.next();
  fields.placement_version = word();
  fields.mask_digest = word();
  fields.routing = random.next();
  return fields;
}

void expect_equal(const FlagFields& got, const FlagFields& expected) {
  EXPECT_EQ(got.epoch, expected.epoch);
  EXPECT_EQ(got.generation, expected.generation);
  EXPECT_EQ(got.kind, expected.kind);
  EXPECT_EQ(got.member, expected.member);
  EXPECT_EQ(got.round_max_tokens, expected.round_max_tokens);
  EXPECT_EQ(got.num_tokens, expected.num_tokens);
  EXPECT_EQ(got.num_rows, expected.num_rows);
  EXPECT_EQ(got.num_payloads, expected.num_payloads);
  EXPECT_EQ(got.digest, expected.digest);
  EXPECT_EQ(got.placement_version, expected.placement_version);
  EXPECT_EQ(got.mask_digest, expected.mask_digest);
  EXPECT_EQ(got.routing, expected.routing);
}

TEST(FlagLineTest, FillsOneCacheLine) {
  EXPECT_EQ(sizeof(FlagLine), 64U);
  EXPECT_EQ(alignof(FlagLine), 64U);
}

TEST(FlagLineTest, EveryFieldSurvivesTheTrip) {
  testing::RandomBits random(kSeed);
  const auto line = std::make_unique<FlagLine>();
  for (int i = 0; i < 1000; ++i) {  // each over what the last one left
    const FlagFields sent = random_fields(random);
    publish(*line, sent);
    expect_equal(read(*line), sent);
  }
}

TEST(FlagLineTest, NoFieldReachesIntoAnother) {
  const std::vector<std::function<void(FlagFields&)>> fill_one = {
      [](FlagFields& f) { f.epoch = UINT64_MAX; },
      [](FlagFields& f) { f.generation = UINT32_MAX; },
      [](FlagFields& f) { f.kind = CallKind::kAck; },
      [](FlagFields& f) { f.member = UINT16_MAX; },
      [](FlagFields& f) { f.round_max_tokens = UINT32_MAX; },
      [](FlagFields& f) { f.num_tokens = UINT32_MAX; },
      [](FlagFields& f) { f.num_rows = UINT32_MAX; },
      [](FlagFields& f) { f.num_payloads = UINT32_MAX; },
      [](FlagFields& f) { f.digest = UINT64_MAX; },
      [](FlagFields& f) { f.placement_version = UINT32_MAX; },
      [](FlagFields& f) { f.mask_digest = UINT32_MAX; },
      [](FlagFields& f) { f.routing = UINT64_MAX; },
  };
  for (const auto& fill : fill_one) {
    FlagFields sent;
    fill(sent);
    FlagLine line{};
    publish(line, sent);
    expect_equal(read(line), sent);
  }
}

TEST(FlagLineTest, HasArrivedForItsEpochOnly) {
  FlagLine line{};
  EXPECT_FALSE(has_arrived(line, 1));
  FlagFields fields;
  fields.epoch = (std::uint64_t{1} << 48) + 7;
  publish(line, fields);
  EXPECT_TRUE(has_arrived(line, fields.epoch));
  EXPECT_FALSE(has_arrived(line, 7));
  EXPECT_FALSE(has_arrived(line, fields.epoch + 1));
}

TEST(FlagLineTest, WhoSeesTheEpochSeesTheOtherFields) {
  constexpr std::uint32_t kEpochs = 2000;
  const auto to_reader = std::make_unique<FlagLine>();
  const auto to_writer = std::make_unique<FlagLine>();
  const auto wait_for = [](const FlagLine& line, std::uint64_t epoch) {
    while (!has_arrived(line, epoch)) std::this_thread::yield();
  };
  std::thread writer([&] {
    for (std::uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
      FlagFields fields;
      fields.epoch = epoch;
      fields.num_tokens = fields.num_rows = epoch;
      fields.digest = fields.routing = epoch;
      publish(*to_reader, fields);
      wait_for(*to_writer, epoch);  // a line is written anew only when it has been read
    }
  });
  for (std::uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
    wait_for(*to_reader, epoch);
    const FlagFields got = read(*to_reader);
    EXPECT_EQ(got.num_tokens, epoch);
    EXPECT_EQ(got.num_rows, epoch);
    EXPECT_EQ(got.digest, epoch);
    EXPECT_EQ(got.routing, epoch);
    FlagFields reply;
    reply.epoch = epoch;
    publish(*to_writer, reply);
  }
  writer.join();
}

// --- Differences ------------------------------------------------------------------------------

FlagFields dispatch_fields() {
  testing::RandomBits random(kSeed);
  FlagFields fields = random_fields(random);
  fields.kind = CallKind::kDispatch;
  return fields;
}

/// The sentence of rank 2 about rank 5, which differs by `change`.
std::string after(const std::function<void(FlagFields&)>& change,
                  CallKind kind = CallKind::kDispatch) {
  FlagFields mine = dispatch_fields();
  mine.kind = kind;
  mine.generation = 11;
  mine.member = 1;
  mine.round_max_tokens = 12;
  mine.num_payloads = 13;
  mine.digest = 14;
  mine.placement_version = 15;
  mine.mask_digest = 16;
  mine.routing = 17;
  FlagFields got = mine;
  change(got);
  return difference(mine, 2, got, 5);
}

TEST(FlagDifferenceTest, EqualFieldsAgree) {
  const FlagFields fields = dispatch_fields();
  EXPECT_THAT(difference(fields, 0, fields, 1), IsEmpty());
}

TEST(FlagDifferenceTest, RanksMayHaveTheirOwnEpochTokensAndRows) {
  EXPECT_THAT(after([](FlagFields& f) { ++f.epoch; }), IsEmpty());
  EXPECT_THAT(after([](FlagFields& f) { ++f.num_tokens; }), IsEmpty());
  EXPECT_THAT(after([](FlagFields& f) { ++f.num_rows; }), IsEmpty());
}

TEST(FlagDifferenceTest, EveryOtherFieldIsNamedWithBothRanksAndValues) {
  EXPECT_EQ(after([](FlagFields& f) { f.generation = 99; }),
            "generation: rank 2 has 11, rank 5 has 99");
  EXPECT_EQ(after([](FlagFields& f) { f.member = 3; }),
            "AllToAll of the shared workspace, in order of creation: rank 2 has 1, rank 5 has 3");
  EXPECT_EQ(after([](FlagFields& f) { f.round_max_tokens = 99; }),
            "round_max_tokens: rank 2 has 12, rank 5 has 99");
  EXPECT_EQ(after([](FlagFields& f) { f.num_payloads = 99; }),
            "number of payloads: rank 2 has 13, rank 5 has 99");
  EXPECT_EQ(after([](FlagFields& f) { f.digest = 99; }),
            "digest of the payload set (row bytes, dtypes, weights): rank 2 has 14, rank 5 has 99");
  EXPECT_EQ(after([](FlagFields& f) { f.placement_version = 99; }),
            "placement version: rank 2 has 15, rank 5 has 99");
  EXPECT_EQ(after([](FlagFields& f) { f.mask_digest = 99; }),
            "digest of the active mask: rank 2 has 16, rank 5 has 99");
  EXPECT_EQ(after([](FlagFields& f) { f.routing = 99; }),
            "routing that is re-used: rank 2 has 17, rank 5 has 99");
}

TEST(FlagDifferenceTest, ValuesBeyondThirtyTwoBitsAreNamedWhole) {
  EXPECT_THAT(after([](FlagFields& f) { f.routing = UINT64_MAX; }),
              HasSubstr("rank 5 has 18446744073709551615"));
  EXPECT_THAT(after([](FlagFields& f) { f.routing += std::uint64_t{1} << 32; }),
              HasSubstr("rank 5 has 4294967313"));
}

TEST(FlagDifferenceTest, ACombineSpeaksOfItsHiddenSize) {
  for (const CallKind kind : {CallKind::kCombine, CallKind::kCombineKeep}) {
    EXPECT_EQ(after([](FlagFields& f) { f.num_payloads = 99; }, kind),
              "hidden of the combine: rank 2 has 13, rank 5 has 99");
  }
}

TEST(FlagDifferenceTest, DifferentCallsAreNamedBeforeAllThatFollowsFromThem) {
  const auto everything = [](FlagFields& f) {
    f.kind = CallKind::kRelease;
    f.generation = f.round_max_tokens = f.num_payloads = 99;
    f.digest = f.routing = 99;
  };
  EXPECT_EQ(after(everything), "call: rank 2 has dispatch, rank 5 has release");
}

TEST(FlagDifferenceTest, EveryPairOfCallsDiffers) {
  for (const CallKind mine : kKinds) {
    for (const CallKind theirs : kKinds) {
      const std::string text = after([theirs](FlagFields& f) { f.kind = theirs; }, mine);
      if (mine == theirs) {
        EXPECT_THAT(text, IsEmpty());
      } else {
        EXPECT_EQ(text, std::string("call: rank 2 has ") + name_of(mine) + ", rank 5 has " +
                            name_of(theirs));
      }
    }
  }
}

TEST(CallKindTest, EveryCallHasANameOfItsOwn) {
  std::set<std::string> names;
  for (const CallKind kind : kKinds) names.insert(name_of(kind));
  EXPECT_EQ(names.size(), std::size(kKinds));
  EXPECT_EQ(names.count("unknown"), 0U);
  EXPECT_STREQ(name_of(CallKind::kDispatchRouted), "dispatch(routing=)");
  EXPECT_STREQ(name_of(CallKind::kCombineKeep), "combine(release=False)");
  EXPECT_STREQ(name_of(static_cast<CallKind>(1000)), "unknown");
}

}  // namespace
}  // namespace fanfold::exec
