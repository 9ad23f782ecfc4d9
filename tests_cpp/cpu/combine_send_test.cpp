// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "cpu/numbers.h"
#include "gtest/gtest.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {
namespace {

using testing::Bytes;
using testing::same_bytes;

constexpr std::uint64_t kSeed = 20240308;
constexpr int kNumRanks = 3;
constexpr int kNumLocal = 3;
constexpr std::int64_t kMaxTokens = 4;  // m
constexpr std::int64_t kRowsPerExpert = kNumRanks * kMaxTokens;
constexpr std::int32_t kRankCounts[] = {3, 0, 2};
/// Where the rows of each source, or of each expert, begin.
using Begins = std::array<std::int64_t, 3>;
constexpr Begins kPadded = {0, kMaxTokens, 2 * kMaxTokens};
constexpr Begins kDense = {0, 3, 3};
constexpr Begins kExpertBegin = {0, kRowsPerExpert, 2 * kRowsPerExpert};

/// Five received rows: with one, three, no, two and three experts, of which the order differs.
plan::ExpertRows small_rows() {
  return {{0, 1, 4, 4, 6, 9},
          {{1, 0, 0.3F},
           {2, 0, 0.7F},
           {0, 0, -1.1F},
           {1, 1, 0.9F},
           {0, 1, 0.2F},
           {2, 1, 1.3F},
           {0, 2, 0.6F},
           {1, 2, 0.1F},
           {2, 2, 0.8F}}};
}

struct Types {
  DType y;
  DType combine;
  std::int64_t hidden;
};

std::vector<Types> all_types() {
  std::vector<Types> types;
  for (const DType y : kSummable) {
    for (const DType combine : kSummable) {
      for (const std::int64_t hidden : {1, 5, 33, 64}) types.push_back({y, combine, hidden});
    }
  }
  return types;
}

std::string describe(const Types& types) {
  return std::string(name_of(types.y)) + " to " + name_of(types.combine) + ", hidden " +
         std::to_string(types.hidden) + ", seed " + std::to_string(kSeed);
}

exec::CombineSendParams params_of(const Types& types, const Bytes& y, Bytes& rows) {
  exec::CombineSendParams params{};
  params.y = y.data();
  params.y_dtype = types.y;
  params.combine_dtype = types.combine;
  params.hidden = types.hidden;
  params.rank_counts = kRankCounts;
  params.row_begin = kPadded.data();
  params.y_begin = kPadded.data();
  params.expert_begin = kExpertBegin.data();
  params.num_y_rows = kNumLocal * kRowsPerExpert;
  params.rows_per_token = 1;
  params.row_bytes = types.hidden * size_of(types.combine);
  params.rows = rows.data();
  return params;
}

void send_alone(const exec::CombineSendParams& params) {
  base::StepHook hook(TestKnobs{}, 0);
  combine_send(context_alone(hook, kNumRanks, 1), params);
}

// --- A layout per rank ------------------------------------------------------------------------

TEST(CombineSendTest, RankMajorResultsElsewhereAreStagedRowForRow) {
  for (const Types& types : all_types()) {
    const std::int64_t y_row = types.hidden * size_of(types.y);
    const std::int64_t row = types.hidden * size_of(types.combine);
    const Bytes y = random_numbers(types.y, kRowsPerExpert * types.hidden, kSeed);
    Bytes rows = testing::untouched_bytes(kRowsPerExpert * row);
    Bytes expected = rows;
    for (std::int64_t source = 0; source < kNumRanks; ++source) {
      for (std::int64_t i = 0; i < kRankCounts[static_cast<std::size_t>(source)]; ++i) {
        const std::int64_t at = source * kMaxTokens + i;
        write_sum(expected.data() + at * row, types.combine, {{y.data() + at * y_row, 1}}, false,
                  types.y, types.hidden);
      }
    }
    send_alone(params_of(types, y, rows));
    EXPECT_TRUE(same_bytes(rows, expected)) << describe(types);
  }
}

TEST(CombineSendTest, RankMajorResultsInTheCombineBufferStayAsTheyAre) {
  for (const DType dtype : kSummable) {
    const Types types{dtype, dtype, 7};
    Bytes rows = testing::random_bytes(kRowsPerExpert * 7 * size_of(dtype), kSeed);
    const Bytes before = rows;
    send_alone(params_of(types, rows, rows));
    EXPECT_TRUE(same_bytes(rows, before)) << name_of(dtype);
  }
}

TEST(CombineSendTest, ResultsMayLieDenserOrWiderThanWhatTravels) {
  for (const auto& [from, to] :
       {std::pair(kDense, kPadded), std::pair(kPadded, kDense), std::pair(kDense, kDense)}) {
    for (const Types& types : all_types()) {
      const std::int64_t y_row = types.hidden * size_of(types.y);
      const std::int64_t row = types.hidden * size_of(types.combine);
      const Bytes y = random_numbers(types.y, kRowsPerExpert * types.hidden, kSeed);
      Bytes rows = testing::untouched_bytes(kRowsPerExpert * row);
      Bytes expected = rows;
      for (std::size_t source = 0; source < kNumRanks; ++source) {
        for (std::int64_t i = 0; i < kRankCounts[source]; ++i) {
          write_sum(expected.data() + (to[source] + i) * row, types.combine,
                    {{y.data() + (from[source] + i) * y_row, 1}}, false, types.y, types.hidden);
        }
      }
      exec::CombineSendParams params = params_of(types, y, rows);
      params.y_begin = from.data();
      params.row_begin = to.data();
      send_alone(params);
      EXPECT_TRUE(same_bytes(rows, expected)) << describe(types);
    }
  }
}

TEST(CombineSendTest, ResultsOfRowsThatWereDroppedAreZeros) {
  constexpr std::int64_t kAllRows = 5;
  for (std::int64_t num_kept = 1; num_kept <= kAllRows; ++num_kept) {
    for (const Types& types : all_types()) {
      const std::int64_t y_row = types.hidden * size_of(types.y);
      const std::int64_t row = types.hidden * size_of(types.combine);
      // No byte behind the rows that were kept may be read.
      const Bytes y = random_numbers(types.y, num_kept * types.hidden, kSeed);
      Bytes rows = testing::untouched_bytes(kRowsPerExpert * row);
      Bytes expected = rows;
      for (std::int64_t at = 0; at < kAllRows; ++at) {
        std::vector<Term> terms;
        if (at < num_kept) terms.push_back({y.data() + at * y_row, 1});
        write_sum(expected.data() + at * row, types.combine, terms, false, types.y, types.hidden);
      }
      exec::CombineSendParams params = params_of(types, y, rows);
      params.y_begin = params.row_begin = kDense.data();
      params.num_y_rows = num_kept;
      send_alone(params);
      EXPECT_TRUE(same_bytes(rows, expected)) << describe(types) << ", kept " << num_kept;
    }
  }
}

TEST(CombineSendTest, ResultsInPlaceAreFollowedByZerosForRowsThatWereDropped) {
  constexpr std::int64_t kAllRows = 5;
  for (std::int64_t num_kept = 0; num_kept <= kAllRows; ++num_kept) {
    for (const DType dtype : kSummable) {
      const Types types{dtype, dtype, 7};
      const std::int64_t row = types.hidden * size_of(dtype);
      Bytes rows = testing::random_bytes((kAllRows + 1) * row, kSeed);
      Bytes expected = rows;
      std::fill(expected.begin() + num_kept * row, expected.begin() + kAllRows * row, std::byte{0});
      exec::CombineSendParams params = params_of(types, rows, rows);
      params.y_begin = params.row_begin = kDense.data();
      params.num_y_rows = num_kept;
      send_alone(params);
      EXPECT_TRUE(same_bytes(rows, expected)) << name_of(dtype) << ", kept " << num_kept;
    }
  }
}

// --- Layouts per expert -----------------------------------------------------------------------

/// The experts' rows of a received row, in their order.
std::vector<Term> terms_of(const plan::ExpertRows& rows, std::size_t row, const Bytes& y,
                           const Types& types, const Begins& expert_begin = kExpertBegin) {
  std::vector<Term> terms;
  for (std::int64_t i = rows.begin[row]; i < rows.begin[row + 1]; ++i) {
    const plan::ExpertRow& from = rows.rows[static_cast<std::size_t>(i)];
    const std::int64_t at =
        expert_begin[static_cast<std::size_t>(from.local_expert)] + from.position;
    terms.push_back({y.data() + at * types.hidden * size_of(types.y), from.weight});
  }
  return terms;
}

/// Where each received row lies among the rows that travel.
std::vector<std::int64_t> places() {
  std::vector<std::int64_t> places;
  for (std::int64_t source = 0; source < kNumRanks; ++source) {
    for (std::int64_t i = 0; i < kRankCounts[static_cast<std::size_t>(source)]; ++i) {
      places.push_back(source * kMaxTokens + i);
    }
  }
  return places;
}

void expect_partials(bool carried) {
  const plan::ExpertRows expert_rows = small_rows();
  for (const Types& types : all_types()) {
    const std::int64_t row = types.hidden * size_of(types.combine);
    const Bytes y = random_numbers(types.y, kNumLocal * kRowsPerExpert * types.hidden, kSeed);
    Bytes rows = testing::untouched_bytes(kRowsPerExpert * row);
    Bytes expected = rows;
    for (std::size_t i = 0; i < places().size(); ++i) {
      write_sum(expected.data() + places()[i] * row, types.combine,
                terms_of(expert_rows, i, y, types), carried, types.y, types.hidden);
    }
    exec::CombineSendParams params = params_of(types, y, rows);
    params.expert_rows = &expert_rows;
    params.carried = carried;
    send_alone(params);
    EXPECT_TRUE(same_bytes(rows, expected)) << describe(types);
  }
}

TEST(CombineSendTest, AppliedPartialsAreSumsInTheOrderOfTheColumns) { expect_partials(false); }

TEST(CombineSendTest, CarriedPartialsMultiplyByTheWeightsThatTravelled) { expect_partials(true); }

TEST(CombineSendTest, OriginSendsEveryRowUnweightedInTheOrderOfTheColumns) {
  constexpr std::int64_t kRowsPerToken = 3;
  const plan::ExpertRows expert_rows = small_rows();
  for (const Types& types : all_types()) {
    const std::int64_t row = types.hidden * size_of(types.combine);
    const Bytes y = random_numbers(types.y, kNumLocal * kRowsPerExpert * types.hidden, kSeed);
    Bytes rows = testing::untouched_bytes(kRowsPerExpert * kRowsPerToken * row);
    Bytes expected = rows;
    for (std::size_t i = 0; i < places().size(); ++i) {
      std::byte* out = expected.data() + places()[i] * kRowsPerToken * row;
      for (const Term& term : terms_of(expert_rows, i, y, types)) {
        write_sum(out, types.combine, {term}, false, types.y, types.hidden);
        out += row;
      }
    }
    exec::CombineSendParams params = params_of(types, y, rows);
    params.expert_rows = &expert_rows;
    params.origin = true;
    params.rows_per_token = kRowsPerToken;
    send_alone(params);
    EXPECT_TRUE(same_bytes(rows, expected)) << describe(types);
  }
}

/// Groups of two, three and three rows, each filled up to a multiple of four.
constexpr Begins kGroupBegin = {0, 4, 8};

TEST(CombineSendTest, GroupsOfExpertsMayLieAnywhere) {
  const plan::ExpertRows expert_rows = small_rows();
  for (const bool carried : {false, true}) {
    for (const Types& types : all_types()) {
      const std::int64_t row = types.hidden * size_of(types.combine);
      const Bytes y = random_numbers(types.y, 12 * types.hidden, kSeed);
      Bytes rows = testing::untouched_bytes(kRowsPerExpert * row);
      Bytes expected = rows;
      for (std::size_t i = 0; i < 5; ++i) {
        write_sum(expected.data() + static_cast<std::int64_t>(i) * row, types.combine,
                  terms_of(expert_rows, i, y, types, kGroupBegin), carried, types.y, types.hidden);
      }
      exec::CombineSendParams params = params_of(types, y, rows);
      params.expert_rows = &expert_rows;
      params.expert_begin = kGroupBegin.data();
      params.row_begin = kDense.data();
      params.num_y_rows = 12;
      params.carried = carried;
      send_alone(params);
      EXPECT_TRUE(same_bytes(rows, expected)) << describe(types);
    }
  }
}

TEST(CombineSendTest, RowsOfExpertsThatWereDroppedAreMissingFromTheSums) {
  const plan::ExpertRows expert_rows = small_rows();
  for (const bool carried : {false, true}) {
    for (std::int64_t num_kept = 1; num_kept <= 12; ++num_kept) {
      const Types types{DType::kBFloat16, DType::kFloat32, 5};
      const Bytes y = random_numbers(types.y, num_kept * types.hidden, kSeed);
      Bytes rows = testing::untouched_bytes(5 * types.hidden * 4);
      Bytes expected = rows;
      for (std::size_t i = 0; i < 5; ++i) {
        std::vector<Term> terms;
        for (const Term& term : terms_of(expert_rows, i, y, types, kGroupBegin)) {
          if (term.row < y.data() + y.size()) terms.push_back(term);
        }
        write_sum(expected.data() + static_cast<std::int64_t>(i) * types.hidden * 4, types.combine,
                  terms, carried, types.y, types.hidden);
      }
      exec::CombineSendParams params = params_of(types, y, rows);
      params.expert_rows = &expert_rows;
      params.expert_begin = kGroupBegin.data();
      params.row_begin = kDense.data();
      params.num_y_rows = num_kept;
      params.carried = carried;
      send_alone(params);
      EXPECT_TRUE(same_bytes(rows, expected)) << "kept " << num_kept << ", carried " << carried;
    }
  }
}

TEST(CombineSendTest, OriginSendsZerosForRowsOfExpertsThatWereDropped) {
  constexpr std::int64_t kRowsPerToken = 3;
  const plan::ExpertRows expert_rows = small_rows();
  for (std::int64_t num_kept = 1; num_kept <= 12; ++num_kept) {
    const Types types{DType::kFloat16, DType::kBFloat16, 5};
    const std::int64_t row = types.hidden * 2;
    const Bytes y = random_numbers(types.y, num_kept * types.hidden, kSeed);
    Bytes rows = testing::untouched_bytes(5 * kRowsPerToken * row);
    Bytes expected = rows;
    for (std::size_t i = 0; i < 5; ++i) {
      std::byte* out = expected.data() + static_cast<std::int64_t>(i) * kRowsPerToken * row;
      for (const Term& term : terms_of(expert_rows, i, y, types, kGroupBegin)) {
        std::vector<Term> kept;
        if (term.row < y.data() + y.size()) kept.push_back(term);
        write_sum(out, types.combine, kept, false, types.y, types.hidden);
        out += row;
      }
    }
    exec::CombineSendParams params = params_of(types, y, rows);
    params.expert_rows = &expert_rows;
    params.expert_begin = kGroupBegin.data();
    params.row_begin = kDense.data();
    params.num_y_rows = num_kept;
    params.origin = true;
    params.rows_per_token = kRowsPerToken;
    send_alone(params);
    EXPECT_TRUE(same_bytes(rows, expected)) << "kept " << num_kept;
  }
}

// --- Flags ------------------------------------------------------------------------------------

void expect_flags(int rank, const std::vector<bool>& active) {
  HandMadeRanks ranks(kNumRanks);
  const Types types{DType::kFloat32, DType::kFloat32, 2};
  const Bytes y = random_numbers(DType::kFloat32, kRowsPerExpert * 2, kSeed);
  Bytes rows = y;
  exec::CombineSendParams params = params_of(types, y, rows);
  const auto lines = ranks.lines_written_by(rank);
  params.flags = lines.data();
  params.active = &active;
  params.fields.epoch = (std::uint64_t{1} << 48) + 3;
  params.fields.kind = exec::CallKind::kCombine;
  params.fields.num_payloads = 2;
  combine_send(ranks.context(rank), params);
  for (int reader = 0; reader < kNumRanks; ++reader) {
    for (int source = 0; source < kNumRanks; ++source) {
      const exec::FlagFields got = exec::read(ranks.line(reader, source));
      const bool is_due =
          source == rank && reader != rank && active[static_cast<std::size_t>(reader)];
      EXPECT_EQ(got.epoch, is_due ? params.fields.epoch : 0)
          << "line of rank " << source << " in the window of " << reader;
      if (!is_due) continue;
      EXPECT_EQ(exec::difference(params.fields, rank, got, rank), "");
    }
  }
}

TEST(CombineSendFlagTest, EveryActivePeerGetsItsFlag) {
  for (int rank = 0; rank < kNumRanks; ++rank) {
    expect_flags(rank, {true, true, true});
    std::vector<bool> without_next(kNumRanks, true);
    without_next[static_cast<std::size_t>((rank + 1) % kNumRanks)] = false;
    expect_flags(rank, without_next);
  }
}

TEST(CombineSendFlagTest, ReceivingNothingStillRaisesTheFlags) {
  HandMadeRanks ranks(kNumRanks);
  const std::vector<std::int32_t> none(kNumRanks, 0);
  const std::vector<bool> active(kNumRanks, true);
  const auto lines = ranks.lines_written_by(0);
  exec::CombineSendParams params{};
  params.rank_counts = none.data();
  params.y_dtype = params.combine_dtype = DType::kBFloat16;
  params.flags = lines.data();
  params.active = &active;
  params.fields.epoch = 5;
  combine_send(ranks.context(0), params);
  EXPECT_TRUE(exec::has_arrived(ranks.line(1, 0), 5));
  EXPECT_TRUE(exec::has_arrived(ranks.line(2, 0), 5));
}

}  // namespace
}  // namespace fanfold::cpu
