// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a kind of communicator must supply: identity, shared memory, liveness.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mapping.h"
#include "comm/failure.h"
#include "comm/parcel.h"

namespace fanfold::comm {

/// One window per rank, all mapped here; index = rank. The windows of one call are equal in size.
using Windows = std::vector<std::shared_ptr<base::Mapping>>;

class RemoteWindows;

/// A set of ranks. Implementations: threads of one process, processes of one machine, ranks that a
/// transport connects. The last share no memory: their windows are copies, see remote_windows.
///
/// Threads: one rank's Group is used by one thread at a time; `lost_reason` may be called by any.
class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const noexcept { return rank_; }
  int num_ranks() const noexcept { return num_ranks_; }
  /// "threads", "processes", or what the transport calls itself.
  virtual const char* kind() const noexcept = 0;

  /// Creates a window of `bytes` (rounded up to the page) on each rank and maps all of them.
  /// Collective. New windows are zero, touched and mapped writable on every rank when it returns.
  /// @throws PeerTimeout, PeerLost, PeerAborted, SystemFailure, std::bad_alloc; a failure on one
  ///         rank fails on all of them.
  virtual Windows share_windows(std::int64_t bytes, base::Deadline deadline) = 0;
  /// Likewise, but the windows take up memory only where they have been touched (Mapping::touch) or
  /// written, which any rank may do at any time without the others.
  virtual Windows reserve_windows(std::int64_t bytes, base::Deadline deadline) = 0;

  /// Brings what each rank has to all others: element r is rank r's, with copies of its
  /// descriptors; this rank's own comes back with its bytes only. `call` is the same on all ranks
  /// and names the exchange in messages. A rank that could not prepare its part gives `failure`.
  /// Collective.
  /// @throws the failure of any rank, on every rank; as share_windows.
  virtual std::vector<Parcel> exchange(const std::string& call, Parcel own,
                                       const std::optional<Failure>& failure,
                                       base::Deadline deadline) = 0;

  /// Makes the group of `members` (ranks of this group in their new order). Collective over *this*
  /// group; a rank that is not in `members` of its own call passes an empty list and gets null.
  virtual std::unique_ptr<Group> split(const std::vector<int>& members,
                                       base::Deadline deadline) = 0;
  /// Whether a rank that is lost without having left has died. Of threads nobody can tell: one that
  /// was told of a loss may end its function as well.
  virtual bool tells_deaths() const noexcept { return false; }

  /// Why `rank` is known to be gone ("its process ended"), or an empty string while it lives.
  /// A system call at most; meant for once in a millisecond, not for the spin phase.
  virtual std::string lost_reason(int rank) const = 0;

  /// Tells the peers that this rank leaves. Idempotent, never waits, never throws.
  virtual void leave() noexcept = 0;

  /// Frees what only messages between the ranks need. After `leave`, when all ranks have left or
  /// `deadline` has passed; what was sent may leave until then. Nothing is waited for otherwise.
  virtual void finish(base::Deadline /*deadline*/) noexcept {}

  /// Whether the windows of all ranks are the same memory on all of them.
  virtual bool shares_memory() const noexcept { return true; }
  /// Why not: "rank 0 is on host 0 and rank 2 on host 1, ...".
  std::string why_no_memory() const;
  /// Where `windows` of this group are copies: what keeps them alike. Else null.
  virtual std::shared_ptr<RemoteWindows> remote_windows(const Windows& /*windows*/) const {
    return nullptr;
  }
  /// The host of each rank, numbered in the order in which ranks first name them.
  const std::vector<int>& hosts() const noexcept { return hosts_; }

  /// @throws InvalidState  only another thread may make calls that talk to peers; `call` is named.
  virtual void check_thread(const char* /*call*/) const {}

  /// True in a process forked from the one that made this group: nothing may be used there.
  virtual bool is_forked_child() const noexcept = 0;

  /// Whether a waiting rank may burn its core: no more ranks on this machine than cores.
  bool may_spin() const noexcept { return may_spin_; }

 protected:
  Group(int rank, int num_ranks);  // fills may_spin_ from the affinity mask

  int rank_;
  int num_ranks_;
  bool may_spin_;
  std::vector<int> hosts_;
  std::string why_apart_;  // see why_no_memory; empty: so asked
};

}  // namespace fanfold::comm
