// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rank hosts which expert, as look-up tables.

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
};

/// @throws InvalidArgument  the table has a wrong length or names a rank that does not exist.
ExpertMap build_expert_map(const Placement& placement, int num_experts, int num_ranks);

}  // namespace fanfold::plan
