// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a backend is told; plain structs. R ranks, K top_k, m rows per source, L local experts.
// "in" memory is only read, "out" memory is overwritten.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "base/kernels.h"
#include "base/step_hook.h"
#include "comm/control.h"
#include "exec/flag_line.h"
#include "exec/peer_distance.h"
#include "exec/workers.h"
#include "fanfold/all_to_all_config.h"
#include "fanfold/dtype.h"
#include "fanfold/tensor_view.h"
#include "plan/expert_map.h"
#include "plan/expert_rows.h"
#include "plan/pair_plan.h"
#include "plan/send_plan.h"

namespace fanfold::exec {

/// What every call on one object shares. Owned by the exchange.
struct Context {
  const base::Kernels* kernels;
  base::StepHook* hook;
  comm::Control* control;  // null where no peer is waited for
  int rank;
  int num_ranks;
  bool streaming;              // remote rows may be pushed past the cache
  PeerDistance* distances;     // [R]; null: unknown
  Workers* workers = nullptr;  // that share large phases; null: the calling thread only
};

/// One payload of a dispatch: the sender's rows and the region that receives them.
struct PayloadRows {
  const std::byte* rows;  // in [T, row_bytes], row_stride_bytes apart
  std::int64_t row_stride_bytes;
  std::int64_t row_bytes;
  std::int64_t region_offset;        // from the slot base
  std::int64_t region_stride_bytes;  // between rows of the region; row_bytes plus the test guard
};

/// Rows of one slot as peers push them: row (r, i) of each array is at r * m + i.
struct RowArrays {
  std::int64_t source_token_offset;  // [R, m] int32, from the slot base
  std::int64_t topk_ids_offset;      // [R, m, K] int32
  std::int64_t topk_weights_offset;  // [R, m, K] float32
  std::int64_t round_max_tokens;     // m
  int top_k;
};

/// Push this rank's rows into every rank's slot, then raise the flags.
struct DispatchSendParams {
  const plan::SendPlan* plan;
  const plan::PairPlan* pairs;  // payload rows go where it says; null: where `plan` says
  const std::vector<PayloadRows>* payloads;
  const float* topk_weights;    // in [T, K], weights_stride apart; null: none travel
  std::int64_t weights_stride;  // elements
  bool with_indices;            // false along an earlier routing: ids stay where they are
  RowArrays arrays;
  const std::int64_t* first_rows;  // in [R] where this rank's rows begin on each rank
  std::byte* const* slot_bases;    // out [R] this slot in each rank's window
  FlagLine* const* flags;          // out [R] this rank's line in each window
  const std::vector<bool>* active;
  FlagFields fields;   // without num_rows
  std::byte* staging;  // scratch [M * K * 4] bytes
};

/// Wait for every active rank's rows; fill the ids of rows without a token.
struct DispatchRecvParams {
  FlagLine* const* flags;  // in [R] lines of this window, by source
  FlagFields fields;       // what the peers' flags must agree with
  const plan::SendPlan* plan;
  std::int32_t* rank_counts;   // out [R]
  std::int32_t* token_counts;  // out [R] every rank's T
  std::int32_t* topk_ids;      // in/out [R, m, K]; null: leave them
  std::int32_t invalid_expert_id;
  RowArrays arrays;
  std::int64_t round;  // for messages
  base::Deadline deadline;
};

/// Copies rows to where their experts want them. Rows of the layout from `num_rows` on are left
/// out.
struct ExpandRowsParams {
  const plan::ExpertRows* expert_rows;
  const std::int32_t* rank_counts;    // in [R]
  const std::int64_t* row_begin;      // in [R] of each source's rows
  const std::int64_t* expert_begin;   // in [L+1] of each expert's rows
  const std::int32_t* expert_counts;  // in [L]; null: do not zero what follows an expert's rows
  std::int64_t num_experts;           // L
  std::int64_t num_rows;              // of the target
  bool in_place;                      // the senders did it; only what follows an expert's rows
  struct Payload {
    const std::byte* source;  // in, row (r, i) at row_begin[r] + i; null if in place
    std::byte* target;        // out, row (l, i) at expert_begin[l] + i
    std::int64_t row_bytes;
    std::int64_t stride_bytes;  // of both
  };
  std::vector<Payload> payloads;
  float* weights;  // out [num_rows]; null: none
};

/// Copies the rows of each source to where a layout per rank wants them. Rows of the target from
/// `num_rows` on are left out.
struct MoveRowsParams {
  const std::int32_t* rank_counts;   // in [R]
  const std::int64_t* source_begin;  // in [R]
  const std::int64_t* target_begin;  // in [R]
  std::int64_t num_rows;             // of the target
  struct Payload {
    const std::byte* source;
    std::byte* target;
    std::int64_t row_bytes;
    std::int64_t stride_bytes;  // of both
  };
  std::vector<Payload> payloads;
};

/// Packs rows of numbers to FP8 E4M3 with one scale per 128 elements.
struct PackRowsParams {
  const std::byte* rows;  // in [num_rows, hidden], row_stride_bytes apart
  std::int64_t row_stride_bytes;
  DType dtype;
  std::int64_t hidden;
  std::int64_t num_rows;
  WireScale wire_scale;
  std::byte* packed;  // out [num_rows, hidden] FP8
  std::byte* scales;  // out [num_rows, ceil(hidden / 128)]
};

/// Copies picked rows to consecutive rows.
struct GatherRowsParams {
  const std::byte* source;  // in, row j at j * source_stride_bytes
  std::int64_t source_stride_bytes;
  const std::int32_t* indices;  // in [num_rows] the rows to pick
  std::int64_t num_rows;
  std::byte* target;  // out, row i at i * target_stride_bytes
  std::int64_t target_stride_bytes;
  std::int64_t row_bytes;  // of the source
  DType source_dtype;      // unequal: each row is rounded to target_dtype
  DType target_dtype;
};

/// Fold the experts' rows to what travels home, and raise the flags.
struct CombineSendParams {
  const std::byte* y;  // in, in the layout
  DType y_dtype;
  DType combine_dtype;
  std::int64_t hidden;
  const std::int32_t* rank_counts;  // in [R]
  const std::int64_t* row_begin;    // in [R] where each source's rows begin in `rows`
  const std::int64_t* y_begin;      // in [R] a layout per rank: where they begin in `y`
  std::int64_t num_y_rows;          // rows of `y`; results of rows beyond count as zeros
  // Not null: the rows of `y`, as many as num_y_rows, go home as the layout has them, from here, as
  // `layout_dtype`. `y` may lie here.
  std::byte* layout_rows;
  DType layout_dtype;
  // Layouts per expert; null: a layout per rank, and `y` may be `rows` itself.
  const plan::ExpertRows* expert_rows;
  const std::int64_t* expert_begin;  // in [L] where each expert's rows begin in `y`
  bool carried;                      // multiply by the weights of expert_rows
  bool origin;                       // one row per pair, rows_per_token rows for each row received
  std::int64_t rows_per_token;
  Wire wire;
  WireScale wire_scale;
  std::int64_t row_bytes;  // of one row that travels
  std::byte* rows;         // out [rows of the store, rows_per_token, row_bytes]
  FlagLine* const* flags;  // out [R] this rank's line in each window; null: none
  const std::vector<bool>* active;
  FlagFields fields;
};

/// Rows of a rank's whole layout, null: they come otherwise.
struct LayoutRows {
  const std::byte* rows = nullptr;
  DType dtype = DType::kFloat32;
};

/// Add each token's rows.
struct SumRowsParams {
  const plan::SendPlan* plan;
  const std::byte* const* sources;  // in [R] rows of this rank's tokens on each rank
  const plan::PairPlan* pairs;      // null: rows come as `plan` says, from every rank
  const LayoutRows* layout_rows;    // in [R] the ranks whose rows come as `pairs` says
  bool carried;                     // multiply these by the weights of `pairs`
  DType combine_dtype;
  std::int64_t hidden;
  std::int64_t rows_per_token;
  Wire wire;
  WireScale wire_scale;
  std::int64_t row_bytes;  // of one row that travelled
  // Weighting origin: one row per (token, distinct expert), k ascending; else null.
  const plan::ExpertMap* origin_map;
  const std::vector<bool>* active;
  const float* topk_weights;  // in [T, K], weights_stride apart
  std::int64_t weights_stride;
  std::byte* out;  // out [T, H], out_stride_bytes apart
  std::int64_t out_stride_bytes;
  DType out_dtype;
};

/// Wait for every active rank's flag of one phase.
struct WaitFlagsParams {
  FlagLine* const* flags;  // in [R] lines of this window, by source
  FlagFields fields;       // what they must agree with
  const std::vector<bool>* active;
  const char* phase;
  std::int64_t round;
  base::Deadline deadline;
};

/// Overwrite ids by policy.
struct SanitizeParams {
  TensorView ids;              // in [R, m, K] (or [n, K] with counts [1])
  const std::int32_t* counts;  // in, per entry of the first dimension
  TensorView out;              // out, shape of ids
  std::int64_t invalid_expert_id;
  SanitizePolicy policy;
  const plan::ExpertMap* map;
  int rank;
};

}  // namespace fanfold::exec
