// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "gtest/gtest.h"

namespace fanfold::cpu {
namespace {

constexpr int kNumRanks = 3;
constexpr int kNumExperts = 8;
constexpr int kRank = 1;
constexpr std::int64_t kNumRows = 4;
constexpr std::int64_t kTopK = 3;
constexpr std::int32_t kBetween = 77;  // what lies between the rows

/// Rank 1 hosts 1, 4 and 6.
constexpr std::int32_t kTable[] = {0, 1, 2, 0, 1, 2, 1, 2};

constexpr SanitizePolicy kPolicies[] = {
    SanitizePolicy::kPadding, SanitizePolicy::kPaddingAndNonLocal, SanitizePolicy::kToLocal};

template <class Id>
constexpr DType kDTypeOf = DType::kInt32;
template <>
constexpr DType kDTypeOf<std::int16_t> = DType::kInt16;
template <>
constexpr DType kDTypeOf<std::int64_t> = DType::kInt64;
template <>
constexpr DType kDTypeOf<std::uint32_t> = DType::kUInt32;

/// Ids of `num_sources` sources and where they lie.
template <class Id>
struct Ids {
  std::int64_t num_sources = 1;
  bool is_flat = false;  // [n, K] instead of [R, m, K]
  std::int64_t row_stride = kTopK;
  std::int64_t source_gap = 0;
  std::vector<Id> values;

  std::int64_t source_stride() const { return kNumRows * row_stride + source_gap; }
  std::size_t at(std::int64_t source, std::int64_t row, std::int64_t k) const {
    return static_cast<std::size_t>(source * source_stride() + row * row_stride + k);
  }
  TensorView view() {
    if (is_flat) {
      TensorView view(values.data(), kDTypeOf<Id>, {kNumRows, kTopK});
      view.strides[0] = row_stride;
      return view;
    }
    TensorView view(values.data(), kDTypeOf<Id>, {num_sources, kNumRows, kTopK});
    view.strides[0] = source_stride();
    view.strides[1] = row_stride;
    return view;
  }
  /// Every expert, ids without one and ids that are too large, in turn.
  void fill() {
    const Id samples[] = {0,
                          1,
                          2,
                          3,
                          4,
                          5,
                          6,
                          static_cast<Id>(-1),
                          static_cast<Id>(-3),
                          Id{kNumExperts},
                          std::numeric_limits<Id>::max()};
    std::size_t next = 0;
    values.assign(static_cast<std::size_t>(num_sources * source_stride()), Id{kBetween});
    for (std::int64_t source = 0; source < num_sources; ++source) {
      for (std::int64_t row = 0; row < kNumRows; ++row) {
        for (std::int64_t k = 0; k < kTopK; ++k) {
          values[at(source, row, k)] = samples[next++ % std::size(samples)];
        }
        next += 2;  // so that each sample meets each column and row
      }
    }
  }
};

/// The contract, with the local ids spelt out.
template <class Id>
Id expected_id(Id id, bool has_token, SanitizePolicy policy, Id invalid) {
  if (!has_token) return invalid;
  if (policy == SanitizePolicy::kPadding) return id;
  const std::vector<Id> local = {1, 4, 6};
  const auto found = std::find(local.begin(), local.end(), id);
  if (found == local.end()) return invalid;
  return policy == SanitizePolicy::kToLocal ? static_cast<Id>(found - local.begin()) : id;
}

template <class Id>
void expect_sanitized(Ids<Id> ids, const std::vector<std::int32_t>& counts, SanitizePolicy policy,
                      std::int64_t invalid_expert_id, bool in_place) {
  ids.fill();
  Ids<Id> out = ids;
  if (!in_place) {
    out.row_stride = kTopK + 2;
    out.source_gap = 3;
    out.fill();
    std::fill(out.values.begin(), out.values.end(), Id{kBetween});
  }
  const Ids<Id> before = ids;
  std::vector<Id> expected = out.values;
  for (std::int64_t source = 0; source < ids.num_sources; ++source) {
    for (std::int64_t row = 0; row < kNumRows; ++row) {
      for (std::int64_t k = 0; k < kTopK; ++k) {
        expected[out.at(source, row, k)] = expected_id(
            ids.values[ids.at(source, row, k)], row < counts[static_cast<std::size_t>(source)],
            policy, static_cast<Id>(invalid_expert_id));
      }
    }
  }
  const plan::ExpertMap map = plan::build_expert_map(
      Placement::from_table({std::begin(kTable), std::end(kTable)}), kNumExperts, kNumRanks);
  const TensorView in_view = in_place ? out.view() : ids.view();
  sanitize({in_view, counts.data(), out.view(), invalid_expert_id, policy, &map, kRank});
  EXPECT_EQ(out.values, expected) << name_of(policy) << ", invalid id " << invalid_expert_id;
  EXPECT_EQ(ids.values, before.values) << "the input was written";
}

template <class Id>
class SanitizeTest : public ::testing::Test {
 protected:
  void expect_everywhere(const Ids<Id>& ids, const std::vector<std::int32_t>& counts) {
    for (const SanitizePolicy policy : kPolicies) {
      for (const std::int64_t invalid : {-1, kNumExperts, 2}) {
        for (const bool in_place : {false, true}) {
          expect_sanitized(ids, counts, policy, invalid, in_place);
        }
      }
    }
  }
};

using IdTypes = ::testing::Types<std::int16_t, std::int32_t, std::int64_t, std::uint32_t>;
TYPED_TEST_SUITE(SanitizeTest, IdTypes);

TYPED_TEST(SanitizeTest, RowsOfSeveralSourcesAreJudgedByTheirOwnCounts) {
  Ids<TypeParam> ids;
  ids.num_sources = 3;
  this->expect_everywhere(ids, {2, 0, 4});
}

TYPED_TEST(SanitizeTest, FlatRowsHaveOneCount) {
  Ids<TypeParam> ids;
  ids.is_flat = true;
  for (const std::int32_t count : {0, 1, 3, 4}) this->expect_everywhere(ids, {count});
}

TYPED_TEST(SanitizeTest, RowsMayLieApart) {
  Ids<TypeParam> ids;
  ids.row_stride = kTopK + 1;
  ids.source_gap = 5;
  ids.num_sources = 2;
  this->expect_everywhere(ids, {1, 3});
  ids.is_flat = true;
  ids.num_sources = 1;
  this->expect_everywhere(ids, {2});
}

TYPED_TEST(SanitizeTest, NothingIsWrittenWithoutRows) {
  const plan::ExpertMap map = plan::build_expert_map(
      Placement::from_table({std::begin(kTable), std::end(kTable)}), kNumExperts, kNumRanks);
  const std::vector<std::int32_t> counts(kNumRanks, 0);
  const TensorView no_rows(static_cast<void*>(nullptr), kDTypeOf<TypeParam>, {kNumRanks, 0, kTopK});
  sanitize({no_rows, counts.data(), no_rows, -1, SanitizePolicy::kToLocal, &map, kRank});
}

TEST(SanitizeWidthTest, WideIdsNeverWrapIntoTheRangeOfExperts) {
  const plan::ExpertMap map = plan::build_expert_map(
      Placement::from_table({std::begin(kTable), std::end(kTable)}), kNumExperts, kNumRanks);
  std::vector<std::int64_t> ids = {(std::int64_t{1} << 32) + 4, -(std::int64_t{1} << 32) + 4, 4};
  const std::int32_t count = 1;
  const TensorView view(ids.data(), DType::kInt64, {1, 3});
  sanitize({view, &count, view, -1, SanitizePolicy::kToLocal, &map, kRank});
  EXPECT_EQ(ids, (std::vector<std::int64_t>{-1, -1, 1}));
}

}  // namespace
}  // namespace fanfold::cpu
