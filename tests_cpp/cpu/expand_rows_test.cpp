// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "gtest/gtest.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {
namespace {

using testing::Bytes;
using testing::copy_bytes;
using testing::same_bytes;

constexpr std::uint64_t kSeed = 20240307;
constexpr int kNumRanks = 3;
constexpr int kNumLocal = 2;
constexpr std::int64_t kMaxTokens = 4;  // m
constexpr std::int64_t kRowsPerExpert = kNumRanks * kMaxTokens;
constexpr float kNoWeight = -5;

/// A copy that is due: row `to` of the experts' rows is row `from` of the received ones.
struct Copy {
  std::int64_t from;
  std::int64_t to;
  float weight;
};

/// Two rows from rank 0, none from rank 1, three from rank 2; the first and the fourth have both
/// experts, the third none.
constexpr std::int32_t kRankCounts[] = {2, 0, 3};
plan::ExpertRows small_rows() {
  return {{0, 2, 3, 3, 5, 6},
          {{1, 0, 0.5F}, {0, 0, 1}, {1, 1, 2}, {0, 1, 0.25F}, {1, 2, 3}, {0, 2, 4}}};
}
constexpr std::int64_t kRowBegin[] = {0, kMaxTokens, 2 * kMaxTokens};
constexpr std::int64_t kExpertBegin[] = {0, kRowsPerExpert, 2 * kRowsPerExpert};
constexpr Copy kCopies[] = {
    {0, kRowsPerExpert, 0.5F},
    {0, 0, 1},
    {1, kRowsPerExpert + 1, 2},
    {2 * kMaxTokens + 1, 1, 0.25F},
    {2 * kMaxTokens + 1, kRowsPerExpert + 2, 3},
    {2 * kMaxTokens + 2, 2, 4},
};

exec::ExpandRowsParams params_without_payloads(const plan::ExpertRows& rows) {
  exec::ExpandRowsParams params{};
  params.expert_rows = &rows;
  params.rank_counts = kRankCounts;
  params.row_begin = kRowBegin;
  params.expert_begin = kExpertBegin;
  params.num_experts = kNumLocal;
  params.num_rows = kNumLocal * kRowsPerExpert;
  return params;
}

void expand(const exec::ExpandRowsParams& params) {
  base::StepHook hook(TestKnobs{}, 0);
  expand_rows(context_alone(hook, kNumRanks), params);
}

TEST(ExpandRowsTest, EachRowGoesToEachOfItsExperts) {
  const plan::ExpertRows rows = small_rows();
  for (const std::int64_t guard : {0, 16}) {
    const std::vector<std::int64_t> row_bytes = {1, 3, 64, 129};
    std::vector<Bytes> sources;
    std::vector<Bytes> targets;
    std::vector<Bytes> expected;
    exec::ExpandRowsParams params = params_without_payloads(rows);
    for (const std::int64_t bytes : row_bytes) {
      const std::int64_t stride = bytes + guard;
      sources.push_back(
          testing::random_bytes(kNumRanks * kMaxTokens * stride, kSeed + sources.size()));
      targets.push_back(testing::untouched_bytes(kNumLocal * kRowsPerExpert * stride));
      expected.push_back(targets.back());
      for (const Copy& copy : kCopies) {
        copy_bytes(expected.back().data() + copy.to * stride,
                   sources.back().data() + copy.from * stride, bytes);
      }
      params.payloads.push_back({sources.back().data(), targets.back().data(), bytes, stride});
    }
    expand(params);
    for (std::size_t i = 0; i < targets.size(); ++i) {
      EXPECT_TRUE(same_bytes(targets[i], expected[i]))
          << row_bytes[i] << " bytes, guard " << guard << ", seed " << kSeed;
    }
  }
}

TEST(ExpandRowsTest, WeightsLieBesideTheRows) {
  const plan::ExpertRows rows = small_rows();
  std::vector<float> weights(kNumLocal * kRowsPerExpert, kNoWeight);
  std::vector<float> expected = weights;
  for (const Copy& copy : kCopies) expected[static_cast<std::size_t>(copy.to)] = copy.weight;
  exec::ExpandRowsParams params = params_without_payloads(rows);
  params.weights = weights.data();
  expand(params);
  EXPECT_EQ(weights, expected);
}

// --- Groups that follow each other, filled up with zeros ----------------------------------------

/// The same rows, those of the sources without gaps; each group a multiple of four rows.
constexpr std::int64_t kDenseBegin[] = {0, 2, 2};
constexpr std::int64_t kGroupBegin[] = {0, 4, 8};
constexpr std::int32_t kExpertCounts[] = {3, 3};
constexpr Copy kGroupCopies[] = {{0, 4, 0.5F},  {0, 0, 1}, {1, 5, 2},
                                 {3, 1, 0.25F}, {3, 6, 3}, {4, 2, 4}};
constexpr std::int64_t kGap[] = {3, 7};

exec::ExpandRowsParams params_of_groups(const plan::ExpertRows& rows, std::int64_t num_rows) {
  exec::ExpandRowsParams params = params_without_payloads(rows);
  params.row_begin = kDenseBegin;
  params.expert_begin = kGroupBegin;
  params.expert_counts = kExpertCounts;
  params.num_rows = num_rows;
  return params;
}

TEST(ExpandRowsTest, GroupsAreFilledUpWithZerosAndRowsPastTheEndAreLeftOut) {
  const plan::ExpertRows rows = small_rows();
  constexpr std::int64_t kAllRows = 8;
  for (std::int64_t num_rows = 0; num_rows <= kAllRows + 1; ++num_rows) {
    for (const std::int64_t guard : {0, 16}) {
      for (const std::int64_t bytes : {1, 3, 64, 129}) {
        const std::int64_t stride = bytes + guard;
        const Bytes source = testing::random_bytes(5 * stride, kSeed);
        // One row more than there are: it must stay as it is.
        Bytes target = testing::untouched_bytes((kAllRows + 1) * stride);
        Bytes expected = target;
        std::vector<float> weights(kAllRows + 1, kNoWeight);
        std::vector<float> expected_weights = weights;
        for (const Copy& copy : kGroupCopies) {
          if (copy.to >= num_rows) continue;
          copy_bytes(expected.data() + copy.to * stride, source.data() + copy.from * stride, bytes);
          expected_weights[static_cast<std::size_t>(copy.to)] = copy.weight;
        }
        for (const std::int64_t gap : kGap) {
          if (gap >= num_rows) continue;
          std::fill_n(expected.data() + gap * stride, bytes, std::byte{0});
          expected_weights[static_cast<std::size_t>(gap)] = 0;
        }
        exec::ExpandRowsParams params = params_of_groups(rows, num_rows);
        params.payloads = {{source.data(), target.data(), bytes, stride}};
        params.weights = weights.data();
        expand(params);
        EXPECT_TRUE(same_bytes(target, expected))
            << bytes << " bytes, guard " << guard << ", " << num_rows << " rows, seed " << kSeed;
        EXPECT_EQ(weights, expected_weights) << num_rows << " rows";
      }
    }
  }
}

// --- Layouts per rank ---------------------------------------------------------------------------

TEST(MoveRowsTest, TheRowsOfEachSourceCloseUpAndRowsPastTheEndAreLeftOut) {
  constexpr std::int64_t kAllRows = 5;
  for (std::int64_t num_rows = 0; num_rows <= kAllRows + 1; ++num_rows) {
    for (const std::int64_t guard : {0, 16}) {
      const std::vector<std::int64_t> row_bytes = {1, 3, 64, 129};
      std::vector<Bytes> sources;
      std::vector<Bytes> targets;
      std::vector<Bytes> expected;
      exec::MoveRowsParams params{};
      params.rank_counts = kRankCounts;
      params.source_begin = kRowBegin;
      params.target_begin = kDenseBegin;
      params.num_rows = num_rows;
      for (const std::int64_t bytes : row_bytes) {
        const std::int64_t stride = bytes + guard;
        sources.push_back(
            testing::random_bytes(kNumRanks * kMaxTokens * stride, kSeed + sources.size()));
        targets.push_back(testing::untouched_bytes((kAllRows + 1) * stride));
        expected.push_back(targets.back());
        for (std::size_t source = 0; source < kNumRanks; ++source) {
          for (std::int64_t i = 0; i < kRankCounts[source]; ++i) {
            const std::int64_t to = kDenseBegin[source] + i;
            if (to >= num_rows) continue;
            copy_bytes(expected.back().data() + to * stride,
                       sources.back().data() + (kRowBegin[source] + i) * stride, bytes);
          }
        }
        params.payloads.push_back({sources.back().data(), targets.back().data(), bytes, stride});
      }
      base::StepHook hook(TestKnobs{}, 0);
      move_rows(context_alone(hook, kNumRanks), params);
      for (std::size_t i = 0; i < targets.size(); ++i) {
        EXPECT_TRUE(same_bytes(targets[i], expected[i]))
            << row_bytes[i] << " bytes, guard " << guard << ", " << num_rows << " rows";
      }
    }
  }
}

TEST(MoveRowsTest, CopiesTooLargeForACacheAreTheSame) {
  constexpr std::int64_t kNumRows = 9000;
  constexpr std::int64_t kRowBytes = 1025;  // more than 8 MiB in all
  const std::vector<std::int32_t> counts = {100, kNumRows - 100};
  const std::vector<std::int64_t> source_begin = {3, 110};
  const std::vector<std::int64_t> target_begin = {0, 100};
  for (const std::int64_t stride : {kRowBytes, kRowBytes + 16}) {
    const Bytes source = testing::random_bytes((kNumRows + 10) * stride, kSeed);
    Bytes expected = testing::untouched_bytes(kNumRows * stride);
    for (std::int64_t row = 0; row < kNumRows; ++row) {
      const std::int64_t from = row < 100 ? row + 3 : row + 10;
      copy_bytes(expected.data() + row * stride, source.data() + from * stride, kRowBytes);
    }
    for (const bool streaming : {false, true}) {
      Bytes target = testing::untouched_bytes(kNumRows * stride);
      exec::MoveRowsParams params{};
      params.rank_counts = counts.data();
      params.source_begin = source_begin.data();
      params.target_begin = target_begin.data();
      params.num_rows = kNumRows;
      params.payloads = {{source.data(), target.data(), kRowBytes, stride}};
      base::StepHook hook(TestKnobs{}, 0);
      move_rows(context_alone(hook, 2, 0, streaming), params);
      EXPECT_TRUE(same_bytes(target, expected)) << "streaming " << streaming << ", seed " << kSeed;
    }
  }
}

// --- Sizes and nothing --------------------------------------------------------------------------

TEST(ExpandRowsTest, CopiesTooLargeForACacheAreTheSame) {
  constexpr std::int64_t kNumRows = 9000;
  constexpr std::int64_t kRowBytes = 1025;  // more than 8 MiB in all
  constexpr std::int64_t kStride = kRowBytes + 16;
  const std::vector<std::int32_t> counts = {kNumRows};
  plan::ExpertRows backwards;
  backwards.begin.push_back(0);
  const Bytes source = testing::random_bytes(kNumRows * kStride, kSeed);
  Bytes expected = testing::untouched_bytes(kNumRows * kStride);
  for (std::int32_t row = 0; row < kNumRows; ++row) {
    const std::int32_t to = static_cast<std::int32_t>(kNumRows) - 1 - row;
    backwards.rows.push_back({0, to, 1});
    backwards.begin.push_back(row + 1);
    copy_bytes(expected.data() + to * kStride, source.data() + row * kStride, kRowBytes);
  }
  for (const bool streaming : {false, true}) {
    Bytes target = testing::untouched_bytes(kNumRows * kStride);
    exec::ExpandRowsParams params{};
    params.expert_rows = &backwards;
    params.rank_counts = counts.data();
    const std::vector<std::int64_t> begins = {0, kNumRows};
    params.row_begin = params.expert_begin = begins.data();
    params.num_experts = 1;
    params.num_rows = kNumRows;
    params.payloads = {{source.data(), target.data(), kRowBytes, kStride}};
    base::StepHook hook(TestKnobs{}, 0);
    expand_rows(context_alone(hook, 1, 0, streaming), params);
    EXPECT_TRUE(same_bytes(target, expected)) << "streaming " << streaming << ", seed " << kSeed;
  }
}

TEST(ExpandRowsTest, NothingReceivedIsNothingWritten) {
  const std::vector<std::int32_t> none(kNumRanks, 0);
  const plan::ExpertRows no_rows = {{0}, {}};
  const Bytes source(8);
  Bytes target = testing::untouched_bytes(kNumLocal * kRowsPerExpert * 8);
  std::vector<float> weights(kNumLocal * kRowsPerExpert, kNoWeight);
  exec::ExpandRowsParams params = params_without_payloads(no_rows);
  params.rank_counts = none.data();
  params.weights = weights.data();
  params.payloads = {{source.data(), target.data(), 8, 8}};
  expand(params);
  EXPECT_TRUE(same_bytes(target, testing::untouched_bytes(kNumLocal * kRowsPerExpert * 8)));
  EXPECT_TRUE(std::all_of(weights.begin(), weights.end(), [](float w) { return w == kNoWeight; }));
}

}  // namespace
}  // namespace fanfold::cpu
