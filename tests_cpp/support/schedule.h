// SPDX-License-Identifier: Apache-2.0
#pragma once

// Legal orders of the phases of many rounds; every rank follows the same one.

#include <cstdint>
#include <vector>

namespace fanfold::testing {

enum class Phase : std::uint8_t {
  kDispatch,
  kDispatchSend,
  kDispatchRecv,
  kCombine,
  kCombineKeep,  // release=false
  kCombineSend,
  kCombineRecv,
  kRelease,
};

struct Step {
  Phase phase;
  int round;  // counted from 0
};

struct ScheduleSpec {
  int num_rounds = 1;
  int max_in_flight = 1;
  bool two_phase = true;  // false: only the calls that do both halves
  bool combines_more_than_once = false;
  std::uint64_t seed = 1;
};

/// A random order in which round n starts after round n - max_in_flight has ended. Every round
/// ends.
std::vector<Step> random_schedule(const ScheduleSpec& spec);

}  // namespace fanfold::testing
