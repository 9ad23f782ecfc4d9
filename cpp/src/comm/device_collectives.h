// SPDX-License-Identifier: Apache-2.0
#pragma once

// Collectives on GPU memory, as the strategies need them; NCCL implements them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "comm/group.h"
#include "fanfold/dtype.h"

namespace fanfold::comm {

/// Every call enqueues on `stream` (a cudaStream_t of `device()`), may be captured into a graph,
/// and returns at once. Ranks make the same calls in the same order; sizes are equal on all ranks
/// but where stated. Between `begin_group` and `end_group` calls are gathered into one launch; of
/// those nothing has begun before `end_group` returns.
///
/// Threads: one at a time, except `abort`.
/// @throws InvalidState  after `abort` or an asynchronous error; the reason is in the message.
class DeviceCollectives {
 public:
  /// Bytes of one peer's part, at its place in a buffer.
  struct Span {
    std::int64_t offset;
    std::int64_t bytes;
  };

  DeviceCollectives() = default;
  virtual ~DeviceCollectives() = default;
  DeviceCollectives(const DeviceCollectives&) = delete;
  DeviceCollectives& operator=(const DeviceCollectives&) = delete;

  virtual int rank() const noexcept = 0;
  virtual int num_ranks() const noexcept = 0;
  virtual int device() const noexcept = 0;

  virtual void begin_group() = 0;
  virtual void end_group() = 0;
  /// Forgets the calls of the open groups: none of them happens.
  virtual void cancel_group() noexcept = 0;
  /// @throws InvalidArgument  calls on `stream` are refused.
  virtual void check_stream(void* stream) const = 0;
  /// recv [num_ranks * bytes]; `send` may be this rank's place in it.
  virtual void all_gather(const void* send, void* recv, std::int64_t bytes, void* stream) = 0;
  /// Block r [bytes] of `send` goes to rank r; recv likewise. No overlap.
  virtual void all_to_all(const void* send, void* recv, std::int64_t bytes, void* stream) = 0;
  /// One span per rank in each buffer; what one rank sends the other must expect.
  virtual void all_to_all_v(const void* send, const std::vector<Span>& to, void* recv,
                            const std::vector<Span>& from, void* stream) = 0;
  virtual void broadcast(void* data, std::int64_t bytes, int root, void* stream) = 0;
  /// Sums in the transport's own order and precision: not deterministic across versions.
  /// float32, float16, bfloat16, int32 or int64.
  virtual void all_reduce(const void* send, void* recv, DType dtype, std::int64_t num_elements,
                          void* stream) = 0;
  /// recv [num_elements] = block `rank()` of the sum of all `send` [num_ranks * num_elements].
  virtual void reduce_scatter(const void* send, void* recv, DType dtype, std::int64_t num_elements,
                              void* stream) = 0;

  /// How long calls from now on may wait for the transport to take them; null: for a time of its
  /// own.
  virtual void limit_calls(std::optional<base::Deadline> deadline) noexcept = 0;
  /// @throws PeerLost, CudaFailure, InvalidState  what has failed since; never waits.
  virtual void check() = 0;
  /// Ends what runs, unless the transport is the caller's own, and makes later calls fail. From any
  /// thread.
  virtual void abort() noexcept = 0;
  /// As `abort`, by the owner, at the end: also lets go of a transport that is the caller's.
  virtual void leave() noexcept = 0;
  /// New ones over the same transport for `group`, some of these ranks. Collective over `group`,
  /// which it borrows.
  virtual std::unique_ptr<DeviceCollectives> on_group(Group& group, base::Deadline deadline) = 0;
  /// Begins anew after a failure or an abort. Collective; what was enqueued before is lost, and
  /// graphs that captured a call must be destroyed before, and captured again.
  /// @throws InvalidState  the transport has not ended, since such a graph exists.
  /// @throws Unsupported  the transport is the caller's own, and it or this object has failed.
  virtual void reset(base::Deadline deadline) = 0;
  /// Ends it in good order: waits for what is enqueued. Collective; idempotent. Without it the
  /// destructor aborts.
  /// Where a peer is gone it is aborted.
  /// @throws PeerTimeout  not idle in time; it is aborted all the same.
  virtual void close(base::Deadline deadline) = 0;
};

}  // namespace fanfold::comm
