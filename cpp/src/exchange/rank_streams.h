// SPDX-License-Identifier: Apache-2.0
#pragma once

// The streams between this rank and all others that strategy two_sided sends through.
//
// Every call puts a record into the streams to all peers: what it is and what it expects of theirs.
// Data may follow the record; the reader knows how much from the record, or by itself. All ranks
// make the same calls in the same order, so each stream must show the records of this rank's own
// calls. A rank compares them when it next waits for its peers, and as its own records are out by
// then, a difference is noticed on both sides.
//
// Records never wait for room, which is what lets a release return at once. Data leaves
// `reserve_bytes` of a ring free, and those suffice. Let the reader be within call X, so that it
// has read all that was sent before X. The writer can be within the next call X' at most, since X'
// ends only when the reader takes part in it. Unread are then at most the records of X and X', and
// those of the releases between the call before X and X': max_in_flight rounds that were open, and
// the one that X may have opened.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/kernels.h"
#include "base/step_hook.h"
#include "exchange/exchange.h"
#include "exchange/fifo_channel.h"
#include "exchange/row_cursor.h"
#include "exchange/shared_window.h"
#include "exec/flag_line.h"
#include "exec/peer_distance.h"
#include "plan/send_plan.h"

namespace fanfold::exchange {

/// A window: control area, a line per rank, a ring per peer.
struct StreamWindow {
  std::int64_t lines_offset;
  std::int64_t rings_offset;
  std::int64_t reserve_bytes;
  std::int64_t ring_bytes;
  std::int64_t bytes;

  StreamWindow(const AllToAllConfig& config, int num_ranks) noexcept;
};

/// Shared by all AllToAlls of one workspace: a stream goes on whoever makes the next call.
/// Threads: one call at a time, except where SharedWindow says more.
class RankStreams {
 public:
  using Record = exec::FlagFields;

  /// Both streams between this rank and one other. This rank's own entry has no rings: what is
  /// listed there to be sent and received is copied.
  struct Peer {
    int rank;
    FifoWriter out;
    FifoReader in;
    RowCursor<const std::byte> sending;  // what is left of the call under way
    RowCursor<std::byte> receiving;
    Record record;  // of the peer's call under way
    exec::PeerDistance distance;
  };
  /// Who calls, and what for.
  struct Call {
    const std::string* what;
    const char* phase;
    std::int64_t round;
    base::Deadline deadline;
    base::StepHook* hook;
  };

  /// Collective.
  RankStreams(const Setup& setup, base::Deadline deadline);

  SharedWindow& window() noexcept { return window_; }
  const SharedWindow& window() const noexcept { return window_; }
  /// By rank.
  std::vector<Peer>& peers() noexcept { return peers_; }

  /// Sends the record of a call to all peers, and what there is room for of the data that is listed
  /// behind it. With a `plan` each record tells its reader how many rows are for it. Never waits.
  void announce(const Record& record, const plan::SendPlan* plan, base::StepHook& hook) noexcept;
  /// The same for a release, which nobody waits for: the next `expect` asks the peers for theirs.
  void announce_release(const Record& record, base::StepHook& hook);
  /// Waits for the records of all peers: of the releases since the last call, and of this one.
  /// @throws InvalidArgument (they differ from this rank's), PeerTimeout, PeerAborted, PeerLost
  void expect(const Record& mine, const Call& call);
  /// Moves all that is listed to be sent and received, for all peers at once. While a rank sends
  /// it takes in what comes: no order of arrival, no size of ring or row can lock the group up.
  /// @throws PeerTimeout, PeerAborted, PeerLost
  void move(const Call& call);
  /// After a collective reset: all streams begin anew.
  void restart() noexcept;

 private:
  Peer make_peer(int rank) const;
  comm::Control& control() const noexcept { return window_.control(); }
  Peer& peer_at(int rank) noexcept { return peers_[static_cast<std::size_t>(rank)]; }
  std::int64_t room(Peer& peer, std::int64_t wanted) const noexcept {
    return peer.out.free_bytes(wanted + layout_.reserve_bytes) - layout_.reserve_bytes;
  }
  std::int64_t next_bytes(const Peer& peer) const noexcept;
  bool can_push(Peer& peer) const noexcept;
  static bool can_pull(Peer& peer) noexcept;
  void post(Peer& peer, Record record) noexcept;
  void show(Peer& peer, base::StepHook& hook) noexcept;
  bool push(Peer& peer, base::StepHook& hook) noexcept;
  bool pull(Peer& peer, base::StepHook& hook) noexcept;
  void await_move(const Call& call);
  Record take_record(Peer& peer, const Call& call);
  void compare(const Record& mine, const Record& got, const Peer& peer, const char* phase,
               const std::string& what) const;

  StreamWindow layout_;
  SharedWindow window_;
  const base::Kernels& kernels_;
  int rank_;
  int num_ranks_;
  bool streaming_;
  std::uint64_t first_epoch_;
  std::int64_t quantum_bytes_;  // least that is waited for before it is written
  std::vector<Peer> peers_;
  std::vector<Record> released_;  // this rank's releases that peers were not asked of
  std::vector<int> pending_;      // scratch: ranks with bytes left to move
};

}  // namespace fanfold::exchange
