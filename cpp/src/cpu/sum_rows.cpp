// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "cpu/backend.h"
#include "plan/wire.h"

namespace fanfold::cpu {
namespace {

/// Finds the row of each distinct expert of a token, k ascending, on the rank that hosts it.
class OriginRows {
 public:
  OriginRows(const exec::SumRowsParams& params, int num_ranks)
      : params_(params), picked_(static_cast<std::size_t>(num_ranks), 0) {}

  void collect(std::int64_t token, std::int64_t row_bytes, std::vector<const void*>& rows,
               std::vector<float>& weights) {
    const plan::SendPlan& plan = *params_.plan;
    const std::int32_t* ids = plan.ids_of(token);
    const float* gates = params_.topk_weights + token * params_.weights_stride;
    std::fill(picked_.begin(), picked_.end(), 0);
    for (int k = 0; k < plan.top_k; ++k) {
      if (ids[k] < 0 || plan::is_repeat(ids, k)) continue;
      const std::int32_t rank = params_.origin_map->rank_of[static_cast<std::size_t>(ids[k])];
      if (!(*params_.active)[static_cast<std::size_t>(rank)]) continue;
      const std::int64_t row =
          row_on(token, rank) * params_.rows_per_token + picked_[static_cast<std::size_t>(rank)]++;
      rows.push_back(params_.sources[rank] + row * row_bytes);
      weights.push_back(plan::merged_weight(ids, gates, k, plan.top_k));
    }
  }

 private:
  std::int64_t row_on(std::int64_t token, std::int32_t rank) const noexcept {
    const plan::SendPlan& plan = *params_.plan;
    std::int64_t at = plan.target_begin[static_cast<std::size_t>(token)];
    while (plan.targets[static_cast<std::size_t>(at)].rank != rank) ++at;
    return plan.targets[static_cast<std::size_t>(at)].row;
  }

  const exec::SumRowsParams& params_;
  std::vector<std::int32_t> picked_;
};

/// How many tokens from `token` on, below `end`, lie in consecutive rows of the same ranks: their
/// sums are one sum of a longer row. With many experts per token nearly all tokens do.
std::int64_t run_length(const plan::SendPlan& plan, std::int64_t token, std::int64_t end) noexcept {
  const auto at = static_cast<std::size_t>(token);
  const plan::Target* first = plan.targets.data() + plan.target_begin[at];
  const std::int64_t num_targets = plan.target_begin[at + 1] - plan.target_begin[at];
  std::int64_t run = 1;
  for (; token + run < end; ++run) {
    const auto next = static_cast<std::size_t>(token + run);
    if (plan.target_begin[next + 1] - plan.target_begin[next] != num_targets) break;
    const plan::Target* targets = plan.targets.data() + plan.target_begin[next];
    const auto follows = [&](const plan::Target& mine, const plan::Target& theirs) {
      return mine.rank == theirs.rank && mine.row == theirs.row + run;
    };
    if (!std::equal(targets, targets + num_targets, first, follows)) break;
  }
  return run;
}

/// Tokens `begin` to `end`.
void sum_tokens(const exec::Context& context, const exec::SumRowsParams& params, std::int64_t begin,
                std::int64_t end) {
  const plan::SendPlan& plan = *params.plan;
  const std::int64_t row_bytes = params.row_bytes;
  const bool is_packed = params.wire != Wire::kNone;
  const bool is_dense =
      !is_packed && params.out_stride_bytes == params.hidden * size_of(params.out_dtype);
  std::vector<const void*> rows;
  std::vector<float> weights;
  rows.reserve(static_cast<std::size_t>(std::int64_t{plan.top_k} + context.num_ranks));
  OriginRows origin(params, context.num_ranks);
  std::int64_t run = 1;
  for (std::int64_t token = begin; token < end; token += run) {
    rows.clear();
    weights.clear();
    if (params.origin_map != nullptr) {
      origin.collect(token, row_bytes, rows, weights);
    } else {
      run = is_dense ? run_length(plan, token, end) : 1;
      for (std::int64_t i = plan.target_begin[static_cast<std::size_t>(token)];
           i < plan.target_begin[static_cast<std::size_t>(token) + 1]; ++i) {
        const plan::Target target = plan.targets[static_cast<std::size_t>(i)];
        rows.push_back(params.sources[target.rank] + target.row * row_bytes);
      }
    }
    std::byte* out = params.out + token * params.out_stride_bytes;
    const float* factors = weights.empty() ? nullptr : weights.data();
    const auto num_rows = static_cast<std::int64_t>(rows.size());
    if (is_packed) {
      context.kernels->sum_unpack_fp8(
          out, params.out_dtype, rows.data(), plan::packed_scales_offset(params.hidden),
          params.wire_scale == WireScale::kUe8m0, factors, num_rows, params.hidden);
    } else {
      context.kernels->sum_rows(out, params.out_dtype, rows.data(), factors, num_rows,
                                params.combine_dtype, run * params.hidden);
    }
  }
}

}  // namespace

void sum_rows(const exec::Context& context, const exec::SumRowsParams& params) {
  const std::int64_t num_tokens = params.plan->num_tokens;
  const auto num_rows = static_cast<std::int64_t>(params.plan->targets.size());
  const std::int64_t per_token =
      num_rows / std::max<std::int64_t>(1, num_tokens) * params.rows_per_token + 1;
  exec::for_ranges(
      context.workers, num_tokens, per_token * params.row_bytes,
      [&](std::int64_t begin, std::int64_t end) { sum_tokens(context, params, begin, end); });
  context.hook->step();
}

}  // namespace fanfold::cpu
