// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory of the driver API for tests: created, reserved, mapped, and given back in the right order.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace fanfold::gpu::litmus {

constexpr std::size_t kGranule = std::size_t{2} << 20;

/// The memory at an address of the driver's, or another number that an API wants as a pointer.
inline void* at_address(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// Properties of memory on a device that can be exported as those types.
CUmemAllocationProp properties(int device, unsigned handle_types = 0);

/// One physical allocation; released at the end.
class Memory {
 public:
  explicit Memory(int device, unsigned handle_types = 0, std::size_t bytes = kGranule);
  /// Takes over a handle, as an import gives it.
  explicit Memory(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
};

/// One mapping of a memory in a reservation of its own, with rights for the devices in a set of
/// bits.
class Mapped {
 public:
  Mapped(CUmemGenericAllocationHandle handle, std::uint64_t devices, std::size_t bytes = kGranule);
  ~Mapped();
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  CUdeviceptr address() const { return address_; }
  int* data() const { return static_cast<int*>(at_address(address_)); }
  /// Zeros in the part that words() names, ordered before all that follows.
  void clear() const;
  /// Payload, flags and results, a page each, for the litmus kernels.
  Words words(int mode) const;

 private:
  CUdeviceptr address_ = 0;
  std::size_t bytes_;
};

/// Lets the devices in the set use the whole mapping, as cuMemSetAccess says.
CUresult allow(CUdeviceptr address, std::size_t bytes, std::uint64_t devices);

}  // namespace fanfold::gpu::litmus
