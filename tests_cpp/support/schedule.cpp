// SPDX-License-Identifier: Apache-2.0
#include "support/schedule.h"

#include <algorithm>

#include "support/random_bits.h"

namespace fanfold::testing {
namespace {

enum class Stage : std::uint8_t { kUnborn, kSent, kReceived, kCombineSent, kEnded };

/// The stage that `phase` leaves behind.
Stage stage_after(Phase phase) {
  switch (phase) {
    case Phase::kDispatchSend:
      return Stage::kSent;
    case Phase::kDispatch:
    case Phase::kDispatchRecv:
    case Phase::kCombineKeep:
      return Stage::kReceived;
    case Phase::kCombineSend:
      return Stage::kCombineSent;
    case Phase::kCombine:
    case Phase::kCombineRecv:
    case Phase::kRelease:
      return Stage::kEnded;
  }
  return Stage::kEnded;
}

Phase random_phase(Stage stage, const ScheduleSpec& spec, RandomBits& random) {
  const bool split = spec.two_phase && random.below(4) != 0;
  switch (stage) {
    case Stage::kUnborn:
      return split ? Phase::kDispatchSend : Phase::kDispatch;
    case Stage::kSent:
      return Phase::kDispatchRecv;
    case Stage::kReceived:
      if (random.below(6) == 0) return Phase::kRelease;
      if (spec.combines_more_than_once && random.below(4) == 0) return Phase::kCombineKeep;
      return split ? Phase::kCombineSend : Phase::kCombine;
    case Stage::kCombineSent:
    case Stage::kEnded:
      break;
  }
  return Phase::kCombineRecv;
}

}  // namespace

std::vector<Step> random_schedule(const ScheduleSpec& spec) {
  RandomBits random(mix(spec.seed, 0x5c4ed));
  std::vector<Stage> stages(static_cast<std::size_t>(spec.num_rounds), Stage::kUnborn);
  std::vector<Step> steps;
  int first_open = 0;
  int num_born = 0;
  while (first_open < spec.num_rounds) {
    // Any open round may go on, or the next one may start when its slot is free.
    const int limit = std::min(spec.num_rounds, num_born + 1);
    const int round = first_open + static_cast<int>(random.below(limit - first_open));
    const auto at = static_cast<std::size_t>(round);
    if (stages[at] == Stage::kEnded) continue;
    const auto previous = static_cast<std::size_t>(round - spec.max_in_flight);
    const bool is_new = stages[at] == Stage::kUnborn;
    if (is_new && round >= spec.max_in_flight && stages[previous] != Stage::kEnded) continue;
    const Phase phase = random_phase(stages[at], spec, random);
    stages[at] = stage_after(phase);
    steps.push_back({phase, round});
    if (is_new) ++num_born;
    while (first_open < spec.num_rounds &&
           stages[static_cast<std::size_t>(first_open)] == Stage::kEnded) {
      ++first_open;
    }
  }
  return steps;
}

}  // namespace fanfold::testing
