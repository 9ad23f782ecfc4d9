// SPDX-License-Identifier: Apache-2.0
#pragma once

// One symmetric allocation of GPU memory.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/export.h"
#include "fanfold/tensor_view.h"

namespace fanfold {

/// A window of GPU memory per rank, each on its rank's device and mapped for this rank's: through a
/// fabric handle across an NVLink domain, a descriptor inside one machine, or within one process.
/// Rank r's window begins r strides behind rank 0's, on every rank. For one allocation; an
/// Allocator over GPU memory makes many, caches and counts them.
///
/// Threads: one call at a time. Shares the communicator's state.
class FANFOLD_EXPORT FabricMemory {
 public:
  /// Zeroed windows of at least `bytes`. Collective.
  /// Stream: none. Synchronizes: with its own copies only. Graph capture: not allowed.
  /// @throws Unsupported      no driver, no such device, built without the GPU backend, or no kind
  ///         of handle works; the text says for each kind which step failed on which rank.
  /// @throws CudaFailure      one kind was asked for, and the driver failed.
  /// @throws InvalidArgument  bytes < 1, or the ranks differ.
  /// @throws PeerTimeout, PeerLost, SystemFailure, std::bad_alloc; whatever fails on one rank fails
  ///         on all, and nothing is left on any.
  FabricMemory(Communicator& communicator, std::int64_t bytes, const GpuMemoryConfig& gpu = {},
               std::optional<std::chrono::nanoseconds> timeout = {});
  /// Unmaps here, once the device is idle; the windows of others stay whole. Nobody may use them
  /// any more.
  ~FabricMemory();
  FabricMemory(FabricMemory&&) noexcept;
  FabricMemory& operator=(FabricMemory&&) noexcept;

  /// Usable bytes per rank: what was asked for, rounded up to the driver's granularity.
  std::int64_t bytes() const;
  int num_ranks() const;
  /// Start of `rank`'s window, an address of this rank's device.
  std::byte* data(int rank) const;
  /// A contiguous tensor in the window of `rank`; see SymmetricMemory::tensor.
  TensorView tensor(int rank, DType dtype, const std::vector<std::int64_t>& shape,
                    std::int64_t offset_bytes = 0) const;
  /// The windows as a block; a copy keeps them mapped here, also past `close`.
  const SymmetricMemory& windows() const noexcept { return memory_; }
  /// The device, the kind of handle, and why those before it were not taken.
  AllocatorMemory memory() const;
  /// Waits until every rank has called it, then for the device, and unmaps. Does not wait for the
  /// others when one of them is gone. Idempotent.
  /// @throws PeerTimeout  this rank's memory is released all the same.
  void close(std::optional<std::chrono::nanoseconds> timeout = {});

 private:
  Allocator allocator_;
  SymmetricMemory memory_;
  std::shared_ptr<Communicator::Impl> communicator_;
};

}  // namespace fanfold
