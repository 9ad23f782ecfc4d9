// SPDX-License-Identifier: Apache-2.0
#pragma once

// A transport between threads of this process, with faults at will.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
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

/// As spawn_ranks, on communicators that are made with `from_transport` over a new network.
void spawn_loopback_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
                          LoopbackNetwork::Options options = {},
                          std::chrono::nanoseconds timeout = std::chrono::seconds(30));

/// Calls `body(rank, transport)` for each rank of `network`, each on a thread of its own, and waits
/// for all. Rethrows the first error in time.
void spawn_on(LoopbackNetwork& network, int num_ranks,
              const std::function<void(int rank, std::shared_ptr<Transport>)>& body);

}  // namespace fanfold::testing
