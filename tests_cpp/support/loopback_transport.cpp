// SPDX-License-Identifier: Apache-2.0
#include "support/loopback_transport.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "fanfold/error.h"
#include "support/random_bits.h"
#include "support/spawn_ranks.h"

namespace fanfold::testing {
namespace {

using Clock = std::chrono::steady_clock;

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

}  // namespace

struct LoopbackNetwork::State {
  struct Sent {
    Clock::time_point due;
    std::vector<std::byte> bytes;
  };
  struct Rank {
    std::vector<std::deque<Sent>> queues;  // by source
    std::vector<std::string> lost;         // by peer; empty: not lost
    std::int64_t max_bytes = -1;           // before start
    std::int64_t num_bytes_sent = 0;
    int sends_until_failure = -1;  // none
    bool is_frozen = false;
    bool is_closed = false;
  };

  State(int num, Options given) : options(given), ranks(at(num)), random(20260101) {
    for (Rank& rank : ranks) {
      rank.queues.resize(ranks.size());
      rank.lost.resize(ranks.size());
    }
  }

  const Options options;
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::vector<Rank> ranks;
  RandomBits random;
  int num_breaches = 0;

  [[noreturn]] void breach(const std::string& text) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ++num_breaches;
    }
    throw std::logic_error("LoopbackNetwork: " + text);
  }

  void put(int source, int destination, std::vector<std::byte> bytes) {
    Clock::time_point due = Clock::now();
    if (options.max_delay.count() > 0) {
      due += std::chrono::microseconds(random.below(options.max_delay.count() + 1));
    }
    std::deque<Sent>& queue = ranks[at(destination)].queues[at(source)];
    if (!queue.empty()) due = std::max(due, queue.back().due);
    queue.push_back({due, std::move(bytes)});
    changed.notify_all();
  }
};

/// One rank's transport.
class LoopbackNetwork::End final : public Transport {
 public:
  End(std::shared_ptr<State> state, int rank) : state_(std::move(state)), rank_(rank) {}

  int rank() const noexcept override { return rank_; }
  int num_ranks() const noexcept override { return static_cast<int>(state_->ranks.size()); }
  std::string kind() const override { return "loopback"; }
  bool is_thread_bound() const noexcept override { return state_->options.is_thread_bound; }

  void start(std::int64_t max_message_bytes) override {
    const Inside inside(*this);
    const std::lock_guard<std::mutex> lock(state_->mutex);
    own().max_bytes = max_message_bytes;
    thread_ = std::this_thread::get_id();
  }

  void send(int peer, const std::vector<Part>& parts) override {
    const Inside inside(*this);
    check_open();
    std::vector<std::byte> bytes;
    for (const Part& part : parts) bytes.insert(bytes.end(), part.data, part.data + part.bytes);
    if (peer == rank_ || static_cast<std::int64_t>(bytes.size()) > own().max_bytes) {
      state_->breach("a message to the own rank, or one that is too large");
    }
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (own().sends_until_failure >= 0) {
      --own().sends_until_failure;
      if (own().sends_until_failure < 0) {
        throw SystemFailure("loopback: send: the wire broke", EIO);
      }
    }
    if (!own().lost[at(peer)].empty() || state_->ranks[at(peer)].is_closed) return;
    own().num_bytes_sent += static_cast<std::int64_t>(bytes.size());
    if (state_->options.sends_take_calls > 0) {
      unsent_.push_back({peer, state_->options.sends_take_calls, std::move(bytes)});
    } else {
      state_->put(rank_, peer, std::move(bytes));
    }
  }

  std::optional<Message> receive(std::chrono::nanoseconds max_wait) override {
    const Inside inside(*this);
    check_open();
    const Clock::time_point end = Clock::now() + max_wait;
    std::unique_lock<std::mutex> lock(state_->mutex);
    advance();
    for (;;) {
      const Clock::time_point now = Clock::now();
      Clock::time_point next = end;
      std::vector<int> ready;
      for (int source = 0; source < num_ranks(); ++source) {
        const auto& queue = own().queues[at(source)];
        if (queue.empty() || state_->ranks[at(source)].is_frozen) continue;
        if (queue.front().due <= now) ready.push_back(source);
        next = std::min(next, queue.front().due);
      }
      if (!ready.empty()) {
        const auto choice = state_->random.below(static_cast<std::int64_t>(ready.size()));
        const int source = ready[static_cast<std::size_t>(choice)];
        Message message{source, std::move(own().queues[at(source)].front().bytes)};
        own().queues[at(source)].pop_front();
        return message;
      }
      if (now >= end) return std::nullopt;
      state_->changed.wait_until(lock, next);
    }
  }

  bool has_unsent(int peer) const override {
    const Inside inside(*this);
    const std::lock_guard<std::mutex> lock(state_->mutex);
    const State::Rank& own = state_->ranks[at(rank_)];
    if (!own.lost[at(peer)].empty() || state_->ranks[at(peer)].is_closed) {
      return false;
    }
    const bool is_held = own.is_frozen && !state_->ranks[at(peer)].queues[at(rank_)].empty();
    if (state_->options.sends_take_calls > 0 && is_held) return true;
    return std::any_of(unsent_.begin(), unsent_.end(),
                       [peer](const Unsent& message) { return message.peer == peer; });
  }

  std::string lost_reason(int peer) const override {
    const Inside inside(*this);
    const std::lock_guard<std::mutex> lock(state_->mutex);
    const State::Rank& own = state_->ranks[at(rank_)];
    if (!own.lost[at(peer)].empty()) return own.lost[at(peer)];
    const bool tells = state_->options.tells_losses && own.queues[at(peer)].empty();
    return tells && state_->ranks[at(peer)].is_closed ? "its connection ended" : "";
  }

  void close(std::chrono::nanoseconds) noexcept override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    for (Unsent& message : unsent_) state_->put(rank_, message.peer, std::move(message.bytes));
    unsent_.clear();
    // Counted only: it cannot throw.
    if (is_inside_.load(std::memory_order_acquire)) ++state_->num_breaches;
    own().is_closed = true;
    state_->changed.notify_all();
  }

 private:
  /// A call on this end.
  class Inside {
   public:
    explicit Inside(const End& end) : end_(end) {
      if (end_.is_inside_.exchange(true, std::memory_order_acquire)) {
        end_.state_->breach("two calls at the same time");
      }
      const std::thread::id none;
      if (end_.is_thread_bound() && end_.thread_ != none &&
          end_.thread_ != std::this_thread::get_id()) {
        end_.is_inside_.store(false, std::memory_order_release);
        end_.state_->breach("a call on another thread than that of start");
      }
    }
    ~Inside() { end_.is_inside_.store(false, std::memory_order_release); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    const End& end_;
  };

  /// A message that takes further calls to leave.
  struct Unsent {
    int peer;
    int num_calls;
    std::vector<std::byte> bytes;
  };

  /// Of who holds the lock.
  void advance() {
    for (Unsent& message : unsent_) --message.num_calls;
    while (!unsent_.empty() && unsent_.front().num_calls <= 0) {
      state_->put(rank_, unsent_.front().peer, std::move(unsent_.front().bytes));
      unsent_.pop_front();
    }
  }

  State::Rank& own() { return state_->ranks[at(rank_)]; }
  void check_open() {
    bool is_open = false;
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      is_open = own().max_bytes >= 0 && !own().is_closed;
    }
    if (!is_open) state_->breach("a call before start or after close");
  }

  std::shared_ptr<State> state_;
  int rank_;
  std::thread::id thread_;
  std::deque<Unsent> unsent_;
  mutable std::atomic<bool> is_inside_{false};
};

LoopbackNetwork::LoopbackNetwork(int num_ranks) : LoopbackNetwork(num_ranks, Options{}) {}
LoopbackNetwork::LoopbackNetwork(int num_ranks, Options options)
    : state_(std::make_shared<State>(num_ranks, options)) {}
LoopbackNetwork::~LoopbackNetwork() = default;

std::shared_ptr<Transport> LoopbackNetwork::transport(int rank) {
  return std::make_shared<End>(state_, rank);
}

void LoopbackNetwork::cut(int rank_a, int rank_b, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ranks[at(rank_a)].lost[at(rank_b)] = reason;
  state_->ranks[at(rank_b)].lost[at(rank_a)] = reason;
  state_->changed.notify_all();
}

void LoopbackNetwork::lose(int rank, const std::string& reason) {
  for (int peer = 0; peer < static_cast<int>(state_->ranks.size()); ++peer) {
    if (peer != rank) cut(rank, peer, reason);
  }
}

void LoopbackNetwork::freeze(int rank) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ranks[at(rank)].is_frozen = true;
}

void LoopbackNetwork::thaw(int rank) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ranks[at(rank)].is_frozen = false;
  state_->changed.notify_all();
}

void LoopbackNetwork::fail_send(int rank, int num_sends) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ranks[at(rank)].sends_until_failure = num_sends;
}

void LoopbackNetwork::inject(int source, int destination, std::vector<std::byte> bytes) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->put(source, destination, std::move(bytes));
}

std::int64_t LoopbackNetwork::num_bytes_sent(int rank) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->ranks[at(rank)].num_bytes_sent;
}

int LoopbackNetwork::num_breaches() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->num_breaches;
}

bool LoopbackNetwork::is_closed(int rank) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->ranks[at(rank)].is_closed;
}

void spawn_on(LoopbackNetwork& network, int num_ranks,
              const std::function<void(int, std::shared_ptr<Transport>)>& body) {
  std::vector<Communicator> unused = Communicator::threads(num_ranks);
  spawn_ranks(unused,
              [&](Communicator& rank) { body(rank.rank(), network.transport(rank.rank())); });
}

void spawn_loopback_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
                          LoopbackNetwork::Options options, std::chrono::nanoseconds timeout) {
  LoopbackNetwork network(num_ranks, options);
  spawn_on(network, num_ranks, [&](int, std::shared_ptr<Transport> transport) {
    Communicator comm =
        Communicator::from_transport(std::move(transport), TransportUse::kAlways, timeout);
    body(comm);
  });
  if (network.num_breaches() > 0)
    throw std::logic_error("LoopbackNetwork: the contract was broken");
}

}  // namespace fanfold::testing
