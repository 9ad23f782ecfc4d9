// SPDX-License-Identifier: Apache-2.0
#pragma once

// Device addresses: numbers to the driver, pointers to everybody else.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace fanfold::gpu {

inline CUdeviceptr address_of(const std::byte* data) noexcept {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(data));
}

inline std::byte* data_at(CUdeviceptr address) noexcept {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): what the driver gives is a number
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

/// A descriptor where the driver wants it as a pointer.
inline void* pointer_of(int descriptor) noexcept {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver takes the number itself
  return reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
}

}  // namespace fanfold::gpu
