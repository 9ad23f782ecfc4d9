// SPDX-License-Identifier: Apache-2.0
#include "fanfold/memory_pool.h"

#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "base/byte_math.h"
#include "base/format.h"
#include "fanfold/error.h"
#include "memory/arena.h"

namespace fanfold {

struct MemoryPool::State {
  State(SymmetricMemory memory_, int rank)
      : memory(std::move(memory_)),
        start(memory.data(rank)),
        arena(memory.bytes() / kAlignment * kAlignment) {}

  SymmetricMemory memory;
  std::byte* start;
  mutable std::mutex mutex;  // guards all below
  memory::Arena arena;
  std::map<std::int64_t, std::int64_t> parts;  // offset -> bytes
  std::int64_t bytes_in_use = 0;
};

MemoryPool::MemoryPool(SymmetricMemory memory, int rank)
    : state_(std::make_unique<State>(std::move(memory), rank)) {}
MemoryPool::~MemoryPool() = default;
MemoryPool::MemoryPool(MemoryPool&&) noexcept = default;
MemoryPool& MemoryPool::operator=(MemoryPool&&) noexcept = default;

std::byte* MemoryPool::allocate(std::int64_t bytes) noexcept {
  if (bytes < 0 || bytes > state_->memory.bytes()) return nullptr;
  const std::int64_t size = base::align_up(bytes == 0 ? 1 : bytes, kAlignment);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  try {
    const std::optional<std::int64_t> offset = state_->arena.take(size);
    if (!offset) return nullptr;
    state_->parts.emplace(*offset, size);
    state_->bytes_in_use += size;
    return state_->start + *offset;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void MemoryPool::free(std::byte* data) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto part = state_->parts.find(data - state_->start);
  if (part == state_->parts.end()) {
    throw InvalidArgument("free: expected a part of this pool in use, got another address");
  }
  state_->arena.give(part->first, part->second);
  state_->bytes_in_use -= part->second;
  state_->parts.erase(part);
}

std::int64_t MemoryPool::offset_of(const std::byte* data) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const std::int64_t offset = data - state_->start;
  const auto after = state_->parts.upper_bound(offset);
  if (after != state_->parts.begin()) {
    const auto& [begin, bytes] = *std::prev(after);
    if (offset < begin + bytes) return offset;
  }
  throw InvalidArgument("offset_of: expected an address in a part of this pool, got another");
}

std::int64_t MemoryPool::bytes() const noexcept { return state_->memory.bytes(); }

std::int64_t MemoryPool::bytes_in_use() const noexcept {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->bytes_in_use;
}

std::int64_t MemoryPool::num_in_use() const noexcept {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return static_cast<std::int64_t>(state_->parts.size());
}

const SymmetricMemory& MemoryPool::memory() const noexcept { return state_->memory; }

}  // namespace fanfold
