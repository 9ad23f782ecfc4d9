// SPDX-License-Identifier: Apache-2.0
#pragma once

// A transport between threads of this process, with faults at will.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fanfold/communicator.h"
#include "fanfold/transport.h"

namespace fanfold::testing {

/// The queues between a number of ranks. Messages of one rank to another keep their order; each may
/// be delayed at random, so that those of different ranks overtake each other.
///
/// Checks what Transport promises its implementations: one call at a time, on one thread where it
/// is bound to that, no message beyond the announced size, nothing before `start` or after `close`.
/// A breach is thrown by the call and counted.
///
/// Threads: all functions may be called by any.
class LoopbackNetwork {
 public:
  struct Options {
    std::chrono::microseconds max_delay{0};
    bool is_thread_bound = false;
    /// Above 0, a message leaves only within its sender's calls, at that many `receive`s later.
    int sends_take_calls = 0;
    bool tells_losses = true;  // whether `lost_reason` knows of ranks that have closed their end
  };

  explicit LoopbackNetwork(int num_ranks);
  LoopbackNetwork(int num_ranks, Options options);
  ~LoopbackNetwork();
  LoopbackNetwork(const LoopbackNetwork&) = delete;
  LoopbackNetwork& operator=(const LoopbackNetwork&) = delete;

  /// A rank's end; once for each.
  std::shared_ptr<Transport> transport(int rank);

  /// From now on each of the two knows the other as lost, with `reason`, and loses its messages.
  void cut(int rank_a, int rank_b, const std::string& reason);
  /// Cuts `rank` off from all others.
  void lose(int rank, const std::string& reason);
  /// Holds back what `rank` sends, until `thaw`.
  void freeze(int rank);
  void thaw(int rank);
  /// The send of `rank` after `num_sends` further ones throws SystemFailure.
  void fail_send(int rank, int num_sends);
  /// Puts bytes into the queue from `source` to `destination`, as if it had sent them.
  void inject(int source, int destination, std::vector<std::byte> bytes);

  std::int64_t num_bytes_sent(int rank) const;
  int num_breaches() const;
  bool is_closed(int rank) const;

 private:
  struct State;
  class End;
  std::shared_ptr<State> state_;
};

/// Passes every call on; what a test changes it overrides.
class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int num_ranks() const noexcept override { return inner_->num_ranks(); }
  std::string kind() const override { return inner_->kind(); }
  void start(std::int64_t max_message_bytes) override { inner_->start(max_message_bytes); }
  void send(int peer, const std::vector<Part>& parts) override { inner_->send(peer, parts); }
  std::optional<Message> receive(std::chrono::nanoseconds max_wait) override {
    return inner_->receive(max_wait);
  }
  bool has_unsent(int peer) const override { return inner_->has_unsent(peer); }
  std::string lost_reason(int peer) const override { return inner_->lost_reason(peer); }
  void close(std::chrono::nanoseconds timeout) noexcept override { inner_->close(timeout); }

 private:
  std::shared_ptr<Transport> inner_;
};

/// As spawn_ranks, on communicators that are made with `from_transport` over a new network.
void spawn_loopback_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
                          LoopbackNetwork::Options options = {},
                          std::chrono::nanoseconds timeout = std::chrono::seconds(30));

/// Calls `body(rank, transport)` for each rank of `network`, each on a thread of its own, and waits
/// for all. Rethrows the first error in time.
void spawn_on(LoopbackNetwork& network, int num_ranks,
              const std::function<void(int rank, std::shared_ptr<Transport>)>& body);

}  // namespace fanfold::testing
