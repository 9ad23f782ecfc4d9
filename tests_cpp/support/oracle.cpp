// SPDX-License-Identifier: Apache-2.0
#include "support/oracle.h"

#include <algorithm>

#include "support/number_codec.h"

namespace fanfold::testing {
namespace {

std::int64_t id_at(const Exchange& exchange, int source, std::int64_t token, int k) {
  const auto at = static_cast<std::size_t>(token * exchange.top_k + k);
  return exchange.tokens_of(source).topk_ids[at];
}

bool is_expert(const Exchange& exchange, std::int64_t id) {
  return id >= 0 && id < exchange.num_experts;
}

int rank_of(const Exchange& exchange, std::int64_t expert) {
  return exchange.rank_of_expert[static_cast<std::size_t>(expert)];
}

bool is_active(const Exchange& exchange, int rank) {
  return exchange.active[static_cast<std::size_t>(rank)];
}

/// Appends one row; source < 0: a row without a token.
void add_row(const Exchange& exchange, int source, std::int64_t token, ExpectedRows& rows) {
  rows.source_rank.push_back(source);
  rows.source_token.push_back(source < 0 ? -1 : static_cast<std::int32_t>(token));
  for (int k = 0; k < exchange.top_k; ++k) {
    if (exchange.has_ids) {
      std::int64_t id = source < 0 ? exchange.invalid_expert_id : id_at(exchange, source, token, k);
      if (source >= 0 && id >= exchange.num_experts) id = -1;  // dropped by the sender
      rows.topk_ids.push_back(static_cast<std::int32_t>(id));
    }
    if (exchange.has_weights) {
      const auto at = static_cast<std::size_t>(token * exchange.top_k + k);
      rows.topk_weights.push_back(source < 0 ? 0 : exchange.tokens_of(source).topk_weights[at]);
    }
  }
}

void add_rank_major_rows(const Exchange& exchange, int rank, ExpectedRows& rows) {
  for (int source = 0; source < exchange.num_ranks; ++source) {
    std::int64_t count = 0;
    for (std::int64_t token = 0; token < exchange.tokens_of(source).num_tokens; ++token) {
      if (!is_active(exchange, source) || !exchange.is_routed(source, token, rank)) continue;
      add_row(exchange, source, token, rows);
      ++count;
    }
    rows.rank_counts.push_back(static_cast<std::int32_t>(count));
    for (; count < exchange.round_max_tokens; ++count) add_row(exchange, -1, -1, rows);
  }
}

void add_gathered_rows(const Exchange& exchange, ExpectedRows& rows) {
  for (int source = 0; source < exchange.num_ranks; ++source) {
    const std::int64_t count =
        is_active(exchange, source) ? exchange.tokens_of(source).num_tokens : 0;
    for (std::int64_t token = 0; token < count; ++token) add_row(exchange, source, token, rows);
    rows.rank_counts.push_back(static_cast<std::int32_t>(count));
  }
}

void add_expert_major_rows(const Exchange& exchange, int rank, ExpectedRows& rows) {
  const std::int64_t stride = exchange.num_ranks * exchange.round_max_tokens;
  rows.rank_counts.assign(static_cast<std::size_t>(exchange.num_ranks), 0);
  for (int source = 0; source < exchange.num_ranks; ++source) {
    for (std::int64_t token = 0; token < exchange.tokens_of(source).num_tokens; ++token) {
      if (is_active(exchange, source) && exchange.is_routed(source, token, rank)) {
        ++rows.rank_counts[static_cast<std::size_t>(source)];
      }
    }
  }
  for (const std::int32_t expert : exchange.experts_of(rank)) {
    std::int64_t count = 0;
    for (int source = 0; source < exchange.num_ranks; ++source) {
      if (!is_active(exchange, source)) continue;
      for (std::int64_t token = 0; token < exchange.tokens_of(source).num_tokens; ++token) {
        const std::vector<std::int32_t> experts = exchange.experts_of_token(source, token);
        if (std::find(experts.begin(), experts.end(), expert) == experts.end()) continue;
        rows.source_rank.push_back(source);
        rows.source_token.push_back(static_cast<std::int32_t>(token));
        if (exchange.has_weights) {
          rows.topk_weights.push_back(exchange.merged_weight(
              source, token, expert, exchange.tokens_of(source).topk_weights));
        }
        ++count;
      }
    }
    const auto padded = static_cast<std::size_t>(stride - count);
    rows.source_rank.insert(rows.source_rank.end(), padded, -1);
    rows.source_token.insert(rows.source_token.end(), padded, -1);
    if (exchange.has_weights) {
      rows.topk_weights.insert(rows.topk_weights.end(), padded, 0);
    }
  }
}

void count_experts(const Exchange& exchange, int rank, ExpectedRows& rows) {
  if (!exchange.has_ids) {  // nobody can know
    rows.expert_counts.assign(exchange.experts_of(rank).size(), -1);
    return;
  }
  rows.offsets.push_back(0);
  for (const std::int32_t expert : exchange.experts_of(rank)) {
    std::int32_t count = 0;
    for (int source = 0; source < exchange.num_ranks; ++source) {
      if (!is_active(exchange, source)) continue;
      for (std::int64_t token = 0; token < exchange.tokens_of(source).num_tokens; ++token) {
        const std::vector<std::int32_t> experts = exchange.experts_of_token(source, token);
        if (std::find(experts.begin(), experts.end(), expert) != experts.end()) ++count;
      }
    }
    rows.expert_counts.push_back(count);
    rows.offsets.push_back(rows.offsets.back() + count);
  }
}

/// What `rank` sends home for one token and column, before it is rounded.
float partial_sum(const Exchange& exchange, int rank, int source, std::int64_t token,
                  std::int64_t column, const ResultElement& element) {
  if (exchange.layout != Layout::kExpertMajor) {
    return add(0.0F, element(ResultIndex{rank, -1, source, token, column}));
  }
  float sum = 0.0F;
  for (const std::int32_t expert : exchange.experts_of_token(source, token)) {
    if (rank_of(exchange, expert) != rank) continue;
    float value = element(ResultIndex{rank, expert, source, token, column});
    if (exchange.weighting == Weighting::kCarried) {
      const std::vector<float>& weights = exchange.tokens_of(source).topk_weights;
      value = multiply(exchange.merged_weight(source, token, expert, weights), value);
    }
    sum = add(sum, value);
  }
  return sum;
}

float origin_sum(const Exchange& exchange, int source, std::int64_t token, std::int64_t column,
                 const CombineTypes& types, const ResultElement& element) {
  const std::vector<float>& weights =
      types.weights.empty() ? exchange.tokens_of(source).topk_weights : types.weights;
  float sum = 0.0F;
  for (const std::int32_t expert : exchange.experts_of_token(source, token)) {
    const int rank = rank_of(exchange, expert);
    // Rows travel as combine_dtype, unweighted.
    const float value =
        round_to(types.combine_dtype, element(ResultIndex{rank, expert, source, token, column}));
    sum = add(sum, multiply(exchange.merged_weight(source, token, expert, weights), value));
  }
  return sum;
}

}  // namespace

std::vector<std::int32_t> Exchange::experts_of(int rank) const {
  std::vector<std::int32_t> experts;
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    if (rank_of(*this, expert) == rank) experts.push_back(expert);
  }
  return experts;
}

bool Exchange::is_routed(int source, std::int64_t token, int rank) const {
  for (int k = 0; k < top_k; ++k) {
    const std::int64_t id = id_at(*this, source, token, k);
    if (is_expert(*this, id) && rank_of(*this, id) == rank && is_active(*this, rank)) return true;
  }
  return false;
}

float Exchange::merged_weight(int source, std::int64_t token, std::int32_t expert,
                              const std::vector<float>& weights) const {
  bool is_first = true;
  float sum = 0.0F;
  for (int k = 0; k < top_k; ++k) {
    if (id_at(*this, source, token, k) != expert) continue;
    const float weight = weights[static_cast<std::size_t>(token * top_k + k)];
    sum = is_first ? weight : add(sum, weight);
    is_first = false;
  }
  return sum;
}

std::vector<std::int32_t> Exchange::experts_of_token(int source, std::int64_t token) const {
  std::vector<std::int32_t> experts;
  for (int k = 0; k < top_k; ++k) {
    const std::int64_t id = id_at(*this, source, token, k);
    if (!is_expert(*this, id) || !is_active(*this, rank_of(*this, id))) continue;
    if (std::find(experts.begin(), experts.end(), id) != experts.end()) continue;
    experts.push_back(static_cast<std::int32_t>(id));
  }
  return experts;
}

std::vector<std::int32_t> linear_placement(int num_experts, int num_ranks) {
  std::vector<std::int32_t> rank_of_expert;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int count = num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0);
    rank_of_expert.insert(rank_of_expert.end(), static_cast<std::size_t>(count), rank);
  }
  return rank_of_expert;
}

std::vector<std::int32_t> round_robin_placement(int num_experts, int num_ranks) {
  std::vector<std::int32_t> rank_of_expert;
  for (int expert = 0; expert < num_experts; ++expert) rank_of_expert.push_back(expert % num_ranks);
  return rank_of_expert;
}

ExpectedRows expected_rows(const Exchange& exchange, int rank) {
  ExpectedRows rows;
  if (exchange.layout == Layout::kRankMajor) add_rank_major_rows(exchange, rank, rows);
  if (exchange.layout == Layout::kGathered) add_gathered_rows(exchange, rows);
  if (exchange.layout == Layout::kExpertMajor) add_expert_major_rows(exchange, rank, rows);
  for (const std::int32_t count : rows.rank_counts) rows.num_rows += count;
  count_experts(exchange, rank, rows);
  return rows;
}

std::vector<std::byte> expected_out(const Exchange& exchange, int rank, const CombineTypes& types,
                                    const ResultElement& element) {
  const std::int64_t num_tokens = exchange.tokens_of(rank).num_tokens;
  const std::int64_t size = size_of(types.out_dtype);
  std::vector<std::byte> out(static_cast<std::size_t>(num_tokens * types.hidden * size));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::int64_t column = 0; column < types.hidden; ++column) {
      float sum = 0.0F;
      if (exchange.weighting == Weighting::kOrigin) {
        sum = origin_sum(exchange, rank, token, column, types, element);
      } else {
        for (int peer = 0; peer < exchange.num_ranks; ++peer) {
          if (!is_active(exchange, peer)) continue;
          if (exchange.has_ids && !exchange.is_routed(rank, token, peer)) continue;
          const float partial = partial_sum(exchange, peer, rank, token, column, element);
          sum = add(sum, round_to(types.combine_dtype, partial));
        }
      }
      encode(types.out_dtype, sum, out.data() + (token * types.hidden + column) * size);
    }
  }
  return out;
}

}  // namespace fanfold::testing
