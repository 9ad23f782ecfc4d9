// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which token goes to which rank, and as which row.

#include <cstdint>
#include <optional>
#include <vector>

#include "fanfold/tensor_view.h"
#include "plan/expert_map.h"

namespace fanfold::plan {

/// Where one copy of a token lies: row `row` of this rank's rows on `rank`.
struct Target {
  std::int32_t rank;
  std::int32_t row;
};

/// Routing of one rank's tokens. A token has one target per rank that hosts at least one of its
/// experts; rows of a rank keep the order of the tokens.
struct SendPlan {
  int source_rank = 0;  // whose tokens these are; with replicas the copies depend on it
  std::int64_t num_tokens = 0;
  int top_k = 0;
  std::int64_t capacity = 0;                 // M: stride of tokens_by_rank
  std::vector<std::int32_t> ids;             // [T, K] as they travel; dropped ids are -1
  std::vector<std::int64_t> target_begin;    // [T+1] into targets
  std::vector<Target> targets;               // per token, ranks ascending
  std::vector<std::int32_t> rows_per_rank;   // [R]
  std::vector<std::int32_t> tokens_by_rank;  // [R, M]; the first rows_per_rank[r] of [r]
  std::int64_t num_dropped = 0;
  std::vector<std::int32_t> scratch;  // [K+1]

  const std::int32_t* tokens_for(int rank) const noexcept {
    return tokens_by_rank.data() + rank * capacity;
  }
  const std::int32_t* ids_of(std::int64_t token) const noexcept {
    return ids.data() + token * top_k;
  }
};

/// An id that is too large.
struct BadId {
  std::int64_t row;
  int column;
  std::int64_t id;
};

/// Reserves for `max_tokens` tokens, so that later rounds allocate nothing.
void reserve_send_plan(SendPlan& plan, const ExpertMap& map, int top_k, std::int64_t max_tokens);

/// Fills `plan` from `topk_ids` [>= num_tokens, K] (int16, int32, int64 or uint32; any row stride).
/// With replicas they are logical, and the plan holds the ids of the copies that are picked.
/// Targets on inactive ranks are left out. With `drop`, ids >= map.num_logical become -1 and are
/// counted; without it the first such id is returned and `plan` is unusable.
std::optional<BadId> build_send_plan(const TensorView& topk_ids, std::int64_t num_tokens,
                                     const ExpertMap& map, const std::vector<bool>& active,
                                     bool drop, SendPlan& plan);

/// Every token goes to every active rank: the plan of a gathered dispatch without ids.
void build_full_plan(std::int64_t num_tokens, const ExpertMap& map, const std::vector<bool>& active,
                     SendPlan& plan);

/// Whether column `k` of a token's ids repeats an earlier column.
inline bool is_repeat(const std::int32_t* ids, int k) noexcept {
  for (int i = 0; i < k; ++i) {
    if (ids[i] == ids[k]) return true;
  }
  return false;
}

/// Sum in float32, k ascending, of the weights of all columns that hold the id of column `k`.
inline float merged_weight(const std::int32_t* ids, const float* weights, int k,
                           int top_k) noexcept {
  float sum = weights[k];
  for (int i = k + 1; i < top_k; ++i) {
    if (ids[i] == ids[k]) sum += weights[i];
  }
  return sum;
}

}  // namespace fanfold::plan
