// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the phases of a round are told where the rows lie on a GPU: plain structs that kernels take
// by value. R ranks, K top_k, m rows per source, M the capacity, E experts, L local experts, P =
// min(K, R), Q = min(K, most local experts of any rank).
//
// "in" memory is only read, "out" memory is overwritten. All pointers are addresses of the device:
// private memory of this rank, unless they say otherwise.

#include <cstddef>
#include <cstdint>

#include "exec/flag_fields.h"
#include "fanfold/all_to_all_config.h"
#include "fanfold/dtype.h"
#include "plan/expert_rows.h"
#include "plan/send_plan.h"

namespace fanfold::exec {

constexpr int kMaxDevicePayloads = 17;  // AllToAll::kMaxPayloads and the scales of a wire
constexpr int kMaxDeviceTopK = 128;
constexpr int kMaxDeviceRanks = 256;
constexpr std::int64_t kMaxDeviceRows = std::int64_t{1} << 28;  // R * M and the rows of an expert
constexpr std::int64_t kMaxDeviceHidden = std::int64_t{1} << 30;

/// What a wait was for, when it failed.
enum class DevicePhase : std::uint32_t { kDispatch, kCombine, kRelease, kAck };

/// Why kernels have stopped.
enum class DeviceFailure : std::uint32_t {
  kNone,
  kTimeout,  // a peer's flag did not come
  kAborted,
  kDiffers,
  kStuck,  // a block of a kernel waited in vain for another one of its grid; no peer is concerned
};

/// What a kernel tells the host, which reads it without waiting. Page-locked host memory.
struct DeviceReport {
  std::uint32_t failure;  // a DeviceFailure, stored last (release.sys) <- acquire by the host
  std::uint32_t phase;    // a DevicePhase
  std::uint32_t peer;
  std::uint32_t slot;
  std::uint64_t epoch;             // of the slot's round
  std::uint64_t timeout_ns;        // of the wait that failed: a captured one keeps its own
  std::uint64_t mine[kFlagWords];  // kDiffers: this rank's line as it should be, and the peer's
  std::uint64_t got[kFlagWords];
  std::uint64_t num_dropped_ids;  // since creation; stored relaxed
};

/// Words that all rounds share. The host writes them between rounds, when nothing runs.
struct DeviceControl {
  std::uint32_t generation;
  std::uint32_t placement_version;
  std::uint32_t mask_digest;
  std::uint32_t has_failed;       // set by a kernel: from then on kernels do nothing, until reset
  std::uint64_t num_dropped_ids;  // since creation
};

/// One slot's words, which kernels advance, so that a captured graph replays. Kernels of one slot
/// run one after the other.
struct alignas(128) DeviceSlot {
  std::uint64_t epoch;         // of the slot's last round: counts the rounds of this slot
  std::uint32_t num_combines;  // of that round, so far
  std::int32_t num_tokens;     // T of that round
  std::uint32_t next_tile;     // that no block has taken; 0 between kernels
  std::uint32_t num_done;      // blocks that have no tile left; 0 between kernels
  std::uint64_t num_told_ids;  // num_dropped_ids as a round of this slot told it last
};

/// Scratch by which the blocks of one kernel tell each other how many rows their tiles have:
/// [columns, stride] words, of max(R, most local experts) columns. See gpu/kernels/tiles.cuh, which
/// alone knows what they say.
struct TileWords {
  std::uint64_t* words;
  std::int64_t stride;  // at least the tiles of any kernel
};
/// Rows of a tile at most; n rows are at most b + ceil(n / 32) tiles of a grid of b blocks.
constexpr int kTileRows = 32;

/// How rows and flags get to the peers.
enum class DeviceRoute : std::uint8_t {
  kWindows,  // kernels store to the peers' windows and load from them
  kBlocks,   // collectives carry the blocks of a staging window: block r goes to rank r, or came
             // from there; every other rank's window is that one
  kGather,   // likewise, but what every rank gets of a dispatch is all tokens of all others
};

/// What every phase of a round knows.
struct DeviceRound {
  std::byte* const* windows;       // in [R] all ranks' windows, as this device reaches them
  std::byte* staging;              // kGather: where all tokens are gathered, built as a window
  const std::int32_t* rank_of;     // in [E] which rank hosts an expert
  const std::int32_t* local_of;    // in [E] its number there
  const std::int32_t* copy_begin;  // in [num_logical + 1] into copies; null: no replicas
  const std::int32_t* copies;      // in [E] copies of each logical expert
  const std::int32_t* is_active;   // in [R] 0 or 1; read live
  DeviceControl* control;
  DeviceSlot* slot;
  DeviceReport* report;            // out; page-locked host memory
  const std::uint32_t* abort_any;  // in; page-locked host memory: 1 + the generation that a rank
                                   // has aborted
  std::int64_t store_offset;       // of the slot's store in every window
  std::int64_t round_max_tokens;   // m
  // Of each wait for a peer, and of a block for another one of its grid, where 0 is no limit: that
  // wait then ends only when kernels have failed.
  std::uint64_t timeout_ns;
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int32_t num_experts;
  std::int32_t num_logical;  // ids that callers may give are below it
  std::int32_t num_local_experts;
  std::int32_t top_k;
  std::int32_t slot_index;
  DeviceRoute route;
};

/// The flags of one phase. `fields` lacks what kernels fill in: epoch, generation, both counts,
/// placement_version, mask_digest and sent_ns.
struct DeviceFlags {
  std::int64_t offset;  // of the phase's lines [R], by source, in every window (staging: by reader)
  FlagFields fields;
  DevicePhase phase;
};

/// What came in, known once all dispatch flags are there.
struct DeviceCounts {
  const std::int32_t* rows_per_rank;  // in [R] rows that this rank sends; its own count comes there
  std::int32_t* rank_counts;          // out [R] rows from each rank, 0 from inactive ones
  std::int32_t* token_counts;         // out [R] every rank's T
  std::int32_t* num_rows;             // out [1] sum of rank_counts
};

/// Raise the flags of a phase, wait for all active peers' flags of it, or both: one block.
struct DeviceSignalParams {
  DeviceRound round;
  DeviceFlags flags;
  bool announces;
  bool waits;
  DeviceCounts counts;  // of a dispatch that waits; else null pointers
};

/// One payload of a dispatch.
struct DevicePayload {
  const std::byte* rows;  // in [T, row_bytes], row_stride_bytes apart; the caller's memory
  std::int64_t row_stride_bytes;
  std::int64_t row_bytes;
  std::int64_t region_offset;        // from the store's base; row i at block * m + i (DeviceRoute)
  std::int64_t region_stride_bytes;  // between rows of the region
  std::int32_t unit;                 // 16, 8, 4, 2 or 1: divides all of these and `rows` itself
};

/// Work out where each token goes, push its rows there, raise the flags.
struct DeviceDispatchSendParams {
  DeviceRound round;
  DeviceFlags flags;
  bool waits;           // the last block then waits for the peers' flags and writes `counts`
  DeviceCounts counts;  // `rows_per_rank` always, the others where it waits
  // Along an earlier routing: sent_ids, targets and rows_per_rank are read, and no indices travel.
  bool is_routed;
  const void* topk_ids;  // in [T, K] of id_dtype, ids_stride apart; the caller's memory
  DType id_dtype;
  std::int64_t ids_stride;    // elements
  const float* topk_weights;  // in [T, K], weights_stride apart, the caller's; null: none travel
  std::int64_t weights_stride;
  std::int64_t num_tokens;              // rows given
  const std::int32_t* num_tokens_word;  // in [1]: T, at most num_tokens; null: num_tokens
  std::int32_t* sent_ids;            // out [M, K] ids as they travel, dropped ones -1; routed: in
  float* sent_weights;               // out [M, K] (weighting origin); null: not kept
  plan::Target* targets;             // out [M, P] ranks ascending, then rank -1; routed: in
  std::int32_t* rows_per_rank;       // out [R]; routed: in
  std::int64_t source_token_offset;  // of [R, m] int32, from the store's base
  std::int64_t topk_ids_offset;      // of [R, m, K] int32
  std::int64_t topk_weights_offset;  // of [R, m, K] float32
  std::int32_t num_payloads;
  DevicePayload payloads[kMaxDevicePayloads];
  TileWords tiles;
};

/// One payload that is copied from one order of rows to another.
struct DeviceExpansion {
  const std::byte* source;  // in, row (r, i) at r * m + i; own window, or staging
  std::byte* target;        // out, row (l, i) at l * R * m + i, or as in `source`
  std::int64_t row_bytes;
  std::int64_t stride_bytes;  // between rows of both
  std::int32_t unit;          // as in DevicePayload
};

/// Of the tokens of all ranks, keep those that name an expert of this one: what a dispatch over
/// kGather does once all have come.
struct DeviceCompactParams {
  DeviceRound round;
  const std::int32_t* token_counts;  // in [R] every rank's T
  // Staged: token (r, i) at r * m + i. Out, in the own window: row (r, i) at r * m + i.
  const std::int32_t* staged_ids;  // in [R, m, K]
  const float* staged_weights;     // in [R, m, K]; null: none came
  std::int32_t* topk_ids;          // out [R, m, K]
  float* topk_weights;             // out [R, m, K]
  std::int32_t* source_tokens;     // out [R, m]
  // Along an earlier routing no indices came, and its own say which tokens to keep; else null.
  const std::int32_t* routed_counts;  // in [R]
  const std::int32_t* routed_tokens;  // in [R, m]
  std::int32_t* rank_counts;          // out [R] rows from each rank
  std::int32_t* num_rows;             // out [1] sum of rank_counts
  std::int32_t num_payloads;
  DeviceExpansion payloads[kMaxDevicePayloads];  // from (r, token) to (r, row)
  TileWords tiles;
};

/// Give what came in its layout. Each part is done where its pointer is not null.
struct DeviceArrangeParams {
  DeviceRound round;
  const std::int32_t* rank_counts;  // in [R]
  std::int32_t* topk_ids;           // in [R, m, K]; own window
  const float* topk_weights;        // in [R, m, K]; own window; null: none came
  // Rows without a token get this id.
  bool pads_ids;
  std::int32_t invalid_expert_id;
  // Indices of an earlier routing, which go where those of a new one would have arrived.
  const std::int32_t* routed_ids;     // in [R, m, K]
  const float* routed_weights;        // in [R, m, K]; null: none
  const std::int32_t* routed_tokens;  // in [R, m]
  std::int32_t* source_tokens;        // out [R, m], where routed; own window
  float* restored_weights;            // out [R, m, K], where routed; own window
  // Rows per (token, local expert), order (source, row) within an expert.
  std::int32_t* expert_counts;  // out [L]; null: experts are not counted
  std::int32_t* offsets;        // out [L+1] exclusive sums
  plan::ExpertRow* pairs;       // out [R*m, Q], by row r * m + i, closed by local_expert -1; null
  std::int32_t max_pairs;       // Q
  float* expert_weights;        // out [L, R*m]; null: none
  std::int32_t num_payloads;
  DeviceExpansion payloads[kMaxDevicePayloads];
  TileWords tiles;
};

/// Say where each row of the layout came from: per row of a layout per rank, or (pairs) per expert.
/// Rows without a token are -1 already.
struct DeviceDescribeParams {
  DeviceRound round;
  const std::int32_t* rank_counts;    // in [R]
  const std::int32_t* source_tokens;  // in [R, m]; own window
  const plan::ExpertRow* pairs;       // in [R*m, Q]; null: rank_major
  std::int32_t max_pairs;
  std::int32_t* source_rank;   // out [R, m] or [L, R*m]
  std::int32_t* source_token;  // likewise
};

/// Fold the experts' rows to what travels home, or copy them to where peers pull them, and raise
/// the flags.
struct DeviceCombineSendParams {
  DeviceRound round;
  DeviceFlags flags;
  bool waits;          // the last block then waits for the peers' flags
  const std::byte* y;  // in, in the layout: row (r, i) at r * m + i, or (l, i) at l * R * m + i
  DType y_dtype;
  DType combine_dtype;
  std::int64_t hidden;
  const std::int32_t* rank_counts;  // in [R]
  const plan::ExpertRow* pairs;     // in [R*m, Q]; null: a layout per rank, rows are staged
  std::int32_t max_pairs;
  bool carried;  // multiply by the weights of pairs
  bool origin;   // one row per pair, at most rows_per_token for each row received
  Wire wire;
  WireScale wire_scale;
  std::int64_t rows_per_token;
  std::int64_t row_bytes;  // of one row that travels
  std::byte* rows;         // out [R, m, rows_per_token, row_bytes]; own window
};

/// Pull each token's rows and add them.
struct DeviceSumParams {
  DeviceRound round;
  const plan::Target* targets;   // in [M, P]
  const std::int32_t* sent_ids;  // in [M, K] (weighting origin)
  std::int64_t num_tokens;       // rows of `out`; those from T on become zeros
  std::int64_t combine_offset;   // of [R, m, rows_per_token, row_bytes], from the store's base
  DType combine_dtype;
  std::int64_t hidden;
  std::int64_t rows_per_token;
  std::int64_t row_bytes;
  Wire wire;
  WireScale wire_scale;
  bool origin;
  const float* topk_weights;  // in [T, K] (origin), weights_stride apart
  std::int64_t weights_stride;
  std::byte* out;  // out [num_tokens, H], out_stride_bytes apart; the caller's memory
  std::int64_t out_stride_bytes;
  DType out_dtype;
  // The round stays open: when all is pulled, tell the peers and wait for them.
  bool acks;
  DeviceFlags ack;
};

/// Pack rows of numbers to FP8 E4M3 with one scale per 128 elements.
struct DevicePackParams {
  const std::byte* rows;  // in [num_rows, hidden], row_stride_bytes apart; the caller's memory
  std::int64_t row_stride_bytes;
  DType dtype;
  std::int64_t hidden;
  std::int64_t num_rows;                // rows given
  const std::int32_t* num_tokens_word;  // in [1]: rows to pack, if fewer; null: num_rows
  WireScale wire_scale;
  std::byte* packed;  // out [num_rows, hidden]
  std::byte* scales;  // out [num_rows, ceil(hidden / 128)]
};

/// Overwrite ids by policy.
struct DeviceSanitizeParams {
  const void* ids;  // in [num_sources, num_rows, K]
  void* out;        // out, likewise; may be `ids`
  DType dtype;
  std::int64_t source_stride;  // elements, of ids
  std::int64_t row_stride;
  std::int64_t out_source_stride;
  std::int64_t out_row_stride;
  std::int64_t num_sources;
  std::int64_t num_rows;
  std::int32_t top_k;
  const std::int32_t* counts;  // in [num_sources] rows with a token
  std::int64_t invalid_expert_id;
  SanitizePolicy policy;
  const std::int32_t* rank_of;   // in [E]
  const std::int32_t* local_of;  // in [E]
  std::int32_t num_experts;
  std::int32_t rank;
};

}  // namespace fanfold::exec
