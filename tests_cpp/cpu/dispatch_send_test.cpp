// SPDX-License-Identifier: Apache-2.0
// Whole slots are compared: a byte where none belongs shows as well as one that is wrong.

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/workspace.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {
namespace {

using testing::Bytes;
using testing::copy_bytes;
using testing::same_bytes;

constexpr std::uint64_t kSeed = 20240305;
constexpr int kNumRanks = 3;
constexpr int kNumExperts = 7;
constexpr int kTopK = 3;
constexpr std::int64_t kCapacity = 16;   // M
constexpr std::int64_t kMaxTokens = 14;  // m
constexpr std::int64_t kNumTokens = 13;

/// Sizes of each kind: below, at and above the entries of the index arrays, whole cache lines and
/// not, short and long.
constexpr std::int64_t kRowBytes[] = {1, 3, 8, 12, 33, 64, 512, 513, 576, 1024, 1088, 3008};

/// How tokens choose their ranks.
enum class Spread { kAllRanks, kInTurn, kInRuns, kOneRank, kNowhere, kRandom };

/// The ids of `token`, by the linear placement of 7 experts: 0, 1, 2 | 3, 4 | 5, 6.
std::vector<std::int32_t> ids_of(Spread spread, std::int64_t token, testing::RandomBits& random) {
  const std::int32_t first_of_rank[] = {0, 3, 5};
  switch (spread) {
    case Spread::kAllRanks:
      return {5, 0, 3};
    case Spread::kInTurn:
      return {-1, first_of_rank[token % 3], first_of_rank[token % 3]};
    case Spread::kInRuns:
      return {first_of_rank[token / 4 % 3], -1, first_of_rank[token / 6 % 3]};
    case Spread::kOneRank:
      return {4, 3, 4};
    case Spread::kNowhere:
      return {-1, -1, -5};
    case Spread::kRandom:
      break;
  }
  std::vector<std::int32_t> ids;
  for (int k = 0; k < kTopK; ++k) {
    ids.push_back(static_cast<std::int32_t>(random.below(kNumExperts + 2) - 2));
  }
  return ids;
}

int host_of(std::int32_t id) { return id < 3 ? 0 : id < 5 ? 1 : 2; }

struct Options {
  bool streaming = false;
  std::int64_t guard_bytes = 0;  // behind each row of a region
  std::int64_t gap_bytes = 0;    // behind each row of a payload
  Spread spread = Spread::kRandom;
  bool with_indices = true;
  bool with_weights = true;
  std::int64_t weights_stride = kTopK + 2;
  std::vector<bool> active = std::vector<bool>(kNumRanks, true);
  std::int64_t num_tokens = kNumTokens;
  std::vector<std::int64_t> first_rows;  // [R] on each rank; empty: at rank * m
};

/// One send of one rank into the slots of all, and what the slots must then hold.
class Send {
 public:
  Send(int rank, const Options& options) : rank_(rank), options_(options) {
    if (options_.first_rows.empty()) options_.first_rows.assign(kNumRanks, rank * kMaxTokens);
    testing::RandomBits random(kSeed);
    for (std::int64_t token = 0; token < options.num_tokens; ++token) {
      const auto of_token = ids_of(options.spread, token, random);
      ids_.insert(ids_.end(), of_token.begin(), of_token.end());
    }
    for (std::int64_t i = 0; i < options.num_tokens * options.weights_stride; ++i) {
      weights_.push_back(random.unit());
    }
    arrays_.round_max_tokens = kMaxTokens;
    arrays_.top_k = kTopK;
    arrays_.source_token_offset = take(kNumRanks * kCapacity * 4);
    arrays_.topk_ids_offset = take(kNumRanks * kCapacity * kTopK * 4);
    arrays_.topk_weights_offset = take(kNumRanks * kCapacity * kTopK * 4);
    for (const std::int64_t row_bytes : kRowBytes) {
      const std::int64_t stride = row_bytes + options.guard_bytes;
      const std::int64_t bytes = plan::payload_region_bytes(kNumRanks * kCapacity, stride);
      regions_.push_back({take(bytes), stride});
      // The last row has no gap behind it, so that a read of one shows.
      const std::int64_t gaps = std::max<std::int64_t>(0, options.num_tokens - 1);
      payloads_.push_back(testing::random_bytes(
          options.num_tokens * row_bytes + gaps * options.gap_bytes, kSeed + payloads_.size()));
    }
    slots_.assign(kNumRanks, testing::untouched_bytes(slot_bytes_));
  }

  void run(HandMadeRanks& ranks) {
    const plan::ExpertMap map = plan::build_expert_map(Placement::linear(), kNumExperts, kNumRanks);
    plan::SendPlan plan;
    plan::reserve_send_plan(plan, map, kTopK, kCapacity);
    const TensorView ids(ids_.data(), DType::kInt32, {options_.num_tokens, kTopK});
    ASSERT_FALSE(
        plan::build_send_plan(ids, options_.num_tokens, map, options_.active, false, plan));
    std::vector<exec::PayloadRows> rows;
    for (std::size_t i = 0; i < payloads_.size(); ++i) {
      rows.push_back({payloads_[i].data(), kRowBytes[i] + options_.gap_bytes, kRowBytes[i],
                      regions_[i].offset, regions_[i].stride_bytes});
    }
    std::vector<std::byte*> bases;
    for (Bytes& slot : slots_) bases.push_back(slot.data());
    Bytes staging(kCapacity * kTopK * 4);
    const auto lines = ranks.lines_written_by(rank_);
    exec::DispatchSendParams params{};
    params.plan = &plan;
    params.payloads = &rows;
    params.topk_weights = options_.with_weights ? weights_.data() : nullptr;
    params.weights_stride = options_.weights_stride;
    params.with_indices = options_.with_indices;
    params.arrays = arrays_;
    params.first_rows = options_.first_rows.data();
    params.slot_bases = bases.data();
    params.flags = lines.data();
    params.active = &options_.active;
    params.fields = fields();
    params.staging = staging.data();
    dispatch_send(ranks.context(rank_, options_.streaming), params);
  }

  exec::FlagFields fields() const {
    exec::FlagFields fields;
    fields.epoch = 17;
    fields.kind = exec::CallKind::kDispatch;
    fields.round_max_tokens = kMaxTokens;
    fields.num_tokens = static_cast<std::uint32_t>(options_.num_tokens);
    fields.num_payloads = static_cast<std::uint32_t>(std::size(kRowBytes));
    fields.digest = kSeed;
    return fields;
  }

  /// Tokens with an expert on `rank`.
  std::vector<std::int64_t> tokens_for(int rank) const {
    std::vector<std::int64_t> tokens;
    if (!options_.active[static_cast<std::size_t>(rank)]) return tokens;
    for (std::int64_t token = 0; token < options_.num_tokens; ++token) {
      const auto first = ids_.begin() + token * kTopK;
      if (std::any_of(first, first + kTopK,
                      [rank](std::int32_t id) { return id >= 0 && host_of(id) == rank; })) {
        tokens.push_back(token);
      }
    }
    return tokens;
  }

  /// The slot of `rank`, one row at a time.
  Bytes expected_slot(int rank) const {
    Bytes slot = testing::untouched_bytes(slot_bytes_);
    std::int64_t at = options_.first_rows[static_cast<std::size_t>(rank)];
    for (const std::int64_t token : tokens_for(rank)) {
      if (options_.with_indices) {
        const auto number = static_cast<std::int32_t>(token);
        copy_bytes(slot.data() + arrays_.source_token_offset + at * 4, &number, 4);
        copy_bytes(slot.data() + arrays_.topk_ids_offset + at * kTopK * 4,
                   ids_.data() + token * kTopK, kTopK * 4);
      }
      if (options_.with_indices && options_.with_weights) {
        copy_bytes(slot.data() + arrays_.topk_weights_offset + at * kTopK * 4,
                   weights_.data() + token * options_.weights_stride, kTopK * 4);
      }
      for (std::size_t i = 0; i < payloads_.size(); ++i) {
        copy_bytes(slot.data() + regions_[i].offset + at * regions_[i].stride_bytes,
                   payloads_[i].data() + token * (kRowBytes[i] + options_.gap_bytes), kRowBytes[i]);
      }
      ++at;
    }
    return slot;
  }

  const Bytes& slot(int rank) const { return slots_[static_cast<std::size_t>(rank)]; }

 private:
  struct Region {
    std::int64_t offset;
    std::int64_t stride_bytes;
  };
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t offset = slot_bytes_;
    slot_bytes_ += bytes;
    return offset;
  }

  int rank_;
  Options options_;
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
  exec::RowArrays arrays_{};
  std::vector<Region> regions_;
  std::vector<Bytes> payloads_;
  std::vector<Bytes> slots_;
  std::int64_t slot_bytes_ = 0;
};

void expect_slots(const Options& options) {
  HandMadeRanks ranks(kNumRanks);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (!options.active[static_cast<std::size_t>(rank)]) continue;  // sends nothing itself
    Send send(rank, options);
    send.run(ranks);
    for (int peer = 0; peer < kNumRanks; ++peer) {
      EXPECT_TRUE(same_bytes(send.slot(peer), send.expected_slot(peer)))
          << "from rank " << rank << " to rank " << peer << ", seed " << kSeed;
    }
  }
}

// --- Rows -------------------------------------------------------------------------------------

using DispatchCase = std::pair<bool, Spread>;  // streaming, spread

std::string name_of_case(const ::testing::TestParamInfo<DispatchCase>& info) {
  const char* const spreads[] = {"all_ranks", "in_turn", "in_runs",
                                 "one_rank",  "nowhere", "random"};
  const auto& [streaming, spread] = info.param;
  return std::string(streaming ? "streaming_" : "ordinary_") + spreads[static_cast<int>(spread)];
}

std::vector<DispatchCase> all_cases() {
  std::vector<DispatchCase> cases;
  for (const Spread spread : {Spread::kAllRanks, Spread::kInTurn, Spread::kInRuns, Spread::kOneRank,
                              Spread::kNowhere, Spread::kRandom}) {
    cases.emplace_back(false, spread);
    cases.emplace_back(true, spread);
  }
  return cases;
}

class DispatchSendTest : public ::testing::TestWithParam<DispatchCase> {};

TEST_P(DispatchSendTest, EveryByteOfEverySlotIsWhatWasSentOrUntouched) {
  Options options;
  std::tie(options.streaming, options.spread) = GetParam();
  for (const std::int64_t guard_bytes : {0, 16, 64}) {
    for (const std::int64_t gap_bytes : {0, 1, 64}) {
      SCOPED_TRACE(::testing::Message() << "guard " << guard_bytes << ", gap " << gap_bytes);
      options.guard_bytes = guard_bytes;
      options.gap_bytes = gap_bytes;
      expect_slots(options);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, DispatchSendTest, ::testing::ValuesIn(all_cases()), name_of_case);

TEST(DispatchSendIndexTest, WithoutWeightsTheirArrayIsLeftAlone) {
  Options options;
  options.with_weights = false;
  expect_slots(options);
}

TEST(DispatchSendIndexTest, WeightsMayBeDense) {
  Options options;
  options.weights_stride = kTopK;
  expect_slots(options);
}

TEST(DispatchSendIndexTest, AlongARoutingOnlyPayloadsTravel) {
  for (const bool with_weights : {false, true}) {
    Options options;
    options.with_indices = false;
    options.with_weights = with_weights;
    expect_slots(options);
  }
}

TEST(DispatchSendIndexTest, NoTokensLeaveEverySlotAlone) {
  Options options;
  options.num_tokens = 0;
  expect_slots(options);
}

TEST(DispatchSendIndexTest, InactiveRanksGetNothing) {
  for (std::size_t inactive = 0; inactive < kNumRanks; ++inactive) {
    Options options;
    options.active[inactive] = false;
    expect_slots(options);
  }
}

TEST(DispatchSendIndexTest, RowsMayBeginAnywhereOnEachRank) {
  // As where the sources' rows follow each other without gaps.
  for (const bool streaming : {false, true}) {
    for (const std::int64_t guard_bytes : {0, 16, 64}) {
      for (const bool with_indices : {true, false}) {
        Options options;
        options.streaming = streaming;
        options.guard_bytes = guard_bytes;
        options.with_indices = with_indices;
        options.first_rows = {0, 5, 31};
        expect_slots(options);
      }
    }
  }
}

// --- Flags ------------------------------------------------------------------------------------

/// The send of `rank`, then the flags in everyone's window.
void expect_flags(int rank, const Options& options) {
  HandMadeRanks ranks(kNumRanks);
  Send send(rank, options);
  send.run(ranks);
  for (int reader = 0; reader < kNumRanks; ++reader) {
    for (int source = 0; source < kNumRanks; ++source) {
      const exec::FlagFields got = exec::read(ranks.line(reader, source));
      const bool is_due =
          source == rank && reader != rank && options.active[static_cast<std::size_t>(reader)];
      if (!is_due) {
        EXPECT_EQ(got.epoch, 0U) << "line of rank " << source << " in the window of " << reader;
        continue;
      }
      EXPECT_EQ(got.epoch, send.fields().epoch);
      EXPECT_EQ(got.num_rows, send.tokens_for(reader).size());
      EXPECT_EQ(got.num_tokens, send.fields().num_tokens);
      EXPECT_EQ(exec::difference(send.fields(), rank, got, rank), "");
    }
  }
}

TEST(DispatchSendFlagTest, EveryPeerLearnsItsNumberOfRows) {
  for (int rank = 0; rank < kNumRanks; ++rank) {
    for (const Spread spread : {Spread::kRandom, Spread::kOneRank, Spread::kNowhere}) {
      Options options;
      options.spread = spread;
      expect_flags(rank, options);
    }
  }
}

TEST(DispatchSendFlagTest, WithoutTokensTheFlagsAreRaisedAllTheSame) {
  Options options;
  options.num_tokens = 0;
  expect_flags(1, options);
}

TEST(DispatchSendFlagTest, InactiveRanksGetNoFlag) {
  Options options;
  options.active = {true, true, false};
  expect_flags(0, options);
  expect_flags(1, options);
}

}  // namespace
}  // namespace fanfold::cpu
