// SPDX-License-Identifier: Apache-2.0
#include "memory/window_source.h"

#include <cstring>

#include "base/mapping.h"

namespace fanfold::memory {

comm::Windows HostSource::make_windows(std::int64_t bytes, base::Deadline deadline) {
  return group_.share_windows(bytes, deadline);
}

std::shared_ptr<std::byte> HostSource::allocate_private(std::int64_t bytes) {
  return base::map_private(bytes);
}

AllocatorMemory HostSource::memory() const { return {}; }

void HostSource::zero(std::byte* data, std::int64_t bytes) {
  std::memset(data, 0, static_cast<std::size_t>(bytes));
}

std::uint64_t HostSource::read_word(const std::byte* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

void HostSource::write_word(std::byte* data, std::uint64_t word) {
  std::memcpy(data, &word, sizeof word);
}

}  // namespace fanfold::memory
