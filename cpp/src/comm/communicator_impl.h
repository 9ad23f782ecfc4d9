// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a Communicator owns, for the parts of the library that are made from one.

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"
#include "comm/channel.h"
#include "comm/group.h"
#include "fanfold/communicator.h"

namespace fanfold {

/// Shared by a Communicator and all that is made from it; the last of them leaves the group.
class Communicator::Impl {
 public:
  Impl(std::unique_ptr<comm::Group> group, std::unique_ptr<comm::Channel> channel,
       std::chrono::nanoseconds timeout);
  /// Marks this rank as left unless it is closed; does nothing in a forked child.
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  comm::Group& group() noexcept { return *group_; }
  /// Only between a `Call`'s begin and end: `close` frees it.
  comm::Channel& channel() noexcept { return *channel_; }
  std::chrono::nanoseconds timeout() const noexcept { return timeout_; }
  /// Acquire: pairs with the release in `close`; may be asked by any thread.
  bool is_closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  /// The deadline of a call that starts now.
  /// @throws InvalidArgument  `timeout` is negative.
  base::Deadline deadline(std::optional<std::chrono::nanoseconds> timeout) const;
  /// @throws InvalidState  closed, or in a forked child; `call` is named in the message.
  void check_usable(const char* call) const;

  void abort(const std::string& reason);
  void close(base::Deadline deadline);

  /// One call on the channel; a second at the same time is the caller's mistake.
  class Call {
   public:
    /// @throws InvalidState  as `check_usable`, another thread is inside a call, or only another
    ///                       thread may make any.
    Call(Impl& impl, const char* name);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Impl& impl_;
  };

 private:
  std::unique_ptr<comm::Group> group_;      // outlives the channel
  std::mutex channel_mutex_;                // guards the life of `channel_` against `abort`
  std::unique_ptr<comm::Channel> channel_;  // null once closed
  std::chrono::nanoseconds timeout_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> is_running_{false};  // acquire and release by `Call`
};

}  // namespace fanfold
