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

/// Writes the ids that name experts of `rank` to `picked` [K], repeats included; returns their
/// number. Without branches, which no processor could foretell: 30 ns a row of 8 ids, not 80.
int pick_local(const std::int32_t* ids, int top_k, const ExpertMap& map, int rank,
               ExpertRows::LocalId* picked) noexcept {
  const auto num_experts = static_cast<std::uint32_t>(map.num_experts);
  const std::int32_t* const rank_of = map.rank_of.data();
  const std::int32_t* const local_of = map.local_of.data();
  int count = 0;
  for (int k = 0; k < top_k; ++k) {
    const auto id = static_cast<std::uint32_t>(ids[k]);  // "no expert" is beyond them all
    const bool is_expert = id < num_experts;
    const std::uint32_t at = is_expert ? id : 0;
    picked[count] = {k, local_of[at]};
    count += static_cast<int>(is_expert) & static_cast<int>(rank_of[at] == rank);
  }
  return count;
}

void clear_counts(const ExpertMap& map, int rank, std::int32_t* expert_counts) {
  const std::size_t num_local = map.experts_of[static_cast<std::size_t>(rank)].size();
  std::fill(expert_counts, expert_counts + num_local, 0);
}

}  // namespace

void build_expert_rows(const std::vector<SourceRows>& sources, const ExpertMap& map, int rank,
                       int top_k, std::int32_t* expert_counts, ExpertRows& out) {
  clear_counts(map, rank, expert_counts);
  out.last_pair.assign(map.experts_of[static_cast<std::size_t>(rank)].size(), -1);
  out.local_ids.resize(static_cast<std::size_t>(top_k));
  out.begin.clear();
  out.rows.clear();
  out.begin.push_back(0);
  for (const SourceRows& source : sources) {
    for (std::int64_t row = 0; row < source.num_rows; ++row) {
      const float* weights = source.weights == nullptr ? nullptr : source.weights + row * top_k;
      const int count =
          pick_local(source.ids + row * top_k, top_k, map, rank, out.local_ids.data());
      const auto first = static_cast<std::int64_t>(out.rows.size());
      for (int i = 0; i < count; ++i) {
        const auto [k, local] = out.local_ids[static_cast<std::size_t>(i)];
        std::int64_t& last_pair = out.last_pair[static_cast<std::size_t>(local)];
        if (last_pair >= first) {  // of this row: a repeat, whose weights add up, k ascending
          if (weights != nullptr)
            out.rows[static_cast<std::size_t>(last_pair)].weight += weights[k];
          continue;
        }
        last_pair = static_cast<std::int64_t>(out.rows.size());
        out.rows.push_back(
            ExpertRow{local, expert_counts[local]++, weights == nullptr ? 1.0F : weights[k]});
      }
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
