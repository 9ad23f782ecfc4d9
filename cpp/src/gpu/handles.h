// SPDX-License-Identifier: Apache-2.0
#pragma once

// Owners of the driver's memory objects. Each gives back what it holds, and nothing can fail there
// that anybody could mend.

#include <cuda.h>

#include <cstddef>
#include <utility>

#include "gpu/driver.h"

namespace fanfold::gpu {

/// Physical memory, or a part in another process's.
class MemoryHandle {
 public:
  MemoryHandle() = default;
  MemoryHandle(const Driver& driver, CUmemGenericAllocationHandle handle) noexcept
      : driver_(&driver), handle_(handle) {}
  ~MemoryHandle() { reset(); }
  MemoryHandle(MemoryHandle&& other) noexcept
      : driver_(std::exchange(other.driver_, nullptr)), handle_(other.handle_) {}
  MemoryHandle& operator=(MemoryHandle&& other) noexcept {
    if (this != &other) {
      reset();
      driver_ = std::exchange(other.driver_, nullptr);
      handle_ = other.handle_;
    }
    return *this;
  }

  CUmemGenericAllocationHandle get() const noexcept { return handle_; }
  /// What is mapped of it stays.
  void reset() noexcept {
    if (driver_ != nullptr && !driver_->is_forked_child()) (void)driver_->cuMemRelease(handle_);
    driver_ = nullptr;
  }

 private:
  const Driver* driver_ = nullptr;
  CUmemGenericAllocationHandle handle_ = 0;
};

/// A range of addresses. Nothing may be mapped there when it ends.
class AddressRange {
 public:
  AddressRange() = default;
  AddressRange(const Driver& driver, CUdeviceptr begin, std::size_t bytes) noexcept
      : driver_(&driver), begin_(begin), bytes_(bytes) {}
  ~AddressRange() { reset(); }
  AddressRange(AddressRange&& other) noexcept { *this = std::move(other); }
  AddressRange& operator=(AddressRange&& other) noexcept {
    if (this != &other) {
      reset();
      driver_ = std::exchange(other.driver_, nullptr);
      begin_ = other.begin_;
      bytes_ = other.bytes_;
    }
    return *this;
  }

  CUdeviceptr begin() const noexcept { return begin_; }

 private:
  void reset() noexcept {
    if (driver_ != nullptr && !driver_->is_forked_child())
      (void)driver_->cuMemAddressFree(begin_, bytes_);
    driver_ = nullptr;
  }

  const Driver* driver_ = nullptr;
  CUdeviceptr begin_ = 0;
  std::size_t bytes_ = 0;
};

/// Memory mapped into a part of an AddressRange.
class MappedMemory {
 public:
  MappedMemory(const Driver& driver, CUdeviceptr begin, std::size_t bytes) noexcept
      : driver_(&driver), begin_(begin), bytes_(bytes) {}
  ~MappedMemory() {
    if (driver_ != nullptr && !driver_->is_forked_child())
      (void)driver_->cuMemUnmap(begin_, bytes_);
  }
  MappedMemory(MappedMemory&& other) noexcept
      : driver_(std::exchange(other.driver_, nullptr)),
        begin_(other.begin_),
        bytes_(other.bytes_) {}
  MappedMemory& operator=(MappedMemory&&) = delete;

 private:
  const Driver* driver_;
  CUdeviceptr begin_;
  std::size_t bytes_;
};

}  // namespace fanfold::gpu
