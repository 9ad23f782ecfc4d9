// SPDX-License-Identifier: Apache-2.0
#pragma once

// A device's primary context, and copies and fills that wait for themselves only.

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/function_ref.h"
#include "gpu/driver.h"

namespace fanfold::gpu {

/// Holds the primary context of one device, the one that the CUDA runtime and torch use.
/// Threads: any, at the same time. No call changes the caller's current device visibly.
class DeviceContext {
 public:
  /// Makes the context current while it lives; then the caller's is again. The CUDA runtime's
  /// current device goes with it.
  class Current {
   public:
    explicit Current(const DeviceContext& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Driver& driver_;
  };

  /// @throws Unsupported  no driver, no such device, or one without virtual memory management.
  /// @throws CudaFailure
  explicit DeviceContext(int device);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  int device() const noexcept { return device_; }
  const Driver& driver() const noexcept { return driver_; }
  const std::string& pci_bus_id() const noexcept { return pci_bus_id_; }
  int attribute(CUdevice_attribute attribute) const;
  bool has(CUdevice_attribute attribute) const { return this->attribute(attribute) != 0; }

  // These wait until it is done, and for nothing else on the device.
  void zero(std::byte* data, std::int64_t bytes) const;
  void upload(std::byte* data, const void* host, std::int64_t bytes) const;
  void download(void* host, const std::byte* data, std::int64_t bytes) const;
  std::uint64_t read_word(const std::byte* data) const;
  void write_word(std::byte* data, std::uint64_t word) const;

  /// Waits for all work on the device; meanwhile calls `look`, which must not throw, every few
  /// milliseconds. Nothing in a forked child.
  /// @throws InvalidState  in a graph capture. @throws CudaFailure  work may be under way.
  void wait_idle(base::FunctionRef<void()> look) const;
  /// Likewise for one stream.
  void wait(CUstream stream, base::FunctionRef<void()> look) const;
  /// @throws InvalidState  a graph capture is under way that forbids waiting for the device; the
  ///         driver has then invalidated it.
  void check_no_capture() const;

  /// Device memory; freed by `free`, which never throws.
  std::byte* allocate(std::int64_t bytes) const;
  void free(std::byte* data) const noexcept;
  /// Whether `data` is memory of a GPU.
  bool is_device_memory(const std::byte* data) const;
  /// Whether work for `stream` goes to this context.
  bool owns(CUstream stream) const;

 private:
  class OwnStream;

  const Driver& driver_;
  int device_;
  CUdevice handle_ = 0;
  CUcontext context_ = nullptr;
  std::string pci_bus_id_;
};

}  // namespace fanfold::gpu
