// SPDX-License-Identifier: Apache-2.0
#pragma once

// What stands behind Allocator, for those who bring a kind of memory.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "comm/communicator_impl.h"
#include "comm/group.h"
#include "fanfold/allocator.h"
#include "memory/own_buffers.h"
#include "memory/symmetric_block.h"
#include "memory/window_source.h"

namespace fanfold {

class Allocator::Impl {
 public:
  /// @throws InvalidState  the communicator cannot be used.
  Impl(const Communicator& communicator, std::unique_ptr<memory::WindowSource> source);
  /// All memory comes from `buffers`. Collective.
  void use_own_buffers(const std::vector<OwnBuffer>& buffers, base::Deadline deadline);

  SymmetricMemory allocate(std::int64_t bytes, std::int64_t zero_bytes, base::Deadline deadline);
  void free(const SymmetricMemory& memory);
  void trim();
  Communicator::Impl& communicator() { return *communicator_; }
  AllocatorStats stats() const { return ledger_->stats(); }
  AllocatorMemory memory() const { return source_->memory(); }
  void set_private_memory(PrivateMemorySource source) { private_memory_ = std::move(source); }
  std::shared_ptr<std::byte> allocate_private(std::int64_t bytes) const;

 private:
  struct Cached {
    comm::Windows windows;
    std::int64_t id;
    std::int64_t bytes() const { return windows.front()->bytes(); }
  };

  std::vector<Cached>::iterator smallest_fit(std::int64_t bytes);
  /// Lets go of cached windows that ended with what carried them.
  void drop_unusable();
  comm::Windows make_windows(std::int64_t id, std::int64_t bytes, base::Deadline deadline);
  /// Own buffers: gives back what no rank uses any more. Collective.
  void reclaim(base::Deadline deadline);
  /// Zeroes this rank's window and waits until the others have zeroed theirs.
  void zero(const comm::Windows& windows, std::int64_t bytes, base::Deadline deadline);

  std::shared_ptr<Communicator::Impl> communicator_;  // its group outlives the source
  std::unique_ptr<memory::WindowSource> source_;
  std::shared_ptr<memory::Ledger> ledger_;
  std::vector<Cached> cache_;
  std::int64_t next_id_ = 0;
  std::optional<memory::OwnBuffers> own_buffers_;
  std::vector<std::int64_t> trimmed_;  // own buffers: blocks that this rank has no use for
  PrivateMemorySource private_memory_;
};

}  // namespace fanfold
