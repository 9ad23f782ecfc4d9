// SPDX-License-Identifier: Apache-2.0
#pragma once

// What is behind a RoutingCapture: checks, numbers and sinks here, the rows themselves in a
// HostCapture or a DeviceCapture.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "capture/narrow_ids.h"
#include "capture/row_spans.h"
#include "capture/snapshot_ring.h"
#include "exec/device_backend.h"
#include "fanfold/routing_capture.h"

namespace fanfold {

class RoutingCapture::Impl {
 public:
  virtual ~Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void begin_step(std::int64_t step_id, const std::optional<void*>& stream);
  /// Records ids, or throws and has recorded nothing. `is_sink`: rows may be not written.
  void take(const char* call, int layer, const TensorView& topk_ids, const CaptureLayout& layout,
            const RecordOptions& options, bool is_sink);
  TensorView sink(int layer, DType dtype);
  void import_sink(int layer, std::int64_t num_rows, const CaptureLayout& layout,
                   const RecordOptions& options);
  RoutingSnapshot snapshot(std::int64_t num_tokens, const std::optional<void*>& stream);
  void set_logical_of_expert(std::vector<std::int32_t> logical_of_expert);
  /// Throws what was found after a call returned.
  virtual void check() {}

  const RoutingSpec& spec() const noexcept { return spec_; }
  const RoutingCaptureConfig& config() const noexcept { return config_; }
  int num_in_flight() const noexcept { return ring_->num_held(); }

 protected:
  /// Memory that a fused kernel writes to.
  struct Sink {
    TensorView view;
    std::shared_ptr<std::byte> memory;
    std::int64_t bytes = 0;
  };
  /// A record whose arguments are right, but for the ids.
  struct Record {
    std::size_t slot;
    int layer;
    TensorView ids;
    std::vector<capture::RowSpan> spans;
    bool overwrite;
    bool is_sink;
    exec::Stream stream;
    std::vector<std::int64_t> counts;               // of shards: rows of each rank, as said here
    const std::int32_t* received_counts = nullptr;  // and as sent; null: they are equal
  };
  /// The ids of all shards, and how many each sent; null: as the layout says.
  struct Joined {
    TensorView ids;
    const std::int32_t* received_counts;
  };

  /// The constructor of the subclass makes `ring_`.
  explicit Impl(const RoutingCaptureConfig& config);

  // What the subclasses do, each when all that can be checked before is right.
  /// The tensor lies where this capture's do.
  virtual void check_place(const char* name, const TensorView& view) const = 0;
  /// A stream is given where one is needed.
  virtual exec::Stream to_stream(const std::optional<void*>& stream) const = 0;
  virtual void start_step(exec::Stream stream) = 0;
  virtual void write(const Record& record) = 0;
  /// Brings shards together, which fit.
  virtual Joined join(const TensorView& topk_ids, const CaptureLayout& layout,
                      exec::Stream stream) = 0;
  /// Memory of `rows` x `width` ids that say "not written".
  virtual void make_sink(std::size_t slot, Sink& sink, DType dtype, std::int64_t rows,
                         std::int64_t width) = 0;
  virtual void clear_sink(std::size_t slot, exec::Stream stream) = 0;
  /// Copies to the place that `state` has.
  virtual void copy(RoutingSnapshot::State& state, exec::Stream stream) = 0;
  virtual void use_map(const std::vector<std::int32_t>& logical_of_expert) = 0;
  virtual void check_snapshot(exec::Stream /*stream*/) {}

  capture::IdRule rule() const noexcept;
  const std::vector<std::unique_ptr<Sink>>& sinks() const noexcept { return sinks_; }
  std::uint64_t step() const noexcept { return step_; }
  std::int64_t step_id() const noexcept { return step_id_; }
  std::int64_t cell_bytes() const noexcept { return cell_bytes_; }
  std::int64_t layer_bytes() const noexcept { return layer_bytes_; }

  std::shared_ptr<capture::SnapshotRing> ring_;

 private:
  std::size_t slot_of(int layer) const;
  /// Which rows of all shards are tokens.
  std::vector<capture::RowSpan> check_shards(const TensorView& topk_ids,
                                             const CaptureLayout& layout) const;
  void check_step(const char* call) const;
  void check_source(const std::string& source) const;
  void check_ids(const TensorView& topk_ids) const;
  /// @throws InvalidArgument  `topk_ids` lies in a sink, of which some rows may be not written.
  void check_no_sink(const TensorView& topk_ids) const;

  RoutingCaptureConfig config_;
  RoutingSpec spec_;
  std::int64_t cell_bytes_;   // of one token in one layer
  std::int64_t layer_bytes_;  // of all tokens in one layer
  std::unordered_map<int, std::size_t> slots_of_layers_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // by slot
  std::uint64_t step_ = 0;                    // number of steps begun
  std::int64_t step_id_ = 0;
  bool has_records_ = false;  // in this step
};

namespace capture {

/// One whose memory is the host's.
std::unique_ptr<RoutingCapture::Impl> make_host_capture(const RoutingCaptureConfig& config);

/// Opens a device by its index.
using OpenDevice = std::function<std::unique_ptr<exec::DeviceBackend>(int)>;
/// One whose memory is that of config.device_index.
std::unique_ptr<RoutingCapture::Impl> make_device_capture(const RoutingCaptureConfig& config,
                                                          const OpenDevice& open);

}  // namespace capture
}  // namespace fanfold
