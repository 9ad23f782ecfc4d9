// SPDX-License-Identifier: Apache-2.0
#pragma once

// Transports bound to a thread whose last user ended on another one.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork_guard.h"
#include "fanfold/transport.h"

namespace fanfold::comm {

/// A message on its way into a transport.
struct Posted {
  int peer;
  std::vector<std::byte> bytes;
};

/// What one thread has yet to send and close, since no other may: with its next call on a transport
/// that is bound to it, or else when it ends.
///
/// Threads: any may add.
class Leftovers {
 public:
  /// Of the calling thread.
  static std::shared_ptr<Leftovers> of_this_thread();
  ~Leftovers();

  /// Nothing is sent or closed if the thread has ended, or if there is no memory to note it.
  void add(std::shared_ptr<Transport> transport, std::vector<Posted> posted,
           std::chrono::nanoseconds timeout) noexcept;
  /// For the thread whose they are.
  void close_all() noexcept {
    if (num_.load(std::memory_order_relaxed) > 0) take_and_close();
  }

 private:
  struct One {
    std::shared_ptr<Transport> transport;
    std::vector<Posted> posted;
    std::chrono::nanoseconds timeout;
  };
  struct ThreadEnd;

  static bool send_posted(const One& one) noexcept;
  void take_and_close() noexcept;

  base::ForkGuard guard_;
  std::atomic<std::size_t> num_{0};  // of `all_`; what it leads to is read under the lock
  std::mutex mutex_;                 // guards all below; not held while a transport is called
  std::vector<One> all_;
  bool has_ended_ = false;
};

}  // namespace fanfold::comm
