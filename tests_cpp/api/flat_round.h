// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rounds of the layouts flat and flat_by_expert, with or without a limit of rows, against naive
// expectations. All numbers are small integers, so that every sum is exact in any order.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "gmock/gmock.h"
#include "support/oracle.h"
#include "support/random_bits.h"
#include "support/routing_generators.h"

namespace fanfold::testing {

/// What lies in one row of a layout; source -1: no token.
struct LayoutRow {
  int source = -1;
  std::int64_t token = -1;
  std::int32_t expert = -1;
};

/// One rank's part in one round.
class FlatRound {
 public:
  FlatRound(AllToAll& all_to_all, RoutingKind kind, std::int64_t round_max_tokens,
            std::uint64_t seed)
      : all_to_all_(all_to_all), config_(all_to_all.config()), seed_(seed) {
    exchange_.num_ranks = all_to_all.num_ranks();
    exchange_.num_experts = config_.num_experts;
    exchange_.top_k = config_.top_k;
    exchange_.rank_of_expert = linear_placement(config_.num_experts, exchange_.num_ranks);
    exchange_.active = all_to_all.active_mask();
    exchange_.round_max_tokens = round_max_tokens;
    exchange_.ranks = make_tokens(
        {kind, exchange_.num_ranks, config_.num_experts, config_.top_k, round_max_tokens, seed});
    for (std::size_t rank = 0; rank < exchange_.ranks.size(); ++rank) {
      if (!exchange_.active[rank]) exchange_.ranks[rank] = RankTokens{};
    }
    for (int rank = 0; rank < exchange_.num_ranks; ++rank) rows_.push_back(rows_of(rank));
    const RankTokens& mine = exchange_.tokens_of(all_to_all.rank());
    num_tokens_ = mine.num_tokens;
    ids_ = mine.topk_ids;
    for (std::int64_t token = 0; token < num_tokens_; ++token) {
      for (std::int64_t i = 0; i < config_.hidden; ++i) {
        hidden_.push_back(payload(all_to_all.rank(), token, i));
      }
      tags_.push_back(tag(all_to_all.rank(), token));
    }
    out_.assign(static_cast<std::size_t>(num_tokens_ * config_.hidden), -1.0F);
  }

  DispatchInputs inputs() const {
    DispatchInputs in;
    in.topk_ids = TensorView(ids_.data(), DType::kInt64, {num_tokens_, config_.top_k});
    in.payloads = {TensorView(hidden_.data(), DType::kFloat32, {num_tokens_, config_.hidden}),
                   TensorView(tags_.data(), DType::kUInt8, {num_tokens_, 1})};
    in.round_max_tokens = exchange_.round_max_tokens;
    return in;
  }

  void dispatch() {
    received_ = all_to_all_.dispatch(inputs());
    check_received();
  }
  /// Along the routing of an earlier round with the same seed.
  void dispatch(const Routing& routing) {
    DispatchInputs in = inputs();
    in.topk_ids = TensorView();
    in.routing = routing;
    received_ = all_to_all_.dispatch(in);
    check_received();
  }

  void combine(bool zero_copy = true, bool release = true) {
    CombineInputs in;
    in.y = all_to_all_.combine_buffer(received_.handle());
    std::vector<float> staged(static_cast<std::size_t>(in.y.num_elements()), 1e30F);
    auto* y = static_cast<float*>(const_cast<void*>(in.y.data));
    if (!zero_copy) {
      y = staged.data();
      in.y = TensorView(y, DType::kFloat32, {in.y.shape[0], config_.hidden});
    }
    const std::vector<LayoutRow>& rows = rows_[index(all_to_all_.rank())];
    for (std::size_t i = 0; i < index(kept(rows)); ++i) {
      for (std::int64_t j = 0; j < config_.hidden; ++j) {
        y[i * index(config_.hidden) + index(j)] =
            rows[i].source < 0 ? 1e30F : result(all_to_all_.rank(), rows[i], j);
      }
    }
    in.out = TensorView(out_.data(), DType::kFloat32, {num_tokens_, config_.hidden});
    in.release = release;
    all_to_all_.combine(in, received_.handle());
    EXPECT_THAT(out_, ::testing::ElementsAreArray(expected_out()));
  }

  const Received& received() const { return received_; }
  const std::vector<float>& out() const { return out_; }
  const Exchange& exchange() const { return exchange_; }
  /// Rows of `rank`'s layout, those beyond the limit and those without a token included.
  std::int64_t num_rows(int rank) const {
    return static_cast<std::int64_t>(rows_[index(rank)].size());
  }
  /// Received rows, one per (token, rank), of the fullest rank.
  std::int64_t max_received() const {
    std::int64_t most = 0;
    for (int rank = 0; rank < exchange_.num_ranks; ++rank) {
      std::int64_t rows = 0;
      for (int source = 0; source < exchange_.num_ranks; ++source) rows += sent(source, rank);
      most = std::max(most, rows);
    }
    return most;
  }
  /// Of any rank's layout, the rows that fill up groups included.
  std::int64_t max_layout_rows() const {
    std::size_t most = 0;
    for (const auto& rows : rows_) most = std::max(most, rows.size());
    return static_cast<std::int64_t>(most);
  }

 private:
  static std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }
  bool by_expert() const { return config_.layout == Layout::kFlatByExpert; }
  std::int64_t kept(const std::vector<LayoutRow>& rows) const {
    const auto size = static_cast<std::int64_t>(rows.size());
    return std::min(size, config_.max_recv_rows.value_or(size));
  }
  float payload(int source, std::int64_t token, std::int64_t column) const {
    return static_cast<float>(mix(seed_, 1U, index(source), index(token), index(column)) % 1000);
  }
  std::uint8_t tag(int source, std::int64_t token) const {
    return static_cast<std::uint8_t>(mix(seed_, 2U, index(source), index(token)));
  }
  float result(int rank, const LayoutRow& row, std::int64_t column) const {
    return static_cast<float>(mix(seed_, 3U, index(rank), index(row.source), index(row.token),
                                  index(row.expert + 1), index(column)) %
                              64);
  }
  std::int32_t sent(int source, int rank) const {
    std::int32_t rows = 0;
    for (std::int64_t token = 0; token < exchange_.tokens_of(source).num_tokens; ++token) {
      rows += exchange_.is_routed(source, token, rank) ? 1 : 0;
    }
    return rows;
  }

  std::vector<LayoutRow> rows_of(int rank) const {
    std::vector<LayoutRow> rows;
    const std::vector<std::int32_t> experts =
        by_expert() ? exchange_.experts_of(rank) : std::vector<std::int32_t>{-1};
    for (const std::int32_t expert : experts) {
      for (int source = 0; source < exchange_.num_ranks; ++source) {
        for (std::int64_t token = 0; token < exchange_.tokens_of(source).num_tokens; ++token) {
          if (!exchange_.is_routed(source, token, rank)) continue;
          const auto its = exchange_.experts_of_token(source, token);
          if (expert >= 0 && std::find(its.begin(), its.end(), expert) == its.end()) continue;
          rows.push_back({source, token, expert});
        }
      }
      while (rows.size() % index(config_.expert_alignment) != 0) rows.emplace_back();
    }
    return rows;
  }

  void check_received() const {
    const int rank = all_to_all_.rank();
    const std::vector<LayoutRow>& rows = rows_[index(rank)];
    const auto total = static_cast<std::int64_t>(rows.size());
    const std::int64_t shown = config_.max_recv_rows.value_or(total);
    std::vector<std::int32_t> rank_counts;
    for (int source = 0; source < exchange_.num_ranks; ++source) {
      rank_counts.push_back(sent(source, rank));
    }
    EXPECT_THAT(ints(received_.rank_counts()), ::testing::ElementsAreArray(rank_counts));
    EXPECT_THAT(ints(received_.num_rows()), ::testing::ElementsAre(total));
    const TensorView& hidden = received_.payloads()[0];
    const TensorView& tags = received_.payloads()[1];
    ASSERT_EQ(hidden.describe(),
              TensorView(hidden.data, DType::kFloat32, {shown, config_.hidden}).describe());
    ASSERT_EQ(tags.shape[0], shown);
    const std::vector<std::int32_t> sources = ints(received_.source_rank());
    const std::vector<std::int32_t> tokens = ints(received_.source_token());
    ASSERT_EQ(sources.size(), index(shown));
    for (std::int64_t i = 0; i < shown; ++i) {
      const LayoutRow row = i < total ? rows[index(i)] : LayoutRow{};
      ASSERT_EQ(sources[index(i)], row.source) << "row " << i;
      ASSERT_EQ(tokens[index(i)], row.token) << "row " << i;
      if (i < total) check_row(i, row);
    }
    check_ids(rows, shown);
    check_experts(rows);
  }

  void check_row(std::int64_t at, const LayoutRow& row) const {
    const TensorView& hidden = received_.payloads()[0];
    const auto* values = static_cast<const float*>(hidden.data) + at * hidden.strides[0];
    for (std::int64_t i = 0; i < config_.hidden; ++i) {
      const float expected = row.source < 0 ? 0.0F : payload(row.source, row.token, i);
      ASSERT_EQ(values[i], expected) << "row " << at << ", column " << i;
    }
    const TensorView& tags = received_.payloads()[1];
    const auto* bytes = static_cast<const std::uint8_t*>(tags.data) + at * tags.strides[0];
    ASSERT_EQ(*bytes, row.source < 0 ? 0 : tag(row.source, row.token)) << "row " << at;
  }

  void check_ids(const std::vector<LayoutRow>& rows, std::int64_t shown) const {
    if (by_expert()) {
      EXPECT_FALSE(received_.topk_ids().has_value());
      return;
    }
    const std::vector<std::int32_t> ids = ints(received_.topk_ids());
    std::vector<std::int32_t> expected;
    for (std::int64_t i = 0; i < shown; ++i) {
      for (int k = 0; k < config_.top_k; ++k) {
        if (i >= static_cast<std::int64_t>(rows.size())) {
          expected.push_back(-1);
          continue;
        }
        const LayoutRow& row = rows[index(i)];
        const RankTokens& tokens = exchange_.tokens_of(row.source);
        expected.push_back(
            static_cast<std::int32_t>(tokens.topk_ids[index(row.token * config_.top_k + k)]));
      }
    }
    EXPECT_THAT(ids, ::testing::ElementsAreArray(expected));
  }

  void check_experts(const std::vector<LayoutRow>& rows) const {
    std::vector<std::int32_t> expert_counts;
    std::vector<std::int32_t> offsets = {0};
    const std::int64_t end = kept(rows);
    std::int64_t begin = 0;
    for (const std::int32_t expert : exchange_.experts_of(all_to_all_.rank())) {
      std::int32_t num_rows = 0;
      std::int64_t group = 0;
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(rows.size()); ++i) {
        const LayoutRow& row = rows[index(i)];
        if (row.source < 0) continue;
        const auto its = exchange_.experts_of_token(row.source, row.token);
        const bool is_its = by_expert() ? row.expert == expert
                                        : std::find(its.begin(), its.end(), expert) != its.end();
        group += is_its ? 1 : 0;
        num_rows += is_its && i < end ? 1 : 0;
      }
      expert_counts.push_back(num_rows);
      const std::int64_t alignment = config_.expert_alignment;
      begin += (group + alignment - 1) / alignment * alignment;
      offsets.push_back(by_expert() ? static_cast<std::int32_t>(std::min(begin, end))
                                    : offsets.back() + num_rows);
    }
    EXPECT_THAT(ints(received_.expert_counts()), ::testing::ElementsAreArray(expert_counts));
    EXPECT_THAT(ints(received_.offsets()), ::testing::ElementsAreArray(offsets));
  }

  std::vector<float> expected_out() const {
    std::vector<float> out(out_.size(), 0.0F);
    for (int rank = 0; rank < exchange_.num_ranks; ++rank) {
      const std::vector<LayoutRow>& rows = rows_[index(rank)];
      for (std::int64_t i = 0; i < kept(rows); ++i) {
        const LayoutRow& row = rows[index(i)];
        if (row.source != all_to_all_.rank()) continue;
        for (std::int64_t j = 0; j < config_.hidden; ++j) {
          out[index(row.token * config_.hidden + j)] += result(rank, row, j);
        }
      }
    }
    return out;
  }

  static std::vector<std::int32_t> ints(const TensorView& view) {
    const auto* values = static_cast<const std::int32_t*>(view.data);
    return {values, values + view.num_elements()};
  }

  AllToAll& all_to_all_;
  const AllToAllConfig& config_;
  std::uint64_t seed_;
  Exchange exchange_;
  std::vector<std::vector<LayoutRow>> rows_;  // by rank
  std::int64_t num_tokens_ = 0;
  std::vector<std::int64_t> ids_;
  std::vector<float> hidden_;
  std::vector<std::uint8_t> tags_;
  std::vector<float> out_;
  Received received_;
};

}  // namespace fanfold::testing
