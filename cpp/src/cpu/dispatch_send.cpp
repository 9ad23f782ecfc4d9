// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/byte_math.h"
#include "base/clock.h"
#include "cpu/backend.h"
#include "cpu/copy.h"

namespace fanfold::cpu {
namespace {

/// Copies the rows of `tokens` from `begin` to `end` to consecutive rows, row 0 at `target`. Runs
/// of consecutive tokens that are dense on both sides go as one copy.
void copy_rows(CopyFunction copy, const exec::PayloadRows& payload, const std::int32_t* tokens,
               std::int64_t begin, std::int64_t end, std::byte* target) {
  const bool dense = payload.row_stride_bytes == payload.row_bytes &&
                     payload.region_stride_bytes == payload.row_bytes;
  std::int64_t row = begin;
  while (row < end) {
    const std::int64_t token = tokens[row];
    std::int64_t run = 1;
    while (dense && row + run < end && tokens[row + run] == token + run) ++run;
    copy(target + row * payload.region_stride_bytes,
         payload.rows + token * payload.row_stride_bytes, run * payload.row_bytes);
    row += run;
  }
}

/// Packs one 4-byte-element index array row by row in `staging`, then pushes it as one copy: a
/// store per field straight into a peer's lines would fetch each line.
template <class RowOf>
void push_packed(CopyFunction copy, std::byte* staging, std::byte* target, std::int64_t num_rows,
                 std::int64_t row_bytes, RowOf&& row_of) {
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(staging + row * row_bytes, row_of(row), static_cast<std::size_t>(row_bytes));
  }
  copy(target, staging, num_rows * row_bytes);
}

void push_indices(CopyFunction copy, const exec::DispatchSendParams& params, int rank,
                  std::byte* slot) {
  const exec::RowArrays& arrays = params.arrays;
  const std::int32_t* tokens = params.plan->tokens_for(rank);
  const std::int64_t num_rows = params.plan->rows_per_rank[static_cast<std::size_t>(rank)];
  if (num_rows == 0) return;
  const std::int64_t first = params.first_rows[rank];
  const std::int64_t entry_bytes = std::int64_t{arrays.top_k} * 4;
  push_packed(copy, params.staging, slot + arrays.topk_ids_offset + first * entry_bytes, num_rows,
              entry_bytes, [&](std::int64_t row) { return params.plan->ids_of(tokens[row]); });
  if (params.topk_weights != nullptr) {
    push_packed(copy, params.staging, slot + arrays.topk_weights_offset + first * entry_bytes,
                num_rows, entry_bytes, [&](std::int64_t row) {
                  return params.topk_weights + tokens[row] * params.weights_stride;
                });
  }
  copy(slot + arrays.source_token_offset + first * 4, reinterpret_cast<const std::byte*>(tokens),
       num_rows * 4);
}

/// Rows that fill whole lines of the region, and all that have a place for each expert, go to all
/// their targets in turns of this many bytes: streaming stores to peers drain while ordinary ones
/// to this rank's own slot proceed, and a row is loaded once. Measured on Zen 4, 32 rows of 4096
/// bytes to two ranks: 5.5 us against 7.4 us one destination after the other.
constexpr std::int64_t kTurnBytes = 1024;
/// Of the many targets of a row by expert: past this, too many streams of stores are open at once.
constexpr std::int64_t kPairTurnBytes = 16384;

bool fills_lines(const exec::PayloadRows& payload) noexcept {
  return payload.row_bytes >= kTurnBytes / 2 && payload.row_bytes % base::kCacheLine == 0 &&
         payload.region_stride_bytes % base::kCacheLine == 0;
}

bool goes_in_turns(const exec::DispatchSendParams& params,
                   const exec::PayloadRows& payload) noexcept {
  return params.pairs != nullptr || fills_lines(payload);
}

/// Which stores to use for each rank's rows.
///
/// Ordinary stores into lines that a distant core holds crawl (2 GB/s), so past the cache is the
/// rule. Between cores that share a last-level cache they are the faster ones for a few rows, and
/// again where the rows overflow a core's own cache but not the shared one: 128 x 2048 bf16, two
/// ranks, dispatch 26 us against 44 us.
std::vector<CopyFunction> choose_copies(const exec::Context& context,
                                        const exec::DispatchSendParams& params) {
  constexpr std::int64_t kFewBytes = std::int64_t{16} << 10;
  constexpr std::int64_t kOverflowBytes = std::int64_t{256} << 10;
  constexpr std::int64_t kSharedBytes = std::int64_t{2} << 20;
  std::int64_t row_bytes = 0;
  for (const exec::PayloadRows& payload : *params.payloads) row_bytes += payload.row_bytes;
  std::vector<CopyFunction> copies(static_cast<std::size_t>(context.num_ranks), &copy_ordinary);
  if (!context.streaming) return copies;
  for (int rank = 0; rank < context.num_ranks; ++rank) {
    if (rank == context.rank && params.pairs == nullptr) continue;
    const auto index = static_cast<std::size_t>(rank);
    std::int64_t bytes = params.plan->rows_per_rank[index] * row_bytes;
    if (params.pairs != nullptr) {  // several rows for each of these
      bytes = bytes * static_cast<std::int64_t>(params.pairs->pairs.size()) /
              std::max<std::int64_t>(1, static_cast<std::int64_t>(params.plan->targets.size()));
    }
    if (rank == context.rank) {  // as cpu/expand_rows.cpp, which copies rows to experts elsewhere
      if (bytes > kStreamingBytes) copies[index] = context.kernels->copy_streaming;
      continue;
    }
    const bool suits = bytes <= kFewBytes || (bytes >= kOverflowBytes && bytes <= kSharedBytes);
    const bool near = context.distances != nullptr && context.distances[rank].is_near();
    if (!suits || !near) copies[index] = context.kernels->copy_streaming;
  }
  return copies;
}

/// Ordinary stores to near peers run at 15 GB/s and more, to far ones at 2 GB/s: a push below 4
/// GB/s was not near. A push that was interrupted may be mistaken, which costs little.
void check_speed(const exec::Context& context, const std::vector<CopyFunction>& copies,
                 std::int64_t bytes, std::int64_t ns) {
  constexpr std::int64_t kEnoughBytes = std::int64_t{64} << 10;
  if (context.distances == nullptr || bytes < kEnoughBytes || ns < bytes / 4) return;
  for (int rank = 0; rank < context.num_ranks; ++rank) {
    if (copies[static_cast<std::size_t>(rank)] == &copy_ordinary) context.distances[rank].refute();
  }
}

/// The rows of tokens `begin` to `end`, each to all its targets, or to all its experts.
void push_in_turns(const std::vector<CopyFunction>& copies, const exec::DispatchSendParams& params,
                   const exec::PayloadRows& payload, std::int64_t begin, std::int64_t end) {
  const plan::SendPlan& plan = *params.plan;
  struct To {
    std::byte* row;
    CopyFunction copy;
  };
  std::vector<To> targets;
  targets.reserve(copies.size());
  for (std::int64_t token = begin; token < end; ++token) {
    targets.clear();
    const auto add = [&](std::int32_t rank, std::int64_t row) {
      targets.push_back(
          {params.slot_bases[rank] + payload.region_offset + row * payload.region_stride_bytes,
           copies[static_cast<std::size_t>(rank)]});
    };
    const auto at = static_cast<std::size_t>(token);
    if (params.pairs != nullptr) {
      for (std::int64_t i = params.pairs->begin[at]; i < params.pairs->begin[at + 1]; ++i) {
        const plan::Pair& pair = params.pairs->pairs[static_cast<std::size_t>(i)];
        add(pair.rank, pair.row);
      }
    } else {
      for (std::int64_t i = plan.target_begin[at]; i < plan.target_begin[at + 1]; ++i) {
        const plan::Target target = plan.targets[static_cast<std::size_t>(i)];
        add(target.rank, params.first_rows[target.rank] + target.row);
      }
    }
    const std::byte* row = payload.rows + token * payload.row_stride_bytes;
    const std::int64_t turn = params.pairs != nullptr ? kPairTurnBytes : kTurnBytes;
    for (std::int64_t first = 0; first < payload.row_bytes; first += turn) {
      const std::int64_t bytes = std::min(turn, payload.row_bytes - first);
      for (const To& to : targets) to.copy(to.row + first, row + first, bytes);
    }
  }
}

/// Short rows: packed first where the region is dense, so that they fill whole lines.
void push_payload(const exec::Context& context, CopyFunction copy,
                  const exec::DispatchSendParams& params, const exec::PayloadRows& payload,
                  int rank) {
  const std::int32_t* tokens = params.plan->tokens_for(rank);
  const std::int64_t num_rows = params.plan->rows_per_rank[static_cast<std::size_t>(rank)];
  std::byte* target = params.slot_bases[rank] + payload.region_offset +
                      params.first_rows[rank] * payload.region_stride_bytes;
  const std::int64_t index_bytes = std::int64_t{params.arrays.top_k} * 4;
  if (payload.row_bytes <= index_bytes && payload.region_stride_bytes == payload.row_bytes) {
    push_packed(copy, params.staging, target, num_rows, payload.row_bytes, [&](std::int64_t row) {
      return payload.rows + tokens[row] * payload.row_stride_bytes;
    });
    return;
  }
  exec::for_ranges(context.workers, num_rows, payload.row_bytes,
                   [&](std::int64_t begin, std::int64_t end) {
                     copy_rows(copy, payload, tokens, begin, end, target);
                   });
}

}  // namespace

// One fence covers the streaming stores of this thread to all peers, which the release of a flag
// alone would not, and each helper has fenced its own (exec/workers.h); then the flags.
void dispatch_send(const exec::Context& context, const exec::DispatchSendParams& params) {
  const std::vector<CopyFunction> copies = choose_copies(context, params);
  const auto is_active = [&](int rank) { return (*params.active)[static_cast<std::size_t>(rank)]; };
  std::int64_t bytes = 0;  // of rows that say how fast the stores are
  std::int64_t ns = 0;
  for (const exec::PayloadRows& payload : *params.payloads) {
    if (goes_in_turns(params, payload)) {
      const std::int64_t start = base::now_ns();
      const auto num_rows = static_cast<std::int64_t>(
          params.pairs != nullptr ? params.pairs->pairs.size() : params.plan->targets.size());
      const std::int64_t num_tokens = params.plan->num_tokens;
      const std::int64_t per_token = num_rows / std::max<std::int64_t>(1, num_tokens) + 1;
      exec::for_ranges(context.workers, num_tokens, per_token * payload.row_bytes,
                       [&](std::int64_t begin, std::int64_t end) {
                         push_in_turns(copies, params, payload, begin, end);
                       });
      if (fills_lines(payload)) {
        bytes += num_rows * payload.row_bytes;
        ns += base::now_ns() - start;
      }
    }
    context.hook->step();
  }
  check_speed(context, copies, bytes, ns);
  for (int i = 1; i <= context.num_ranks; ++i) {
    const int rank = (context.rank + i) % context.num_ranks;
    if (!is_active(rank)) continue;
    const CopyFunction copy = copies[static_cast<std::size_t>(rank)];
    if (params.with_indices) push_indices(copy, params, rank, params.slot_bases[rank]);
    context.hook->step();
    for (const exec::PayloadRows& payload : *params.payloads) {
      if (!goes_in_turns(params, payload)) push_payload(context, copy, params, payload, rank);
      context.hook->step();
    }
  }
  context.kernels->store_fence();
  context.hook->step();
  for (int i = 1; i < context.num_ranks; ++i) {
    const int peer = (context.rank + i) % context.num_ranks;
    if (!is_active(peer)) continue;
    exec::FlagFields fields = params.fields;
    fields.num_rows =
        static_cast<std::uint32_t>(params.plan->rows_per_rank[static_cast<std::size_t>(peer)]);
    exec::publish(*params.flags[peer], fields);
    context.control->ring(peer);
    context.hook->step();
  }
}

}  // namespace fanfold::cpu
