// SPDX-License-Identifier: Apache-2.0
// Where all or some threads of a block meet, and what a thread leaves behind when it ends.

#include <algorithm>

#include "block.h"
#include "state.h"

namespace cudasim {
namespace {

unsigned num_needed(const Block& block, const Barrier& barrier) {
  return barrier.num_expected == 0 ? block.num_alive : barrier.num_expected;
}

std::string name_of(const Block& block, unsigned id) {
  return (id == 0 ? std::string("__syncthreads") : "barrier " + std::to_string(id)) + " of rank " +
         std::to_string(block.run->device->id) + " kernel " + block.run->operation->name +
         " block " + std::to_string(block.index);
}

/// Lets all that wait go on; `running` is the thread that completed it, if it is one of them.
void complete(Barrier& barrier, const Fiber* running) {
  join_clocks(barrier.waiting, barrier.arrivals);
  for (Fiber* const fiber : barrier.waiting) {
    fiber->result = barrier.num_true;
    if (fiber == running) continue;
    fiber->state = FiberState::kReady;
    engine.ready.push_back(fiber);
  }
  barrier = {};
  engine.has_met = true;
}

void check_positions(const Block& block, const Barrier& barrier) {
  for (const Fiber* const fiber : barrier.waiting) {
    if (fiber->loc.line == barrier.loc.line && fiber->loc.file == barrier.loc.file) continue;
    report("barrier", "threads meet in different calls of " + name_of(block, 0) + ": thread " +
                          std::to_string(barrier.waiting.front()->index) + " at " +
                          describe(barrier.loc) + ", thread " + std::to_string(fiber->index) +
                          " at " + describe(fiber->loc));
    return;
  }
}

/// The running thread comes to the barrier; `num_expected` 0 is the whole block.
unsigned meet(unsigned id, unsigned num_expected, bool waits, bool predicate, Loc loc) {
  Fiber& fiber = *self();
  Block& block = *fiber.block;
  Barrier& barrier = block.barriers[id];
  fiber.loc = loc;
  if (barrier.num_threads() == 0) {
    barrier.num_expected = num_expected;
    barrier.loc = loc;
  } else if (barrier.num_expected != num_expected) {
    report("barrier", name_of(block, id) + " is for " + std::to_string(num_needed(block, barrier)) +
                          " threads at " + describe(barrier.loc) + " and for " +
                          std::to_string(num_expected == 0 ? block.num_alive : num_expected) +
                          " at " + describe(loc) + " (thread " + std::to_string(fiber.index) + ")");
  }
  const auto& arrived = barrier.arrived;
  if (std::find(arrived.begin(), arrived.end(), &fiber) != arrived.end()) {
    report("barrier", "thread " + std::to_string(fiber.index) + " comes twice to " +
                          name_of(block, id) + " before it is complete, at " + describe(loc));
  }
  barrier.num_true += predicate ? 1 : 0;
  if (waits) {
    barrier.waiting.push_back(&fiber);
  } else {
    barrier.arrived.push_back(&fiber);
    barrier.arrivals.push_back(snapshot(fiber, Scope::kCta));
    ++fiber.clock;
  }
  if (barrier.num_threads() >= num_needed(block, barrier)) {
    if (barrier.num_expected == 0) check_positions(block, barrier);
    complete(barrier, &fiber);
    maybe_yield();
  } else if (waits) {
    suspend(FiberState::kBarrier);
  }
  return static_cast<unsigned>(fiber.result);
}

}  // namespace

void op_barrier(Loc loc) { meet(0, 0, true, false, loc); }

unsigned op_barrier_count(bool predicate, Loc loc) { return meet(0, 0, true, predicate, loc); }

void op_named_barrier(unsigned id, unsigned num_threads, bool waits, Loc loc) {
  const unsigned block_threads = self()->block->run->threads_per_block();
  const unsigned rounded = (block_threads + kWarpThreads - 1) / kWarpThreads * kWarpThreads;
  if (id >= kNumBarriers || num_threads == 0 || num_threads % kWarpThreads != 0 ||
      num_threads > rounded) {
    report("barrier", "barrier " + std::to_string(id) + " for " + std::to_string(num_threads) +
                          " threads does not exist, at " + describe(loc) + " by " +
                          describe(*self()));
    op_trap("barrier", loc);
  }
  // All threads of the block in barrier 0 is __syncthreads.
  const bool is_whole = id == 0 && num_threads == rounded && waits;
  meet(id, is_whole ? 0 : num_threads, waits, false, loc);
}

void thread_left(Fiber& fiber) {
  Block& block = *fiber.block;
  --block.num_alive;
  made_progress();
  for (unsigned id = 0; id < kNumBarriers; ++id) {
    Barrier& barrier = block.barriers[id];
    if (barrier.num_expected != 0 || barrier.num_threads() == 0) continue;
    if (barrier.num_threads() != block.num_alive) continue;
    report("barrier", "threads (the last: " + std::to_string(fiber.index) +
                          ") left the kernel while " + std::to_string(barrier.num_threads()) +
                          " others wait in " + name_of(block, id) + " at " + describe(barrier.loc));
    complete(barrier, nullptr);
  }
  const unsigned bit = 1u << fiber.lane;
  for (const WarpMeeting& meeting : block.meetings[fiber.index / kWarpThreads]) {
    if ((meeting.mask & bit) == 0) continue;
    report("warp", describe(fiber) + " left the kernel, but is named in the mask at " +
                       describe(meeting.loc));
  }
}

void join_clocks(const std::vector<Fiber*>& fibers, const std::vector<Release>& arrivals) {
  if (!engine.config.race || fibers.empty()) return;
  auto all = std::make_shared<VectorClock>();
  const VectorClock* last = nullptr;
  const auto add = [&](const ClockPointer& base, SlotId slot, ClockValue clock) {
    if (base != nullptr && base.get() != last) all->join(*base);
    last = base.get();
    all->raise(slot, clock);
  };
  for (const Fiber* fiber : fibers) add(fiber->base, fiber->slot, fiber->clock);
  for (const Release& arrival : arrivals) add(arrival.base, arrival.slot, arrival.clock);
  for (Fiber* const fiber : fibers) {
    fiber->base = all;
    ++fiber->clock;
  }
}

}  // namespace cudasim
