// SPDX-License-Identifier: Apache-2.0

// Driver API: address reservations, mappings and access rights.

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cudasim/control.h"
#include "driver_device.h"
#include "driver_memory.h"
#include "state.h"

namespace cudasim {

namespace {

// The mappings that make up [address, address + bytes) exactly, as [first, last); or two ends.
auto whole_mappings(std::uintptr_t address, std::size_t bytes) {
  auto& mappings = virtual_memory().mappings;
  const auto first = mappings.find(address);
  auto last = first;
  std::uintptr_t reached = address;
  while (last != mappings.end() && last->first == reached && reached < address + bytes) {
    reached += last->second.bytes;
    ++last;
  }
  const bool is_exact = bytes != 0 && reached == address + bytes;
  return is_exact ? std::make_pair(first, last) : std::make_pair(mappings.end(), mappings.end());
}

CUresult map(std::uintptr_t address, std::size_t bytes, const MemoryHandle& handle) {
  VirtualMemory& memory = virtual_memory();
  const auto after = memory.reservations.upper_bound(address);
  if (after == memory.reservations.begin() || bytes > handle.allocation->bytes()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto& [begin, reserved_bytes] = *std::prev(after);
  if (address + bytes > begin + reserved_bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto next = memory.mappings.lower_bound(address);
  const bool is_free = next == memory.mappings.end() || next->first >= address + bytes;
  if (!is_free || memory.mapping_at(address) != memory.mappings.end()) {
    return CUDA_ERROR_INVALID_VALUE;  // something is mapped there already
  }
  if (::mmap(at_address(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle.allocation->fd(),
             0) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  map_addresses(address, bytes, handle.allocation->physical(), 0, 0);
  memory.mappings.emplace(address, VirtualMapping{handle.allocation, bytes, 0});
  ++counters().mappings;
  return CUDA_SUCCESS;
}

// Bits of the devices that the descriptors name, and of those that they let in.
CUresult read_rights(const CUmemAccessDesc* wanted, std::size_t count, std::uint64_t* named,
                     std::uint64_t* granted) {
  for (std::size_t i = 0; i < count; ++i) {
    const CUmemLocation& location = wanted[i].location;
    if (location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(location.id)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    *named |= device_bit(location.id);
    if (wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      *granted |= device_bit(location.id);
    } else if (wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ) {
      return CUDA_ERROR_NOT_SUPPORTED;  // device memory has no read-only mappings
    } else if (wanted[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

CUresult set_access(std::uintptr_t address, std::size_t bytes, std::uint64_t named,
                    std::uint64_t granted) {
  const auto [first, last] = whole_mappings(address, bytes);
  if (first == last) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (auto it = first; it != last; ++it) {
    const std::uint64_t own = device_bit(it->second.allocation->device());
    if (!config().driver.peer_access && (granted & ~own) != 0) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
  }
  for (auto it = first; it != last; ++it) {
    VirtualMapping& mapping = it->second;
    mapping.devices = (mapping.devices & ~named) | granted;
    const int protection = mapping.devices != 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    ::mprotect(at_address(it->first), mapping.bytes, protection);
    allow_access(it->first, mapping.bytes, mapping.devices);
  }
  return CUDA_SUCCESS;
}

// Whether a device that may use the memory has work to do. What others do is not held against it:
// one rank of a process may leave while the next still works.
bool is_in_use(const VirtualMapping& mapping) {
  return std::any_of(engine.devices.begin(), engine.devices.end(), [&](const auto& device) {
    return (mapping.devices & device_bit(device->id)) != 0 && device->num_unfinished > 0;
  });
}

void unmap(std::uintptr_t address, std::size_t bytes) {
  unmap_addresses(address, bytes);
  // Replaces the mapping by reserved space in one step, so that nobody else can take it.
  [[maybe_unused]] void* const reserved =
      ::mmap(at_address(address), bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  --counters().mappings;
}

}  // namespace

extern "C" {

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment,
                             CUdeviceptr /*hint*/, unsigned long long flags) {
  return driver_call("cuMemAddressReserve", [&] {
    const bool is_power = (alignment & (alignment - 1)) == 0;  // 0: the driver's choice
    if (address == nullptr || !is_whole(bytes) || !is_power || flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const std::uintptr_t begin = reserve_addresses(bytes, std::max(alignment, kGranularityBytes));
    if (begin == 0) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    virtual_memory().reservations.emplace(begin, bytes);
    ++counters().reservations;
    *address = begin;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  return driver_call("cuMemAddressFree", [&] {
    VirtualMemory& memory = virtual_memory();
    const auto found = memory.reservations.find(address);
    if (found == memory.reservations.end() || found->second != bytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const auto mapped = memory.mappings.lower_bound(address);
    if (mapped != memory.mappings.end() && mapped->first < address + bytes) {
      return CUDA_ERROR_INVALID_VALUE;  // still mapped
    }
    memory.reservations.erase(found);
    release_addresses(address, bytes);
    --counters().reservations;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return driver_call("cuMemMap", [&] {
    const MemoryHandle* const found = virtual_memory().find(handle);
    // The offset exists in the signature only: the driver's manual wants 0.
    if (found == nullptr || !is_whole(bytes) || address % kGranularityBytes != 0 || offset != 0 ||
        flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return map(address, bytes, *found);
  });
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  return driver_call("cuMemUnmap", [&] {
    const auto [first, last] = whole_mappings(address, bytes);
    if (first == last) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (std::any_of(first, last, [](const auto& entry) { return is_in_use(entry.second); })) {
      report("driver", "cuMemUnmap while work is pending");
      return CUDA_ERROR_ILLEGAL_STATE;
    }
    for (auto it = first; it != last; ++it) {
      unmap(it->first, it->second.bytes);
    }
    virtual_memory().mappings.erase(first, last);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* wanted,
                        std::size_t count) {
  return driver_call("cuMemSetAccess", [&] {
    if (wanted == nullptr || count == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    std::uint64_t named = 0;
    std::uint64_t granted = 0;
    const CUresult error = read_rights(wanted, count, &named, &granted);
    return error == CUDA_SUCCESS ? set_access(address, bytes, named, granted) : error;
  });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr address) {
  return driver_call("cuMemGetAccess", [&] {
    VirtualMemory& memory = virtual_memory();
    const auto found = memory.mapping_at(address);
    if (flags == nullptr || location == nullptr || found == memory.mappings.end() ||
        location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(location->id)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    const bool has_access = (found->second.devices & device_bit(location->id)) != 0;
    *flags = has_access ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
  });
}

}  // extern "C"

}  // namespace cudasim
