// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rank hosts which expert, and which experts are copies of one logical expert, as look-up
// tables.

#include <cstdint>
#include <vector>

#include "fanfold/all_to_all_config.h"

namespace fanfold::plan {

/// Tables of one placement. "Local" ids count a rank's experts in ascending order of global id.
struct ExpertMap {
  int num_experts = 0;
  int num_ranks = 0;
  int max_local_experts = 0;                          // of any rank
  std::vector<std::int32_t> rank_of;                  // [E]
  std::vector<std::int32_t> local_of;                 // [E]
  std::vector<std::vector<std::int32_t>> experts_of;  // [R] ascending global ids
  // Replicas. Without them every expert is its own only copy, and the two tables are empty.
  int num_logical = 0;                   // ids that callers may give: 0 to num_logical - 1
  std::vector<std::int32_t> copy_begin;  // [num_logical + 1] into copies
  std::vector<std::int32_t> copies;      // [E] by logical id, then ascending

  bool has_replicas() const noexcept { return !copies.empty(); }
  /// The copy of `logical` (below num_logical) that token `token` of rank `source_rank` goes to.
  std::int32_t copy_for(std::int64_t logical, int source_rank, std::int64_t token) const noexcept {
    if (!has_replicas()) return static_cast<std::int32_t>(logical);
    const auto at = static_cast<std::size_t>(logical);
    const std::int64_t num_copies = copy_begin[at + 1] - copy_begin[at];
    return copies[static_cast<std::size_t>(copy_begin[at] + (source_rank + token) % num_copies)];
  }
};

/// @throws InvalidArgument  a table has a wrong length, or names a rank or logical expert that
///         cannot be, or a logical expert has no copy.
ExpertMap build_expert_map(const Placement& placement, int num_experts, int num_ranks);

}  // namespace fanfold::plan
