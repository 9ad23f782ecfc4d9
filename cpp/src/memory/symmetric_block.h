// SPDX-License-Identifier: Apache-2.0
#pragma once

// What stands behind SymmetricMemory.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/group.h"
#include "fanfold/allocator.h"

namespace fanfold {

namespace memory {

/// The counts of one allocator. Outlives it while blocks are out.
class Ledger {
 public:
  void add_block(std::int64_t bytes);                    // new from the system and given out
  void reuse_block(std::int64_t bytes);                  // from the cache and given out
  void cache_block(std::int64_t bytes);                  // back into the cache
  void drop_block(std::int64_t id, std::int64_t bytes);  // released without `free`
  void trim_block(std::int64_t bytes);                   // from the cache to the system
  AllocatorStats stats() const;
  /// From now on remembers which blocks were dropped.
  void keep_dropped();
  /// The ids of the blocks that were dropped since.
  std::vector<std::int64_t> dropped() const;
  void forget_dropped(std::int64_t id);

 private:
  void give_out(std::int64_t bytes);

  mutable std::mutex mutex_;  // guards all below: blocks may be released on any thread
  AllocatorStats stats_;
  bool keeps_dropped_ = false;
  std::vector<std::int64_t> dropped_;
};

}  // namespace memory

/// One lease of a window per rank. A cached block that is given out again is a new lease, so that
/// what is left of the old one cannot free it. Threads: released by any; otherwise as its
/// allocator.
struct SymmetricMemory::Block {
  Block(comm::Windows windows, std::int64_t id, AllocatorMemory memory,
        std::shared_ptr<memory::Ledger> ledger);
  /// Counts the block as dropped if it was not freed.
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::int64_t bytes() const noexcept { return windows.front()->bytes(); }

  comm::Windows windows;
  std::int64_t id;  // the same on every rank, never given twice by one allocator
  AllocatorMemory memory;
  std::shared_ptr<memory::Ledger> ledger;
  std::function<bool()> is_usable;  // see memory::WindowSource::usability
  bool is_freed = false;
};

}  // namespace fanfold
