// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs a function on every rank of a group of threads.

#include <chrono>
#include <functional>
#include <vector>

#include "fanfold/communicator.h"

namespace fanfold::testing {

/// Calls `body(communicator)` for each rank, each on a thread of its own, and waits for all. A
/// rank's communicator is closed without waiting when its body ends, so that peers do not wait for
/// a rank that failed. Rethrows the first error in time.
void spawn_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
                 std::chrono::nanoseconds timeout = std::chrono::seconds(30));

/// The same on communicators that exist.
void spawn_ranks(std::vector<Communicator>& ranks, const std::function<void(Communicator&)>& body);

}  // namespace fanfold::testing
