// SPDX-License-Identifier: Apache-2.0
#pragma once

// The offset table of one AllToAll: sizes and addresses come from the same walk.

#include <cstdint>

#include "fanfold/all_to_all_config.h"
#include "fanfold/metainfo.h"

namespace fanfold::plan {

/// Byte counts and offsets. Everything is fixed by the configuration; a round's m moves rows inside
/// its regions only.
///
/// A window (symmetric memory, strategy one_sided) is: control area, flags, then `max_in_flight`
/// slots. A slot is: the rows that peers push, then the rows that peers pull. Strategy broadcast
/// has no window; its slots lie at the start of the private memory, whose other parts follow.
struct Workspace {
  // What it was made from.
  int num_ranks = 0;
  int num_experts = 0;
  int max_local_experts = 0;
  int top_k = 0;
  std::int64_t max_tokens_per_rank = 0;
  int max_in_flight = 0;
  std::int64_t dispatch_row_bytes = 0;
  std::int64_t combine_row_bytes = 0;
  std::int64_t row_guard_bytes = 0;
  std::int64_t rows_per_token = 0;  // combine rows that one received row can return

  // Window.
  std::int64_t control_offset = 0;
  std::int64_t slot_offset = 0;
  std::int64_t slot_stride = 0;
  // Flags of all slots lie together, so that a re-used window is made fit by zeroing its head. From
  // the start of a slot's flags, flags_offset + slot * flags_stride:
  std::int64_t flags_offset = 0;
  std::int64_t flags_stride = 0;
  std::int64_t dispatch_flags_offset = 0;  // [R] lines, by source
  std::int64_t combine_flags_offset = 0;   // [R] lines, by source
  std::int64_t ack_flags_offset = 0;       // [R] lines, by source
  // From the start of a slot.
  std::int64_t source_token_offset = 0;  // [R, m] int32
  std::int64_t topk_ids_offset = 0;      // [R, m, K] int32
  std::int64_t topk_weights_offset = 0;  // [R, m, K] float32
  std::int64_t payload_offset = 0;       // one region per payload, see `payload_region_bytes`
  std::int64_t payload_bytes = 0;
  std::int64_t combine_offset = 0;  // [R, m, rows_per_token, H]
  std::int64_t combine_bytes = 0;
  std::int64_t symmetric_bytes = 0;

  // Private memory: per slot, from local_slot_offset + slot * local_slot_stride.
  std::int64_t local_slot_offset = 0;
  std::int64_t local_slot_stride = 0;
  std::int64_t local_counts_offset = 0;        // rank [R], expert [L], offsets [L+1], rows [1]
  std::int64_t local_source_rank_offset = 0;   // per row of the layout, int32
  std::int64_t local_source_token_offset = 0;  // per row of the layout, int32
  std::int64_t local_weights_offset = 0;       // expert_major: [L, R*m] float32
  std::int64_t local_payload_offset = 0;       // expert_major, gathered: rows in the layout
  std::int64_t local_payload_bytes = 0;
  std::int64_t local_combine_offset = 0;  // expert_major, gathered: the experts' results
  std::int64_t local_combine_bytes = 0;
  std::int64_t local_ids_offset = 0;   // broadcast: every token's ids [R*M, K] int32
  std::int64_t local_gate_offset = 0;  // broadcast: every token's weights [R*M, K] float32
  // Broadcast: shared by all slots.
  std::int64_t local_scratch_offset = 0;  // the rows of one rank's combine
  std::int64_t local_mine_offset = 0;     // rows that came home, by rank
  std::int64_t local_bytes = 0;

  std::int64_t total_bytes() const noexcept { return symmetric_bytes + local_bytes; }
  Metainfo metainfo() const;
};

/// Number of int32 in the counts block of one slot.
std::int64_t num_counts(int num_ranks, int max_local_experts) noexcept;

/// Bytes between the starts of two payload regions of `num_rows` rows.
std::int64_t payload_region_bytes(std::int64_t num_rows, std::int64_t row_stride) noexcept;

/// The walk. `config` is resolved: strategy, row bytes and combine dtype are set.
/// `control_bytes` is the size of the control area; for broadcast, of the channel's whole window.
/// @throws InvalidArgument  its size may reach 2^62 bytes.
Workspace walk_workspace(const AllToAllConfig& config, int num_ranks, int max_local_experts,
                         std::int64_t control_bytes);

}  // namespace fanfold::plan
