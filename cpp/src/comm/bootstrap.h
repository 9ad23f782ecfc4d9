// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finding a rendezvous without being told a path.

#include <memory>

#include "base/clock.h"
#include "comm/group.h"
#include "comm/rendezvous.h"
#include "fanfold/communicator.h"

namespace fanfold::comm {

constexpr int kMaxRanks = 1024;

/// @throws InvalidArgument
void check_num_ranks(int num_ranks);
void check_rank(int rank, int num_ranks);

/// Rank, size and a path in this user's run-time directory, from torchrun's environment variables.
/// @throws InvalidArgument  a variable is missing or malformed.
RendezvousConfig rendezvous_from_env();

/// Joins a group whose ranks agree on a path through the caller's collectives.
/// @throws Unsupported  the ranks are on different machines (on every rank).
std::unique_ptr<Group> join_with_callbacks(int rank, int num_ranks,
                                           const Communicator::AllGatherCallback& all_gather,
                                           const Communicator::BarrierCallback& barrier,
                                           base::Deadline deadline);

}  // namespace fanfold::comm
