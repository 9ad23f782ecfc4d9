// SPDX-License-Identifier: Apache-2.0
// The double of NCCL: memory that is known to all ranks of a communicator.
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>

#include "comm.h"

namespace cudasim::nccl {
namespace {

/// Memory of ncclMemAlloc.
struct Allocation {
  CUmemGenericAllocationHandle handle = 0;
  std::size_t bytes = 0;
};

struct Allocations {
  std::mutex mutex;  // guards the map
  std::map<void*, Allocation> all;
};

Allocations& allocations() {
  static Allocations& made = *new Allocations;
  return made;
}

CUdeviceptr address_of(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

bool find_allocation(void* data, Allocation* found) {
  Allocations& made = allocations();
  const std::lock_guard<std::mutex> lock(made.mutex);
  const auto it = made.all.find(data);
  if (it == made.all.end()) return false;
  *found = it->second;
  return true;
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

/// Maps all of it for the device at addresses of its own; null where that fails.
void* map_for(int device, CUmemGenericAllocationHandle handle, std::size_t bytes) {
  CUdeviceptr begin = 0;
  if (cuMemAddressReserve(&begin, bytes, 0, 0, 0) != CUDA_SUCCESS) return nullptr;
  if (cuMemMap(begin, bytes, 0, handle, 0) != CUDA_SUCCESS) {
    (void)cuMemAddressFree(begin, bytes);
    return nullptr;
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (cuMemSetAccess(begin, bytes, &access, 1) == CUDA_SUCCESS) {
    return reinterpret_cast<void*>(begin);  // NOLINT(performance-no-int-to-ptr)
  }
  (void)cuMemUnmap(begin, bytes);
  (void)cuMemAddressFree(begin, bytes);
  return nullptr;
}

void unmap(void* data, std::size_t bytes) {
  (void)cuMemUnmap(address_of(data), bytes);
  (void)cuMemAddressFree(address_of(data), bytes);
}

}  // namespace
}  // namespace cudasim::nccl

/// One rank's view of a window: every rank's memory, mapped for this rank's device.
struct ncclWindow_vidmem {  // NOLINT(readability-identifier-naming): NCCL's
  ncclComm* comm = nullptr;
  std::vector<void*> data;  // by rank
  std::vector<std::size_t> bytes;
};

namespace cudasim::nccl {
namespace {

struct Windows {
  std::mutex mutex;  // guards the set
  std::set<ncclWindow_vidmem*> all;
};

Windows& windows() {
  static Windows& made = *new Windows;
  return made;
}

bool is_live_window(ncclWindow_vidmem* window) {
  Windows& made = windows();
  const std::lock_guard<std::mutex> lock(made.mutex);
  return made.all.count(window) != 0;
}

void unmap_peers(const ncclWindow_vidmem& window) {
  for (int rank = 0; rank < static_cast<int>(window.data.size()); ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    if (rank != window.comm->rank && window.data[place] != nullptr) {
      unmap(window.data[place], window.bytes[place]);
    }
  }
}

/// Maps the memory of rank `peer` that its card tells of.
void* import(const ncclComm& comm, const Card& card, std::size_t place) {
  const std::string path =
      "/proc/" + std::to_string(card.pid) + "/fd/" + std::to_string(card.window_fd[place]);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  CUmemGenericAllocationHandle handle = 0;
  // The interface takes a descriptor for a pointer.  NOLINTNEXTLINE(performance-no-int-to-ptr)
  void* const as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  const CUresult result =
      cuMemImportFromShareableHandle(&handle, as_pointer, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  ::close(fd);
  if (result != CUDA_SUCCESS) return nullptr;
  void* const data = map_for(comm.device, handle, card.window_bytes[place]);
  (void)cuMemRelease(handle);
  return data;
}

/// One registration, step by step.
class Registration {
 public:
  Registration(ncclComm& comm, void* data, const Allocation& allocation, ncclWindow_t* out)
      : comm_(comm),
        number_(++comm.num_windows),
        place_(number_ % 2),
        data_(data),
        bytes_(allocation.bytes),
        out_(out) {
    const CUresult result = cuMemExportToShareableHandle(
        &fd_, allocation.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) fd_ = -1;
    Card& card = own();
    card.window_fd[place_] = fd_;
    card.window_bytes[place_] = bytes_;
    __atomic_store_n(&card.window_count[place_], number_, __ATOMIC_RELEASE);
  }
  ~Registration() {
    if (fd_ >= 0) ::close(fd_);
    if (window_ != nullptr) unmap_peers(*window_);
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  ncclResult_t advance() {
    if (window_ == nullptr) {
      if (!all([&](const Card& card) {
            return __atomic_load_n(&card.window_count[place_], __ATOMIC_ACQUIRE) >= number_;
          })) {
        return ncclInProgress;
      }
      map_all();
      __atomic_store_n(&own().window_taken[place_], std::uint64_t{number_}, __ATOMIC_RELEASE);
    }
    // The descriptor stays open until the last peer has taken it.
    if (!all([&](const Card& card) {
          return __atomic_load_n(&card.window_taken[place_], __ATOMIC_ACQUIRE) >= number_;
        })) {
      return ncclInProgress;
    }
    const bool is_whole =
        std::find(window_->data.begin(), window_->data.end(), nullptr) == window_->data.end();
    if (!is_whole) return refuse(&comm_, ncclUnhandledCudaError, "double: a window was not mapped");
    Windows& made = windows();
    const std::lock_guard<std::mutex> lock(made.mutex);
    *out_ = window_.release();
    made.all.insert(*out_);
    return ncclSuccess;
  }

 private:
  Card& own() const { return comm_.meeting->card(comm_.rank); }

  template <class Test>
  bool all(Test&& test) const {
    for (int rank = 0; rank < comm_.num_ranks; ++rank) {
      if (!test(comm_.meeting->card(rank))) return false;
    }
    return true;
  }

  void map_all() {
    window_ = std::make_unique<ncclWindow_vidmem>();
    window_->comm = &comm_;
    for (int rank = 0; rank < comm_.num_ranks; ++rank) {
      const Card& card = comm_.meeting->card(rank);
      window_->bytes.push_back(card.window_bytes[place_]);
      window_->data.push_back(rank == comm_.rank ? data_ : import(comm_, card, place_));
    }
  }

  ncclComm& comm_;
  std::uint32_t number_;
  std::size_t place_;
  void* data_;
  std::size_t bytes_;
  ncclWindow_t* out_;
  int fd_ = -1;
  std::unique_ptr<ncclWindow_vidmem> window_;
};

}  // namespace

void forget_windows(const ncclComm& comm) {
  Windows& made = windows();
  const std::lock_guard<std::mutex> lock(made.mutex);
  for (auto it = made.all.begin(); it != made.all.end();) {
    ncclWindow_vidmem* const window = *it;
    if (window->comm != &comm) {
      ++it;
      continue;
    }
    it = made.all.erase(it);
    unmap_peers(*window);
    delete window;
  }
}

}  // namespace cudasim::nccl

// NOLINTBEGIN(readability-identifier-naming): NCCL's names
using namespace cudasim::nccl;

extern "C" {

ncclResult_t ncclMemAlloc(void** data, size_t bytes) {
  int device = 0;
  if (data == nullptr || bytes == 0) return ncclInvalidArgument;
  if (cudaGetDevice(&device) != cudaSuccess) return ncclUnhandledCudaError;
  const CUmemAllocationProp prop = properties(device);
  std::size_t granularity = 0;
  if (cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) !=
      CUDA_SUCCESS) {
    return ncclUnhandledCudaError;
  }
  Allocation made;
  made.bytes = (bytes + granularity - 1) / granularity * granularity;
  if (cuMemCreate(&made.handle, made.bytes, &prop, 0) != CUDA_SUCCESS) {
    return refuse(nullptr, ncclUnhandledCudaError, "double: out of memory");
  }
  *data = map_for(device, made.handle, made.bytes);
  if (*data == nullptr) {
    (void)cuMemRelease(made.handle);
    return ncclUnhandledCudaError;
  }
  Allocations& all = allocations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.all[*data] = made;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* data) {
  if (data == nullptr) return ncclSuccess;
  Allocation found;
  if (!find_allocation(data, &found)) return ncclInvalidArgument;
  {
    Allocations& all = allocations();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.all.erase(data);
  }
  unmap(data, found.bytes);
  (void)cuMemRelease(found.handle);
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, size_t bytes, ncclWindow_t* window,
                                    int) {
  Allocation found;
  if (!is_live(comm) || window == nullptr) return ncclInvalidArgument;
  const std::lock_guard<std::recursive_mutex> lock(comm->mutex);
  if (const ncclResult_t result = failure_of(*comm)) return result;
  if (!find_allocation(data, &found) || bytes > found.bytes || bytes == 0) {
    return refuse(comm, ncclInvalidArgument, "double: not the start of memory of ncclMemAlloc");
  }
  *window = nullptr;
  auto registration = std::make_shared<Registration>(*comm, data, found, window);
  return begin_late(*comm, [registration] { return registration->advance(); });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (!is_live(comm) || !is_live_window(window) || window->comm != comm) return ncclInvalidArgument;
  {
    Windows& made = windows();
    const std::lock_guard<std::mutex> lock(made.mutex);
    made.all.erase(window);
  }
  unmap_peers(*window);
  delete window;
  return ncclSuccess;
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** data) {
  if (!is_live_window(window) || data == nullptr || peer < 0 ||
      peer >= static_cast<int>(window->data.size())) {
    return ncclInvalidArgument;
  }
  *data = static_cast<std::byte*>(window->data[static_cast<std::size_t>(peer)]) + offset;
  return ncclSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
