// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
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

/// The rows of a token where ranks leave the results of each expert where the layout has them.
class PairRows {
 public:
  PairRows(const exec::Context& context, const exec::SumRowsParams& params)
      : context_(context), params_(params) {}

  /// One partial per rank, which is summed here unless the rank has sent it.
  void collect(std::int64_t token, std::vector<const void*>& rows) {
    const plan::SendPlan& plan = *params_.plan;
    const auto at = static_cast<std::size_t>(token);
    num_scratch_ = 0;
    const plan::Pair* pair = params_.pairs->pairs.data() + params_.pairs->begin[at];
    const plan::Pair* const end = params_.pairs->pairs.data() + params_.pairs->begin[at + 1];
    for (std::int64_t i = plan.target_begin[at]; i < plan.target_begin[at + 1]; ++i) {
      const plan::Target target = plan.targets[static_cast<std::size_t>(i)];
      const exec::LayoutRows& layout = params_.layout_rows[target.rank];
      group_.clear();
      weights_.clear();
      for (; pair < end && pair->rank == target.rank; ++pair) {
        group_.push_back(row_of(layout, *pair));
        weights_.push_back(pair->weight);
      }
      if (layout.rows == nullptr) {
        rows.push_back(params_.sources[target.rank] + target.row * params_.row_bytes);
      } else if (group_.size() == 1 && !params_.carried && layout.dtype == params_.combine_dtype) {
        rows.push_back(group_.front());
      } else {
        rows.push_back(sum_group(layout.dtype));
      }
    }
  }

  /// One row per distinct expert, k ascending, as combine_dtype.
  void collect_origin(std::int64_t token, std::vector<const void*>& rows,
                      std::vector<float>& weights) {
    const plan::SendPlan& plan = *params_.plan;
    const std::int32_t* ids = plan.ids_of(token);
    const float* gates = params_.topk_weights + token * params_.weights_stride;
    const auto at = static_cast<std::size_t>(token);
    const plan::Pair* const begin = params_.pairs->pairs.data() + params_.pairs->begin[at];
    const plan::Pair* const end = params_.pairs->pairs.data() + params_.pairs->begin[at + 1];
    num_scratch_ = 0;
    for (int k = 0; k < plan.top_k; ++k) {
      if (ids[k] < 0 || plan::is_repeat(ids, k)) continue;
      const plan::Pair* const pair =
          std::find_if(begin, end, [&](const plan::Pair& p) { return p.expert == ids[k]; });
      if (pair == end) continue;  // on a rank that is left out
      const exec::LayoutRows& layout = params_.layout_rows[pair->rank];
      const void* row = row_of(layout, *pair);
      if (layout.dtype != params_.combine_dtype) {
        std::byte* const out = next_scratch(plan.top_k);
        context_.kernels->sum_rows(out, params_.combine_dtype, &row, nullptr, 1, layout.dtype,
                                   params_.hidden);
        row = out;
      }
      rows.push_back(row);
      weights.push_back(plan::merged_weight(ids, gates, k, plan.top_k));
    }
  }

 private:
  std::int64_t row_bytes() const noexcept {
    return params_.hidden * size_of(params_.combine_dtype);
  }
  const void* row_of(const exec::LayoutRows& layout, const plan::Pair& pair) const noexcept {
    return layout.rows == nullptr ? nullptr
                                  : layout.rows + pair.row * params_.hidden * size_of(layout.dtype);
  }
  /// A row of combine_dtype; of `most` rows in all.
  std::byte* next_scratch(std::int64_t most) {
    if (scratch_ == nullptr) {
      scratch_.reset(new std::byte[static_cast<std::size_t>(most * row_bytes())]);
    }
    return scratch_.get() + num_scratch_++ * row_bytes();
  }
  const void* sum_group(DType dtype) {
    std::byte* const out = next_scratch(std::min(params_.plan->top_k, context_.num_ranks));
    context_.kernels->sum_rows(out, params_.combine_dtype, group_.data(),
                               params_.carried ? weights_.data() : nullptr,
                               static_cast<std::int64_t>(group_.size()), dtype, params_.hidden);
    return out;
  }

  const exec::Context& context_;
  const exec::SumRowsParams& params_;
  std::unique_ptr<std::byte[]> scratch_;  // made when first needed, and then not cleared
  std::int64_t num_scratch_ = 0;          // rows in use
  std::vector<const void*> group_;
  std::vector<float> weights_;
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
  std::optional<PairRows> pairs;
  if (params.pairs != nullptr) pairs.emplace(context, params);
  std::int64_t run = 1;
  for (std::int64_t token = begin; token < end; token += run) {
    rows.clear();
    weights.clear();
    if (pairs && params.origin_map != nullptr) {
      pairs->collect_origin(token, rows, weights);
    } else if (pairs) {
      pairs->collect(token, rows);
    } else if (params.origin_map != nullptr) {
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
  const auto num_rows = static_cast<std::int64_t>(
      params.pairs != nullptr ? params.pairs->pairs.size() : params.plan->targets.size());
  const std::int64_t rows_per_token = params.pairs != nullptr ? 1 : params.rows_per_token;
  const std::int64_t per_token =
      num_rows / std::max<std::int64_t>(1, num_tokens) * rows_per_token + 1;
  exec::for_ranges(
      context.workers, num_tokens, per_token * params.row_bytes,
      [&](std::int64_t begin, std::int64_t end) { sum_tokens(context, params, begin, end); });
  context.hook->step();
}

}  // namespace fanfold::cpu
