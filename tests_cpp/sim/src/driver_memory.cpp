// SPDX-License-Identifier: Apache-2.0

// Driver API: physical memory and its handles.

#include "driver_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <iterator>
#include <string>

#include "cudasim/control.h"
#include "driver_device.h"

namespace cudasim {

Allocation::Allocation(int fd, FileKey key, std::size_t bytes, int device,
                       std::size_t counted_bytes, Physical* physical)
    : fd_(fd),
      key_(key),
      bytes_(bytes),
      device_(device),
      counted_bytes_(counted_bytes),
      physical_(physical) {
  virtual_memory().used_bytes[device_] += counted_bytes_;
}

Allocation::~Allocation() {
  VirtualMemory& memory = virtual_memory();
  memory.used_bytes[device_] -= counted_bytes_;
  memory.by_file.erase(key_);
  drop_reference(physical_);
  ::close(fd_);
}

VirtualMemory& virtual_memory() {
  static auto* memory = new VirtualMemory;  // outlives whatever static objects still hold
  return *memory;
}

MemoryHandle* VirtualMemory::find(CUmemGenericAllocationHandle handle) {
  const auto found = handles.find(handle);
  return found == handles.end() ? nullptr : &found->second;
}

CUmemGenericAllocationHandle VirtualMemory::add(MemoryHandle handle) {
  ++counters().handles;
  handles.emplace(next_handle, std::move(handle));
  return next_handle++;
}

std::map<std::uintptr_t, VirtualMapping>::iterator VirtualMemory::mapping_at(
    std::uintptr_t address) {
  auto after = mappings.upper_bound(address);
  if (after == mappings.begin()) {
    return mappings.end();
  }
  --after;
  return address - after->first < after->second.bytes ? after : mappings.end();
}

bool VirtualMemory::is_reserved(std::uintptr_t address) const {
  const auto after = reservations.upper_bound(address);
  if (after == reservations.begin()) {
    return false;
  }
  const auto& [begin, bytes] = *std::prev(after);
  return address - begin < bytes;
}

bool VirtualMemory::is_accessible(std::uintptr_t address, std::size_t bytes, int device) {
  std::size_t done = 0;
  while (done < bytes) {
    const auto found = mapping_at(address + done);
    if (found == mappings.end()) {
      return false;
    }
    if ((found->second.devices & device_bit(device)) == 0) {
      return false;
    }
    done = found->first + found->second.bytes - address;
  }
  return true;
}

namespace {

constexpr unsigned kKnownHandleTypes =
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;

CUresult check_properties(const CUmemAllocationProp* properties) {
  if (properties == nullptr || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->win32HandleMetaData != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_NOT_SUPPORTED;  // host memory is not simulated
  }
  if (!is_device(properties->location.id)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  const unsigned types = properties->requestedHandleTypes;
  const DriverConfig& driver = config().driver;
  const bool wants_fd = (types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  const bool wants_fabric = (types & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
  if ((types & ~kKnownHandleTypes) != 0 || (wants_fd && !driver.fd_handles) ||
      (wants_fabric && !driver.fabric_handles)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

// The file's name tells an importer whose memory it is.
int create_file(std::size_t bytes, int device) {
  const std::string name = "cudasim-device-" + std::to_string(machine_number(device));
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    ::close(fd);
    return -1;
  }
  return fd;
}

void fill_file(int fd, std::size_t bytes) {
  void* const view = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (view != MAP_FAILED) {
    std::memset(view, 0xcd, bytes);
    ::munmap(view, bytes);
  }
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp& properties) {
  VirtualMemory& memory = virtual_memory();
  const DriverConfig& driver = config().driver;
  const int device = properties.location.id;
  if (driver.memory_bytes != 0 && memory.used_bytes[device] + bytes > driver.memory_bytes) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const int fd = create_file(bytes, device);
  if (fd < 0) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (driver.fill_new_memory) {
    fill_file(fd, bytes);
  }
  struct stat status = {};
  ::fstat(fd, &status);
  const FileKey key(status.st_dev, status.st_ino);
  auto allocation = std::make_shared<Allocation>(fd, key, bytes, device, bytes,
                                                 create_physical(bytes, device, "mapped memory"));
  memory.by_file[key] = allocation;
  *handle = memory.add({std::move(allocation), properties.requestedHandleTypes});
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuMemGetAllocationGranularity(std::size_t* granularity,
                                       const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  return driver_call("cuMemGetAllocationGranularity", [&] {
    if (granularity == nullptr || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
                                   option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult error = check_properties(properties);
    if (error == CUDA_SUCCESS) {
      *granularity = kGranularityBytes;
    }
    return error;
  });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  return driver_call("cuMemCreate", [&] {
    if (handle == nullptr || !is_whole(bytes) || flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult error = check_properties(properties); error != CUDA_SUCCESS) {
      return error;
    }
    const bool wants_fabric = (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
    if (wants_fabric && !config().driver.imex_channel) {
      return CUDA_ERROR_NOT_PERMITTED;
    }
    return create(handle, bytes, *properties);
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return driver_call("cuMemRelease", [&] {
    if (virtual_memory().handles.erase(handle) == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    --counters().handles;
    return CUDA_SUCCESS;
  });
}

}  // extern "C"

}  // namespace cudasim
