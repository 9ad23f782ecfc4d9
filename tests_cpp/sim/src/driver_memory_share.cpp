// SPDX-License-Identifier: Apache-2.0

// Driver API: handles that leave the process. A file descriptor is a duplicate of the memory's own;
// a fabric handle is 64 bytes that name process and descriptor, opened through procfs.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cudasim/control.h"
#include "driver_device.h"
#include "driver_memory.h"

namespace cudasim {

namespace {

constexpr std::array<char, 8> kMagic = {'c', 'u', 's', 'i', 'm', 'f', 'a', 'b'};

struct FabricBlob {
  std::array<char, 8> magic;
  std::uint64_t file_device;
  std::uint64_t inode;
  std::int32_t process;
  std::int32_t fd;
  std::uint32_t uid;
  std::uint32_t clique;
  std::array<unsigned char, 16> cluster_uuid;
};
static_assert(sizeof(FabricBlob) <= CU_IPC_HANDLE_SIZE, "a fabric handle has 64 bytes");

std::uint32_t own_uid() {
  const std::int64_t uid = config().driver.uid;
  return uid < 0 ? ::geteuid() : static_cast<std::uint32_t>(uid);
}

CUresult export_fabric(void* shareable, const Allocation& allocation) {
  FabricBlob blob = {};
  blob.magic = kMagic;
  blob.file_device = allocation.key().first;
  blob.inode = allocation.key().second;
  blob.process = ::getpid();
  blob.fd = allocation.fd();
  blob.uid = own_uid();
  blob.clique = clique_of(allocation.device());
  blob.cluster_uuid = config().driver.cluster_uuid;
  std::memset(shareable, 0, CU_IPC_HANDLE_SIZE);
  std::memcpy(shareable, &blob, sizeof(blob));
  return CUDA_SUCCESS;
}

CUresult export_fd(void* shareable, const Allocation& allocation) {
  const int fd = ::fcntl(allocation.fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  std::memcpy(shareable, &fd, sizeof(fd));
  return CUDA_SUCCESS;
}

// Opens the file that a fabric handle names; the memory may be gone, and its number in other use.
CUresult open_fabric(const void* shareable, int* fd) {
  FabricBlob blob;
  std::memcpy(&blob, shareable, sizeof(blob));
  const DriverConfig& driver = config().driver;
  if (!driver.fabric_handles) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (blob.magic != kMagic || blob.cluster_uuid != driver.cluster_uuid ||
      blob.clique != clique_of(current_device())) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!driver.imex_channel || blob.uid != own_uid()) {
    return CUDA_ERROR_NOT_PERMITTED;
  }
  const std::string path =
      "/proc/" + std::to_string(blob.process) + "/fd/" + std::to_string(blob.fd);
  *fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status = {};
  if (*fd < 0 || ::fstat(*fd, &status) != 0) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const bool is_same = status.st_ino == blob.inode && status.st_dev == blob.file_device;
  return is_same ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult open_fd(void* shareable, int* fd) {
  if (!config().driver.fd_handles) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  *fd = ::fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)), F_DUPFD_CLOEXEC, 0);
  return *fd < 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

// Number on the machine of the device whose memory a file is, from the file's name; -1: not ours.
int machine_number_of(int fd) {
  std::array<char, 128> target = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (::readlink(link.c_str(), target.data(), target.size() - 1) < 0) {
    return -1;
  }
  constexpr const char* kName = "/memfd:cudasim-device-";
  const std::size_t length = std::strlen(kName);
  if (std::strncmp(target.data(), kName, length) != 0) {
    return -1;
  }
  return static_cast<int>(std::strtol(target.data() + length, nullptr, 10));
}

// Takes over the open file of a memory, which this process may have already.
CUresult adopt(int fd, unsigned handle_type, CUmemGenericAllocationHandle* handle) {
  VirtualMemory& memory = virtual_memory();
  struct stat status = {};
  const int number = machine_number_of(fd);
  if (number < 0 || ::fstat(fd, &status) != 0) {
    ::close(fd);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const FileKey key(status.st_dev, status.st_ino);
  std::shared_ptr<Allocation> allocation = memory.by_file[key].lock();
  if (allocation != nullptr) {
    ::close(fd);
  } else {
    // Memory of a device that only another process sees counts as the importing device's.
    const int local = number - config().driver.first_device;
    const int device = is_device(local) ? local : current_device();
    const auto bytes = static_cast<std::size_t>(status.st_size);
    allocation = std::make_shared<Allocation>(fd, key, bytes, device, 0,
                                              create_physical(bytes, device, "mapped memory"));
    memory.by_file[key] = allocation;
  }
  *handle = memory.add({std::move(allocation), handle_type});
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  return driver_call("cuMemExportToShareableHandle", [&] {
    const MemoryHandle* const found = virtual_memory().find(handle);
    const bool is_one_type =
        type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || type == CU_MEM_HANDLE_TYPE_FABRIC;
    if (shareable == nullptr || found == nullptr || flags != 0 || !is_one_type ||
        (found->handle_types & static_cast<unsigned>(type)) == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const Allocation& allocation = *found->allocation;
    return type == CU_MEM_HANDLE_TYPE_FABRIC ? export_fabric(shareable, allocation)
                                             : export_fd(shareable, allocation);
  });
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type) {
  return driver_call("cuMemImportFromShareableHandle", [&] {
    const bool is_fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
    if (handle == nullptr || (is_fabric && shareable == nullptr)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_fabric && type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    int fd = -1;
    const CUresult error = is_fabric ? open_fabric(shareable, &fd) : open_fd(shareable, &fd);
    if (error != CUDA_SUCCESS) {
      if (fd >= 0) {
        ::close(fd);
      }
      return error;
    }
    return adopt(fd, type, handle);
  });
}

}  // extern "C"

}  // namespace cudasim
