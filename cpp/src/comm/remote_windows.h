// SPDX-License-Identifier: Apache-2.0
#pragma once

// Windows of ranks that share no memory: a copy of each here, and messages in place of stores.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/group.h"
#include "comm/message_hub.h"
#include "comm/transport_message.h"

namespace fanfold::comm {

/// What a rank would store into one window, in order.
class Stores {
 public:
  /// Plain bytes; they are read when the stores are sent.
  void bytes(std::int64_t offset, const std::byte* data, std::int64_t size) {
    if (size == 0) return;
    records_.push_back({Store::Kind::kBytes, 0, to_u64(offset), to_u64(size)});
    parts_.push_back({data, size});
  }
  /// An atomic word of 64 bits, release.
  void set64(std::int64_t offset, std::uint64_t value) {
    records_.push_back({Store::Kind::kSet64, 0, to_u64(offset), value});
  }
  /// An atomic word of 32 bits that is never lowered, release.
  void raise32(std::int64_t offset, std::uint32_t value) {
    records_.push_back({Store::Kind::kRaise32, 0, to_u64(offset), value});
  }
  /// Of the `num_guarded` words that follow none is stored if the word at `offset`, but for its top
  /// bit, is not below `value`: for what may come from several ranks in any order.
  void if_lower(std::int64_t offset, std::uint64_t value, std::uint32_t num_guarded) {
    records_.push_back({Store::Kind::kIfLower, num_guarded, to_u64(offset), value});
  }

 private:
  friend class RemoteWindows;
  static std::uint64_t to_u64(std::int64_t value) noexcept {
    return static_cast<std::uint64_t>(value);
  }

  std::vector<Store> records_;
  std::vector<Transport::Part> parts_;
};

/// One rank's copies of the windows of one `share_windows`. Messages for windows that are gone
/// here are dropped.
///
/// Threads: any; what they store into one window their owners order.
class RemoteWindows {
 public:
  /// Most bytes of a message that are not those of `Stores::bytes`.
  static constexpr std::int64_t kMaxOverhead = 4096;

  /// `id`: the same on all ranks. `ranks`: of the transport, by rank of the group.
  RemoteWindows(std::shared_ptr<MessageHub> hub, std::uint64_t group, std::uint64_t id,
                std::vector<int> ranks, std::int64_t bytes);

  std::uint64_t id() const noexcept { return id_; }
  std::byte* data(int rank) const noexcept {
    return memory_.get() + static_cast<std::int64_t>(rank) * bytes_;
  }
  std::int64_t bytes() const noexcept { return bytes_; }

  /// Makes the stores in `peer`'s copy of the window of `owner`.
  /// @throws what the transport throws.
  void send(int peer, int owner, const Stores& stores);
  /// The same, from any thread and without waiting; an error is thrown by the next call that can.
  void post(int peer, int owner, const Stores& stores) noexcept;
  /// As `post`, but leaves with `send_queued` or any later call: see MessageHub::queue.
  void queue(int peer, int owner, const Stores& stores) noexcept;
  void send_queued() noexcept { hub_->send_queued(); }
  /// Keeps the error being handled for the next call that can throw.
  void defer_current() noexcept { hub_->defer_current(); }
  /// See MessageHub::flush; the peers are all ranks of the group.
  void flush(base::Deadline deadline, base::FunctionRef<bool()> give_up) {
    hub_->flush(ranks_, deadline, give_up);
  }
  /// Lets messages in; waits at most `max_ns` for one. @throws what the transport throws.
  void progress(std::int64_t max_ns) { hub_->progress(max_ns); }
  /// @throws InvalidState  the transport is bound to another thread.
  void check_thread(const char* call) const { hub_->check_thread(call); }

  /// Makes the stores of a message of a peer.
  /// @throws InvalidState  they do not fit.
  void apply(const MessageHead& head, const std::vector<std::byte>& message) const;

 private:
  MessageHead head_of(int owner, const Stores& stores) const;

  std::shared_ptr<MessageHub> hub_;
  std::uint64_t group_;
  std::uint64_t id_;
  std::vector<int> ranks_;
  std::int64_t bytes_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace fanfold::comm
