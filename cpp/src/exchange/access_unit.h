// SPDX-License-Identifier: Apache-2.0
#pragma once

// How wide the accesses of kernels that copy rows may be.

#include <cstdint>
#include <initializer_list>

namespace fanfold::exchange {

/// The widest access, of 16 bytes or fewer, that all of these addresses and sizes allow.
inline std::int32_t unit_of(std::initializer_list<std::uint64_t> values) noexcept {
  std::uint64_t bits = 16;
  for (const std::uint64_t value : values) bits |= value;
  return static_cast<std::int32_t>(bits & (~bits + 1));
}

inline std::uint64_t address(const void* data) noexcept {
  return reinterpret_cast<std::uintptr_t>(data);
}
inline std::uint64_t word(std::int64_t value) noexcept { return static_cast<std::uint64_t>(value); }

}  // namespace fanfold::exchange
