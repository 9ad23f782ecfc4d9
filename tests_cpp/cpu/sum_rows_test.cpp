// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "cpu/numbers.h"
#include "gtest/gtest.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {
namespace {

using testing::Bytes;
using testing::same_bytes;

constexpr std::uint64_t kSeed = 20240309;
constexpr int kNumRanks = 4;
constexpr int kNumExperts = 9;
constexpr int kTopK = 5;
constexpr std::int64_t kNumTokens = 11;
constexpr std::int64_t kWeightsStride = kTopK + 1;

struct Options {
  DType combine_dtype = DType::kBFloat16;
  DType out_dtype = DType::kFloat32;
  std::int64_t hidden = 33;
  std::int64_t out_gap_bytes = 0;
  std::vector<bool> active = std::vector<bool>(kNumRanks, true);
  bool origin = false;
  std::int64_t rows_per_token = 1;
};

/// Tokens with repeated, missing and no experts, experts dealt in turn, and rows that came home.
class Sum {
 public:
  explicit Sum(const Options& options) : options_(options) {
    testing::RandomBits random(kSeed);
    for (std::int64_t i = 0; i < kNumTokens * kTopK; ++i) {
      const bool has_expert = i >= kTopK && random.below(5) != 0;  // the first token has none
      ids_.push_back(has_expert ? static_cast<std::int32_t>(random.below(kNumExperts)) : -1);
    }
    for (std::int64_t i = 0; i < kNumTokens * kWeightsStride; ++i) {
      weights_.push_back(random.unit() - 0.3F);
    }
    plan::reserve_send_plan(plan_, map_, kTopK, kNumTokens);
    plan::build_send_plan(TensorView(ids_.data(), DType::kInt32, {kNumTokens, kTopK}), kNumTokens,
                          map_, options.active, false, plan_);
    for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
      const std::int64_t rows = plan_.rows_per_rank[rank] * options.rows_per_token;
      sources_.push_back(
          random_numbers(options.combine_dtype, rows * options.hidden, kSeed + rank));
    }
  }

  Bytes run() const {
    std::vector<const std::byte*> sources;
    for (const Bytes& rows : sources_) sources.push_back(rows.data());
    Bytes out = untouched();
    exec::SumRowsParams params{};
    params.plan = &plan_;
    params.sources = sources.data();
    params.combine_dtype = options_.combine_dtype;
    params.hidden = options_.hidden;
    params.rows_per_token = options_.rows_per_token;
    params.row_bytes = options_.hidden * size_of(options_.combine_dtype);
    params.active = &options_.active;
    if (options_.origin) {
      params.origin_map = &map_;
      params.topk_weights = weights_.data();
      params.weights_stride = kWeightsStride;
    }
    params.out = out.data();
    params.out_stride_bytes = out_stride();
    params.out_dtype = options_.out_dtype;
    base::StepHook hook(TestKnobs{}, 0);
    sum_rows(context_alone(hook, kNumRanks, 2), params);
    return out;
  }

  Bytes expected() const {
    Bytes out = untouched();
    std::vector<std::int64_t> num_rows(kNumRanks, 0);  // rows of earlier tokens, by rank
    for (std::int64_t token = 0; token < kNumTokens; ++token) {
      const std::vector<Term> terms =
          options_.origin ? by_expert(token, num_rows) : by_rank(token, num_rows);
      write_sum(out.data() + token * out_stride(), options_.out_dtype, terms, options_.origin,
                options_.combine_dtype, options_.hidden);
      for (int rank = 0; rank < kNumRanks; ++rank) {
        if (is_on(token, rank)) ++num_rows[static_cast<std::size_t>(rank)];
      }
    }
    return out;
  }

 private:
  std::int64_t out_stride() const {
    return options_.hidden * size_of(options_.out_dtype) + options_.out_gap_bytes;
  }
  Bytes untouched() const {
    return testing::untouched_bytes(kNumTokens * out_stride() - options_.out_gap_bytes);
  }
  std::int32_t id(std::int64_t token, int k) const {
    return ids_[static_cast<std::size_t>(token * kTopK + k)];
  }
  bool is_on(std::int64_t token, int rank) const {
    if (!options_.active[static_cast<std::size_t>(rank)]) return false;
    for (int k = 0; k < kTopK; ++k) {
      if (id(token, k) >= 0 && id(token, k) % kNumRanks == rank) return true;
    }
    return false;
  }
  const std::byte* row(int rank, std::int64_t index) const {
    return sources_[static_cast<std::size_t>(rank)].data() +
           index * options_.hidden * size_of(options_.combine_dtype);
  }

  /// One row per rank, ranks ascending.
  std::vector<Term> by_rank(std::int64_t token, const std::vector<std::int64_t>& num_rows) const {
    std::vector<Term> terms;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      if (is_on(token, rank)) {
        terms.push_back({row(rank, num_rows[static_cast<std::size_t>(rank)]), 1});
      }
    }
    return terms;
  }

  /// One row per distinct expert on an active rank, columns ascending.
  std::vector<Term> by_expert(std::int64_t token, const std::vector<std::int64_t>& num_rows) const {
    std::vector<Term> terms;
    std::vector<std::int64_t> picked(kNumRanks, 0);
    for (int k = 0; k < kTopK; ++k) {
      const std::int32_t expert = id(token, k);
      bool is_first = expert >= 0;
      float weight = 0;
      for (int i = 0; i < kTopK; ++i) {
        if (id(token, i) != expert) continue;
        is_first = is_first && i >= k;
        weight += weights_[static_cast<std::size_t>(token * kWeightsStride + i)];
      }
      if (!is_first || !is_on(token, expert % kNumRanks)) continue;
      const auto rank = static_cast<std::size_t>(expert % kNumRanks);
      const std::int64_t at = num_rows[rank] * options_.rows_per_token + picked[rank]++;
      terms.push_back({row(expert % kNumRanks, at), weight});
    }
    return terms;
  }

  Options options_;
  plan::ExpertMap map_ = plan::build_expert_map(Placement::round_robin(), kNumExperts, kNumRanks);
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
  plan::SendPlan plan_;
  std::vector<Bytes> sources_;
};

/// Over all types, sizes and distances of rows.
void expect_sums(Options options) {
  for (const DType combine : kSummable) {
    for (const DType out : kSummable) {
      for (const std::int64_t hidden : {1, 7, 64, 129}) {
        for (const std::int64_t gap : {0, 8}) {
          options.combine_dtype = combine;
          options.out_dtype = out;
          options.hidden = hidden;
          options.out_gap_bytes = gap;
          const Sum sum(options);
          EXPECT_TRUE(same_bytes(sum.run(), sum.expected()))
              << name_of(combine) << " to " << name_of(out) << ", hidden " << hidden << ", gap "
              << gap << ", seed " << kSeed;
        }
      }
    }
  }
}

TEST(SumRowsTest, PartialsAreAddedByAscendingRank) { expect_sums({}); }

TEST(SumRowsTest, InactiveRanksAreMissingFromTheSums) {
  Options options;
  options.active = {true, false, true, false};
  expect_sums(options);
}

TEST(SumRowsTest, WithoutActiveRanksEveryTokenIsZero) {
  Options options;
  options.active.assign(kNumRanks, false);
  const Bytes out = Sum(options).run();
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](std::byte b) { return b == std::byte{0}; }));
}

TEST(SumRowsTest, OriginWeighsTheRowsOfTheDistinctExpertsByAscendingColumn) {
  Options options;
  options.origin = true;
  options.rows_per_token = 3;  // the most experts of one rank
  expect_sums(options);
}

TEST(SumRowsTest, OriginLeavesOutInactiveRanks) {
  Options options;
  options.origin = true;
  options.rows_per_token = 3;
  options.active = {false, true, true, true};
  expect_sums(options);
}

TEST(SumRowsTest, NoTokensNeedNoMemory) {
  plan::SendPlan plan;
  const plan::ExpertMap map = plan::build_expert_map(Placement::linear(), 2, 2);
  plan::reserve_send_plan(plan, map, 1, 4);
  const std::vector<bool> active = {true, true};
  plan::build_send_plan(TensorView(static_cast<void*>(nullptr), DType::kInt32, {0, 1}), 0, map,
                        active, false, plan);
  const std::vector<const std::byte*> sources = {nullptr, nullptr};
  base::StepHook hook(TestKnobs{}, 0);
  for (const bool origin : {false, true}) {
    exec::SumRowsParams params{};
    params.plan = &plan;
    params.sources = sources.data();
    params.combine_dtype = params.out_dtype = DType::kFloat16;
    params.hidden = 3;
    params.rows_per_token = 1;
    params.origin_map = origin ? &map : nullptr;
    params.active = &active;
    sum_rows(context_alone(hook, 2), params);
  }
}

}  // namespace
}  // namespace fanfold::cpu
