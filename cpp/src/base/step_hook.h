// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where tests reach into the protocol: a call between every store, fence, flag and read.

#include <cstdint>

#include "fanfold/all_to_all_config.h"

namespace fanfold::base {

/// Counts protocol steps and, when a test knob says so, delays, kills or stops this process there.
/// One predictable branch when no knob is set.
class StepHook {
 public:
  explicit StepHook(const TestKnobs& knobs, int rank) noexcept;
  void step() noexcept {
    if (enabled_) act();
  }

 private:
  void act() noexcept;

  bool enabled_;
  std::uint64_t random_;
  bool delays_;
  std::int64_t count_ = 0;
  std::int64_t kill_at_;
  std::int64_t stop_at_;
};

}  // namespace fanfold::base
