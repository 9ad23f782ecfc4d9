// SPDX-License-Identifier: Apache-2.0
#pragma once

// What is behind a RoutingCapture.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "capture/narrow_ids.h"
#include "capture/row_set.h"
#include "capture/row_spans.h"
#include "capture/snapshot_ring.h"
#include "fanfold/routing_capture.h"

namespace fanfold {

class RoutingCapture::Impl {
 public:
  explicit Impl(const RoutingCaptureConfig& config);

  void begin_step(std::int64_t step_id);
  /// Records ids, or throws and has recorded nothing. `is_sink`: rows may be not written.
  void take(const char* call, int layer, const TensorView& topk_ids, const CaptureLayout& layout,
            const RecordOptions& options, bool is_sink);
  TensorView sink(int layer, DType dtype);
  void import_sink(int layer, std::int64_t num_rows, const CaptureLayout& layout,
                   const RecordOptions& options);
  RoutingSnapshot snapshot(std::int64_t num_tokens);
  void set_logical_of_expert(std::vector<std::int32_t> logical_of_expert);

  const RoutingSpec& spec() const noexcept { return spec_; }
  const RoutingCaptureConfig& config() const noexcept { return config_; }
  int num_in_flight() const noexcept { return ring_->num_held(); }

 private:
  /// What is known of one recorded layer.
  struct Slot {
    explicit Slot(std::int64_t max_tokens) : rows(max_tokens) {}
    std::uint64_t step = 0;  // the step that `rows` is about; of another one: nothing is recorded
    capture::RowSet rows;
  };
  /// Memory that a fused kernel writes to.
  struct Sink {
    TensorView view;
    std::vector<std::byte> memory;
  };

  std::size_t slot_of(int layer) const;
  void check_step(const char* call) const;
  void check_source(const std::string& source) const;
  void check_ids(const TensorView& topk_ids) const;
  /// @throws InvalidArgument  `topk_ids` lies in a sink, of which some rows may be not written.
  void check_no_sink(const TensorView& topk_ids) const;
  capture::IdRule rule() const noexcept;
  /// The ids of all shards, and which of them are tokens.
  TensorView join(const TensorView& topk_ids, const CaptureLayout& layout,
                  std::vector<capture::RowSpan>& spans);
  void write(int layer, const TensorView& topk_ids, const std::vector<capture::RowSpan>& spans,
             bool overwrite);
  void write_again(int layer, const TensorView& topk_ids,
                   const std::vector<capture::RowSpan>& spans, bool overwrite);
  [[noreturn]] void refuse_ids(int layer, const TensorView& topk_ids,
                               const capture::RowSpan& span) const;
  std::byte* row(std::size_t slot, std::int64_t token) noexcept;

  RoutingCaptureConfig config_;
  RoutingSpec spec_;
  std::int64_t cell_bytes_;   // of one token in one layer
  std::int64_t layer_bytes_;  // of all tokens in one layer
  const capture::NarrowTable* narrow_;
  std::unordered_map<int, std::size_t> slots_of_layers_;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // by slot
  // [num_layers][max_tokens][top_k]: a record writes one dense range. A snapshot interleaves.
  std::vector<std::byte> buffer_;
  std::vector<std::byte> joined_;  // ids of all shards
  std::vector<std::byte> packed_;  // ids of this shard without gaps; rows recorded once more
  std::shared_ptr<capture::SnapshotRing> ring_;
  std::uint64_t step_ = 0;  // number of steps begun
  std::int64_t step_id_ = 0;
  bool has_records_ = false;  // in this step
};

}  // namespace fanfold
