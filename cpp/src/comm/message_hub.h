// SPDX-License-Identifier: Apache-2.0
#pragma once

// One transport, used by the threads of all that was made on it.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "base/function_ref.h"
#include "comm/leftovers.h"
#include "fanfold/transport.h"

namespace fanfold::comm {

/// The end of a group to which a hub brings messages.
class Inbox {
 public:
  Inbox() = default;
  virtual ~Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  /// `source` is a rank of the transport. Called by whichever thread is inside the hub, by one at a
  /// time; keeps nothing of `bytes`.
  virtual void take(int source, const std::vector<std::byte>& bytes) = 0;
};

/// Lets one thread at a time into the transport. A thread that waits for messages while another is
/// inside sleeps until that one has brought something, or has left and it can go in itself.
///
/// Threads: any, all at once. Of a thread-bound transport only the one that made the hub, but for
/// `post` and the end: what other threads post leaves with the next call of that one, which also
/// closes what ended elsewhere (see leftovers.h).
/// In a forked child nothing happens.
class MessageHub {
 public:
  using Parts = std::vector<Transport::Part>;

  /// Starts the transport.
  MessageHub(std::shared_ptr<Transport> transport, std::int64_t max_message_bytes);
  /// Closes the transport, without waiting, if `remove` has not.
  ~MessageHub();
  MessageHub(const MessageHub&) = delete;
  MessageHub& operator=(const MessageHub&) = delete;

  int rank() const noexcept { return rank_; }
  int num_ranks() const noexcept { return num_ranks_; }
  const std::string& kind() const noexcept { return kind_; }
  std::int64_t max_message_bytes() const noexcept { return max_message_bytes_; }
  bool is_forked_child() const noexcept { return guard_.is_child(); }
  /// A number for a new group that no other group on this transport has.
  std::uint64_t new_group();

  void add(std::uint64_t group, std::shared_ptr<Inbox> inbox);
  /// Messages for `group` are dropped from now on. The last group closes the transport, which gets
  /// `timeout` for what has not left yet. Idempotent.
  void remove(std::uint64_t group, std::chrono::nanoseconds timeout) noexcept;

  /// @throws InvalidState  the transport is bound to another thread; `call` is named.
  void check_thread(const char* call) const;
  /// Waits for the thread that is inside the transport, as long as a `receive` may take.
  /// @throws what the transport throws. Nothing is sent after the transport was closed.
  void send(int peer, const Parts& parts);
  /// Never waits: if another thread is inside, that one sends it. An error of the transport is
  /// thrown by the next `send` or `progress`.
  void post(int peer, const Parts& parts) noexcept;
  /// As `post`, but leaves with the next call of any thread, such as `send_queued`: never enters
  /// the transport, for who holds a lock that a transport's thread may want.
  void queue(int peer, const Parts& parts) noexcept;
  /// Sends what `queue` took, unless another thread is inside, which does it then. Never waits.
  void send_queued() noexcept;
  /// Keeps an error that happened where none can be thrown, as one of a post; the first of several.
  /// Call in a catch block.
  void defer_current() noexcept;
  /// Takes what has arrived; waits at most `max_ns` for something that this or another thread
  /// takes.
  /// @throws what the transport throws.
  void progress(std::int64_t max_ns);
  /// Moves messages until all that was sent to `peers` (this rank may be among them) has left,
  /// `deadline` has passed or `give_up()`, which is asked time and again.
  /// @throws what the transport and `give_up` throw.
  void flush(const std::vector<int>& peers, base::Deadline deadline,
             base::FunctionRef<bool()> give_up);
  /// Why `peer` is known to be gone, after all that it sent has been taken; else empty.
  std::string lost_reason(int peer);

 private:
  class Turn;

  bool is_foreign_thread() const noexcept {
    return is_thread_bound_ && std::this_thread::get_id() != thread_;
  }
  /// Whether this call comes from within the transport, as of what a garbage collector ends there.
  bool is_inside() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return inside_ == std::this_thread::get_id();
  }
  std::shared_ptr<void> wait_until_free(std::unique_lock<std::mutex>& lock);
  bool take_some(std::int64_t max_ns);
  bool has_unsent(const std::vector<int>& peers);
  void deliver(const Transport::Message& message);
  void send_posted(std::unique_lock<std::mutex>& lock) noexcept;
  void leave_turn() noexcept;
  void defer(std::exception_ptr failure) noexcept;
  void throw_deferred(std::unique_lock<std::mutex>& lock);
  void close(std::chrono::nanoseconds timeout) noexcept;

  const std::shared_ptr<Transport> transport_;
  const int rank_;
  const int num_ranks_;
  const std::string kind_;
  const bool is_thread_bound_;
  const std::int64_t max_message_bytes_;
  const std::thread::id thread_;
  const std::shared_ptr<Leftovers> leftovers_;  // of that thread
  base::ForkGuard guard_;

  std::mutex mutex_;  // guards all below; not held while the transport is called
  std::condition_variable changed_;
  bool is_busy_ = false;         // a thread is inside the transport
  std::thread::id inside_;       // which
  int num_senders_ = 0;          // threads that wait to go in and will not stay
  int num_waiting_ = 0;          // threads in `progress` that wait
  int num_short_turns_ = 0;      // receives to come that stay inside for a short time only
  std::uint64_t num_taken_ = 0;  // messages so far
  std::vector<Posted> posted_;
  std::exception_ptr deferred_;  // what a post met first; never destroyed under the lock
  std::map<std::uint64_t, std::shared_ptr<Inbox>> inboxes_;
  std::uint64_t num_groups_ = 0;
  bool is_closed_ = false;
};

}  // namespace fanfold::comm
