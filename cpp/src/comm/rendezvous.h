// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the processes of a group find each other: a Unix socket that rank 0 opens.

#include <sys/types.h>

#include <memory>
#include <string>

#include "base/clock.h"
#include "comm/group.h"

namespace fanfold::comm {

struct RendezvousConfig {
  std::string path;  // of the socket; in a directory that only this user can write to
  int rank = 0;
  int num_ranks = 1;
  uid_t expected_uid;  // of every process of the group; others are refused and do not count

  RendezvousConfig(std::string path, int rank, int num_ranks);
};

/// Joins the group; collective. The socket is gone when it returns, on success and on failure.
/// @throws InvalidArgument  path, rank or num_ranks do not fit, or the ranks disagree (on every
///                          rank that has come, or comes within a second).
/// @throws PeerTimeout, PeerLost, SystemFailure, Unsupported
std::unique_ptr<Group> join_group(const RendezvousConfig& config, base::Deadline deadline);

}  // namespace fanfold::comm
