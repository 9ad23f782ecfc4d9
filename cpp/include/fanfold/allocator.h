// SPDX-License-Identifier: Apache-2.0
#pragma once

// Symmetric memory: the same offsets on every rank, each rank's memory visible to its peers.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "fanfold/communicator.h"
#include "fanfold/export.h"

namespace fanfold {

/// One block of symmetric memory: a window per rank, all of them mapped here.
///
/// Host kind: anonymous shared memory that no other user can open and that vanishes with its last
/// process. Copies share the block. The block stays mapped while a copy, or anything made from it,
/// lives; it goes back to its allocator by `Allocator::free` only.
class FANFOLD_EXPORT SymmetricMemory {
 public:
  SymmetricMemory();
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&);
  SymmetricMemory(SymmetricMemory&&) noexcept;
  SymmetricMemory& operator=(const SymmetricMemory&);
  SymmetricMemory& operator=(SymmetricMemory&&) noexcept;

  bool has_value() const noexcept { return block_ != nullptr; }
  /// Usable bytes per rank; at least what was asked for.
  std::int64_t bytes() const;
  /// Start of `rank`'s window in this process.
  std::byte* data(int rank) const;
  int num_ranks() const;

  struct Block;
  explicit SymmetricMemory(std::shared_ptr<Block> block) noexcept;
  /// For the library itself.
  const std::shared_ptr<Block>& block() const noexcept { return block_; }

 private:
  std::shared_ptr<Block> block_;
};

/// What an allocator holds, in bytes of this rank's own windows.
struct FANFOLD_EXPORT AllocatorStats {
  std::int64_t reserved = 0;     ///< held from the system: in use and cached
  std::int64_t in_use = 0;       ///< given out
  std::int64_t peak_in_use = 0;  ///< highest `in_use` so far
  std::int64_t num_blocks = 0;   ///< blocks held
  std::int64_t num_reused = 0;   ///< allocations served from the cache
};

/// Allocates, caches and reuses symmetric memory of one group.
///
/// Every call marked collective is made by all ranks in the same order.
/// Threads: one call at a time. Shares the communicator's state. Copies share cache and counts;
/// what is made with an allocator keeps a copy.
class FANFOLD_EXPORT Allocator {
 public:
  /// Local; allocates nothing.
  explicit Allocator(Communicator& communicator);
  ~Allocator();
  Allocator(const Allocator&);
  Allocator(Allocator&&) noexcept;
  Allocator& operator=(const Allocator&);
  Allocator& operator=(Allocator&&) noexcept;

  /// A block of at least `bytes` per rank, zeroed in its first `zero_bytes` (all of it when fresh).
  /// Takes the smallest cached block that fits on every rank, else a new one. Collective.
  /// @throws InvalidArgument  bytes < 1, or the ranks ask for different sizes (on every rank).
  /// @throws PeerTimeout, PeerLost, SystemFailure, std::bad_alloc
  SymmetricMemory allocate(std::int64_t bytes, std::int64_t zero_bytes = 0,
                           std::optional<std::chrono::nanoseconds> timeout = {});
  /// Returns a block to the cache. Collective in effect: every rank frees the same blocks in the
  /// same order; does not wait. Nobody may use the block's memory afterwards.
  /// @throws InvalidArgument  the block is not of this allocator or was freed before.
  void free(const SymmetricMemory& memory);
  /// Gives all cached blocks back to the system. Every rank calls it; does not wait.
  void trim();
  AllocatorStats stats() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace fanfold
