// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small cases that together take every path of the kernels, run by one host thread, so that equal
// seeds give equal runs.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"

namespace fanfold::testing {

struct FaultScenario {
  const char* name = "";
  int num_ranks = 3;
  int num_devices = 3;  // that the ranks share in turn
  int tokens = 5;       // of each rank, but for what `uneven` takes away
  int num_experts = 7;
  int top_k = 3;
  int hidden = 40;
  Strategy strategy = Strategy::kOneSided;
  Layout layout = Layout::kRankMajor;
  Weighting weighting = Weighting::kApplied;
  Wire combine_wire = Wire::kNone;
  bool has_replicas = false;
  bool in_place = true;           // results in the combine buffer, else staged
  bool whole_calls = true;        // dispatch and combine, else their halves
  bool masks_last = false;        // the last rank is left out after the first round
  bool counts_on_device = false;  // T is a word of the device, on one rank larger than the rows
  int num_combines = 1;           // of a round, all but the last with release = false
  bool waits_between_combines = true;
  bool runs_between_ranks =
      false;  // a rank's combine runs for a while before the next's is enqueued
  int max_in_flight = 1;
  int num_rounds = 3;
  int resident_blocks = 2;
};

/// How a scenario went.
struct FaultOutcome {
  std::vector<std::string> kinds;               // of what the simulated device reported, each once
  std::string text;                             // the first report or error, for messages
  bool has_failed = false;                      // kernels or calls reported an error
  std::vector<std::vector<std::byte>> results;  // all that came out, in a fixed order
};

/// Runs it on devices that behave as `seed` says.
FaultOutcome run(const FaultScenario& scenario, std::uint64_t seed);

}  // namespace fanfold::testing
