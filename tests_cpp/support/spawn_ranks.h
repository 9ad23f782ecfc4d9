// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs a function on every rank of a group of threads.

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "fanfold/communicator.h"

namespace fanfold::testing {

/// Calls `body(communicator)` for each rank, each on a thread of its own, and waits for all. A
/// rank's communicator is closed without waiting when its body ends, so that peers do not wait for
/// a rank that failed. Rethrows the first error in time.
void spawn_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
                 std::chrono::nanoseconds timeout = std::chrono::seconds(30));

/// Kinds of groups whose ranks can be threads of one process.
enum class GroupKind : std::uint8_t { kThreads, kLoopback };

/// The same for ranks of `kind`: kLoopback, over a LoopbackNetwork that delays at random.
void spawn_ranks(GroupKind kind, int num_ranks, const std::function<void(Communicator&)>& body,
                 std::chrono::nanoseconds timeout = std::chrono::seconds(30));
/// The ranks of a new group of `kind`; element r is rank r. A loopback group delays nothing.
std::vector<Communicator> make_ranks(GroupKind kind, int num_ranks,
                                     std::chrono::nanoseconds timeout = std::chrono::seconds(30));
const char* name_of(GroupKind kind) noexcept;
inline constexpr GroupKind kGroupKinds[] = {GroupKind::kThreads, GroupKind::kLoopback};

/// The same on communicators that exist.
void spawn_ranks(std::vector<Communicator>& ranks, const std::function<void(Communicator&)>& body);

}  // namespace fanfold::testing
