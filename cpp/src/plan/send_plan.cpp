// SPDX-License-Identifier: Apache-2.0
#include "plan/send_plan.h"

#include <algorithm>
#include <limits>

namespace fanfold::plan {
namespace {

void start(SendPlan& plan, const ExpertMap& map, std::int64_t num_tokens) {
  plan.num_tokens = num_tokens;
  plan.num_dropped = 0;
  plan.target_begin.clear();
  plan.target_begin.push_back(0);
  plan.targets.clear();
  plan.rows_per_rank.assign(static_cast<std::size_t>(map.num_ranks), 0);
}

void add_target(SendPlan& plan, std::int32_t rank, std::int64_t token) {
  std::int32_t& rows = plan.rows_per_rank[static_cast<std::size_t>(rank)];
  plan.tokens_by_rank[static_cast<std::size_t>(rank * plan.capacity + rows)] =
      static_cast<std::int32_t>(token);
  plan.targets.push_back(Target{rank, rows});
  ++rows;
}

/// Inserts `rank` into the ascending set `ranks[0..count)`; returns the new count.
int insert_rank(std::int32_t* ranks, int count, std::int32_t rank) noexcept {
  int at = count;
  while (at > 0 && ranks[at - 1] > rank) --at;
  if (at > 0 && ranks[at - 1] == rank) return count;
  for (int i = count; i > at; --i) ranks[i] = ranks[i - 1];
  ranks[at] = rank;
  return count + 1;
}

/// As sent where 32 bits hold it; a more negative id still means "no expert".
template <class Id>
std::int32_t narrow_negative(Id id) noexcept {
  if constexpr (sizeof(Id) > 4) {
    return static_cast<std::int32_t>(std::max<Id>(id, std::numeric_limits<std::int32_t>::min()));
  } else {
    return static_cast<std::int32_t>(id);
  }
}

template <class Id>
std::optional<BadId> build(const TensorView& topk_ids, std::int64_t num_tokens,
                           const ExpertMap& map, const std::vector<bool>& active, bool drop,
                           SendPlan& plan) {
  start(plan, map, num_tokens);
  const int top_k = plan.top_k;
  const auto* rows = static_cast<const Id*>(topk_ids.data);
  const std::int64_t stride = topk_ids.strides[0];
  plan.ids.resize(static_cast<std::size_t>(num_tokens * top_k));
  std::int32_t* ranks = plan.scratch.data();
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const Id* in = rows + token * stride;
    std::int32_t* out = plan.ids.data() + token * top_k;
    int count = 0;
    for (int k = 0; k < top_k; ++k) {
      const Id id = in[k];
      if constexpr (std::numeric_limits<Id>::is_signed) {
        if (id < 0) {
          out[k] = narrow_negative(id);
          continue;
        }
      }
      if (static_cast<std::uint64_t>(id) >= static_cast<std::uint64_t>(map.num_logical)) {
        if (!drop) return BadId{token, k, static_cast<std::int64_t>(id)};
        out[k] = -1;
        ++plan.num_dropped;
        continue;
      }
      out[k] = map.copy_for(static_cast<std::int64_t>(id), plan.source_rank, token);
      count = insert_rank(ranks, count, map.rank_of[static_cast<std::size_t>(out[k])]);
    }
    for (int i = 0; i < count; ++i) {
      const std::int32_t rank = ranks[i];
      if (active[static_cast<std::size_t>(rank)]) add_target(plan, rank, token);
    }
    plan.target_begin.push_back(static_cast<std::int64_t>(plan.targets.size()));
  }
  return std::nullopt;
}

}  // namespace

void reserve_send_plan(SendPlan& plan, const ExpertMap& map, int top_k, std::int64_t max_tokens) {
  const std::int64_t per_token = std::min<std::int64_t>(top_k, map.num_ranks);
  plan.scratch.resize(static_cast<std::size_t>(top_k) + 1);
  plan.top_k = top_k;
  plan.capacity = max_tokens;
  plan.ids.reserve(static_cast<std::size_t>(max_tokens * top_k));
  plan.target_begin.reserve(static_cast<std::size_t>(max_tokens + 1));
  plan.targets.reserve(static_cast<std::size_t>(max_tokens * per_token));
  plan.tokens_by_rank.resize(static_cast<std::size_t>(map.num_ranks * max_tokens));
}

std::optional<BadId> build_send_plan(const TensorView& topk_ids, std::int64_t num_tokens,
                                     const ExpertMap& map, const std::vector<bool>& active,
                                     bool drop, SendPlan& plan) {
  switch (topk_ids.dtype) {
    case DType::kInt16:
      return build<std::int16_t>(topk_ids, num_tokens, map, active, drop, plan);
    case DType::kInt64:
      return build<std::int64_t>(topk_ids, num_tokens, map, active, drop, plan);
    case DType::kUInt32:
      return build<std::uint32_t>(topk_ids, num_tokens, map, active, drop, plan);
    default:  // the caller has checked: int32
      return build<std::int32_t>(topk_ids, num_tokens, map, active, drop, plan);
  }
}

void build_full_plan(std::int64_t num_tokens, const ExpertMap& map, const std::vector<bool>& active,
                     SendPlan& plan) {
  start(plan, map, num_tokens);
  plan.ids.clear();
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::int32_t rank = 0; rank < map.num_ranks; ++rank) {
      if (active[static_cast<std::size_t>(rank)]) add_target(plan, rank, token);
    }
    plan.target_begin.push_back(static_cast<std::int64_t>(plan.targets.size()));
  }
}

}  // namespace fanfold::plan
