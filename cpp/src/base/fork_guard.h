// SPDX-License-Identifier: Apache-2.0
#pragma once

// Noticing, without a system call, that this process is a forked copy.

#include <atomic>
#include <cstdint>

namespace fanfold::base {

/// Remembers the process that made it.
///
/// Holds a page that the kernel zeroes in a forked child. On a kernel without that (before 4.14)
/// the process id is compared instead. Threads: `is_child` may be called by any.
class ForkGuard {
 public:
  /// @throws std::bad_alloc
  ForkGuard();
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool is_child() const noexcept {
    // Relaxed: written once, by the constructor; the kernel clears it before the child runs.
    return word_ != nullptr ? word_->load(std::memory_order_relaxed) == 0 : pid_differs();
  }

 private:
  bool pid_differs() const noexcept;

  std::atomic<std::uint32_t>* word_ = nullptr;
  std::int64_t page_bytes_;
  std::int64_t pid_;
};

}  // namespace fanfold::base
