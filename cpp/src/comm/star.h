// SPDX-License-Identifier: Apache-2.0
#pragma once

// Collective exchange of small messages and descriptors between processes.
//
// Every rank has one socket to rank 0, the hub, which passes everything on. Used when memory is
// shared and groups are made, never by a collective of the user. The hub first takes everything in
// and then sends, while the others first send and then read: no full socket can block both ends. A
// collective call consists of two exchanges, kGather and kCommit: a rank that is not content with
// what it got says so in the second. Each exchange has a number, the same on all ranks even when
// some gave up half-way; what is left of an earlier one is recognised and dropped.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/function_ref.h"
#include "base/mapping.h"
#include "comm/failure.h"
#include "comm/parcel.h"
#include "comm/socket.h"

namespace fanfold::comm {

/// One rank's end of the star.
class Star {
 public:
  /// Why a rank is known to be gone, or an empty string.
  using LostReason = base::FunctionRef<std::string(int)>;

  /// `links`: of the hub, a socket per rank (its own not open); of the others, one to the hub.
  Star(int rank, int num_ranks, std::vector<base::FileDescriptor> links);

  /// Fails exchange 0 of the process at the other end of `socket`. Does not wait.
  static void refuse(int socket, const Failure& failure);

  enum class Phase : std::uint8_t { kGather, kCommit };

  /// Collective: delivers all parcels, in the order of their sources. `call` must be the same on
  /// all ranks and names the exchange in messages. A rank that could not prepare its part gives
  /// `failure`.
  /// @throws whatever any rank gave as its failure, on every rank; PeerTimeout, PeerLost,
  ///         PeerAborted (this rank came too late), InvalidArgument (the calls differ).
  std::vector<Parcel> exchange(Phase phase, const std::string& call, std::vector<Parcel> parcels,
                               const std::optional<Failure>& failure, LostReason lost_reason,
                               base::Deadline deadline);

  /// Ends all connections, also those that a forked child holds.
  void shut_down() noexcept;

 private:
  struct Head;
  struct Gathered;
  std::vector<Parcel> exchange_as_hub(const std::string& call, std::vector<Parcel> parcels,
                                      const std::optional<Failure>& failure, LostReason lost_reason,
                                      base::Deadline deadline);
  std::vector<Parcel> exchange_as_leaf(const std::string& call, const std::vector<Parcel>& parcels,
                                       const std::optional<Failure>& failure,
                                       LostReason lost_reason, base::Deadline deadline);
  std::optional<Failure> gather(const std::string& call, Gathered* gathered, LostReason lost_reason,
                                base::Deadline deadline);
  std::optional<Failure> take_in(int rank, const std::string& call, Gathered* gathered);
  std::optional<Failure> first_problem(const std::string& call, const Gathered& gathered) const;
  void deliver(const std::string& call, Gathered* gathered, base::Deadline deadline);

  int rank_;
  int num_ranks_;
  std::int64_t num_calls_ = 0;
  std::int64_t number_ = 0;  // of the present exchange
  std::vector<base::FileDescriptor> links_;
};

}  // namespace fanfold::comm
