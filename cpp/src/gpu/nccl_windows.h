// SPDX-License-Identifier: Apache-2.0
#pragma once

// Symmetric memory of NCCL: ncclMemAlloc, known to all ranks of a communicator.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "comm/group.h"
#include "gpu/nccl_collectives.h"

namespace fanfold::gpu {

/// A window per rank, equal in size. Rank r's lies on its own device; all of them have addresses
/// here, which this rank's device may use.
class NcclWindows {
 public:
  /// Zeroed windows of at least `bytes`. Collective over `group`; a failure on one rank leaves
  /// nothing on any. Not in a graph capture.
  /// @throws Unsupported  NCCL is older than 2.29, the communicator has no symmetric memory, or a
  ///         device cannot reach a peer's memory.
  /// @throws InvalidState  the communicator has failed or is closed.
  /// @throws OutOfMemory, CudaFailure, PeerTimeout, PeerLost
  static std::shared_ptr<NcclWindows> make(comm::Group& group,
                                           std::shared_ptr<NcclCollectives> collectives,
                                           std::int64_t bytes, base::Deadline deadline);

  /// Of `make` only: nothing yet.
  NcclWindows(std::shared_ptr<NcclCollectives> collectives, std::int64_t bytes);
  /// Waits for the device. Where that fails, as in a graph capture, or NCCL was not done with the
  /// registration in time, the memory stays.
  ~NcclWindows();
  NcclWindows(const NcclWindows&) = delete;
  NcclWindows& operator=(const NcclWindows&) = delete;

  /// Not where the communicator has ended on which they were made.
  bool are_usable() const noexcept { return collectives_->generation() == generation_; }
  std::byte* data(int rank) const noexcept { return data_[static_cast<std::size_t>(rank)]; }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  void allocate();
  void register_memory(base::Deadline deadline);
  void find_peers();
  void zero();

  std::shared_ptr<NcclCollectives> collectives_;
  std::int64_t bytes_;
  void* memory_ = nullptr;
  nccl::Window window_ = nullptr;
  std::int64_t generation_;       // of the communicator that knows the window
  bool is_unsettled_ = false;     // NCCL may still be registering the memory
  std::vector<std::byte*> data_;  // by rank
};

}  // namespace fanfold::gpu
