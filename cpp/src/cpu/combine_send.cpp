// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cpu/backend.h"

namespace fanfold::cpu {
namespace {

/// Folds the rows of `source` of expert_major results to partials (or, for origin, picks them).
/// `row` counts the received rows of all sources.
class Folder {
 public:
  Folder(const exec::Context& context, const exec::CombineSendParams& params)
      : context_(context),
        params_(params),
        y_row_bytes_(params.hidden * size_of(params.y_dtype)),
        row_bytes_(params.hidden * size_of(params.combine_dtype)) {}

  void fold(int source, std::size_t first_row) {
    const plan::ExpertRows& map = *params_.expert_rows;
    for (std::int64_t i = 0; i < params_.rank_counts[source]; ++i) {
      const std::size_t row = first_row + static_cast<std::size_t>(i);
      rows_.clear();
      weights_.clear();
      for (std::int64_t pair = map.begin[row]; pair < map.begin[row + 1]; ++pair) {
        const plan::ExpertRow& from = map.rows[static_cast<std::size_t>(pair)];
        const std::int64_t at = from.local_expert * params_.rows_per_expert + from.position;
        rows_.push_back(params_.y + at * y_row_bytes_);
        weights_.push_back(from.weight);
      }
      std::byte* out = params_.rows + (source * params_.round_max_tokens + i) *
                                          params_.rows_per_token * row_bytes_;
      if (params_.origin) {
        for (std::size_t j = 0; j < rows_.size(); ++j) {
          sum(out + static_cast<std::int64_t>(j) * row_bytes_, &rows_[j], nullptr, 1);
        }
      } else {
        sum(out, rows_.data(), params_.carried ? weights_.data() : nullptr, rows_.size());
      }
    }
  }

 private:
  void sum(std::byte* out, const void* const* rows, const float* weights,
           std::size_t num_rows) const {
    context_.kernels->sum_rows(out, params_.combine_dtype, rows, weights,
                               static_cast<std::int64_t>(num_rows), params_.y_dtype,
                               params_.hidden);
  }

  const exec::Context& context_;
  const exec::CombineSendParams& params_;
  std::int64_t y_row_bytes_;
  std::int64_t row_bytes_;
  std::vector<const void*> rows_;
  std::vector<float> weights_;
};

/// rank_major results that do not lie in the combine buffer: a copy, or a rounding to
/// combine_dtype.
void stage(const exec::Context& context, const exec::CombineSendParams& params, int source) {
  const std::int64_t first = source * params.round_max_tokens;
  const std::int64_t num_rows = params.rank_counts[source];
  const std::int64_t row_bytes = params.hidden * size_of(params.combine_dtype);
  if (num_rows == 0 || params.y == params.rows) return;
  if (params.y_dtype == params.combine_dtype) {
    std::memcpy(params.rows + first * row_bytes, params.y + first * row_bytes,
                static_cast<std::size_t>(num_rows * row_bytes));
    return;
  }
  const std::int64_t y_row_bytes = params.hidden * size_of(params.y_dtype);
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const void* row = params.y + (first + i) * y_row_bytes;
    context.kernels->sum_rows(params.rows + (first + i) * row_bytes, params.combine_dtype, &row,
                              nullptr, 1, params.y_dtype, params.hidden);
  }
}

}  // namespace

// Peers read the rows in place. Each peer's flag follows its own rows, so that it need not wait for
// the others'; the release of the flag (and the fence, for streaming stores of the expert) carries
// the rows, the expert's included.
void combine_send(const exec::Context& context, const exec::CombineSendParams& params) {
  std::vector<std::size_t> first_rows(static_cast<std::size_t>(context.num_ranks));
  std::size_t row = 0;
  for (int source = 0; source < context.num_ranks; ++source) {
    first_rows[static_cast<std::size_t>(source)] = row;
    row += static_cast<std::size_t>(params.rank_counts[source]);
  }
  Folder folder(context, params);
  for (int i = 1; i <= context.num_ranks; ++i) {
    const int peer = (context.rank + i) % context.num_ranks;
    if (params.expert_rows != nullptr) {
      folder.fold(peer, first_rows[static_cast<std::size_t>(peer)]);
    } else {
      stage(context, params, peer);
    }
    context.hook->step();
    if (peer == context.rank || params.flags == nullptr ||
        !(*params.active)[static_cast<std::size_t>(peer)]) {
      continue;
    }
    context.kernels->store_fence();
    exec::publish(*params.flags[peer], params.fields);
    context.control->ring(peer);
    context.hook->step();
  }
}

}  // namespace fanfold::cpu
