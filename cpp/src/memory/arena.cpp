// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <algorithm>
#include <iterator>

#include "base/byte_math.h"

namespace fanfold::memory {

Arena::Arena(std::int64_t bytes) {
  const std::int64_t usable = bytes / kAlignment * kAlignment;
  if (usable > 0) free_.emplace(0, usable);
}

std::optional<std::int64_t> Arena::take(std::int64_t bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < bytes) continue;  // first, so that the sum below cannot overflow
    const std::int64_t size = base::align_up(bytes, kAlignment);
    const auto [offset, room] = *it;
    free_.erase(it);
    if (room > size) free_.emplace(offset + size, room - size);
    return offset;
  }
  return std::nullopt;
}

void Arena::give(std::int64_t offset, std::int64_t bytes) {
  std::int64_t size = base::align_up(bytes, kAlignment);
  const auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + size == after->first) size += after->second;
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      free_.erase(before);
    }
  }
  if (after != free_.end() && after->first <= offset + size) free_.erase(after);
  free_.emplace(offset, size);
}

std::int64_t Arena::free_bytes() const noexcept {
  std::int64_t total = 0;
  for (const auto& part : free_) total += part.second;
  return total;
}

std::int64_t Arena::largest_free_bytes() const noexcept {
  std::int64_t largest = 0;
  for (const auto& part : free_) largest = std::max(largest, part.second);
  return largest;
}

}  // namespace fanfold::memory
