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

SymmetricMemory::Block::Block(comm::Windows windows_, std::int64_t id_, AllocatorMemory memory_,
                              std::shared_ptr<memory::Ledger> ledger_)
    : windows(std::move(windows_)),
      id(id_),
      memory(std::move(memory_)),
      ledger(std::move(ledger_)) {}

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

AllocatorMemory SymmetricMemory::memory() const { return checked(block_).memory; }

TensorView SymmetricMemory::tensor(int rank, DType dtype, const std::vector<std::int64_t>& shape,
                                   std::int64_t offset_bytes) const {
  std::byte* const start = data(rank);
  if (shape.size() > static_cast<std::size_t>(TensorView::kMaxDims)) {
    throw InvalidArgument(base::str("shape: expected at most ", TensorView::kMaxDims,
                                    " dimensions, got ", shape.size()));
  }
  TensorView view;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::int64_t count = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    view.shape[dim] = shape[dim];
    view.strides[dim] = count;
    if (shape[dim] < 0 || __builtin_mul_overflow(count, shape[dim], &count)) {
      throw InvalidArgument(
          base::str("shape: expected extents of 0 or more whose product is a "
                    "number of 64 bits, got ",
                    shape[dim], " in dimension ", dim));
    }
  }
  const std::int64_t room = bytes() - offset_bytes;
  if (offset_bytes < 0 || room < 0 || count > room / size_of(dtype)) {
    throw InvalidArgument(base::str("tensor: expected ", count, " elements of ", name_of(dtype),
                                    " within the window of ", bytes(), " bytes, got offset_bytes ",
                                    offset_bytes));
  }
  if (offset_bytes % size_of(dtype) != 0) {
    throw InvalidArgument(
        base::str("offset_bytes: expected a multiple of ", size_of(dtype), ", got ", offset_bytes));
  }
  view.data = start + offset_bytes;
  view.device = checked(block_).memory.device;
  view.device_index = checked(block_).memory.device_index;
  return view;
}

}  // namespace fanfold
