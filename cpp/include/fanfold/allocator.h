// SPDX-License-Identifier: Apache-2.0
#pragma once

// Symmetric memory: the same offsets on every rank, each rank's memory visible to its peers.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/communicator.h"
#include "fanfold/export.h"
#include "fanfold/tensor_view.h"

namespace fanfold {

/// How ranks reach each other's GPU memory, best first.
enum class HandleKind : std::uint8_t {
  kFabric,          ///< handles of an NVLink domain (groups are of one machine in this version)
  kFileDescriptor,  ///< descriptors, on one machine
  kSameProcess,     ///< none needed: ranks that are threads of one process, also several on one GPU
  /// Memory of NCCL 2.29 or later, on a communicator of from_nccl; never taken unasked. It ends
  /// with NCCL's communicator: after a reset, abort or close of that nobody may use it, kernels of
  /// strategies that lie on it must have ended before, and new blocks are allocated anew.
  kNccl,
};

/// GPU memory instead of the host's.
struct FANFOLD_EXPORT GpuMemoryConfig {
  int device = 0;  ///< this rank's CUDA device; ranks may share one
  /// The kinds to try, in this order; the first that works on all ranks is taken. Equal on all
  /// ranks. Empty: all but kNccl, which must be the only one.
  std::vector<HandleKind> kinds;
};

/// What memory an allocator gives.
struct FANFOLD_EXPORT AllocatorMemory {
  DeviceType device = DeviceType::kCpu;
  int device_index = 0;
  /// Whether the host may read and write it: not on a GPU, but on the simulated device.
  bool is_host_accessible = true;
  /// GPU memory, once a block was made: how the ranks share it.
  std::optional<HandleKind> kind;
  /// Why the kinds before it did not work: a sentence each, with rank and step.
  std::vector<std::string> passed_over;
};

/// One block of symmetric memory: a window per rank, all of them mapped here.
///
/// Host kind: anonymous shared memory that no other user can open and that vanishes with its last
/// process. GPU kind: memory of each rank's device, mapped for this rank's. Copies share the block.
/// The block stays mapped while a copy, or anything made from it, lives; it goes back to its
/// allocator by `Allocator::free` only.
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
  /// Start of `rank`'s window in this process; an address of the device for GPU memory.
  std::byte* data(int rank) const;
  /// A contiguous tensor over the window of `rank` from `offset_bytes` on. GPU memory: enqueued
  /// work on it must have ended before the block is freed.
  /// @throws InvalidArgument  it does not fit into the window, or the offset is not a multiple of
  ///         the element's size.
  TensorView tensor(int rank, DType dtype, const std::vector<std::int64_t>& shape,
                    std::int64_t offset_bytes = 0) const;
  AllocatorMemory memory() const;
  int num_ranks() const;

  struct Block;
  explicit SymmetricMemory(std::shared_ptr<Block> block) noexcept;
  /// For the library itself.
  const std::shared_ptr<Block>& block() const noexcept { return block_; }

 private:
  std::shared_ptr<Block> block_;
};

/// Memory of the caller's for the windows of one rank, as mapped in this process.
struct FANFOLD_EXPORT OwnBuffer {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

/// Gives at least `bytes` bytes of private memory that begins on 128 bytes; its deleter takes it
/// back, on any thread. Contents are unspecified.
using PrivateMemorySource = std::function<std::shared_ptr<std::byte>(std::int64_t bytes)>;

/// What an allocator holds, in bytes of this rank's own windows.
struct FANFOLD_EXPORT AllocatorStats {
  std::int64_t reserved = 0;     ///< held from the system or the caller: in use and cached
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
  /// Symmetric memory comes out of the caller's own: `buffers[r]` becomes the windows of rank r,
  /// and every rank gives all of them, as it sees them: threads the same arrays, processes the same
  /// shared memory, each as mapped there. Equal in size on all ranks that give them; the smallest
  /// counts. Collective: each rank writes to its own, and all must see it.
  /// Ownership: the caller keeps the memory until all that was made with the allocator is closed
  /// on every rank, and until the last view is gone.
  /// @throws InvalidArgument  not one buffer per rank, too small, or (on every rank) a rank gives
  ///         other sizes or does not see another's memory.
  /// @throws PeerTimeout, PeerLost
  Allocator(Communicator& communicator, const std::vector<OwnBuffer>& buffers,
            std::optional<std::chrono::nanoseconds> timeout = {});
  /// GPU memory. Collective; allocates nothing.
  /// @throws Unsupported      no CUDA driver, no such device, or built without the GPU backend (on
  ///         every rank).
  /// @throws InvalidArgument  the ranks give different kinds (on every rank).
  Allocator(Communicator& communicator, const GpuMemoryConfig& gpu,
            std::optional<std::chrono::nanoseconds> timeout = {});
  /// GPU memory out of the caller's buffers, which lie on the devices: `buffers[r]` is rank r's as
  /// this rank's device reaches it, which the caller sees to (peer access, a mapping): only that
  /// all ranks mean the same memory is checked, by copies. Otherwise as for the host's.
  /// @throws InvalidArgument  also: not memory of a GPU. @throws CudaFailure (on every rank)
  Allocator(Communicator& communicator, const GpuMemoryConfig& gpu,
            const std::vector<OwnBuffer>& buffers,
            std::optional<std::chrono::nanoseconds> timeout = {});
  ~Allocator();
  Allocator(const Allocator&);
  Allocator(Allocator&&) noexcept;
  Allocator& operator=(const Allocator&);
  Allocator& operator=(Allocator&&) noexcept;

  /// A block of at least `bytes` per rank, zeroed in its first `zero_bytes` (all of it when fresh
  /// from the system). Takes the smallest cached block that fits on every rank, else a new one.
  /// Collective. GPU memory: synchronizes with its own copies and fills only; not allowed in a
  /// graph capture.
  /// @throws InvalidArgument   bytes < 1, or the ranks ask for different sizes (on every rank).
  /// @throws CapacityExceeded  the caller's buffers have no such room left (on every rank).
  /// @throws Unsupported       GPU memory: no kind of handle works; the text says why for each.
  /// @throws PeerTimeout, PeerLost, SystemFailure, CudaFailure, std::bad_alloc
  SymmetricMemory allocate(std::int64_t bytes, std::int64_t zero_bytes = 0,
                           std::optional<std::chrono::nanoseconds> timeout = {});
  /// Returns a block to the cache. Collective in effect: every rank frees the same blocks in the
  /// same order; does not wait. Nobody may use the block's memory afterwards, and work on it must
  /// have ended, on every rank.
  /// @throws InvalidArgument  the block is not of this allocator or was freed before.
  void free(const SymmetricMemory& memory);
  /// Gives all cached blocks back to the system or the caller's buffers. Every rank calls it; does
  /// not wait.
  void trim();
  AllocatorStats stats() const;
  AllocatorMemory memory() const;

  /// Where the private memory of what is made with this allocator, or a copy of it, comes from;
  /// empty: from the system. Local.
  void set_private_memory(PrivateMemorySource source);
  /// For the library itself: private memory of at least `bytes`.
  /// @throws InvalidArgument  the source gave memory that does not begin on 128 bytes.
  /// @throws std::bad_alloc   it gave none.
  std::shared_ptr<std::byte> allocate_private(std::int64_t bytes) const;

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace fanfold
