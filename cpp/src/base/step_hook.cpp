// SPDX-License-Identifier: Apache-2.0
#include "base/step_hook.h"

#include <sched.h>

#include <csignal>
#include <ctime>

namespace fanfold::base {

StepHook::StepHook(const TestKnobs& knobs, int rank) noexcept
    : enabled_(knobs.delay_seed != 0 || knobs.kill_at_step >= 0 || knobs.stop_at_step >= 0),
      random_(knobs.delay_seed * 2654435761U + static_cast<std::uint64_t>(rank) * 40503U + 1),
      delays_(knobs.delay_seed != 0),
      kill_at_(knobs.kill_at_step),
      stop_at_(knobs.stop_at_step) {}

void StepHook::act() noexcept {
  const std::int64_t step = count_++;
  if (step == kill_at_) std::raise(SIGKILL);
  if (step == stop_at_) std::raise(SIGSTOP);
  if (!delays_) return;
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  const std::uint64_t draw = random_ >> 16;
  if (draw % 8 == 0) {
    sched_yield();
  } else if (draw % 64 == 1) {
    const timespec pause{0, static_cast<long>(draw % 200'000)};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace fanfold::base
