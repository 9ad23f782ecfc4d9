// SPDX-License-Identifier: Apache-2.0
#include "memory/symmetric_block.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold {

namespace memory {

void Ledger::give_out(std::int64_t bytes) {
  stats_.in_use += bytes;
  stats_.peak_in_use = std::max(stats_.peak_in_use, stats_.in_use);
}

void Ledger::add_block(std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.reserved += bytes;
  stats_.num_blocks += 1;
  give_out(bytes);
}

void Ledger::reuse_block(std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.num_reused += 1;
  give_out(bytes);
}

void Ledger::cache_block(std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.in_use -= bytes;
}

void Ledger::drop_block(std::int64_t id, std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (keeps_dropped_) dropped_.push_back(id);
  stats_.in_use -= bytes;
  stats_.reserved -= bytes;
  stats_.num_blocks -= 1;
}

void Ledger::trim_block(std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.reserved -= bytes;
  stats_.num_blocks -= 1;
}

void Ledger::keep_dropped() {
  const std::lock_guard<std::mutex> lock(mutex_);
  keeps_dropped_ = true;
}

std::vector<std::int64_t> Ledger::dropped() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return dropped_;
}

void Ledger::forget_dropped(std::int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  dropped_.erase(std::remove(dropped_.begin(), dropped_.end(), id), dropped_.end());
}

AllocatorStats Ledger::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace memory

SymmetricMemory::Block::Block(comm::Windows windows_, std::int64_t id_,
                              std::shared_ptr<memory::Ledger> ledger_)
    : windows(std::move(windows_)), id(id_), ledger(std::move(ledger_)) {}

SymmetricMemory::Block::~Block() {
  if (!is_freed) ledger->drop_block(id, bytes());
}

SymmetricMemory::SymmetricMemory() = default;
SymmetricMemory::~SymmetricMemory() = default;
SymmetricMemory::SymmetricMemory(const SymmetricMemory&) = default;
SymmetricMemory::SymmetricMemory(SymmetricMemory&&) noexcept = default;
SymmetricMemory& SymmetricMemory::operator=(const SymmetricMemory&) = default;
SymmetricMemory& SymmetricMemory::operator=(SymmetricMemory&&) noexcept = default;
SymmetricMemory::SymmetricMemory(std::shared_ptr<Block> block) noexcept
    : block_(std::move(block)) {}

namespace {

const SymmetricMemory::Block& checked(const std::shared_ptr<SymmetricMemory::Block>& block) {
  if (block == nullptr) {
    throw InvalidState("symmetric memory: expected a block, got an object that holds none");
  }
  return *block;
}

}  // namespace

std::int64_t SymmetricMemory::bytes() const { return checked(block_).bytes(); }

int SymmetricMemory::num_ranks() const { return static_cast<int>(checked(block_).windows.size()); }

std::byte* SymmetricMemory::data(int rank) const {
  const Block& block = checked(block_);
  if (rank < 0 || rank >= num_ranks()) {
    throw InvalidArgument(base::str("rank: expected 0 to ", num_ranks() - 1, ", got ", rank));
  }
  return block.windows[static_cast<std::size_t>(rank)]->data();
}

}  // namespace fanfold
