// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels of a RoutingCapture are told: plain structs that they take by value, and the
// words that they share. L layers, K top_k, T tokens of a snapshot.

#include <cstddef>
#include <cstdint>

#include "fanfold/dtype.h"

namespace fanfold::exec {

/// What was wrong with ids that a kernel was to record. Of one launch the first in this order has
/// the word, then the one of the lowest row and column.
enum class CaptureFault : std::int64_t { kOtherCount, kPartlyWritten, kWrongId, kOtherIds };

/// The first error of a step. All of 8 bytes: kernels copy it word by word.
struct CaptureError {
  std::uint64_t number;  // of all errors of this capture, from 1 on; 0: none
  CaptureFault fault;
  std::int64_t slot;         // of the layer
  std::int64_t row, column;  // of the tensor that was recorded; kOtherCount: row is the shard
  std::int64_t id;           // kOtherCount: rows that it sent
  std::int64_t token;
  std::int64_t step_id;
  std::int64_t num_ids;      // ids below it are right; kOtherCount: rows that it should have sent
  std::int64_t is_physical;  // 1: ids are mapped to logical ones
};
constexpr int kCaptureErrorWords = static_cast<int>(sizeof(CaptureError) / sizeof(std::uint64_t));

/// What kernels tell the host, which reads it without waiting. Page-locked host memory.
struct CaptureReport {
  std::uint64_t number;        // of `error`; stored last (release.sys) <- acquire by the host
  std::uint64_t acknowledged;  // the last number that the host has seen; the host's. While it is
                               // another one than `number`, `error` stays as it is
  CaptureError error;
};

/// Which ids callers may give.
struct CaptureRule {
  const std::int32_t* logical_of_expert;  // in [num_ids]; null: ids are logical
  std::int64_t num_ids;
};

/// Words of one capture, which its kernels read and advance, so that a captured graph replays. Its
/// kernels run one after the other.
struct CaptureState {
  CaptureRule rule;           // the host writes it when the device is idle
  std::uint64_t step;         // steps begun; a row of another step counts as not recorded
  std::int64_t step_id;       // the caller's name for it
  std::uint64_t first_error;  // of the kernel under way: the fault, then row * K + column; all bits
                              // set between kernels
  std::uint64_t num_errors;
  std::uint64_t num_reported;  // number of the last error in the report
  CaptureError error;          // of this step
  std::uint32_t num_done;      // blocks that are done; 0 between kernels
};
constexpr std::uint64_t kNoCaptureError = UINT64_MAX;
constexpr int kCaptureFaultShift = 62;

/// Memory that fused kernels write ids to.
struct CaptureSink {
  std::byte* data;      // null: the layer has none; begins on 16 bytes
  std::int64_t bytes;   // a multiple of 16
  std::uint64_t empty;  // the bytes that say "not written"
};

/// Begin a step: what was recorded counts no more, and sinks are cleared.
struct DeviceBeginStepParams {
  CaptureState* state;  // null: sinks are cleared only
  std::int64_t step_id;
  const CaptureSink* sinks;  // in [num_sinks]
  std::int32_t num_sinks;
  std::int64_t num_bytes;  // of all sinks, for the size of the grid
};

/// Rows from `source` on, which go to the tokens from `token` on.
struct CaptureSpan {
  std::int64_t source;
  std::int64_t token;
  std::int64_t first;  // rows of the spans before it
};
constexpr int kMaxCaptureSpans = 128;   // of one launch: kernels take 4 KiB of parameters
constexpr int kMaxCaptureShards = 128;  // as many as an AllToAll of a GPU has ranks

/// Check the ids of one layer, turn them into logical ones and store them in their narrow type.
struct DeviceRecordParams {
  CaptureState* state;
  CaptureReport* report;  // out; page-locked host memory
  const void* ids;        // in [rows, K] of dtype, ids_stride elements apart; the caller's memory
  std::int64_t ids_stride;
  DType dtype;
  std::int32_t top_k;
  std::int32_t id_bytes;  // of a stored id: 1, 2 or 4
  bool is_sink;           // rows of which all ids are the type's minimum are left out
  bool overwrite;         // rows that this step has recorded already
  bool is_wide;           // rows can be read and written by 8 ids at a time
  std::byte* cells;       // out [max_tokens, K] of id_bytes
  std::uint64_t* stamps;  // out [max_tokens] the step that recorded each row
  std::int64_t slot;      // of the layer
  std::int64_t num_rows;  // of all spans
  std::int32_t num_spans;
  CaptureSpan spans[kMaxCaptureSpans];
  const std::int32_t* received_counts;  // in [num_shards] rows that each sent; null: not compared
  std::int32_t num_shards;
  std::int32_t counts[kMaxCaptureShards];  // and those that it should have sent
};
static_assert(sizeof(DeviceRecordParams) <= 4096);

/// What comes before the ids of a snapshot. Page-locked host memory.
struct CaptureSnapshotHead {
  std::int64_t step_id;
  CaptureError error;  // of the step; number 0: none
};

/// Copy what a step recorded of the first tokens, token by token.
struct DeviceSnapshotParams {
  const CaptureState* state;
  const std::byte* cells;       // in [L, max_tokens] of cell_bytes
  const std::uint64_t* stamps;  // in [L, max_tokens]
  std::int64_t max_tokens;
  std::int64_t num_tokens;  // T
  std::int32_t num_layers;
  std::int64_t cell_bytes;    // K ids
  std::int32_t unit;          // 16, 8, 4, 2 or 1: divides cell_bytes
  CaptureSnapshotHead* head;  // out; this and the next two in page-locked host memory
  std::byte* ids;             // out [T, L] of cell_bytes; rows not recorded: all bits set
  std::uint32_t* recorded;    // out [ceil(T * L / 32)] bit i % 32 of word i / 32: row i was
                              // recorded, in the order of `ids`
};

}  // namespace fanfold::exec
