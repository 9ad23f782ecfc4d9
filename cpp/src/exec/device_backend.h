// SPDX-License-Identifier: Apache-2.0
#pragma once

// The data movement that a strategy asks for where rows lie on a GPU: the twin of backend.h.
// Everything that takes a stream is enqueued there and waits for nothing; the rest says that it
// waits.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/function_ref.h"
#include "exec/capture_params.h"
#include "exec/device_params.h"

namespace fanfold::exec {

/// A cudaStream_t; null is the legacy default stream.
using Stream = void*;

/// Page-locked host memory, as both sides reach it.
struct PinnedMemory {
  std::shared_ptr<std::byte> host;  // keeps it
  std::byte* device = nullptr;
};

/// One device. Threads: any, at the same time. No call changes the caller's current device visibly.
class DeviceBackend {
 public:
  DeviceBackend() = default;
  virtual ~DeviceBackend() = default;
  DeviceBackend(const DeviceBackend&) = delete;
  DeviceBackend& operator=(const DeviceBackend&) = delete;

  virtual int device() const noexcept = 0;

  // Memory. Not in a graph capture (InvalidState).
  /// Zeroed device memory that begins on 128 bytes.
  virtual std::shared_ptr<std::byte> allocate(std::int64_t bytes) = 0;
  /// Zeroed page-locked memory that the device reads and writes.
  virtual PinnedMemory allocate_pinned(std::int64_t bytes) = 0;
  /// Page-locks `bytes` bytes from `host` on, whole pages of the caller's memory, while the
  /// result's `host` is held.
  virtual PinnedMemory pin(std::byte* host, std::int64_t bytes) = 0;
  /// These wait until it is done, and for nothing else.
  virtual void upload(std::byte* device, const void* host, std::int64_t bytes) = 0;
  virtual void download(void* host, const std::byte* device, std::int64_t bytes) = 0;

  // Streams.
  /// The graph capture that `stream` is in, by a number of its own in the process; 0: none.
  /// @throws InvalidArgument  not a stream of this device. @throws InvalidState  its capture is
  ///         invalid.
  virtual std::uint64_t capture_of(Stream stream) const = 0;
  /// @throws InvalidState  a graph capture is under way in which this thread may not wait; it is
  ///         then invalid.
  virtual void check_no_capture() = 0;
  /// Work for `after` waits from now on for what is on `before`; both belong to one capture or to
  /// none.
  virtual void order(Stream before, Stream after) = 0;
  // These wait, and meanwhile call `look`, which must not throw, every few milliseconds.
  // @throws InvalidState  in a graph capture. @throws CudaFailure  work may be under way still.
  /// For what is enqueued on `stream`.
  virtual void wait(Stream stream, base::FunctionRef<void()> look) = 0;
  /// For all work of the device.
  virtual void wait_idle(base::FunctionRef<void()> look) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes, Stream stream) = 0;
  virtual void fill(std::byte* to, int byte, std::int64_t bytes, Stream stream) = 0;

  // Points in the order of a stream. Not in a graph capture.
  virtual std::shared_ptr<void> make_event() = 0;
  virtual void record_event(void* event, Stream stream) = 0;
  /// Waits for what `event` was recorded behind.
  virtual void wait_event(void* event) = 0;
  virtual bool has_passed(void* event) = 0;

  // Phases. @throws CudaFailure  a launch was refused; nothing was enqueued.
  virtual void signal(const DeviceSignalParams& params, Stream stream) = 0;
  virtual void dispatch_send(const DeviceDispatchSendParams& params, Stream stream) = 0;
  virtual void compact_rows(const DeviceCompactParams& params, Stream stream) = 0;
  virtual void arrange(const DeviceArrangeParams& params, Stream stream) = 0;
  virtual void describe_rows(const DeviceDescribeParams& params, Stream stream) = 0;
  virtual void combine_send(const DeviceCombineSendParams& params, Stream stream) = 0;
  virtual void sum_rows(const DeviceSumParams& params, Stream stream) = 0;
  virtual void pack_rows(const DevicePackParams& params, Stream stream) = 0;
  virtual void sanitize(const DeviceSanitizeParams& params, Stream stream) = 0;
  virtual void begin_step(const DeviceBeginStepParams& params, Stream stream) = 0;
  virtual void record_ids(const DeviceRecordParams& params, Stream stream) = 0;
  virtual void copy_snapshot(const DeviceSnapshotParams& params, Stream stream) = 0;
  /// Tiles that the kernels above may need for `num_rows` rows.
  virtual std::int64_t max_tiles(std::int64_t num_rows) const noexcept = 0;
};

}  // namespace fanfold::exec
