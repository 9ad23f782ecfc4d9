// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a Communicator needs of ranks that share no memory: messages.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/export.h"

namespace fanfold {

/// Messages between the ranks of a group, whatever carries them: MPI, gloo, a caller's own network.
/// `Communicator::from_transport` builds everything else on it: collectives, their checks,
/// deadlines, aborts.
///
/// Messages of one rank to another arrive complete and in the order in which they were sent; those
/// of different ranks in any order. Nothing is lost while both ranks live.
///
/// Threads: the library makes one call at a time, from the threads that call the communicator and
/// what is made from it, never from one of its own; only from the thread that called `start` if
/// `is_thread_bound`. No call waits for a peer, except `receive` for at most `max_wait`.
/// Errors: what an implementation throws goes to the caller of the collective. The failure of a
/// single peer is not thrown: `lost_reason` tells it.
class FANFOLD_EXPORT Transport {
 public:
  struct Part {
    const std::byte* data;
    std::int64_t bytes;
  };
  struct Message {
    int source;
    std::vector<std::byte> bytes;
  };

  Transport() = default;
  virtual ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual int rank() const noexcept = 0;
  virtual int num_ranks() const noexcept = 0;
  /// Names it in messages and as `Communicator::kind`: "mpi", "gloo".
  virtual std::string kind() const = 0;
  /// Whether only the thread that called `start` may make calls.
  virtual bool is_thread_bound() const noexcept { return false; }

  /// Called once, before all else. No message will have more bytes.
  virtual void start(std::int64_t max_message_bytes) = 0;
  /// Sends the parts, one after the other, as one message to another rank. `parts` may be reused
  /// when it returns. Does nothing if `peer` is lost.
  virtual void send(int peer, const std::vector<Part>& parts) = 0;
  /// The next message of any rank; waits for one, at most `max_wait`. Advances what `send` left.
  virtual std::optional<Message> receive(std::chrono::nanoseconds max_wait) = 0;
  /// Whether something for `peer` is left of what `send` took and will only leave within further
  /// calls. A collective then goes on calling `receive` before it returns, since peers would wait
  /// for this rank's next one otherwise. False if `peer` is lost. What leaves without calls, as
  /// from a thread of the transport's own, does not count.
  virtual bool has_unsent(int /*peer*/) const { return false; }
  /// Why `peer` is known to be gone, in words that follow "rank 3 is gone: "; empty while it lives
  /// or where the transport cannot tell.
  virtual std::string lost_reason(int peer) const = 0;
  /// Called, on any thread and at any time, before the library waits for another thread that is
  /// inside the transport. Where calls take a lock that the library's callers may hold, such as an
  /// interpreter's, this lets go of it, and the destructor of the result takes it again. Null:
  /// there is none.
  virtual std::shared_ptr<void> before_wait() const { return nullptr; }
  /// The last call: gives what was sent until `timeout` to leave and frees what it holds. Peers
  /// that send afterwards lose their messages. Never throws.
  virtual void close(std::chrono::nanoseconds timeout) noexcept = 0;
};

/// What carries the data of ranks that a transport connects.
enum class TransportUse : std::uint8_t {
  kAuto,          // shared memory if all ranks are on one host and meet there, else the transport
  kSharedMemory,  // only to meet: Unsupported where ranks are on different hosts
  kAlways,        // the transport, on one host too
};

}  // namespace fanfold
