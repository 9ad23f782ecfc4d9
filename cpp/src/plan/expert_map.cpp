// SPDX-License-Identifier: Apache-2.0
#include "plan/expert_map.h"

#include <algorithm>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::plan {
namespace {

std::int32_t rank_of_expert(const Placement& placement, int expert, int num_experts,
                            int num_ranks) {
  switch (placement.kind) {
    case Placement::Kind::kLinear: {
      // The first `longer` ranks host `base + 1` experts.
      const int base = num_experts / num_ranks;
      const int longer = num_experts % num_ranks;
      const int in_longer = longer * (base + 1);
      if (expert < in_longer) return expert / (base + 1);
      return longer + (expert - in_longer) / base;
    }
    case Placement::Kind::kRoundRobin:
      return expert % num_ranks;
    case Placement::Kind::kTable:
      return placement.table[static_cast<std::size_t>(expert)];
  }
  return 0;
}

/// Sorts the experts by the logical expert that each is a copy of.
void add_replicas(const std::vector<std::int32_t>& logical_of_expert, ExpertMap& map) {
  map.num_logical = map.num_experts;
  if (logical_of_expert.empty()) return;
  if (logical_of_expert.size() != static_cast<std::size_t>(map.num_experts)) {
    throw InvalidArgument(base::str("placement.logical_of_expert: expected ", map.num_experts,
                                    " logical ids (num_experts), got ", logical_of_expert.size()));
  }
  std::vector<std::int32_t> num_copies;
  for (int expert = 0; expert < map.num_experts; ++expert) {
    const std::int32_t logical = logical_of_expert[static_cast<std::size_t>(expert)];
    if (logical < 0 || logical >= map.num_experts) {
      throw InvalidArgument(base::str("placement.logical_of_expert: expected ids in [0, ",
                                      map.num_experts, "), got ", logical, " for expert ", expert));
    }
    const auto at = static_cast<std::size_t>(logical);
    num_copies.resize(std::max(num_copies.size(), at + 1));
    ++num_copies[at];
  }
  map.num_logical = static_cast<int>(num_copies.size());
  map.copy_begin.push_back(0);
  for (std::size_t logical = 0; logical < num_copies.size(); ++logical) {
    if (num_copies[logical] == 0) {
      throw InvalidArgument(
          base::str("placement.logical_of_expert: expected a copy of each of the ", map.num_logical,
                    " logical experts, got none of ", logical));
    }
    map.copy_begin.push_back(map.copy_begin.back() + num_copies[logical]);
  }
  map.copies.resize(logical_of_expert.size());
  std::vector<std::int32_t> next = map.copy_begin;
  for (std::size_t expert = 0; expert < logical_of_expert.size(); ++expert) {
    std::int32_t& at = next[static_cast<std::size_t>(logical_of_expert[expert])];
    map.copies[static_cast<std::size_t>(at++)] = static_cast<std::int32_t>(expert);
  }
}

}  // namespace

ExpertMap build_expert_map(const Placement& placement, int num_experts, int num_ranks) {
  if (placement.kind == Placement::Kind::kTable &&
      placement.table.size() != static_cast<std::size_t>(num_experts)) {
    throw InvalidArgument(base::str("placement: expected a table of ", num_experts,
                                    " ranks (num_experts), got ", placement.table.size()));
  }
  ExpertMap map;
  map.num_experts = num_experts;
  map.num_ranks = num_ranks;
  map.experts_of.resize(static_cast<std::size_t>(num_ranks));
  for (int expert = 0; expert < num_experts; ++expert) {
    const std::int32_t rank = rank_of_expert(placement, expert, num_experts, num_ranks);
    if (rank < 0 || rank >= num_ranks) {
      throw InvalidArgument(base::str("placement: expected ranks in [0, ", num_ranks,
                                      "), got rank ", rank, " for expert ", expert));
    }
    auto& experts = map.experts_of[static_cast<std::size_t>(rank)];
    map.rank_of.push_back(rank);
    map.local_of.push_back(static_cast<std::int32_t>(experts.size()));
    experts.push_back(expert);
    map.max_local_experts = std::max(map.max_local_experts, static_cast<int>(experts.size()));
  }
  add_replicas(placement.logical_of_expert, map);
  return map;
}

}  // namespace fanfold::plan
