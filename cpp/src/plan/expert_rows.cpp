// SPDX-License-Identifier: Apache-2.0
#include "plan/expert_rows.h"

#include <algorithm>

#include "plan/send_plan.h"

namespace fanfold::plan {
namespace {

/// Calls visit(k, local expert) for each distinct expert of `rank` among a row's ids.
template <class Visit>
void for_each_local(const std::int32_t* ids, int top_k, const ExpertMap& map, int rank,
                    Visit&& visit) {
  for (int k = 0; k < top_k; ++k) {
    const std::int32_t id = ids[k];
    if (id < 0 || id >= map.num_experts) continue;
    if (map.rank_of[static_cast<std::size_t>(id)] != rank || is_repeat(ids, k)) continue;
    visit(k, map.local_of[static_cast<std::size_t>(id)]);
  }
}

void clear_counts(const ExpertMap& map, int rank, std::int32_t* expert_counts) {
  const std::size_t num_local = map.experts_of[static_cast<std::size_t>(rank)].size();
  std::fill(expert_counts, expert_counts + num_local, 0);
}

}  // namespace

void build_expert_rows(const std::vector<SourceRows>& sources, const ExpertMap& map, int rank,
                       int top_k, std::int32_t* expert_counts, ExpertRows& out) {
  clear_counts(map, rank, expert_counts);
  out.begin.clear();
  out.rows.clear();
  out.begin.push_back(0);
  for (const SourceRows& source : sources) {
    for (std::int64_t row = 0; row < source.num_rows; ++row) {
      const std::int32_t* ids = source.ids + row * top_k;
      for_each_local(ids, top_k, map, rank, [&](int k, std::int32_t local) {
        const float weight = source.weights == nullptr
                                 ? 1.0F
                                 : merged_weight(ids, source.weights + row * top_k, k, top_k);
        out.rows.push_back(ExpertRow{local, expert_counts[local]++, weight});
      });
      out.begin.push_back(static_cast<std::int64_t>(out.rows.size()));
    }
  }
}

void count_expert_rows(const std::vector<SourceRows>& sources, const ExpertMap& map, int rank,
                       int top_k, std::int32_t* expert_counts) {
  clear_counts(map, rank, expert_counts);
  for (const SourceRows& source : sources) {
    for (std::int64_t row = 0; row < source.num_rows; ++row) {
      for_each_local(source.ids + row * top_k, top_k, map, rank,
                     [&](int, std::int32_t local) { ++expert_counts[local]; });
    }
  }
}

}  // namespace fanfold::plan
