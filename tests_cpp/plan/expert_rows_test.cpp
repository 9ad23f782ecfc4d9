// SPDX-License-Identifier: Apache-2.0
#include "plan/expert_rows.h"

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/random_bits.h"

namespace fanfold::plan {

bool operator==(const ExpertRow& a, const ExpertRow& b) {
  return a.local_expert == b.local_expert && a.position == b.position && a.weight == b.weight;
}
std::ostream& operator<<(std::ostream& out, const ExpertRow& row) {
  return out << "row " << row.position << " of local expert " << row.local_expert << ", weight "
             << row.weight;
}

namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kSeed = 20240302;
constexpr std::int32_t kUnwritten = -77;

/// Rows that one source sent.
struct Source {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;  // empty: none travelled
};

/// What a rank lays out from its sources.
struct Laid {
  std::vector<std::int32_t> expert_counts;  // one entry past the local experts
  ExpertRows rows;
};

std::vector<SourceRows> views_of(const std::vector<Source>& sources, int top_k) {
  std::vector<SourceRows> views;
  for (const Source& source : sources) {
    views.push_back({source.ids.data(), source.weights.empty() ? nullptr : source.weights.data(),
                     static_cast<std::int64_t>(source.ids.size()) / top_k});
  }
  return views;
}

Laid lay_out(const std::vector<Source>& sources, const ExpertMap& map, int rank, int top_k) {
  const std::size_t num_local = map.experts_of[static_cast<std::size_t>(rank)].size();
  Laid laid;
  laid.expert_counts.assign(num_local + 1, kUnwritten);
  laid.rows.begin = {5, 6};  // of an earlier round
  laid.rows.rows = {{9, 9, 9}};
  build_expert_rows(views_of(sources, top_k), map, rank, top_k, laid.expert_counts.data(),
                    laid.rows);
  std::vector<std::int32_t> counted(num_local + 1, kUnwritten);
  count_expert_rows(views_of(sources, top_k), map, rank, top_k, counted.data());
  EXPECT_EQ(counted, laid.expert_counts) << "count_expert_rows counts otherwise";
  EXPECT_EQ(laid.expert_counts.back(), kUnwritten) << "wrote past the local experts";
  laid.expert_counts.pop_back();
  return laid;
}

/// Seven experts on three ranks: rank 0 hosts 0, 1, 2, rank 1 hosts 3, 4, rank 2 hosts 5, 6.
ExpertMap small_map() { return build_expert_map(Placement::linear(), 7, 3); }

TEST(ExpertRowsTest, PositionsAreDenseInTheOrderOfSourcesAndTheirRows) {
  const std::vector<Source> sources = {{{3, 4, 4, 0}, {}}, {{}, {}}, {{4, 3, 3, 6}, {}}};
  const Laid laid = lay_out(sources, small_map(), 1, 2);
  EXPECT_THAT(laid.expert_counts, ElementsAre(3, 3));
  EXPECT_THAT(laid.rows.begin, ElementsAre(0, 2, 3, 5, 6));
  EXPECT_THAT(laid.rows.rows,
              ElementsAre(ExpertRow{0, 0, 1}, ExpertRow{1, 0, 1}, ExpertRow{1, 1, 1},
                          ExpertRow{1, 2, 1}, ExpertRow{0, 1, 1}, ExpertRow{0, 2, 1}));
}

TEST(ExpertRowsTest, PairsOfARowKeepTheOrderOfTheirFirstColumns) {
  const Laid laid = lay_out({{{2, 0, 2, 1}, {}}}, small_map(), 0, 4);
  EXPECT_THAT(laid.rows.rows,
              ElementsAre(ExpertRow{2, 0, 1}, ExpertRow{0, 0, 1}, ExpertRow{1, 0, 1}));
}

TEST(ExpertRowsTest, RepeatedExpertsMergeTheirWeightsInTheOrderOfTheColumns) {
  // In float32 1 is lost beside 1e8: the sums tell their order.
  const std::vector<Source> sources = {
      {{5, 6, 5, 5, 6, 5, 5, 5}, {1.0F, 0.25F, 1e8F, -1e8F, 0.5F, 1e8F, -1e8F, 1.0F}}};
  const Laid laid = lay_out(sources, small_map(), 2, 4);
  EXPECT_THAT(laid.rows.rows, ElementsAre(ExpertRow{0, 0, 0.0F}, ExpertRow{1, 0, 0.25F},
                                          ExpertRow{1, 1, 0.5F}, ExpertRow{0, 1, 1.0F}));
  EXPECT_THAT(laid.expert_counts, ElementsAre(2, 2));
}

TEST(ExpertRowsTest, WeightsOfOneSourceDoNotReachAnother) {
  const std::vector<Source> sources = {{{5}, {0.5F}}, {{5}, {}}, {{5}, {0.125F}}};
  const Laid laid = lay_out(sources, small_map(), 2, 1);
  EXPECT_THAT(laid.rows.rows,
              ElementsAre(ExpertRow{0, 0, 0.5F}, ExpertRow{0, 1, 1}, ExpertRow{0, 2, 0.125F}));
}

TEST(ExpertRowsTest, NegativeAndForeignIdsSelectNoRow) {
  const std::vector<Source> sources = {{{-1, 3, 0, 6, -2147483647 - 1, 5, 7, 1000}, {}}};
  const Laid laid = lay_out(sources, small_map(), 1, 2);
  EXPECT_THAT(laid.expert_counts, ElementsAre(1, 0));
  EXPECT_THAT(laid.rows.begin, ElementsAre(0, 1, 1, 1, 1));
  EXPECT_THAT(laid.rows.rows, ElementsAre(ExpertRow{0, 0, 1}));
}

TEST(ExpertRowsTest, ARankWithoutRowsHasZeroCounts) {
  const Laid laid = lay_out({{{}, {}}, {{}, {}}}, small_map(), 0, 2);
  EXPECT_THAT(laid.expert_counts, ElementsAre(0, 0, 0));
  EXPECT_THAT(laid.rows.begin, ElementsAre(0));
  EXPECT_THAT(laid.rows.rows, IsEmpty());
}

TEST(ExpertRowsTest, ARankWithoutExpertsHasNoCounts) {
  const ExpertMap map = build_expert_map(Placement::linear(), 2, 3);
  const Laid laid = lay_out({{{0, 1}, {}}, {{1, 0}, {}}}, map, 2, 2);
  EXPECT_THAT(laid.expert_counts, IsEmpty());
  EXPECT_THAT(laid.rows.begin, ElementsAre(0, 0, 0));
}

/// The contract for one expert at a time: its rows over sources, then rows.
void expect_contract(const Laid& laid, const std::vector<Source>& sources, const ExpertMap& map,
                     int rank, std::size_t top_k) {
  const auto& experts = map.experts_of[static_cast<std::size_t>(rank)];
  for (std::size_t local = 0; local < experts.size(); ++local) {
    std::int32_t position = 0;
    std::size_t row = 0;
    for (const Source& source : sources) {
      for (std::size_t begin = 0; begin < source.ids.size(); begin += top_k, ++row) {
        bool is_named = false;
        float weight = 0;
        for (std::size_t k = begin; k < begin + top_k; ++k) {
          if (source.ids[k] != experts[local]) continue;
          is_named = true;
          weight += source.weights[k];
        }
        std::vector<std::pair<std::int32_t, float>> found;
        for (std::int64_t at = laid.rows.begin[row]; at < laid.rows.begin[row + 1]; ++at) {
          const ExpertRow& pair = laid.rows.rows[static_cast<std::size_t>(at)];
          if (pair.local_expert == static_cast<std::int32_t>(local)) {
            found.emplace_back(pair.position, pair.weight);
          }
        }
        if (is_named) {
          EXPECT_THAT(found, ElementsAre(std::pair(position++, weight)));
        } else {
          EXPECT_THAT(found, IsEmpty());
        }
      }
    }
    EXPECT_EQ(laid.expert_counts[local], position);
    EXPECT_EQ(laid.rows.begin.size(), row + 1);
  }
}

TEST(ExpertRowsTest, RandomRowsKeepTheContract) {
  testing::RandomBits random(kSeed);
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(::testing::Message() << "case " << i << ", seed " << kSeed);
    const int num_ranks = 1 + static_cast<int>(random.below(4));
    const int num_experts = 1 + static_cast<int>(random.below(9));
    const auto top_k = static_cast<std::size_t>(1 + random.below(5));
    const ExpertMap map = build_expert_map(Placement::round_robin(), num_experts, num_ranks);
    std::vector<Source> sources(static_cast<std::size_t>(num_ranks));
    for (Source& source : sources) {
      const auto num_ids = static_cast<std::size_t>(random.below(6)) * top_k;
      for (std::size_t j = 0; j < num_ids; ++j) {
        source.ids.push_back(static_cast<std::int32_t>(random.below(num_experts + 1) - 1));
        source.weights.push_back(random.unit());
      }
      source.weights.push_back(0);  // never an empty vector, which would mean "none travelled"
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Laid laid = lay_out(sources, map, rank, static_cast<int>(top_k));
      expect_contract(laid, sources, map, rank, top_k);
    }
  }
}

}  // namespace
}  // namespace fanfold::plan
