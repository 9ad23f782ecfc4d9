// SPDX-License-Identifier: Apache-2.0
#pragma once

// The offset table of one AllToAll: sizes and addresses come from the same walk.

#include <cstdint>

#include "fanfold/all_to_all_config.h"
#include "fanfold/metainfo.h"

namespace fanfold::plan {

/// Where the rows of one slot lie, from the slot's base: those that arrive from the sources, then
/// those that go home.
struct Store {
  std::int64_t num_rows = 0;             // capacity
  std::int64_t num_places = 0;           // capacity for payloads: num_rows, or rows by expert
  std::int64_t source_token_offset = 0;  // [rows] int32
  std::int64_t topk_ids_offset = 0;      // [rows, K] int32
  std::int64_t topk_weights_offset = 0;  // [rows, K] float32
  std::int64_t payload_offset = 0;       // one region per payload, see `payload_region_bytes`
  std::int64_t payload_bytes = 0;
  std::int64_t combine_offset = 0;  // [rows, rows_per_token, combine row]; by expert: [places]
  std::int64_t combine_bytes = 0;
  std::int64_t partial_offset = 0;  // by expert: [rows, combine row], the folded ones
  std::int64_t partial_bytes = 0;
  std::int64_t bytes = 0;
};

// What kernels need beside the rows, in private memory. The structs are exec/device_params.h's.
constexpr std::int64_t kDeviceSlotBytes = 128;     // a DeviceSlot
constexpr std::int64_t kDeviceControlBytes = 128;  // room for a DeviceControl
constexpr std::int64_t kDeviceTileRows = 32;       // of a tile at most
constexpr std::int64_t kMaxDeviceBlocks = 1024;    // of a grid that takes tiles

/// Where that lies, on a GPU. R ranks, K top_k, M the capacity, E experts, L the most local
/// experts, F = max_in_flight, P = min(K, R), Q = min(K, L).
struct DeviceRegions {
  // From the start of a private slot.
  std::int64_t sent_ids_offset = 0;       // [M, K] int32
  std::int64_t sent_weights_offset = 0;   // [M, K] float32 (weighting origin)
  std::int64_t targets_offset = 0;        // [M, P] Target
  std::int64_t rows_per_rank_offset = 0;  // [R] int32
  std::int64_t pairs_offset = 0;          // [R * M, Q] ExpertRow (per expert)
  std::int64_t tiles_offset = 0;          // [tile_columns, num_tiles] words
  std::int64_t tile_columns = 0;          // max(R, L)
  std::int64_t num_tiles = 0;             // of R * M rows, at most
  // From the start of the private memory.
  std::int64_t slots_offset = 0;       // [F] DeviceSlot
  std::int64_t control_offset = 0;     // a DeviceControl
  std::int64_t windows_offset = 0;     // [R] addresses
  std::int64_t rank_of_offset = 0;     // [E] int32, and so the others
  std::int64_t local_of_offset = 0;    // [E]
  std::int64_t copy_begin_offset = 0;  // [E + 1]
  std::int64_t copies_offset = 0;      // [E]
  std::int64_t is_active_offset = 0;   // [R]
  // Where rows travel by collectives: flags and slots once more, as far from the own ones, for what
  // goes to the peers and what came home.
  std::int64_t staging_offset = 0;
  std::int64_t scratch_offset = 0;  // broadcast: from the start of a private slot, combine rows
};

/// Targets of a token and pairs of a received row at most.
constexpr int max_targets(int top_k, int num_ranks) noexcept {
  return top_k < num_ranks ? top_k : num_ranks;
}
constexpr int max_pairs(int top_k, int max_local_experts) noexcept {
  const int pairs = top_k < max_local_experts ? top_k : max_local_experts;
  return pairs < 1 ? 1 : pairs;
}

/// Byte counts and offsets. Everything is fixed by the configuration; a round's m moves rows inside
/// its regions only.
///
/// A window (symmetric memory) is: control area (none on a GPU), flags, then, for one_sided and
/// low_latency, `max_in_flight` slots. A slot is a store. The strategies over collectives or
/// channels have their slots (on a GPU flags and slots, twice) at the start of the private memory,
/// whose other parts follow; of
/// layout gathered peers reach a block per slot as well. high_throughput keeps the stores of its
/// slots in symmetric memory of their own, which grows with the rows received.
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
  std::int64_t rows_per_token = 0;   // combine rows that one received row can return
  std::int64_t wire_row_bytes = 0;   // most bytes of one combine row as it travels
  std::int64_t max_layout_rows = 0;  // rows of the layout's tensors

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
  std::int64_t count_flags_offset = 0;     // [R] lines, by source (high_throughput)
  // high_throughput: per slot [R, R] int32, by source; where rows are stored by expert [R, R + E].
  std::int64_t counts_offset = 0;
  std::int64_t counts_stride = 0;
  Store store;  // high_throughput: as it is at creation
  std::int64_t symmetric_bytes = 0;
  std::int64_t block_bytes = 0;  // high_throughput: the stores of all slots, as at creation
  // Layout gathered, in the window behind the channel: per slot, from block_offset + slot *
  // block_stride, every token's rows, then the experts' results in the type that travels.
  std::int64_t block_offset = 0;
  std::int64_t block_stride = 0;
  std::int64_t block_combine_offset = 0;

  // Private memory: per slot, from local_slot_offset + slot * local_slot_stride.
  std::int64_t local_slot_offset = 0;
  std::int64_t local_slot_stride = 0;
  std::int64_t local_counts_offset = 0;        // rank [R], expert [L], offsets [L+1], rows [1]
  std::int64_t local_source_rank_offset = 0;   // per row of the layout, int32
  std::int64_t local_source_token_offset = 0;  // per row of the layout, int32
  std::int64_t local_weights_offset = 0;       // per expert: per row float32
  std::int64_t local_payload_offset = 0;       // rows in the layout, where the store has them not
  std::int64_t local_payload_bytes = 0;
  std::int64_t local_combine_offset = 0;  // the experts' results, where they do not go home as is
  std::int64_t local_combine_bytes = 0;
  std::int64_t local_ids_offset = 0;   // ids [rows, K] int32: of every token, or of flat rows
  std::int64_t local_gate_offset = 0;  // likewise weights [rows, K] float32
  std::int64_t local_wire_offset = 0;  // dispatch_wire: this rank's packed rows, then their scales
  std::int64_t local_wire_scales_offset = 0;
  // Shared by all slots; strategies without symmetric rows.
  std::int64_t local_scratch_offset = 0;  // what is sent
  std::int64_t local_scratch_bytes = 0;
  std::int64_t local_mine_offset = 0;  // rows that came home, by rank
  DeviceRegions device;                // on a GPU
  std::int64_t local_bytes = 0;

  std::int64_t total_bytes() const noexcept { return symmetric_bytes + block_bytes + local_bytes; }
  Metainfo metainfo() const;
};

/// Number of int32 in the counts block of one slot.
std::int64_t num_counts(int num_ranks, int max_local_experts) noexcept;

/// Bytes between the starts of two payload regions of `num_rows` rows.
std::int64_t payload_region_bytes(std::int64_t num_rows, std::int64_t row_stride) noexcept;

/// How a strategy keeps received rows.
enum class StoreKind : std::uint8_t {
  kWindow,   // in the slots of a symmetric window
  kBlocks,   // in symmetric memory of its own, as much of it as there are rows
  kPrivate,  // in private memory
};
StoreKind store_kind(Strategy strategy) noexcept;
/// Whether every rank receives every token's row first.
bool gathers(Strategy strategy) noexcept;
/// Whether the rows of the sources follow each other without gaps in the store, rather than at
/// source * m.
bool stores_flat(const AllToAllConfig& config) noexcept;
/// Whether rows are pushed straight to where the layout has them among the rows of their expert.
bool stores_by_expert(const AllToAllConfig& config) noexcept;
/// Rows of the layout's tensors at most.
std::int64_t max_layout_rows(const AllToAllConfig& config, int num_ranks, int max_local_experts);

/// The store of `num_rows` rows; `num_places` of the layout count where `stores_by_expert`. Not
/// below `min_combine_offset`: where its rows that go home begin.
Store walk_store(const AllToAllConfig& config, const Workspace& workspace, std::int64_t num_rows,
                 std::int64_t num_places, std::int64_t min_combine_offset = 0);

/// The walk. `config` is resolved: strategy, row bytes and combine dtype are set.
/// `control_bytes` is the size of the control area; for the strategies whose store is private, of
/// all their symmetric memory.
/// @throws InvalidArgument  its size may reach 2^62 bytes.
Workspace walk_workspace(const AllToAllConfig& config, int num_ranks, int max_local_experts,
                         std::int64_t control_bytes);

}  // namespace fanfold::plan
