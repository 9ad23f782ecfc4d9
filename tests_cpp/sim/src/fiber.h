// SPDX-License-Identifier: Apache-2.0
#pragma once

// One simulated CUDA thread: its stack, its state for the scheduler, and what it knows of others.

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "clocks.h"
#include "cudasim/operations.h"
#include "switch.h"

namespace cudasim {

struct Block;

enum class FiberState : std::uint8_t {
  kReady,
  kBarrier,
  kWarp,
  kDependency,  // waits for the kernel it depends on
  kPolling,     // saw nothing new, or sleeps
  kDone,
  kDead,  // trapped
};

/// A release that a relaxed load has observed; a later acquire fence, or an acquire load of the
/// same location, takes it.
struct Observation {
  const void* location;
  Scope reader;
  Release release;
};

/// What a thread has seen since it last did something new: who sees the same again is polling.
struct PollMemory {
  std::vector<std::pair<const void*, std::uint64_t>> seen;
  int timer_reads = 0;

  bool has(const void* address) const;
  bool knows(const void* address, std::uint64_t value) const;
  void add(const void* address, std::uint64_t value);
  void clear();
};

struct Fiber : ThreadContext {
  Continuation continuation;
  char* stack = nullptr;
  std::size_t stack_bytes = 0;
  void* sanitizer = nullptr;  // what the build's sanitizer knows it by

  Block* block = nullptr;
  unsigned index = 0;  // in the block
  FiberState state = FiberState::kReady;
  Loc loc{};                 // of the last operation
  std::uint64_t result = 0;  // of a warp operation or barrier that others completed
  PollMemory polls;

  ClockPointer base;
  SlotId slot = 0;
  ClockValue clock = 1;
  // Fences by scope: what later stores publish. A null base: none.
  std::array<Release, 3> fences;
  bool has_fence = false;
  std::vector<Observation> observations;
};

/// The thread that runs, on the OS thread that runs the devices.
inline Fiber* self() { return static_cast<Fiber*>(current_thread); }

/// A fiber with a stack, ready to start; used ones are taken again.
Fiber* take_fiber();
void give_back_fiber(Fiber* fiber);

/// Runs the fiber until it gives control back; called by the scheduler only.
void run_fiber(Fiber* fiber);
/// Did the fiber write past the end of its stack?
bool has_overflown(const Fiber& fiber);
/// Gives control back to the scheduler, in `state`; returns when the fiber is run again.
void suspend(FiberState state);
/// Is the calling OS thread inside run_fiber?
bool is_on_fiber();

std::string describe(const Fiber& fiber);

}  // namespace cudasim
