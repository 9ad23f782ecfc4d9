// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks that share no memory: what one would store into another's window travels as a message.
//
// Each rank keeps a copy of every window of the group (RemoteWindows). Control and Channel make
// their stores into copies of their own; those that a peer reads go to it as one message, and are
// made there, in the same order and with the same atomics, by whichever thread of the peer is
// inside the transport. Messages of one rank arrive in order, so whoever sees a word sees all that
// its rank stored before, as through shared memory.
//
//   message     sent by                       made or read by             carries
//   kStores     Channel::step, to each peer   Control::wait of the peer   the source's half, as
//   much
//                                                                         as the peer reads, then
//                                                                         its seq
//               Control::abort                likewise                    the source's abort line,
//                                                                         then abort_any
//               Control::reset                Control::reset of the peer  the source's reset line
//               Control::mark_left            likewise, and close         the source's left word
//   kOffer      `exchange`, to each peer      its `exchange`              call and bytes, or
//   failure kVerdict    `exchange`, to each peer      its `exchange`              whether the rank
//   goes on kLeft       `leave`, to each peer         lost_reason                 -
//
// Why no copy of a half is overwritten while it is read. It is the rule of channel.h with "send"
// for "store": a rank sends half n mod 2 of step n + 2 only once it has every peer's seq n + 1, and
// a peer sends n + 1 after it has finished reading step n, so that message can arrive only after. A
// reset waits for every rank's reset line, which follows all that the rank sent before.
//
// An exchange is two steps. Each rank sends its offer to all and waits for all offers; then says
// whether it goes on, and waits for everybody to say so. A rank that fails, or gives up waiting,
// says that instead, or after it, which is thrown on all that still wait. New windows and groups
// exist on every rank before its verdict, and nobody uses them before all verdicts: messages for
// what is not there are for what is no more, and are dropped.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/message_hub.h"
#include "comm/transport_message.h"

namespace fanfold::comm {

/// A rank of a group over a transport.
class TransportGroup final : public Group {
 public:
  /// The largest message of a group of any size, and of those split from it.
  static std::int64_t max_message_bytes() noexcept;

  /// The group of all ranks of the transport, which must be one that nothing has been made on.
  /// Local: peers may come later.
  explicit TransportGroup(const std::shared_ptr<MessageHub>& hub);
  ~TransportGroup() override;

  const char* kind() const noexcept override { return hub_->kind().c_str(); }
  Windows share_windows(std::int64_t bytes, base::Deadline deadline) override;
  /// As share_windows: copies take up memory where something was stored.
  Windows reserve_windows(std::int64_t bytes, base::Deadline deadline) override;
  /// Bytes of any size; a parcel with descriptors is Unsupported on every rank.
  std::vector<Parcel> exchange(const std::string& call, Parcel own,
                               const std::optional<Failure>& failure,
                               base::Deadline deadline) override;
  std::unique_ptr<Group> split(const std::vector<int>& members, base::Deadline deadline) override;
  /// As far as the transport can.
  bool tells_deaths() const noexcept override { return true; }
  std::string lost_reason(int rank) const override;
  void leave() noexcept override;
  void finish(base::Deadline deadline) noexcept override;
  bool is_forked_child() const noexcept override { return hub_->is_forked_child(); }
  void check_thread(const char* call) const override { hub_->check_thread(call); }
  bool shares_memory() const noexcept override { return false; }
  std::shared_ptr<RemoteWindows> remote_windows(const Windows& windows) const override;

  /// The host of each rank.
  void set_hosts(std::vector<int> hosts) { hosts_ = std::move(hosts); }
  /// Why ranks of one host use messages, in words that follow "all ranks are on one host, but ".
  void set_why_apart(std::string why) { why_apart_ = std::move(why); }

 private:
  struct Meeting;
  struct Offer;
  class Mailbox;
  /// What a rank makes once all offers are there. It may throw, which then fails everywhere.
  using Prepare = std::function<void(const std::vector<std::string>& offers)>;

  TransportGroup(std::shared_ptr<MessageHub> hub, std::uint64_t id, std::vector<int> ranks,
                 int rank);
  void check_usable(const char* call) const;
  std::vector<std::string> meet(const std::string& call, const std::string& offer,
                                const std::optional<Failure>& failure, const Prepare& prepare,
                                base::Deadline deadline);
  void tell_all(MessageKind kind, std::int64_t number, const std::string& text);
  void tell_failure(std::int64_t number, const std::optional<Failure>& problem,
                    base::Deadline deadline) noexcept;
  std::vector<std::string> read_offers(std::int64_t number, const Offer& own,
                                       std::optional<Failure>* agreed);
  void flush(base::Deadline deadline);
  std::optional<Failure> await(MessageKind kind, std::int64_t number, const std::string& call,
                               base::Deadline deadline);

  std::shared_ptr<MessageHub> hub_;
  std::uint64_t id_;
  std::vector<int> ranks_;  // of the transport, by rank of the group
  std::shared_ptr<Mailbox> mailbox_;
  std::int64_t num_meetings_ = 0;
  bool has_left_ = false;
  std::atomic<bool> is_finished_{false};
};

}  // namespace fanfold::comm
