// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/copy.h"

namespace fanfold::cpu {
namespace {

template <class Payload>
std::int64_t row_bytes_of(const std::vector<Payload>& payloads) noexcept {
  std::int64_t row_bytes = 0;
  for (const Payload& payload : payloads) row_bytes += payload.row_bytes;
  return row_bytes;
}

/// Rows `begin` to `end` of all received rows, each to every one of its experts. `copy` is told
/// where the next copy will go: hardware does not foresee that, and fetching those lines meanwhile
/// saves 5 us of 40 for 256 rows of 4 KiB (Sapphire Rapids).
template <class Copy>
void expand(const exec::ExpandRowsParams& params, std::int64_t begin, std::int64_t end,
            Copy&& copy) {
  const plan::ExpertRows& map = *params.expert_rows;
  const auto num_pairs = static_cast<std::int64_t>(map.rows.size());
  const auto place_of = [&](std::int64_t pair) {
    const plan::ExpertRow& to = map.rows[static_cast<std::size_t>(pair)];
    return params.expert_begin[to.local_expert] + to.position;
  };
  std::int64_t row = 0;
  for (int source = 0; row < end; ++source) {
    const std::int64_t first = row;
    const std::int64_t next = first + params.rank_counts[source];
    for (row = std::max(first, begin); row < std::min(next, end); ++row) {
      const std::int64_t from = params.row_begin[source] + row - first;
      for (std::int64_t pair = map.begin[static_cast<std::size_t>(row)];
           pair < map.begin[static_cast<std::size_t>(row) + 1]; ++pair) {
        const std::int64_t at = place_of(pair);
        if (at >= params.num_rows) continue;
        std::int64_t next_at = pair + 1 < num_pairs ? place_of(pair + 1) : at;
        if (next_at >= params.num_rows) next_at = at;
        for (const auto& payload : params.payloads) {
          if (params.in_place) break;
          copy(payload.target + at * payload.stride_bytes,
               payload.source + from * payload.stride_bytes, payload.row_bytes,
               payload.target + next_at * payload.stride_bytes);
        }
        if (params.weights != nullptr) {
          params.weights[at] = map.rows[static_cast<std::size_t>(pair)].weight;
        }
      }
    }
    row = next;
  }
}

/// The rows between the end of each expert's rows and the next expert's, of experts `begin` to
/// `end`.
void zero_gaps(const exec::ExpandRowsParams& params, std::int64_t begin, std::int64_t end) {
  for (std::int64_t expert = begin; expert < end; ++expert) {
    const std::int64_t end_of_gap = std::min(params.expert_begin[expert + 1], params.num_rows);
    const std::int64_t first = params.expert_begin[expert] + params.expert_counts[expert];
    for (std::int64_t at = first; at < end_of_gap; ++at) {
      for (const auto& payload : params.payloads) {
        std::memset(payload.target + at * payload.stride_bytes, 0,
                    static_cast<std::size_t>(payload.row_bytes));
      }
      if (params.weights != nullptr) params.weights[at] = 0.0F;
    }
  }
}

}  // namespace

void expand_rows(const exec::Context& context, const exec::ExpandRowsParams& params) {
  const plan::ExpertRows& map = *params.expert_rows;
  const auto num_rows = static_cast<std::int64_t>(map.begin.size()) - 1;
  const auto num_pairs = static_cast<std::int64_t>(map.rows.size());
  const std::int64_t row_bytes = row_bytes_of(params.payloads);
  const bool streaming = context.streaming && num_pairs * row_bytes > kStreamingBytes;
  const base::Kernels& kernels = *context.kernels;
  const std::int64_t per_row = num_pairs / std::max<std::int64_t>(1, num_rows) + 1;
  const auto stream = [&](std::byte* to, const std::byte* from, std::int64_t bytes,
                          const std::byte*) { kernels.copy_streaming(to, from, bytes); };
  exec::for_ranges(context.workers, num_rows, params.in_place ? 8 : per_row * row_bytes,
                   [&](std::int64_t begin, std::int64_t end) {
                     if (streaming) return expand(params, begin, end, stream);
                     expand(params, begin, end, kernels.copy_fetching);
                   });
  if (params.expert_counts != nullptr) {
    const std::int64_t num_zeros = params.expert_begin[params.num_experts] - num_pairs;
    exec::for_ranges(context.workers, params.num_experts,
                     num_zeros / std::max<std::int64_t>(1, params.num_experts) * row_bytes,
                     [&](std::int64_t begin, std::int64_t end) { zero_gaps(params, begin, end); });
  }
  if (streaming) context.kernels->store_fence();
}

void move_rows(const exec::Context& context, const exec::MoveRowsParams& params) {
  std::int64_t num_rows = 0;
  for (int source = 0; source < context.num_ranks; ++source) num_rows += params.rank_counts[source];
  const bool streaming =
      context.streaming && num_rows * row_bytes_of(params.payloads) > kStreamingBytes;
  const auto copy = streaming ? context.kernels->copy_streaming : &copy_ordinary;
  const auto move = [&](int source, std::int64_t begin, std::int64_t end) {
    for (const auto& payload : params.payloads) {
      std::byte* target =
          payload.target + (params.target_begin[source] + begin) * payload.stride_bytes;
      const std::byte* rows =
          payload.source + (params.source_begin[source] + begin) * payload.stride_bytes;
      if (payload.stride_bytes == payload.row_bytes) {
        copy(target, rows, (end - begin) * payload.row_bytes);
        continue;
      }
      for (std::int64_t i = 0; i < end - begin; ++i) {
        copy(target + i * payload.stride_bytes, rows + i * payload.stride_bytes, payload.row_bytes);
      }
    }
  };
  for (int source = 0; source < context.num_ranks; ++source) {
    const std::int64_t num_kept = std::min<std::int64_t>(
        params.rank_counts[source], params.num_rows - params.target_begin[source]);
    if (num_kept <= 0) continue;
    exec::for_ranges(context.workers, num_kept, row_bytes_of(params.payloads),
                     [&](std::int64_t begin, std::int64_t end) { move(source, begin, end); });
  }
  if (streaming) context.kernels->store_fence();
}

}  // namespace fanfold::cpu
