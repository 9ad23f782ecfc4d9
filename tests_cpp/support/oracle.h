// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an exchange must give, by naive loops over tokens. Knows nothing of the library's plans.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "fanfold/all_to_all_config.h"
#include "fanfold/dtype.h"

namespace fanfold::testing {

/// The routing that one rank brings to a dispatch.
struct RankTokens {
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> topk_ids;  // [T, K] as the caller gives them
  std::vector<float> topk_weights;     // [T, K]; not looked at without Exchange::has_weights
};

/// All ranks' part in one round, and what they agree on.
struct Exchange {
  int num_ranks = 0;
  int num_experts = 0;
  int top_k = 0;
  std::vector<std::int32_t> rank_of_expert;  // [E]
  /// [E] the logical expert that each is a copy of; empty: each is its own. Callers' ids are
  /// logical.
  std::vector<std::int32_t> logical_of_expert;
  std::vector<bool> active;  // [R]
  Layout layout = Layout::kRankMajor;
  Weighting weighting = Weighting::kApplied;
  std::int64_t round_max_tokens = 0;          // m
  std::int64_t expert_alignment = 1;          // flat_by_expert
  std::optional<std::int64_t> max_recv_rows;  // flat, flat_by_expert
  std::int32_t invalid_expert_id = -1;
  bool has_ids = true;            // false: gathered rows only, topk_ids are not given
  bool has_weights = true;        // whether dispatch was given topk_weights
  std::vector<RankTokens> ranks;  // [R]

  /// Ids that callers may give are below it.
  int num_logical_experts() const;
  /// The expert that column k of the token means, -1 for none: with replicas the copy that its rank
  /// picks. Ids that are no expert stay negative.
  std::int64_t expert_at(int source, std::int64_t token, int k) const;
  const RankTokens& tokens_of(int rank) const { return ranks[static_cast<std::size_t>(rank)]; }
  /// Global ids of `rank`'s experts, ascending.
  std::vector<std::int32_t> experts_of(int rank) const;
  /// Whether `rank` is active and hosts an expert of the token.
  bool is_routed(int source, std::int64_t token, int rank) const;
  /// The sum of the token's weights for `expert`, k ascending; `weights` [T, K] of `source`.
  float merged_weight(int source, std::int64_t token, std::int32_t expert,
                      const std::vector<float>& weights) const;
  /// The distinct experts of the token on active ranks, in order of their first column.
  std::vector<std::int32_t> experts_of_token(int source, std::int64_t token) const;
};

/// Placements as design and header state them.
std::vector<std::int32_t> linear_placement(int num_experts, int num_ranks);
std::vector<std::int32_t> round_robin_placement(int num_experts, int num_ranks);

/// What one rank must receive. Rows run over the whole layout, padding included.
struct ExpectedRows {
  std::vector<std::int32_t> rank_counts;    // [R]
  std::vector<std::int32_t> expert_counts;  // [L], -1 without ids
  std::vector<std::int32_t> offsets;        // [L+1], empty without ids
  std::int32_t num_rows = 0;
  std::int64_t num_dropped = 0;            // rows past max_recv_rows
  std::vector<std::int32_t> source_rank;   // [rows], -1: no token
  std::vector<std::int32_t> source_token;  // [rows], -1: no token
  std::vector<std::int32_t> expert;        // [rows], -1: none, or a layout per rank
  std::vector<bool> is_zero;               // [rows] a row of zeros that fills up a group
  std::vector<std::int32_t> topk_ids;      // [rows, K]; empty for layouts per expert, without ids
  std::vector<float> topk_weights;         // [rows, K] or (per expert) [rows]; 0 without a token
};
ExpectedRows expected_rows(const Exchange& exchange, int rank);

/// One element of an expert's result, already in the type of the result: `expert` is -1 for layouts
/// with one row per (token, rank).
struct ResultIndex {
  int rank;
  std::int32_t expert;
  int source;
  std::int64_t token;
  std::int64_t column;
};
using ResultElement = std::function<float(const ResultIndex&)>;

/// Types and weights of one combine.
struct CombineTypes {
  std::int64_t hidden = 0;
  DType combine_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  std::vector<float> weights;  // kOrigin: [T, K] in place of those of dispatch; or empty
};

/// `out` [T, hidden] of `rank`, bit for bit: the nested sum of the contract.
std::vector<std::byte> expected_out(const Exchange& exchange, int rank, const CombineTypes& types,
                                    const ResultElement& element);

}  // namespace fanfold::testing
