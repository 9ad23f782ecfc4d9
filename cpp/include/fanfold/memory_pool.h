// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parts of one window, for frameworks that allocate their own tensors.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fanfold/allocator.h"
#include "fanfold/export.h"

namespace fanfold {

/// Divides one rank's window of a block. Equal calls in equal order give equal offsets, so that
/// ranks which allocate alike find each other's tensors without asking.
///
/// Threads: any, at the same time. Keeps the block mapped; the parts end with the pool.
class FANFOLD_EXPORT MemoryPool {
 public:
  /// Parts begin on this many bytes.
  static constexpr std::int64_t kAlignment = 512;

  /// Local. The whole window of `rank` belongs to the pool from now on.
  /// @throws InvalidArgument  no such rank, or a block that holds nothing.
  MemoryPool(SymmetricMemory memory, int rank);
  ~MemoryPool();
  MemoryPool(MemoryPool&&) noexcept;
  MemoryPool& operator=(MemoryPool&&) noexcept;

  /// A part of at least `bytes`; null if there is no room or `bytes` is negative.
  std::byte* allocate(std::int64_t bytes) noexcept;
  /// Takes back what `allocate` gave. Work on it must have ended or be in stream order with what
  /// will use it next.
  /// @throws InvalidArgument  the pool did not give it, or has it back already.
  void free(std::byte* data);
  /// How far `data` lies behind the window's start: as far as its peers in the other windows.
  /// @throws InvalidArgument  it does not lie in a part that is in use.
  std::int64_t offset_of(const std::byte* data) const;

  std::int64_t bytes() const noexcept;         ///< of the window
  std::int64_t bytes_in_use() const noexcept;  ///< rounded up to the alignment
  std::int64_t num_in_use() const noexcept;    ///< parts
  const SymmetricMemory& memory() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fanfold
