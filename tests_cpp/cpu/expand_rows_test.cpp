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
  params.round_max_tokens = kMaxTokens;
  params.rows_per_expert = kRowsPerExpert;
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
    params.round_max_tokens = params.rows_per_expert = kNumRows;
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
