// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "block.h"
#include "state.h"

#if defined(CUDASIM_REAL_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(CUDASIM_REAL_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace cudasim {

ThreadContext* current_thread = nullptr;

namespace {

/// At the far end of each stack.
constexpr std::uint64_t kCanary = 0x5ca1ab1e0ddba11ull;

// Read outside of fibers only; a fiber may go on on another OS thread.
thread_local bool this_thread_runs_fiber = false;

/// The scheduler's own flow of control, while a fiber runs.
Continuation scheduler;

// What the build's sanitizer must be told around a switch.
#if defined(CUDASIM_REAL_ADDRESS_SANITIZER)
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_bytes = 0;
void* scheduler_fake_stack = nullptr;

void leaving_scheduler(const Fiber& fiber) {
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, fiber.stack_bytes);
}
void back_in_scheduler() {
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}
void leaving_fiber(Fiber& fiber) {
  const bool is_last = fiber.state == FiberState::kDone;
  __sanitizer_start_switch_fiber(is_last ? nullptr : &fiber.sanitizer, scheduler_stack,
                                 scheduler_stack_bytes);
}
void back_in_fiber(const Fiber& fiber) {
  __sanitizer_finish_switch_fiber(fiber.sanitizer, &scheduler_stack, &scheduler_stack_bytes);
}
void reset_for_sanitizer(Fiber& fiber) {
  fiber.sanitizer = nullptr;
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
}
#elif defined(CUDASIM_REAL_THREAD_SANITIZER)
// Switches synchronise, so that only the host code is checked.
void* scheduler_fiber = nullptr;

void leaving_scheduler(const Fiber& fiber) {
  scheduler_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.sanitizer, 0);
}
void back_in_scheduler() {}
void leaving_fiber(const Fiber&) { __tsan_switch_to_fiber(scheduler_fiber, 0); }
void back_in_fiber(const Fiber&) {}
void reset_for_sanitizer(Fiber& fiber) {
  if (fiber.sanitizer == nullptr) fiber.sanitizer = __tsan_create_fiber(0);
}
#else
void leaving_scheduler(const Fiber&) {}
void back_in_scheduler() {}
void leaving_fiber(const Fiber&) {}
void back_in_fiber(const Fiber&) {}
void reset_for_sanitizer(Fiber&) {}
#endif

void fiber_main() {
  Fiber* const fiber = self();
  back_in_fiber(*fiber);
  fiber->block->run->operation->body();
  fiber->state = FiberState::kDone;
  thread_left(*fiber);
  suspend(FiberState::kDone);
  std::abort();  // nobody runs a fiber that is done
}

void give_stack(Fiber& fiber, std::size_t bytes) {
  if (fiber.stack_bytes == bytes) return;
  if (fiber.stack != nullptr) munmap(fiber.stack, fiber.stack_bytes);
  void* const stack = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) {
    std::fputs("cudasim: no memory for the stack of a CUDA thread\n", stderr);
    std::abort();
  }
  fiber.stack = static_cast<char*>(stack);
  fiber.stack_bytes = bytes;
}

}  // namespace

Fiber* take_fiber() {
  Fiber* fiber = nullptr;
  if (engine.free_fibers.empty()) {
    fiber = new Fiber;
    ++engine.stats.fibers;
  } else {
    fiber = engine.free_fibers.back();
    engine.free_fibers.pop_back();
  }
  give_stack(*fiber, engine.config.stack_bytes);
  std::memcpy(fiber->stack, &kCanary, sizeof kCanary);
  reset_for_sanitizer(*fiber);
  prepare(fiber->continuation, fiber->stack, fiber->stack_bytes, &fiber_main);
  fiber->state = FiberState::kReady;
  fiber->loc = {};
  fiber->polls.clear();
  return fiber;
}

void give_back_fiber(Fiber* fiber) {
  fiber->base.reset();
  for (Release& fence : fiber->fences) fence = {};
  fiber->has_fence = false;
  fiber->observations.clear();
  engine.free_fibers.push_back(fiber);
}

void run_fiber(Fiber* fiber) {
  this_thread_runs_fiber = true;
  current_thread = fiber;
  leaving_scheduler(*fiber);
  switch_stack(scheduler, fiber->continuation);
  back_in_scheduler();
  current_thread = nullptr;
  this_thread_runs_fiber = false;
}

void suspend(FiberState state) {
  Fiber* const fiber = self();
  fiber->state = state;
  leaving_fiber(*fiber);
  switch_stack(fiber->continuation, scheduler);
  back_in_fiber(*fiber);
}

bool is_on_fiber() { return this_thread_runs_fiber; }

bool has_overflown(const Fiber& fiber) {
  return std::memcmp(fiber.stack, &kCanary, sizeof kCanary) != 0;
}

std::string describe(const Fiber& fiber) {
  return "rank " + std::to_string(fiber.block->run->device->id) + " kernel " +
         fiber.block->run->operation->name + " block " + std::to_string(fiber.block->index) +
         " thread " + std::to_string(fiber.index);
}

bool PollMemory::has(const void* address) const {
  return std::any_of(seen.begin(), seen.end(),
                     [&](const auto& old) { return old.first == address; });
}

bool PollMemory::knows(const void* address, std::uint64_t value) const {
  return std::any_of(seen.begin(), seen.end(),
                     [&](const auto& old) { return old.first == address && old.second == value; });
}

void PollMemory::add(const void* address, std::uint64_t value) {
  // A loop over more locations than this is never taken for polling.
  constexpr std::size_t kMaxLocations = 512;
  for (auto& old : seen) {
    if (old.first == address) {
      old.second = value;
      return;
    }
  }
  if (seen.size() == kMaxLocations) seen.clear();
  seen.emplace_back(address, value);
}

void PollMemory::clear() {
  seen.clear();
  timer_reads = 0;
}

}  // namespace cudasim
