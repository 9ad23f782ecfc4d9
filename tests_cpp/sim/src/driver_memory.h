// SPDX-License-Identifier: Apache-2.0
#pragma once

// Virtual memory of the driver API: what handles, reservations and mappings are. Physical memory is
// an anonymous file, so that its handles cross processes just as the real ones do.

#include <cuda.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "device_memory.h"

namespace cudasim {

constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

/// Device and inode of the file behind an allocation: the same in every process.
using FileKey = std::pair<dev_t, ino_t>;

/// Physical memory that this process holds open. It lives while a handle or a mapping needs it.
class Allocation {
 public:
  /// Takes over `fd` and the reference to `physical`; `counted_bytes` are given back to the device.
  Allocation(int fd, FileKey key, std::size_t bytes, int device, std::size_t counted_bytes,
             Physical* physical);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  int fd() const { return fd_; }
  const FileKey& key() const { return key_; }
  std::size_t bytes() const { return bytes_; }
  int device() const { return device_; }
  Physical* physical() const { return physical_; }

 private:
  int fd_;
  FileKey key_;
  std::size_t bytes_;
  int device_;
  std::size_t counted_bytes_;
  Physical* physical_;
};

struct MemoryHandle {
  std::shared_ptr<Allocation> allocation;
  unsigned handle_types = 0;  // CUmemAllocationHandleType bits that it may be exported as
};

struct VirtualMapping {
  std::shared_ptr<Allocation> allocation;
  std::size_t bytes = 0;
  std::uint64_t devices = 0;  // those with access, one bit each
};

/// All that the process has. Guarded by the engine's lock.
struct VirtualMemory {
  std::map<CUmemGenericAllocationHandle, MemoryHandle> handles;
  std::map<std::uintptr_t, std::size_t> reservations;
  std::map<std::uintptr_t, VirtualMapping> mappings;
  // An allocation that comes in twice is one memory with one shadow.
  std::map<FileKey, std::weak_ptr<Allocation>> by_file;
  std::map<int, std::size_t> used_bytes;  // of each device
  // Handles are numbers that never come again, so that a released one is always recognised.
  CUmemGenericAllocationHandle next_handle = 1;

  MemoryHandle* find(CUmemGenericAllocationHandle handle);
  CUmemGenericAllocationHandle add(MemoryHandle handle);
  /// The mapping that `address` lies in, or mappings.end().
  std::map<std::uintptr_t, VirtualMapping>::iterator mapping_at(std::uintptr_t address);
  /// Whether `address` lies in a reservation, mapped or not.
  bool is_reserved(std::uintptr_t address) const;
  /// Whether mappings that `device` may use cover the whole range.
  bool is_accessible(std::uintptr_t address, std::size_t bytes, int device);
};

VirtualMemory& virtual_memory();

/// Whether a size is a multiple of the granularity, as nearly all sizes must be.
inline bool is_whole(std::size_t bytes) { return bytes != 0 && bytes % kGranularityBytes == 0; }

/// The memory at an address of the driver's, which are numbers.
inline void* at_address(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// Bit of a device in a set of them; none for a number that no set can hold.
inline std::uint64_t device_bit(int device) {
  return device >= 0 && device < 64 ? std::uint64_t{1} << device : 0;
}

}  // namespace cudasim
