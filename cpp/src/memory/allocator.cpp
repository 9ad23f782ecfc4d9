// SPDX-License-Identifier: Apache-2.0
#include "fanfold/allocator.h"

#include <algorithm>
#include <functional>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "base/format.h"
#include "comm/failure.h"
#include "fanfold/error.h"
#include "memory/allocator_impl.h"

namespace fanfold {
namespace {

/// What the ranks tell each other before they allocate.
struct Proposal {
  static constexpr std::size_t kNumValues = 4;

  std::int64_t bytes;
  std::int64_t zero_bytes;
  std::int64_t cached_id;  // the block that this rank would reuse, -1 for none
  std::int64_t next_id;    // what this rank would call a new block

  std::vector<std::int64_t> values() const { return {bytes, zero_bytes, cached_id, next_id}; }
  static Proposal of(const std::vector<std::int64_t>& gathered, std::size_t rank) {
    const std::int64_t* const first = gathered.data() + rank * kNumValues;
    return {first[0], first[1], first[2], first[3]};
  }
};

void check_same(const char* field, std::int64_t expected, std::int64_t got, std::size_t rank) {
  if (got == expected) return;
  throw InvalidArgument(base::str("allocate: ", field, ": expected the same on every rank, got ",
                                  expected, " on rank 0 and ", got, " on rank ", rank));
}

template <class Impl>
Impl& checked(const std::shared_ptr<Impl>& impl) {
  if (impl == nullptr) throw InvalidState("allocator: the object was moved from");
  return *impl;
}

std::shared_ptr<Communicator::Impl> usable(const Communicator& communicator) {
  checked(communicator.impl()).check_usable("allocator");
  const comm::Group& group = communicator.impl()->group();
  if (!group.shares_memory()) {
    throw Unsupported(base::str("allocator: expected ranks that share memory, got others: ",
                                group.why_no_memory()));
  }
  return communicator.impl();
}

}  // namespace

Allocator::Impl::Impl(const Communicator& communicator,
                      std::unique_ptr<memory::WindowSource> source)
    : communicator_(usable(communicator)),
      source_(std::move(source)),
      ledger_(std::make_shared<memory::Ledger>()) {}

void Allocator::Impl::use_own_buffers(const std::vector<OwnBuffer>& buffers,
                                      base::Deadline deadline) {
  const Communicator::Impl::Call call(*communicator_, "Allocator");
  comm::Group& group = communicator_->group();
  own_buffers_.emplace(*source_, group, buffers, deadline);
  ledger_->keep_dropped();
}

std::vector<Allocator::Impl::Cached>::iterator Allocator::Impl::smallest_fit(std::int64_t bytes) {
  auto best = cache_.end();
  for (auto it = cache_.begin(); it != cache_.end(); ++it) {
    if (it->bytes() < bytes) continue;
    if (best == cache_.end() ||
        std::make_pair(it->bytes(), it->id) < std::make_pair(best->bytes(), best->id)) {
      best = it;
    }
  }
  return best;
}

void Allocator::Impl::drop_unusable() {
  for (auto it = cache_.begin(); it != cache_.end();) {
    const std::function<bool()> is_usable = source_->usability(it->windows);
    if (!is_usable || is_usable()) {
      ++it;
      continue;
    }
    ledger_->trim_block(it->bytes());
    it = cache_.erase(it);
  }
}

void Allocator::Impl::zero(const comm::Windows& windows, std::int64_t bytes,
                           base::Deadline deadline) {
  if (bytes == 0) return;
  comm::Group& group = communicator_->group();
  std::optional<comm::Failure> failure;
  try {
    source_->zero(windows[static_cast<std::size_t>(group.rank())]->data(), bytes);
  } catch (...) {
    failure = comm::Failure::current(group.rank());
  }
  (void)group.exchange("allocate: zeroing", {}, failure, deadline);
}

SymmetricMemory Allocator::Impl::allocate(std::int64_t bytes, std::int64_t zero_bytes,
                                          base::Deadline deadline) {
  const Communicator::Impl::Call call(*communicator_, "allocate");
  drop_unusable();
  const auto fit = smallest_fit(bytes);
  const Proposal own{bytes, zero_bytes, fit == cache_.end() ? -1 : fit->id, next_id_};
  const std::vector<std::int64_t> gathered =
      communicator_->channel().all_gather_values(own.values(), deadline, "allocate");
  bool may_reuse = own.cached_id >= 0;
  const Proposal first = Proposal::of(gathered, 0);
  for (std::size_t rank = 0; rank < gathered.size() / Proposal::kNumValues; ++rank) {
    const Proposal theirs = Proposal::of(gathered, rank);
    check_same("bytes", first.bytes, theirs.bytes, rank);
    check_same("zero_bytes", first.zero_bytes, theirs.zero_bytes, rank);
    may_reuse = may_reuse && theirs.cached_id == own.cached_id;
    next_id_ = std::max(next_id_, theirs.next_id);
  }
  // Only now, so that no rank waits for one that was refused.
  if (bytes < 1) {
    throw InvalidArgument(base::str("bytes: expected 1 or more, got ", bytes));
  }
  if (zero_bytes < 0 || zero_bytes > bytes) {
    throw InvalidArgument(base::str("zero_bytes: expected 0 to ", bytes, ", got ", zero_bytes));
  }
  if (may_reuse) {
    Cached cached = std::move(*fit);
    cache_.erase(fit);
    const auto block = std::make_shared<SymmetricMemory::Block>(
        std::move(cached.windows), cached.id, source_->memory(), ledger_);
    block->is_usable = source_->usability(block->windows);
    ledger_->reuse_block(block->bytes());
    zero(block->windows, zero_bytes, deadline);
    return SymmetricMemory(block);
  }
  const std::int64_t id = next_id_++;
  comm::Windows windows = make_windows(id, bytes, deadline);
  const auto block =
      std::make_shared<SymmetricMemory::Block>(std::move(windows), id, source_->memory(), ledger_);
  block->is_usable = source_->usability(block->windows);
  ledger_->add_block(block->bytes());
  if (own_buffers_) zero(block->windows, zero_bytes, deadline);
  return SymmetricMemory(block);
}

comm::Windows Allocator::Impl::make_windows(std::int64_t id, std::int64_t bytes,
                                            base::Deadline deadline) {
  if (!own_buffers_) return source_->make_windows(bytes, deadline);
  memory::OwnBuffers& own = *own_buffers_;
  // What is free is the same on all ranks: so is every decision here.
  std::optional<comm::Windows> windows = own.take(id, bytes);
  if (!windows) {
    reclaim(deadline);
    windows = own.take(id, bytes);
  }
  if (windows) return std::move(*windows);
  const memory::Arena& arena = own.arena();
  throw CapacityExceeded(base::str("allocate: expected room for ", bytes,
                                   " bytes in the caller's buffers, got ", arena.free_bytes(),
                                   " bytes free, at most ", arena.largest_free_bytes(),
                                   " of them together"));
}

// A rank may still look at a block that the others have freed.
void Allocator::Impl::reclaim(base::Deadline deadline) {
  if (!own_buffers_) return;
  std::vector<std::int64_t> idle = ledger_->dropped();
  idle.insert(idle.end(), trimmed_.begin(), trimmed_.end());
  for (const Cached& cached : cache_) idle.push_back(cached.id);
  for (const std::int64_t id : memory::common_ids(communicator_->channel(), idle, deadline)) {
    own_buffers_->give_back(id);
    ledger_->forget_dropped(id);
    trimmed_.erase(std::remove(trimmed_.begin(), trimmed_.end(), id), trimmed_.end());
    const auto is_it = [id](const Cached& cached) { return cached.id == id; };
    const auto cached = std::find_if(cache_.begin(), cache_.end(), is_it);
    if (cached == cache_.end()) continue;
    ledger_->trim_block(cached->bytes());
    cache_.erase(cached);
  }
}

std::shared_ptr<std::byte> Allocator::Impl::allocate_private(std::int64_t bytes) const {
  if (!private_memory_) return source_->allocate_private(bytes);
  std::shared_ptr<std::byte> memory = private_memory_(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  if (address % memory::Arena::kAlignment != 0) {
    throw InvalidArgument(base::str("private memory: expected an address that is a multiple of ",
                                    memory::Arena::kAlignment, ", got one that is ",
                                    address % memory::Arena::kAlignment, " beyond"));
  }
  return memory;
}

void Allocator::Impl::free(const SymmetricMemory& memory) {
  const std::shared_ptr<SymmetricMemory::Block>& block = memory.block();
  if (block == nullptr || block->ledger != ledger_) {
    throw InvalidArgument(base::str("memory: expected a block of this allocator, got ",
                                    block == nullptr ? "an object that holds none" : "another's"));
  }
  if (block->is_freed) {
    throw InvalidArgument("memory: expected a block in use, got one that was freed before");
  }
  cache_.push_back({block->windows, block->id});
  block->is_freed = true;
  ledger_->cache_block(block->bytes());
}

void Allocator::Impl::trim() {
  for (const Cached& cached : cache_) {
    ledger_->trim_block(cached.bytes());
    if (own_buffers_) trimmed_.push_back(cached.id);
  }
  cache_.clear();
}

Allocator::Allocator(Communicator& communicator)
    : impl_(std::make_shared<Impl>(
          communicator, std::make_unique<memory::HostSource>(usable(communicator)->group()))) {}
Allocator::Allocator(Communicator& communicator, const std::vector<OwnBuffer>& buffers,
                     std::optional<std::chrono::nanoseconds> timeout)
    : Allocator(communicator) {
  impl_->use_own_buffers(buffers, communicator.impl()->deadline(timeout));
}
Allocator::~Allocator() = default;
Allocator::Allocator(const Allocator&) = default;
Allocator::Allocator(Allocator&&) noexcept = default;
Allocator& Allocator::operator=(const Allocator&) = default;
Allocator& Allocator::operator=(Allocator&&) noexcept = default;

SymmetricMemory Allocator::allocate(std::int64_t bytes, std::int64_t zero_bytes,
                                    std::optional<std::chrono::nanoseconds> timeout) {
  Impl& impl = checked(impl_);
  return impl.allocate(bytes, zero_bytes, impl.communicator().deadline(timeout));
}

void Allocator::free(const SymmetricMemory& memory) { checked(impl_).free(memory); }

void Allocator::trim() { checked(impl_).trim(); }

void Allocator::set_private_memory(PrivateMemorySource source) {
  checked(impl_).set_private_memory(std::move(source));
}

std::shared_ptr<std::byte> Allocator::allocate_private(std::int64_t bytes) const {
  return checked(impl_).allocate_private(bytes);
}

AllocatorStats Allocator::stats() const { return checked(impl_).stats(); }

AllocatorMemory Allocator::memory() const { return checked(impl_).memory(); }

}  // namespace fanfold
