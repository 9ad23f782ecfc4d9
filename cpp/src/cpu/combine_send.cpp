// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/copy.h"
#include "plan/wire.h"

namespace fanfold::cpu {
namespace {

/// Folds rows of results per expert to partials (or, for origin, picks them). Each worker has its
/// own.
class Folder {
 public:
  Folder(const exec::Context& context, const exec::CombineSendParams& params)
      : context_(context),
        params_(params),
        y_row_bytes_(params.hidden * size_of(params.y_dtype)),
        row_bytes_(params.row_bytes) {}

  /// Rows `begin` to `end` of `source`, whose row 0 is `first_row` of all received rows.
  void fold(int source, std::int64_t first_row, std::int64_t begin, std::int64_t end) {
    const plan::ExpertRows& map = *params_.expert_rows;
    for (std::int64_t i = begin; i < end; ++i) {
      const auto row = static_cast<std::size_t>(first_row + i);
      rows_.clear();
      weights_.clear();
      for (std::int64_t pair = map.begin[row]; pair < map.begin[row + 1]; ++pair) {
        const plan::ExpertRow& from = map.rows[static_cast<std::size_t>(pair)];
        const std::int64_t at = params_.expert_begin[from.local_expert] + from.position;
        const bool is_kept = at < params_.num_y_rows;
        if (!is_kept && !params_.origin) continue;
        rows_.push_back(is_kept ? params_.y + at * y_row_bytes_ : nullptr);
        weights_.push_back(from.weight);
      }
      std::byte* out =
          params_.rows + (params_.row_begin[source] + i) * params_.rows_per_token * row_bytes_;
      if (params_.origin) {
        for (std::size_t j = 0; j < rows_.size(); ++j) {
          sum(out + static_cast<std::int64_t>(j) * row_bytes_, &rows_[j], nullptr,
              rows_[j] == nullptr ? 0 : 1);
        }
      } else {
        sum(out, rows_.data(), params_.carried ? weights_.data() : nullptr, rows_.size());
      }
    }
  }

 private:
  void sum(std::byte* out, const void* const* rows, const float* weights,
           std::size_t num_rows) const {
    if (params_.wire != Wire::kNone) {
      context_.kernels->sum_pack_fp8(out, out + plan::packed_scales_offset(params_.hidden),
                                     params_.wire_scale == WireScale::kUe8m0, rows, weights,
                                     static_cast<std::int64_t>(num_rows), params_.y_dtype,
                                     params_.hidden);
      return;
    }
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

/// Copies `num_rows` rows of `y`, or rounds them to `dtype`.
void put_rows(const exec::Context& context, const exec::CombineSendParams& params, std::byte* out,
              DType dtype, const std::byte* y, std::int64_t num_rows) {
  const std::int64_t row_bytes = params.hidden * size_of(dtype);
  const std::int64_t y_row_bytes = params.hidden * size_of(params.y_dtype);
  if (params.y_dtype == dtype) return copy_ordinary(out, y, num_rows * row_bytes);
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const void* row = y + i * y_row_bytes;
    context.kernels->sum_rows(out + i * row_bytes, dtype, &row, nullptr, 1, params.y_dtype,
                              params.hidden);
  }
}

/// Results per rank that do not lie in the combine buffer: a copy, or a rounding to combine_dtype.
/// Rows `begin` to `end` of `source`.
void stage(const exec::Context& context, const exec::CombineSendParams& params, int source,
           std::int64_t begin, std::int64_t end) {
  const std::int64_t first = params.y_begin[source];
  const std::int64_t end_kept = std::clamp(params.num_y_rows - first, begin, end);
  const std::int64_t row_bytes = params.row_bytes;
  const std::int64_t y_row_bytes = params.hidden * size_of(params.y_dtype);
  std::byte* out = params.rows + params.row_begin[source] * row_bytes;
  const std::byte* y = params.y + first * y_row_bytes;
  put_rows(context, params, out + begin * row_bytes, params.combine_dtype, y + begin * y_row_bytes,
           end_kept - begin);
  if (end_kept < end) {
    std::memset(out + end_kept * row_bytes, 0,
                static_cast<std::size_t>((end - end_kept) * row_bytes));
  }
}

/// The layout's rows, which go home as they are, to where the peers find them.
void stage_layout(const exec::Context& context, const exec::CombineSendParams& params) {
  const std::int64_t row_bytes = params.hidden * size_of(params.layout_dtype);
  const std::int64_t y_row_bytes = params.hidden * size_of(params.y_dtype);
  if (params.y == params.layout_rows) return;
  const auto stage_rows = [&](std::int64_t begin, std::int64_t end) {
    put_rows(context, params, params.layout_rows + begin * row_bytes, params.layout_dtype,
             params.y + begin * y_row_bytes, end - begin);
  };
  exec::for_ranges(context.workers, params.num_y_rows, y_row_bytes, stage_rows);
}

/// Results in place end where the layout ends; the rows behind it go home, too.
void clear_dropped(const exec::CombineSendParams& params, int source) {
  const std::int64_t first = params.row_begin[source];
  const std::int64_t end = first + params.rank_counts[source];
  const std::int64_t begin = std::clamp(params.num_y_rows, first, end);
  if (begin == end) return;
  std::memset(params.rows + begin * params.row_bytes, 0,
              static_cast<std::size_t>((end - begin) * params.row_bytes));
}

/// What goes home to `source`, whose row 0 is `first_row` of all received rows; on all workers.
void prepare_rows(const exec::Context& context, const exec::CombineSendParams& params, int source,
                  std::int64_t first_row) {
  const std::int64_t num_rows = params.rank_counts[source];
  const std::int64_t y_row_bytes = params.hidden * size_of(params.y_dtype);
  if (num_rows == 0) return;
  if (params.expert_rows != nullptr) {
    const std::vector<std::int64_t>& pairs = params.expert_rows->begin;
    const std::int64_t num_pairs = pairs[static_cast<std::size_t>(first_row + num_rows)] -
                                   pairs[static_cast<std::size_t>(first_row)];
    exec::for_ranges(context.workers, num_rows, (num_pairs / num_rows + 1) * y_row_bytes,
                     [&](std::int64_t begin, std::int64_t end) {
                       Folder(context, params).fold(source, first_row, begin, end);
                     });
  } else if (params.y != params.rows) {
    exec::for_ranges(
        context.workers, num_rows, y_row_bytes,
        [&](std::int64_t begin, std::int64_t end) { stage(context, params, source, begin, end); });
  } else {
    clear_dropped(params, source);
  }
}

}  // namespace

// Peers read the rows in place. Each peer's flag follows its own rows, so that it need not wait for
// the others'; the release of the flag (and the fence, for streaming stores of the expert) carries
// the rows, the expert's included. Rows that helpers wrote are carried, too: see exec/workers.h.
void combine_send(const exec::Context& context, const exec::CombineSendParams& params) {
  std::vector<std::int64_t> first_rows(static_cast<std::size_t>(context.num_ranks));
  std::int64_t row = 0;
  for (int source = 0; source < context.num_ranks; ++source) {
    first_rows[static_cast<std::size_t>(source)] = row;
    row += params.rank_counts[source];
  }
  if (params.layout_rows != nullptr) stage_layout(context, params);
  for (int i = 1; i <= context.num_ranks; ++i) {
    const int peer = (context.rank + i) % context.num_ranks;
    if (params.layout_rows == nullptr) {
      prepare_rows(context, params, peer, first_rows[static_cast<std::size_t>(peer)]);
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
