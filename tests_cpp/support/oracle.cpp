// SPDX-License-Identifier: Apache-2.0
#include "support/oracle.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "support/number_codec.h"

namespace fanfold::testing {
namespace {

std::int64_t given_id(const Exchange& exchange, int source, std::int64_t token, int k) {
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

bool contains(const std::vector<std::int32_t>& values, std::int32_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

/// One row of a layout; source < 0: a row without a token.
struct Row {
  int source = -1;
  std::int64_t token = -1;
  std::int32_t expert = -1;
  bool is_zero = false;  // fills up a group
};

void add_padding(std::vector<Row>& rows, std::int64_t up_to, bool is_zero = false) {
  while (static_cast<std::int64_t>(rows.size()) < up_to) rows.push_back({-1, -1, -1, is_zero});
}

/// Calls visit(source, token) for the tokens of active ranks, in order.
template <class Visit>
void for_each_token(const Exchange& exchange, int source, Visit&& visit) {
  if (!is_active(exchange, source)) return;
  for (std::int64_t token = 0; token < exchange.tokens_of(source).num_tokens; ++token) visit(token);
}

std::vector<Row> rows_per_rank(const Exchange& exchange, int rank) {
  std::vector<Row> rows;
  for (int source = 0; source < exchange.num_ranks; ++source) {
    for_each_token(exchange, source, [&](std::int64_t token) {
      const bool is_here = exchange.is_routed(source, token, rank);
      if (is_here || exchange.layout == Layout::kGathered) rows.push_back({source, token});
    });
    if (exchange.layout == Layout::kRankMajor) {
      add_padding(rows, (source + 1) * exchange.round_max_tokens);
    }
  }
  return rows;
}

std::vector<Row> rows_per_expert(const Exchange& exchange, int rank,
                                 std::vector<std::int64_t>& begins) {
  std::vector<Row> rows;
  for (const std::int32_t expert : exchange.experts_of(rank)) {
    begins.push_back(static_cast<std::int64_t>(rows.size()));
    for (int source = 0; source < exchange.num_ranks; ++source) {
      for_each_token(exchange, source, [&](std::int64_t token) {
        if (contains(exchange.experts_of_token(source, token), expert)) {
          rows.push_back({source, token, expert});
        }
      });
    }
    if (exchange.layout == Layout::kExpertMajor) {
      add_padding(rows, begins.back() + exchange.num_ranks * exchange.round_max_tokens);
    } else {
      const std::int64_t step = exchange.expert_alignment;
      const auto end = static_cast<std::int64_t>(rows.size());
      add_padding(rows, (end + step - 1) / step * step, /*is_zero=*/true);
    }
  }
  begins.push_back(static_cast<std::int64_t>(rows.size()));
  return rows;
}

/// All rows of the layout of `rank`, as if there were no limit; `begins` [L+1] of each expert's, in
/// layouts per expert.
std::vector<Row> layout_rows(const Exchange& exchange, int rank,
                             std::vector<std::int64_t>& begins) {
  return is_per_expert(exchange.layout) ? rows_per_expert(exchange, rank, begins)
                                        : rows_per_rank(exchange, rank);
}

void write_row(const Exchange& exchange, const Row& row, ExpectedRows& out) {
  out.source_rank.push_back(row.source);
  out.source_token.push_back(static_cast<std::int32_t>(row.token));
  out.expert.push_back(row.expert);
  out.is_zero.push_back(row.is_zero);
  const bool by_expert = is_per_expert(exchange.layout);
  if (by_expert && exchange.has_weights) {
    out.topk_weights.push_back(
        row.source < 0 ? 0
                       : exchange.merged_weight(row.source, row.token, row.expert,
                                                exchange.tokens_of(row.source).topk_weights));
  }
  for (int k = 0; k < exchange.top_k && !by_expert; ++k) {
    if (exchange.has_ids) {
      const std::int64_t id = row.source < 0 ? exchange.invalid_expert_id
                                             : exchange.expert_at(row.source, row.token, k);
      out.topk_ids.push_back(static_cast<std::int32_t>(id));
    }
    if (exchange.has_weights) {
      const auto at = static_cast<std::size_t>(row.token * exchange.top_k + k);
      out.topk_weights.push_back(row.source < 0 ? 0
                                                : exchange.tokens_of(row.source).topk_weights[at]);
    }
  }
}

std::vector<std::int32_t> count_ranks(const Exchange& exchange, int rank) {
  std::vector<std::int32_t> counts(static_cast<std::size_t>(exchange.num_ranks), 0);
  for (int source = 0; source < exchange.num_ranks; ++source) {
    for_each_token(exchange, source, [&](std::int64_t token) {
      if (exchange.layout == Layout::kGathered || exchange.is_routed(source, token, rank)) {
        ++counts[static_cast<std::size_t>(source)];
      }
    });
  }
  return counts;
}

/// Pairs of a token and an expert of `rank` among `rows`.
std::vector<std::int32_t> count_experts(const Exchange& exchange, int rank,
                                        const std::vector<Row>& rows) {
  const std::vector<std::int32_t> experts = exchange.experts_of(rank);
  if (!exchange.has_ids) return std::vector<std::int32_t>(experts.size(), -1);  // nobody can know
  std::vector<std::int32_t> counts(experts.size(), 0);
  for (const Row& row : rows) {
    if (row.source < 0) continue;
    for (std::size_t i = 0; i < experts.size(); ++i) {
      const bool is_here =
          is_per_expert(exchange.layout)
              ? row.expert == experts[i]
              : contains(exchange.experts_of_token(row.source, row.token), experts[i]);
      if (is_here) ++counts[i];
    }
  }
  return counts;
}

/// The rows that each rank had no room for.
using Dropped = std::vector<std::set<std::tuple<int, std::int64_t, std::int32_t>>>;

Dropped dropped_rows(const Exchange& exchange) {
  Dropped dropped(static_cast<std::size_t>(exchange.num_ranks));
  if (!exchange.max_recv_rows) return dropped;
  for (int rank = 0; rank < exchange.num_ranks; ++rank) {
    std::vector<std::int64_t> begins;
    const std::vector<Row> rows = layout_rows(exchange, rank, begins);
    for (auto i = static_cast<std::size_t>(*exchange.max_recv_rows); i < rows.size(); ++i) {
      const Row& row = rows[i];
      dropped[static_cast<std::size_t>(rank)].emplace(row.source, row.token, row.expert);
    }
  }
  return dropped;
}

/// One result that goes home for a token.
struct Term {
  int rank = 0;
  std::int32_t expert = -1;
  float weight = 1.0F;   // of the token for the expert
  bool is_kept = false;  // not dropped for want of room
};

/// What the sums of a token are made of.
class Results {
 public:
  Results(const Exchange& exchange, const CombineTypes& types, const ResultElement& element)
      : exchange_(exchange), types_(types), element_(element), dropped_(dropped_rows(exchange)) {}

  /// In layouts per expert one for each of the token's experts, in their order; otherwise one for
  /// each rank that got the token.
  std::vector<Term> terms_of(int source, std::int64_t token) const {
    std::vector<Term> terms;
    if (is_per_expert(exchange_.layout)) {
      const bool is_origin = exchange_.weighting == Weighting::kOrigin;
      const std::vector<float>& weights = is_origin && !types_.weights.empty()
                                              ? types_.weights
                                              : exchange_.tokens_of(source).topk_weights;
      for (const std::int32_t expert : exchange_.experts_of_token(source, token)) {
        Term term{rank_of(exchange_, expert), expert};
        if (exchange_.weighting != Weighting::kApplied) {
          term.weight = exchange_.merged_weight(source, token, expert, weights);
        }
        terms.push_back(term);
      }
    } else {
      for (int rank = 0; rank < exchange_.num_ranks; ++rank) {
        const bool is_sent = !exchange_.has_ids || exchange_.is_routed(source, token, rank);
        if (is_active(exchange_, rank) && is_sent) terms.push_back({rank});
      }
    }
    for (Term& term : terms) {
      term.is_kept =
          dropped_[static_cast<std::size_t>(term.rank)].count({source, token, term.expert}) == 0;
    }
    return terms;
  }

  /// Partials per rank, ranks ascending, each rounded to the type in which it travels.
  float nested_sum(const std::vector<Term>& terms, ResultIndex index) const {
    float sum = 0.0F;
    for (index.rank = 0; index.rank < exchange_.num_ranks; ++index.rank) {
      float partial = 0.0F;
      bool is_sent = false;
      for (const Term& term : terms) {
        if (term.rank != index.rank) continue;
        is_sent = true;
        if (!term.is_kept) continue;
        index.expert = term.expert;
        const float value = element_(index);
        const bool is_weighted = exchange_.weighting == Weighting::kCarried;
        partial = add(partial, is_weighted ? multiply(term.weight, value) : value);
      }
      if (is_sent) sum = add(sum, round_to(types_.combine_dtype, partial));
    }
    return sum;
  }

  /// Rows travel as combine_dtype, unweighted; as zeros where they were dropped.
  float origin_sum(const std::vector<Term>& terms, ResultIndex index) const {
    float sum = 0.0F;
    for (const Term& term : terms) {
      index.rank = term.rank;
      index.expert = term.expert;
      const float value = term.is_kept ? round_to(types_.combine_dtype, element_(index)) : 0.0F;
      sum = add(sum, multiply(term.weight, value));
    }
    return sum;
  }

 private:
  const Exchange& exchange_;
  const CombineTypes& types_;
  const ResultElement& element_;
  Dropped dropped_;
};

}  // namespace

int Exchange::num_logical_experts() const {
  if (logical_of_expert.empty()) return num_experts;
  return 1 + *std::max_element(logical_of_expert.begin(), logical_of_expert.end());
}

std::int64_t Exchange::expert_at(int source, std::int64_t token, int k) const {
  const std::int64_t id = given_id(*this, source, token, k);
  if (id < 0) return id;
  if (id >= num_logical_experts()) return -1;  // dropped by the sender
  if (logical_of_expert.empty()) return id;
  std::vector<std::int32_t> copies;
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    if (logical_of_expert[static_cast<std::size_t>(expert)] == id) copies.push_back(expert);
  }
  return copies[static_cast<std::size_t>(source + token) % copies.size()];
}

std::vector<std::int32_t> Exchange::experts_of(int rank) const {
  std::vector<std::int32_t> experts;
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    if (rank_of(*this, expert) == rank) experts.push_back(expert);
  }
  return experts;
}

bool Exchange::is_routed(int source, std::int64_t token, int rank) const {
  for (int k = 0; k < top_k; ++k) {
    const std::int64_t id = expert_at(source, token, k);
    if (is_expert(*this, id) && rank_of(*this, id) == rank && is_active(*this, rank)) return true;
  }
  return false;
}

float Exchange::merged_weight(int source, std::int64_t token, std::int32_t expert,
                              const std::vector<float>& weights) const {
  bool is_first = true;
  float sum = 0.0F;
  for (int k = 0; k < top_k; ++k) {
    if (expert_at(source, token, k) != expert) continue;
    const float weight = weights[static_cast<std::size_t>(token * top_k + k)];
    sum = is_first ? weight : add(sum, weight);
    is_first = false;
  }
  return sum;
}

std::vector<std::int32_t> Exchange::experts_of_token(int source, std::int64_t token) const {
  std::vector<std::int32_t> experts;
  for (int k = 0; k < top_k; ++k) {
    const std::int64_t id = expert_at(source, token, k);
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
  ExpectedRows out;
  std::vector<std::int64_t> begins;
  std::vector<Row> rows = layout_rows(exchange, rank, begins);
  const auto num_all = static_cast<std::int64_t>(rows.size());
  const std::int64_t num_kept = std::min(num_all, exchange.max_recv_rows.value_or(num_all));
  out.num_dropped = num_all - num_kept;
  rows.resize(static_cast<std::size_t>(num_kept));
  out.rank_counts = count_ranks(exchange, rank);
  for (const std::int32_t count : out.rank_counts) out.num_rows += count;
  if (exchange.layout == Layout::kFlatByExpert) out.num_rows = static_cast<std::int32_t>(num_all);
  out.expert_counts = count_experts(exchange, rank, rows);
  if (exchange.layout == Layout::kFlatByExpert) {
    for (const std::int64_t begin : begins) {
      out.offsets.push_back(static_cast<std::int32_t>(std::min(begin, num_kept)));
    }
  } else if (exchange.has_ids) {
    out.offsets.push_back(0);
    for (const std::int32_t count : out.expert_counts) {
      out.offsets.push_back(out.offsets.back() + count);
    }
  }
  add_padding(rows, exchange.max_recv_rows.value_or(num_kept));
  for (const Row& row : rows) write_row(exchange, row, out);
  return out;
}

std::vector<std::byte> expected_out(const Exchange& exchange, int rank, const CombineTypes& types,
                                    const ResultElement& element) {
  const Results results(exchange, types, element);
  const std::int64_t num_tokens = exchange.tokens_of(rank).num_tokens;
  const std::int64_t size = size_of(types.out_dtype);
  std::vector<std::byte> out(static_cast<std::size_t>(num_tokens * types.hidden * size));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const std::vector<Term> terms = results.terms_of(rank, token);
    for (std::int64_t column = 0; column < types.hidden; ++column) {
      const ResultIndex index{0, -1, rank, token, column};
      const float sum = exchange.weighting == Weighting::kOrigin ? results.origin_sum(terms, index)
                                                                 : results.nested_sum(terms, index);
      encode(types.out_dtype, sum, out.data() + (token * types.hidden + column) * size);
    }
  }
  return out;
}

}  // namespace fanfold::testing
