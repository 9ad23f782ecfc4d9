// SPDX-License-Identifier: Apache-2.0
#pragma once

// The protocol of a round as an automaton small enough to visit all its states.
//
// Every rank issues one common sequence of calls, and the sequence itself is open: whichever rank
// is ahead may append any call that the table of round_rules.h allows. A call is a list of steps,
// each one access to memory that others see (write the rows of one peer, publish one flag, read one
// flag, pull one peer's partials, …); the steps of the ranks interleave in every order. Beside the
// shared memory the state keeps facts that no rank can see (who still reads what), and a step that
// breaks one of them is a violation.

#include <cstdint>
#include <string>
#include <vector>

#include "exchange/round_rules.h"

namespace fanfold::testing {

/// Mistakes that a protocol could make; the model must find each.
enum class ProtocolFault : std::uint8_t {
  kNone,
  kCombineRecvWaitsForSourcesOnly,  // not for ranks that it pulls nothing from
  kDispatchSendIgnoresOpenSlot,
  kDispatchSendIgnoresReleasedSlot,  // does not wait for the peers' flags of a released round
  kDispatchFlagBeforeRows,
  kCombineFlagBeforeRows,  // announces partials before the rows are read
  kDispatchRecvSkipsAPeer,
  kKeepWithoutAcknowledgement,  // a second combine does not wait for the first one's readers
  kReleaseBeforeReceive,        // release of a round that was sent only
  kResetWithoutBarrier,
  kResetWithoutGroupMaximum,  // each rank restarts above its own highest epoch
  kEpochsRestartAtOne,
};

struct ProtocolOptions {
  int num_ranks = 2;            // 2 or 3
  int max_in_flight = 1;        // 1 or 2
  int num_rounds = 3;           // per generation, at most 3
  bool keeps_open = false;      // a round may have one combine with release=false
  int num_resets = 0;           // at most 2; a rank may start one between any two calls
  int num_aborts = 0;           // by another thread of any rank, at any time before the last reset
  bool waits_time_out = false;  // a wait may fail at any time before the last reset
  bool rank_zero_pulls = true;  // false: none of rank 0's tokens has an expert
  ProtocolFault fault = ProtocolFault::kNone;
};

struct ProtocolReport {
  std::int64_t num_states = 0;
  std::string violation;           // empty: none was found
  std::vector<std::string> trace;  // the shortest way there, a line per step
};

/// Visits every reachable state, breadth first; stops at the first violation or deadlock.
ProtocolReport explore_protocol(const ProtocolOptions& options);

}  // namespace fanfold::testing
