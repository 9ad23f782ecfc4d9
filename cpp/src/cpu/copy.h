// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two ways to copy rows.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fanfold::cpu {

/// As base::Kernels::copy_streaming.
using CopyFunction = void (*)(std::byte*, const std::byte*, std::int64_t);

/// The one that goes through the cache. An empty copy may come with null pointers.
inline void copy_ordinary(std::byte* target, const std::byte* source, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(target, source, static_cast<std::size_t>(bytes));
}

}  // namespace fanfold::cpu
