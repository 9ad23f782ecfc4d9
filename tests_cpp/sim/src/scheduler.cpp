// SPDX-License-Identifier: Apache-2.0
// Which thread runs next, when time passes, and when nobody can go on any more.

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "state.h"

namespace cudasim {
namespace {

/// Virtual time that one turn of a thread takes.
constexpr std::uint64_t kTurnNs = 20;

double real_seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void wake_polling() {
  for (Fiber* fiber : engine.polling) {
    fiber->state = FiberState::kReady;
    engine.ready.push_back(fiber);
  }
  engine.polling.clear();
}

const char* waits_how(FiberState state) {
  switch (state) {
    case FiberState::kBarrier:
      return " waits in barrier ";
    case FiberState::kWarp:
      return " waits in warp operation ";
    case FiberState::kDependency:
      return " waits for the kernel before it at ";
    default:
      return " polls at ";
  }
}

struct Group {
  int num_threads = 0;
  std::string first;
};

/// Lines for the threads that wait, those that wait alike in one.
std::string describe_waiting() {
  std::map<std::string, Group> groups;
  for (const auto& block : engine.blocks) {
    const std::string kernel =
        "rank " + std::to_string(block->run->device->id) + " " + block->run->operation->name;
    for (const Fiber* fiber : block->threads) {
      if (fiber->state == FiberState::kDone || fiber->state == FiberState::kReady) continue;
      Group& group = groups[kernel + waits_how(fiber->state) + describe(fiber->loc)];
      if (group.num_threads++ == 0) {
        group.first = " (block " + std::to_string(block->index) + " thread " +
                      std::to_string(fiber->index) +
                      (fiber->state == FiberState::kDead ? ", trapped)" : ")");
      }
    }
  }
  std::string text;
  for (const auto& [where, group] : groups) {
    text += "\n    " + std::to_string(group.num_threads) + " threads: " + where + group.first;
  }
  return text;
}

void report_deadlock() {
  std::string text = "no thread can make progress" + describe_waiting();
  for (const Task* task : engine.kernels) {
    const std::size_t num_left = task->run->order.size() - task->run->num_issued;
    if (num_left == 0) continue;
    text += "\n    rank " + std::to_string(task->device->id) + " " + task->operation.name + ": " +
            std::to_string(num_left) + " blocks not resident yet";
  }
  report("deadlock", text);
  for (const auto& block : engine.blocks) fail_device(*block->run->device, cudaErrorLaunchTimeout);
  engine.idle_ns = 0;
  engine.idle_since_s = 0;
}

/// Can anyone but the devices' threads change what they wait for?
bool others_can_act() {
  if (engine.config.multiprocess || engine.num_host_functions_running > 0) return true;
  if (static_cast<int>(engine.host_waits.size()) < engine.config.host_threads) return true;
  return std::any_of(engine.host_waits.begin(), engine.host_waits.end(),
                     [](const auto* done) { return (*done)(); });
}

/// Real time passes for others; virtual time follows it. False: they have had their time.
bool wait_for_others() {
  const double now_s = real_seconds();
  if (engine.idle_since_s == 0) {
    engine.idle_since_s = now_s;
  } else {
    engine.now_ns += static_cast<std::uint64_t>((now_s - engine.idle_last_s) * 1e9);
  }
  engine.idle_last_s = now_s;
  if (now_s - engine.idle_since_s > engine.config.wall_limit_s) return false;
  constexpr int kEagerRounds = 50;
  const useconds_t pause_us = engine.idle_rounds > kEagerRounds ? 50 : 0;
  engine.mutex.unlock();
  usleep(pause_us);
  engine.mutex.lock();
  return true;
}

/// Nobody else can act: virtual time passes, ever faster. False: enough of it.
bool let_time_pass() {
  // So many looks at the same values may be a loop that ends by itself; more are a wait.
  constexpr std::uint64_t kPatientRounds = 1000;
  constexpr std::uint64_t kRoundNs = 1000;
  const auto rounds = static_cast<std::uint64_t>(engine.idle_rounds);
  std::uint64_t factor = 1;
  if (engine.has_met) {
    factor = rounds;  // threads that meet in between may do more than wait
  } else if (rounds > kPatientRounds) {
    factor <<= std::min<std::uint64_t>(rounds - kPatientRounds, 20);
  }
  engine.now_ns += kRoundNs * factor;
  engine.idle_ns += kRoundNs * factor;
  return engine.idle_ns <= engine.config.deadlock_ns;
}

/// All threads that are left poll.
void idle_round() {
  if (engine.has_progress) {
    engine.idle_ns = 0;
    engine.idle_rounds = 0;
    engine.idle_since_s = 0;
  } else {
    ++engine.idle_rounds;
    if (!(others_can_act() ? wait_for_others() : let_time_pass())) {
      report_deadlock();
      return;
    }
  }
  engine.has_progress = false;
  engine.has_met = false;
  wake_polling();
}

Fiber* choose_ready() {
  std::vector<Fiber*>& ready = engine.ready;
  if (!engine.config.random_schedule) {
    Fiber* const first = ready.front();
    ready.erase(ready.begin());
    return first;
  }
  const std::size_t chosen = engine.random() % ready.size();
  Fiber* const fiber = ready[chosen];
  ready[chosen] = ready.back();
  ready.pop_back();
  return fiber;
}

void file_by_state(Fiber* fiber) {
  switch (fiber->state) {
    case FiberState::kReady:
      engine.ready.push_back(fiber);
      break;
    case FiberState::kPolling:
      engine.polling.push_back(fiber);
      break;
    case FiberState::kDone: {
      Block& block = *fiber->block;
      if (++block.num_ended == block.threads.size()) end_block(block);
      break;
    }
    default:
      break;  // whoever ends its wait makes it ready
  }
}

void drop_failed_devices() {
  engine.any_device_failed = false;
  for (const auto& device : engine.devices) {
    if (!device->has_failed) continue;
    device->has_failed = false;
    drop_blocks(*device);
    drop_tasks(*device);
  }
}

}  // namespace

void made_progress() {
  engine.has_progress = true;
  engine.idle_rounds = 0;
  if (!engine.polling.empty() && (engine.random() & 7) == 0) wake_polling();
}

void maybe_yield() {
  if (engine.config.random_schedule && (engine.random() & 3) == 0) suspend(FiberState::kReady);
}

bool step() {
  if (engine.any_device_failed) {
    drop_failed_devices();
    return true;
  }
  const bool has_advanced = advance_tasks();
  if (run_host_function()) return true;
  if (engine.ready.empty()) {
    if (engine.polling.empty()) {
      if (engine.blocks.empty() || engine.num_host_functions_running > 0) return has_advanced;
      report_deadlock();
      return true;
    }
    idle_round();
    if (engine.ready.empty()) return true;
  }
  Fiber* const fiber = choose_ready();
  ++engine.stats.switches;
  engine.now_ns += kTurnNs;
  run_fiber(fiber);
  if (has_overflown(*fiber)) {
    std::fprintf(stderr, "cudasim: stack overflow in %s\n", describe(*fiber).c_str());
    std::abort();
  }
  file_by_state(fiber);
  return true;
}

cudaError_t run_until(const std::function<bool()>& done) {
  constexpr unsigned kStepsBetweenOffers = 256;
  engine.host_waits.push_back(&done);
  for (unsigned num_steps = 1; !done(); ++num_steps) {
    const bool did_something = step();
    if (!did_something) {
      // Nothing is left that could make it true, unless a host function still runs elsewhere.
      if (engine.num_host_functions_running == 0) break;
      engine.mutex.unlock();
      usleep(20);
      engine.mutex.lock();
    } else if (num_steps % kStepsBetweenOffers == 0 && engine.num_waiting_for_lock > 0) {
      engine.mutex.unlock();
      sched_yield();
      engine.mutex.lock();
    }
  }
  auto& waits = engine.host_waits;
  waits.erase(std::find(waits.begin(), waits.end(), &done));
  return sticky_error(current_device());
}

}  // namespace cudasim
