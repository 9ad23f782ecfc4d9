// SPDX-License-Identifier: Apache-2.0
// What a receiving rank makes of flags that have, or have not, arrived.

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold::cpu {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kNumRanks = 3;
constexpr int kRank = 1;
constexpr int kTopK = 2;
constexpr std::int64_t kMaxTokens = 3;  // m
constexpr std::int32_t kReceived = 4;
constexpr std::int32_t kPadded = -9;

exec::FlagFields fields_of(exec::CallKind kind) {
  exec::FlagFields fields;
  fields.epoch = 8;
  fields.kind = kind;
  fields.round_max_tokens = kMaxTokens;
  return fields;
}

class DispatchRecvTest : public ::testing::Test {
 protected:
  DispatchRecvTest() {
    plan_.num_tokens = 3;
    plan_.rows_per_rank = {0, 2, 1};
    active_.assign(kNumRanks, true);
  }

  /// Rank `source` has sent `num_rows` of its `num_tokens` here.
  void arrive(int source, std::uint32_t num_rows, std::uint32_t num_tokens) {
    exec::FlagFields fields = fields_of(exec::CallKind::kDispatch);
    fields.num_rows = num_rows;
    fields.num_tokens = num_tokens;
    exec::publish(ranks_.line(kRank, source), fields);
  }

  void receive(bool with_ids = true) {
    ranks_.control(kRank).set_active(active_);
    const auto lines = ranks_.lines_read_by(kRank);
    exec::RowArrays arrays{};
    arrays.round_max_tokens = kMaxTokens;
    arrays.top_k = kTopK;
    dispatch_recv(ranks_.context(kRank),
                  {lines.data(), fields_of(exec::CallKind::kDispatch), &plan_, rank_counts_.data(),
                   token_counts_.data(), with_ids ? ids_.data() : nullptr, kPadded, arrays, 6,
                   base::Deadline(std::chrono::nanoseconds(0))});
  }

  HandMadeRanks ranks_{kNumRanks};
  std::vector<bool> active_;
  plan::SendPlan plan_;
  std::vector<std::int32_t> rank_counts_ = std::vector<std::int32_t>(kNumRanks, 77);
  std::vector<std::int32_t> token_counts_ = std::vector<std::int32_t>(kNumRanks, 77);
  std::vector<std::int32_t> ids_ =
      std::vector<std::int32_t>(kNumRanks * kMaxTokens * kTopK, kReceived);
};

TEST_F(DispatchRecvTest, CountsComeFromTheFlagsAndFromTheOwnPlan) {
  arrive(0, 1, 5);
  arrive(2, 3, 3);
  receive();
  EXPECT_THAT(rank_counts_, ElementsAre(1, 2, 3));
  EXPECT_THAT(token_counts_, ElementsAre(5, 3, 3));
}

TEST_F(DispatchRecvTest, IdsPastTheCountsAreOverwritten) {
  arrive(0, 1, 5);
  arrive(2, 0, 0);
  receive();
  EXPECT_THAT(ids_, ElementsAre(kReceived, kReceived, kPadded, kPadded, kPadded, kPadded,      //
                                kReceived, kReceived, kReceived, kReceived, kPadded, kPadded,  //
                                kPadded, kPadded, kPadded, kPadded, kPadded, kPadded));
}

TEST_F(DispatchRecvTest, AlongARoutingIdsAreLeftAlone) {
  arrive(0, 1, 5);
  arrive(2, 0, 0);
  receive(/*with_ids=*/false);
  EXPECT_THAT(ids_, ::testing::Each(kReceived));
}

TEST_F(DispatchRecvTest, InactiveRanksAreNotWaitedForAndSentNothing) {
  active_[2] = false;
  arrive(0, 2, 2);
  receive();
  EXPECT_THAT(rank_counts_, ElementsAre(2, 2, 0));
  EXPECT_THAT(token_counts_, ElementsAre(2, 3, 0));
  EXPECT_EQ(ids_[2 * kMaxTokens * kTopK], kPadded);
}

TEST_F(DispatchRecvTest, ARankThatIsLateIsNamedWithPhaseAndRound) {
  arrive(2, 0, 0);
  const std::string text = testing::expect_error<PeerTimeout>({}, [&] { receive(); });
  EXPECT_THAT(text, HasSubstr("AllToAll 'test'"));
  EXPECT_THAT(text, HasSubstr("dispatch of round 6: rank 0"));
}

TEST_F(DispatchRecvTest, ADifferentCallIsRefusedNamingBothRanksAndValues) {
  arrive(2, 0, 0);
  exec::FlagFields other = fields_of(exec::CallKind::kDispatch);
  other.round_max_tokens = kMaxTokens + 1;
  exec::publish(ranks_.line(kRank, 0), other);
  EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { receive(); }),
            "AllToAll 'test': dispatch of round 6 differs between ranks: round_max_tokens: rank 1 "
            "has 3, rank 0 has 4; call reset() on every rank");
}

// --- Flags of other phases --------------------------------------------------------------------

class WaitFlagsTest : public DispatchRecvTest {
 protected:
  void arrive(int source, exec::CallKind kind) {
    exec::publish(ranks_.line(kRank, source), fields_of(kind));
  }
  void wait() {
    const auto lines = ranks_.lines_read_by(kRank);
    wait_flags(ranks_.context(kRank), {lines.data(), fields_of(exec::CallKind::kCombine), &active_,
                                       "combine", 4, base::Deadline(std::chrono::nanoseconds(0))});
  }
};

TEST_F(WaitFlagsTest, EveryPeerMustHaveArrived) {
  arrive(2, exec::CallKind::kCombine);
  EXPECT_THAT(testing::expect_error<PeerTimeout>({}, [&] { wait(); }),
              HasSubstr("combine of round 4: rank 0"));
  arrive(0, exec::CallKind::kCombine);
  wait();
}

TEST_F(WaitFlagsTest, InactiveRanksAreNotWaitedFor) {
  active_ = {false, true, false};
  wait();
}

TEST_F(WaitFlagsTest, AnotherCallIsRefused) {
  arrive(0, exec::CallKind::kRelease);
  arrive(2, exec::CallKind::kCombine);
  EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { wait(); }),
            "AllToAll 'test': combine of round 4 differs between ranks: call: rank 1 has combine, "
            "rank 0 has release; call reset() on every rank");
}

}  // namespace
}  // namespace fanfold::cpu
