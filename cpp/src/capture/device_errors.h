// SPDX-License-Identifier: Apache-2.0
#pragma once

// Errors that kernels found after the call that enqueued them.

#include <cstdint>
#include <vector>

#include "exec/device_backend.h"

namespace fanfold::capture {

/// The report of one capture's kernels. Threads: any, at the same time.
class DeviceErrors {
 public:
  /// @param layers  the model's number of each slot.
  DeviceErrors(exec::PinnedMemory report, std::vector<int> layers, int top_k);

  /// What kernels write to, as the device reaches it.
  exec::CaptureReport* on_device() const noexcept;

  /// Throws the error that nobody has been told of yet, if there is one. Waits for nothing.
  void throw_new();
  /// Throws `error`, which then nobody else needs to be told of.
  [[noreturn]] void raise(const exec::CaptureError& error);

 private:
  exec::CaptureReport& report() const noexcept;
  /// False: another thread has told of an error since `known` was read.
  bool acknowledge(std::uint64_t known, std::uint64_t number) noexcept;
  [[noreturn]] void refuse(const exec::CaptureError& error) const;

  exec::PinnedMemory report_;
  std::vector<int> layers_;
  int top_k_;
};

}  // namespace fanfold::capture
