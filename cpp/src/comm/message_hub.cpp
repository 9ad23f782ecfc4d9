// SPDX-License-Identifier: Apache-2.0
#include "comm/message_hub.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/format.h"
#include "base/keep_forever.h"
#include "comm/transport_message.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

// While several threads use the transport, none stays inside for long: the others want to send.
constexpr std::int64_t kShortTurnNs = 50'000;
constexpr int kShortTurns = 64;
constexpr std::int64_t kFlushSliceNs = 50'000;
constexpr int kMaxMessagesPerTurn = 64;  // then others may look at what has come

std::chrono::steady_clock::time_point instant(std::int64_t at_ns) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at_ns));
}

}  // namespace

/// Needs `lock`, of mutex_. The result must end without it.
std::shared_ptr<void> MessageHub::wait_until_free(std::unique_lock<std::mutex>& lock) {
  if (!is_busy_) return nullptr;
  ++num_senders_;
  lock.unlock();
  std::shared_ptr<void> let_go = transport_->before_wait();
  lock.lock();
  changed_.wait(lock, [this] { return !is_busy_; });
  --num_senders_;
  return let_go;
}

/// A thread's time inside the transport.
class MessageHub::Turn {
 public:
  /// Waits for whoever is inside. Then sends what was posted meanwhile.
  explicit Turn(MessageHub& hub) : hub_(hub) {
    std::shared_ptr<void> let_go;  // its end may wait for who is inside next: not under the lock
    std::unique_lock<std::mutex> lock(hub.mutex_);
    if (hub.is_busy_) hub.num_short_turns_ = kShortTurns;
    let_go = hub.wait_until_free(lock);
    enter(lock);
  }
  /// For who holds `lock` and has seen that nobody is inside.
  Turn(MessageHub& hub, std::unique_lock<std::mutex>& lock) : hub_(hub) { enter(lock); }
  ~Turn() { hub_.leave_turn(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  void enter(std::unique_lock<std::mutex>& lock) {
    hub_.is_busy_ = true;
    hub_.inside_ = std::this_thread::get_id();
    hub_.send_posted(lock);
    lock.unlock();
  }

  MessageHub& hub_;
};

MessageHub::MessageHub(std::shared_ptr<Transport> transport, std::int64_t max_message_bytes)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      num_ranks_(transport_->num_ranks()),
      kind_(transport_->kind()),
      is_thread_bound_(transport_->is_thread_bound()),
      max_message_bytes_(max_message_bytes),
      thread_(std::this_thread::get_id()),
      leftovers_(Leftovers::of_this_thread()) {
  leftovers_->close_all();
  transport_->start(max_message_bytes);
}

MessageHub::~MessageHub() {
  if (!is_forked_child()) {
    close(std::chrono::nanoseconds(0));
  } else {
    base::keep_forever(transport_);  // what it holds belongs to the parent
  }
}

std::uint64_t MessageHub::new_group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return (static_cast<std::uint64_t>(rank_) << 32U) | ++num_groups_;
}

void MessageHub::add(std::uint64_t group, std::shared_ptr<Inbox> inbox) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inboxes_.emplace(group, std::move(inbox));
}

void MessageHub::remove(std::uint64_t group, std::chrono::nanoseconds timeout) noexcept {
  if (is_forked_child()) return;
  std::shared_ptr<Inbox> removed;  // outlives the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = inboxes_.find(group);
    if (place == inboxes_.end()) return;
    removed = std::move(place->second);
    inboxes_.erase(place);
    if (!inboxes_.empty()) return;
  }
  close(timeout);
}

void MessageHub::close(std::chrono::nanoseconds timeout) noexcept {
  std::shared_ptr<void> let_go;  // as in Turn
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_closed_) return;
  if (is_foreign_thread()) {
    // A bound transport is its thread's, which may be inside just now.
    is_closed_ = true;
    leftovers_->add(transport_, std::move(posted_), timeout);
    return;
  }
  let_go = wait_until_free(lock);
  is_busy_ = true;
  inside_ = std::this_thread::get_id();
  send_posted(lock);
  is_closed_ = true;
  lock.unlock();
  transport_->close(timeout);
  leave_turn();
}

void MessageHub::check_thread(const char* call) const {
  if (!is_foreign_thread()) {
    if (is_thread_bound_) leftovers_->close_all();
    return;
  }
  throw InvalidState(base::str(call, ": expected the thread that made the communicator, since a '",
                               kind_, "' transport is bound to it, got a call on another thread"));
}

/// `lock` is held, and by a thread that may call the transport and is the one inside.
void MessageHub::send_posted(std::unique_lock<std::mutex>& lock) noexcept {
  while (!posted_.empty()) {
    std::vector<Posted> batch;
    batch.swap(posted_);
    const bool closed = is_closed_;
    lock.unlock();
    std::exception_ptr failure;
    for (const Posted& one : batch) {
      if (closed) break;
      try {
        transport_->send(one.peer,
                         {{one.bytes.data(), static_cast<std::int64_t>(one.bytes.size())}});
      } catch (...) {
        if (failure == nullptr) failure = std::current_exception();
      }
    }
    if (failure != nullptr) defer(std::move(failure));
    lock.lock();
  }
}

void MessageHub::leave_turn() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  send_posted(lock);
  is_busy_ = false;
  inside_ = {};
  changed_.notify_all();
}

void MessageHub::throw_deferred(std::unique_lock<std::mutex>& lock) {
  if (deferred_ == nullptr) return;
  const std::exception_ptr failure = std::exchange(deferred_, nullptr);
  lock.unlock();
  std::rethrow_exception(failure);
}

void MessageHub::send(int peer, const Parts& parts) {
  check_thread("send");
  const Turn turn(*this);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_closed_) return;
    throw_deferred(lock);
  }
  transport_->send(peer, parts);
}

void MessageHub::post(int peer, const Parts& parts) noexcept {
  queue(peer, parts);
  send_queued();
}

void MessageHub::queue(int peer, const Parts& parts) noexcept {
  if (is_forked_child()) return;
  try {
    Posted posted{peer, {}};
    for (const Transport::Part& part : parts) {
      posted.bytes.insert(posted.bytes.end(), part.data, part.data + part.bytes);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_closed_) posted_.push_back(std::move(posted));
  } catch (...) {
    defer_current();
  }
}

void MessageHub::send_queued() noexcept {
  if (is_forked_child()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  // Else the thread that is inside sends it on its way out, or the one that may go in.
  if (posted_.empty() || is_busy_ || is_foreign_thread()) return;
  const Turn turn(*this, lock);
}

void MessageHub::defer_current() noexcept { defer(std::current_exception()); }

/// A later one goes without the lock: destroying an error may take others (an interpreter's), whose
/// holder may want this one.
void MessageHub::defer(std::exception_ptr failure) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (deferred_ == nullptr) deferred_.swap(failure);
}

void MessageHub::progress(std::int64_t max_ns) {
  check_thread("receive");
  const std::int64_t now = base::now_ns();
  const std::int64_t end = now + std::min(max_ns, INT64_MAX - now);
  std::unique_lock<std::mutex> lock(mutex_);
  throw_deferred(lock);
  const std::uint64_t seen = num_taken_;
  while (is_closed_ || is_busy_ || num_senders_ > 0) {
    if (max_ns <= 0) return;
    if (is_busy_) num_short_turns_ = kShortTurns;
    ++num_waiting_;
    const bool late = changed_.wait_until(lock, instant(end)) == std::cv_status::timeout;
    --num_waiting_;
    if (late || num_taken_ != seen) return;
  }
  std::int64_t slice = std::max<std::int64_t>(0, end - base::now_ns());
  if (num_short_turns_ > 0) {
    slice = std::min(slice, kShortTurnNs);
    --num_short_turns_;
  }
  const Turn turn(*this, lock);
  (void)take_some(slice);
}

bool MessageHub::has_unsent(const std::vector<int>& peers) {
  const Turn turn(*this);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) return false;
  }
  return std::any_of(peers.begin(), peers.end(),
                     [this](int peer) { return peer != rank_ && transport_->has_unsent(peer); });
}

void MessageHub::flush(const std::vector<int>& peers, base::Deadline deadline,
                       base::FunctionRef<bool()> give_up) {
  check_thread("flush");
  while (has_unsent(peers) && !deadline.passed() && !give_up()) {
    progress(std::min(kFlushSliceNs, deadline.remaining_ns()));
  }
}

/// Of who is inside. Returns whether something came.
bool MessageHub::take_some(std::int64_t max_ns) {
  std::optional<Transport::Message> message = transport_->receive(std::chrono::nanoseconds(max_ns));
  std::uint64_t num = 0;
  while (message.has_value()) {
    deliver(*message);
    if (++num == kMaxMessagesPerTurn) break;
    message = transport_->receive(std::chrono::nanoseconds(0));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  num_taken_ += num;
  return num > 0;
}

void MessageHub::deliver(const Transport::Message& message) {
  MessageHead head;
  if (!head.read(message.bytes) || message.source < 0 || message.source >= num_ranks_) {
    throw InvalidState(base::str("transport '", kind_, "': rank ", message.source,
                                 " sent a message that is none of this version of Fanfold's; "
                                 "expected the same version on every rank and no other user"));
  }
  std::shared_ptr<Inbox> inbox;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = inboxes_.find(head.group);
    if (place != inboxes_.end()) inbox = place->second;
  }
  if (inbox != nullptr) inbox->take(message.source, message.bytes);
}

std::string MessageHub::lost_reason(int peer) {
  if (is_foreign_thread() || is_inside()) return "";
  const Turn turn(*this);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) return "";
  }
  std::string reason = transport_->lost_reason(peer);
  // What it sent before has arrived by now.
  if (!reason.empty()) {
    while (take_some(0)) {
    }
  }
  return reason;
}

}  // namespace fanfold::comm
