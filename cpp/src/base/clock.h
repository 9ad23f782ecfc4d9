// SPDX-License-Identifier: Apache-2.0
#pragma once

// Monotonic time and deadlines. Nothing in this library waits without one.

#include <chrono>
#include <cstdint>

namespace fanfold::base {

inline std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// An instant after which a wait gives up. Started when made.
class Deadline {
 public:
  /// `timeout` from now; a timeout too large to add means never.
  explicit Deadline(std::chrono::nanoseconds timeout) noexcept : timeout_ns_(timeout.count()) {
    const std::int64_t now = now_ns();
    at_ns_ = timeout_ns_ > INT64_MAX - now ? INT64_MAX : now + timeout_ns_;
  }
  bool passed() const noexcept { return now_ns() >= at_ns_; }
  std::int64_t at_ns() const noexcept { return at_ns_; }
  std::int64_t timeout_ns() const noexcept { return timeout_ns_; }
  /// Never negative.
  std::int64_t remaining_ns() const noexcept {
    const std::int64_t left = at_ns_ - now_ns();
    return left > 0 ? left : 0;
  }

 private:
  std::int64_t timeout_ns_;
  std::int64_t at_ns_;
};

}  // namespace fanfold::base
