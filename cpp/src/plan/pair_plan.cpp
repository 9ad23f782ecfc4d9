// SPDX-License-Identifier: Apache-2.0
#include "plan/pair_plan.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/byte_math.h"

namespace fanfold::plan {
namespace {

/// Calls visit(expert, its first row on its rank) for every expert; returns the most rows of any
/// rank.
template <class Visit>
std::int64_t walk_experts(const std::vector<std::int32_t>& counts, const ExpertMap& map,
                          std::int64_t alignment, Visit&& visit) {
  const auto num_experts = static_cast<std::size_t>(map.num_experts);
  std::int64_t most = 0;
  for (const auto& experts : map.experts_of) {
    std::int64_t row = 0;
    for (const std::int32_t expert : experts) {
      const auto column = static_cast<std::size_t>(expert);
      visit(column, row);
      std::int64_t total = 0;
      for (std::size_t at = column; at < counts.size(); at += num_experts) total += counts[at];
      row = base::align_up(row + total, alignment);
    }
    most = std::max(most, row);
  }
  return most;
}

/// The pairs from `first` on, of one token, whose ranks `plan` knows. Stable.
void sort_by_rank(const SendPlan& plan, std::int64_t token, std::size_t first, PairPlan& out) {
  constexpr std::size_t kFew = 32;
  const auto begin = out.pairs.begin() + static_cast<std::ptrdiff_t>(first);
  if (out.pairs.size() - first <= kFew) {
    for (auto at = begin; at < out.pairs.end(); ++at) {
      for (auto to = at; to > begin && to[-1].rank > to[0].rank; --to) std::swap(to[-1], to[0]);
    }
    return;
  }
  out.unsorted.assign(begin, out.pairs.end());
  auto next = begin;
  for (std::int64_t i = plan.target_begin[static_cast<std::size_t>(token)];
       i < plan.target_begin[static_cast<std::size_t>(token) + 1]; ++i) {
    const std::int32_t rank = plan.targets[static_cast<std::size_t>(i)].rank;
    next = std::copy_if(out.unsorted.begin(), out.unsorted.end(), next,
                        [rank](const Pair& pair) { return pair.rank == rank; });
  }
}

}  // namespace

void build_pairs(const SendPlan& plan, const ExpertMap& map, const std::vector<bool>& active,
                 const float* weights, std::int64_t weights_stride, PairPlan& out) {
  out.pairs_per_expert.assign(static_cast<std::size_t>(map.num_experts), 0);
  out.last_pair.assign(static_cast<std::size_t>(map.num_experts), -1);
  out.begin.assign(1, 0);
  out.pairs.clear();
  for (std::int64_t token = 0; token < plan.num_tokens; ++token) {
    const std::int32_t* ids = plan.ids_of(token);
    const float* gates = weights == nullptr ? nullptr : weights + token * weights_stride;
    const auto first = static_cast<std::int64_t>(out.pairs.size());
    for (int k = 0; k < plan.top_k; ++k) {
      if (ids[k] < 0) continue;
      const auto expert = static_cast<std::size_t>(ids[k]);
      const std::int32_t rank = map.rank_of[expert];
      if (!active[static_cast<std::size_t>(rank)]) continue;
      const float weight = gates == nullptr ? 1.0F : gates[k];
      std::int64_t& last = out.last_pair[expert];
      if (last >= first) {  // of this token: a repeat
        if (gates != nullptr) out.pairs[static_cast<std::size_t>(last)].weight += weight;
        continue;
      }
      last = static_cast<std::int64_t>(out.pairs.size());
      out.pairs.push_back({rank, ids[k], 0, weight});
      ++out.pairs_per_expert[expert];
    }
    sort_by_rank(plan, token, static_cast<std::size_t>(first), out);
    out.begin.push_back(static_cast<std::int64_t>(out.pairs.size()));
  }
}

std::int64_t place_pairs(const std::vector<std::int32_t>& counts, const ExpertMap& map, int source,
                         std::int64_t alignment, PairPlan& plan) {
  const auto num_experts = static_cast<std::size_t>(map.num_experts);
  std::vector<std::int64_t>& next = plan.last_pair;
  const std::int64_t most =
      walk_experts(counts, map, alignment, [&](std::size_t expert, std::int64_t row) {
        for (int other = 0; other < source; ++other) {
          row += counts[static_cast<std::size_t>(other) * num_experts + expert];
        }
        next[expert] = row;
      });
  for (Pair& pair : plan.pairs) pair.row = next[static_cast<std::size_t>(pair.expert)]++;
  return most;
}

std::int64_t most_places(const std::vector<std::int32_t>& counts, const ExpertMap& map,
                         std::int64_t alignment) {
  return walk_experts(counts, map, alignment, [](std::size_t, std::int64_t) {});
}

}  // namespace fanfold::plan
