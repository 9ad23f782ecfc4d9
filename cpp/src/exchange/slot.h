// SPDX-License-Identifier: Apache-2.0
#pragma once

// One of the `max_in_flight` rounds that may be open at once.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "exec/device_backend.h"
#include "exec/params.h"
#include "fanfold/received.h"
#include "plan/expert_rows.h"
#include "plan/pair_plan.h"
#include "plan/send_plan.h"
#include "plan/workspace.h"

namespace fanfold {

namespace exchange {
struct DeviceRouting;
}

/// What Routing keeps: everything of a dispatch but its payloads.
struct Routing::Data {
  std::uint64_t id = 0;             // the epoch of the dispatch that made it; equal on all ranks
  std::uint64_t config_digest = 0;  // of the AllToAll that made it
  int rank = 0;                     // likewise
  int device_index = 0;             // likewise, on a GPU
  std::uint32_t mask_digest = 0;
  std::int64_t round_max_tokens = 0;
  bool has_ids = false;
  bool has_weights = false;
  std::int32_t invalid_expert_id = -1;
  std::uint32_t placement_version = 0;
  std::uint32_t generation = 0;  // of the round that made it
  plan::SendPlan plan;
  std::vector<float> token_weights;         // [T, K] of this rank's tokens (weighting origin)
  std::vector<std::int32_t> rank_counts;    // [R]
  std::vector<std::int32_t> token_counts;   // [R]
  std::vector<std::int32_t> topk_ids;       // [rows of the store, K], or [sum of T, K] gathered
  std::vector<float> topk_weights;          // likewise
  std::vector<std::int32_t> source_token;   // [rows of the store]
  std::vector<std::int32_t> rows_matrix;    // [source, destination] rows, where every rank knows it
  std::vector<std::int32_t> gathered_rows;  // gathered: the rows routed here
  plan::PairPlan pairs;                     // rows stored by expert
  std::vector<std::int32_t> pairs_matrix;   // [source, expert] pairs, likewise
  // On a GPU counts, ids and tokens lie there; `plan` has the number of tokens only.
  std::shared_ptr<const exchange::DeviceRouting> device;
};

}  // namespace fanfold

namespace fanfold::exchange {

/// Where a slot's round stands on this rank.
enum class SlotState {
  kFree,         // no round, or it ended by a combine
  kSent,         // dispatch_send done
  kReceived,     // dispatch_recv done: the experts' turn
  kCombineSent,  // combine_send done
  kReleased,     // ended by release; peers may still hold it
};

const char* name_of(SlotState state) noexcept;

/// Shape and place of one payload.
struct PayloadSpec {
  DType dtype = DType::kUInt8;
  int ndim = 0;  // of the tensor given, rows included
  std::array<std::int64_t, TensorView::kMaxDims> shape{};
  std::int64_t row_bytes = 0;
  std::int64_t stride_bytes = 0;     // row_bytes plus the test guard
  std::int64_t region_offset = 0;    // of the rows as they arrive, from the slot base
  std::int64_t local_offset = 0;     // of the rows in the layout, in private memory
  std::int64_t gathered_offset = 0;  // layout gathered: of every token's rows, in the block
};

/// State of one slot. Everything a round needs is here, and it is re-used without allocation.
struct Slot {
  int index = 0;
  SlotState state = SlotState::kFree;
  std::int64_t round = -1;
  std::uint32_t generation = 0;
  std::uint64_t epoch = 0;
  std::uint32_t num_combines = 0;  // of this round so far
  bool keeps_open = false;         // the combine under way does not end the round
  std::int64_t hidden = 0;         // of the combine under way
  exec::FlagFields sent;           // the dispatch flag of this rank
  exec::FlagFields released;       // the flag with which this rank released the round
  std::vector<bool> released_to;   // the ranks that were active then

  std::int64_t round_max_tokens = 0;  // m
  std::int64_t num_gathered = 0;      // sum of T (gathered)
  bool has_ids = false;
  bool has_weights = false;
  std::int32_t invalid_expert_id = -1;
  plan::SendPlan own_plan;
  std::shared_ptr<const Routing::Data> routing;  // set when this round re-uses one
  std::shared_ptr<const Routing::Data> frozen;   // copy made before the ids were edited in place
  std::vector<float> token_weights;              // [T, K] (weighting origin)
  std::vector<exec::PayloadRows> payload_rows;
  std::vector<PayloadSpec> payloads;       // with a wire, the scales of payload 0 come last
  plan::Store store;                       // where the rows of this round lie
  std::vector<std::int64_t> row_begin;     // [R+1] of each source's rows in the store
  std::vector<std::int64_t> layout_begin;  // [R+1] of each source's rows in a layout per rank
  std::vector<std::int64_t> expert_begin;  // [L+1] of each expert's rows in a layout per expert
  std::int64_t num_layout_rows = 0;        // that the round brings, dropped ones included
  std::int64_t num_kept_rows = 0;          // of those: rows below the layout's capacity
  std::optional<std::vector<std::int64_t>> num_tokens_per_rank;  // as the caller knows them
  std::vector<std::int32_t> token_counts;                        // [R]
  std::vector<std::int32_t> rows_matrix;    // [source, destination] rows, where every rank knows it
  std::vector<std::int32_t> gathered_rows;  // gathered: the rows routed here
  plan::PairPlan own_pairs;                 // rows stored by expert
  std::vector<std::int32_t> pairs_matrix;   // [source, expert] pairs, likewise
  plan::ExpertRows expert_rows;
  bool has_expert_counts = false;
  bool has_source_rows = false;
  bool has_scales = false;
  // On a GPU:
  exec::Stream stream = nullptr;       // of the round
  exec::Stream call_stream = nullptr;  // of the last call
  bool has_late_work = false;          // a tensor was asked for, and made there, behind that call
  std::uint64_t capture = 0;  // the graph capture that the round was dispatched in; 0: none
  bool has_waited = false;    // the kernel that sent the rows waits for the others'
  bool ids_changed = false;   // the received ids are not as they came

  const plan::SendPlan& plan() const noexcept { return routing ? routing->plan : own_plan; }
  const plan::PairPlan& pairs() const noexcept { return routing ? routing->pairs : own_pairs; }
  const float* weights_of_tokens() const noexcept {
    return routing ? routing->token_weights.data() : token_weights.data();
  }
  bool is_captured() const noexcept { return capture != 0; }
  bool is_open() const noexcept {
    return state != SlotState::kFree && state != SlotState::kReleased;
  }
  /// The epoch of the combine flags of the current combine. The count lies above all epochs, so
  /// that a second combine of a round never looks like the first.
  std::uint64_t combine_epoch() const noexcept {
    return epoch + (std::uint64_t{num_combines} << 48);
  }
};

}  // namespace fanfold::exchange
