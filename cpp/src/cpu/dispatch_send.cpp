// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "cpu/backend.h"

namespace fanfold::cpu {
namespace {

using CopyFunction = void (*)(std::byte*, const std::byte*, std::int64_t);

void copy_ordinary(std::byte* target, const std::byte* source, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(target, source, static_cast<std::size_t>(bytes));
}

/// Copies the rows of `tokens` to consecutive rows at `target`. Runs of consecutive tokens that are
/// dense on both sides go as one copy.
void copy_rows(CopyFunction copy, const exec::PayloadRows& payload, const std::int32_t* tokens,
               std::int64_t num_rows, std::byte* target) {
  const bool dense = payload.row_stride_bytes == payload.row_bytes &&
                     payload.region_stride_bytes == payload.row_bytes;
  std::int64_t row = 0;
  while (row < num_rows) {
    const std::int64_t token = tokens[row];
    std::int64_t run = 1;
    while (dense && row + run < num_rows && tokens[row + run] == token + run) ++run;
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

void push_indices(CopyFunction copy, const exec::Context& context,
                  const exec::DispatchSendParams& params, int rank, std::byte* slot) {
  const exec::RowArrays& arrays = params.arrays;
  const std::int32_t* tokens = params.plan->tokens_for(rank);
  const std::int64_t num_rows = params.plan->rows_per_rank[static_cast<std::size_t>(rank)];
  if (num_rows == 0) return;
  const std::int64_t first = context.rank * arrays.round_max_tokens;
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

void push_to(CopyFunction copy, const exec::Context& context,
             const exec::DispatchSendParams& params, int rank) {
  std::byte* slot = params.slot_bases[rank];
  const std::int32_t* tokens = params.plan->tokens_for(rank);
  const std::int64_t num_rows = params.plan->rows_per_rank[static_cast<std::size_t>(rank)];
  if (params.with_indices) push_indices(copy, context, params, rank, slot);
  context.hook->step();
  for (const exec::PayloadRows& payload : *params.payloads) {
    const std::int64_t first = context.rank * params.arrays.round_max_tokens;
    copy_rows(copy, payload, tokens, num_rows,
              slot + payload.region_offset + first * payload.region_stride_bytes);
    context.hook->step();
  }
}

}  // namespace

// Remote rows first, each followed by its flag, so that peers need not wait for the others' rows;
// this rank's own rows last, with ordinary stores. The fence before each flag covers the streaming
// stores, which a release store alone would not.
void dispatch_send(const exec::Context& context, const exec::DispatchSendParams& params) {
  const CopyFunction remote = context.streaming ? context.kernels->copy_streaming : &copy_ordinary;
  for (int i = 1; i < context.num_ranks; ++i) {
    const int peer = (context.rank + i) % context.num_ranks;
    if (!(*params.active)[static_cast<std::size_t>(peer)]) continue;
    push_to(remote, context, params, peer);
    context.kernels->store_fence();
    context.hook->step();
    exec::FlagFields fields = params.fields;
    fields.num_rows =
        static_cast<std::uint32_t>(params.plan->rows_per_rank[static_cast<std::size_t>(peer)]);
    exec::publish(*params.flags[peer], fields);
    context.control->ring(peer);
    context.hook->step();
  }
  push_to(&copy_ordinary, context, params, context.rank);
}

}  // namespace fanfold::cpu
