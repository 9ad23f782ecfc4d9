// SPDX-License-Identifier: Apache-2.0
#pragma once

// The address space of all simulated devices, and what each address stands for. Every function
// expects the engine's lock to be held.

#include <cstddef>
#include <cstdint>

namespace cudasim {

constexpr std::size_t kPageBytes = 4096;

/// Shadow of one piece of physical memory, however often it is mapped.
struct Physical;

/// Whose memory a Physical is.
enum class MemoryKind : std::uint8_t { kDevice, kHost, kShared };

/// Shadow for `bytes` of memory of `device`, with one reference. `what` names it in reports and
/// must live as long as the program.
Physical* create_physical(std::size_t bytes, int device, const char* what);
void add_reference(Physical* physical);
void drop_reference(Physical* physical);

/// Address space only, without access; 0 if there is none left. `alignment` is a power of two.
std::uintptr_t reserve_addresses(std::size_t bytes, std::size_t alignment);
/// Back to inaccessible reserved space, which may be handed out again.
void release_addresses(std::uintptr_t address, std::size_t bytes);

/// Makes known that the caller has mapped `physical` (from `offset`) at `address` with MAP_FIXED.
/// Takes a reference. `devices` has a bit for each device that may access it.
void map_addresses(std::uintptr_t address, std::size_t bytes, Physical* physical,
                   std::size_t offset, std::uint64_t devices);
/// Replaces the rights of the mappings that lie in the range.
void allow_access(std::uintptr_t address, std::size_t bytes, std::uint64_t devices);
/// Forgets the mappings that lie in the range, and drops their references.
void unmap_addresses(std::uintptr_t address, std::size_t bytes);

/// Does the address belong to memory of a device (not to host memory the devices can reach)?
bool is_device_address(const void* address);
/// The device whose memory it is, -1 for none.
int device_of(const void* address);

/// Memory as cudaMalloc gives it: readable and writable by every device; null if there is none.
void* allocate_device(std::size_t bytes, int device, const char* what);
/// Page-locked host memory that kernels can reach; its bytes count as written.
void* allocate_host(std::size_t bytes);
/// Frees what allocate_device returned; false if it did not.
bool free_device(void* address);
/// Frees what allocate_host returned; false if it did not.
bool free_host(void* address);

/// What one allocation covers, for pointer queries.
struct Extent {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  int device = -1;
  MemoryKind kind = MemoryKind::kDevice;
};
/// The mapping that holds the address; `bytes` is 0 if none does.
Extent extent_of(const void* address);

}  // namespace cudasim
