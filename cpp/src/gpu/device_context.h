// SPDX-License-Identifier: Apache-2.0
#pragma once

// A device's primary context, and copies and fills that wait for themselves only.

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "gpu/driver.h"

namespace fanfold::gpu {

/// Holds the primary context of one device, the one that the CUDA runtime and torch use.
/// Threads: any, at the same time. No call changes the caller's current device visibly.
class DeviceContext {
 public:
  /// @throws Unsupported  no driver, no such device, or one without virtual memory management.
  /// @throws CudaFailure
  explicit DeviceContext(int device);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  int device() const noexcept { return device_; }
  const std::string& pci_bus_id() const noexcept { return pci_bus_id_; }
  bool has(CUdevice_attribute attribute) const;

  // These wait until it is done, and for nothing else on the device.
  void zero(std::byte* data, std::int64_t bytes) const;
  std::uint64_t read_word(const std::byte* data) const;
  void write_word(std::byte* data, std::uint64_t word) const;

  /// Waits for all work on the device; never throws.
  void wait_idle() const noexcept;

  /// Device memory; freed by `free`, which never throws.
  std::byte* allocate(std::int64_t bytes) const;
  void free(std::byte* data) const noexcept;
  /// Whether `data` is memory of a GPU.
  bool is_device_memory(const std::byte* data) const;

 private:
  class Current;
  class OwnStream;

  const Driver& driver_;
  int device_;
  CUdevice handle_ = 0;
  CUcontext context_ = nullptr;
  std::string pci_bus_id_;
};

}  // namespace fanfold::gpu
