// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "block.h"
#include "state.h"

namespace cudasim {
namespace {

/// Between shared variables, so that an access past the end of one is seen.
constexpr std::size_t kSharedGapBytes = 32;
/// Room for dynamic and static shared memory, and the gaps.
constexpr std::size_t kSharedRoomBytes = kMaxSharedBytes + (96 << 10);

uint3 coordinates(unsigned index, dim3 extent) {
  return {index % extent.x, index / extent.x % extent.y, index / (extent.x * extent.y)};
}

std::unique_ptr<Block> take_block() {
  if (engine.free_blocks.empty()) {
    auto block = std::make_unique<Block>();
    block->shared = create_shared_memory(kSharedRoomBytes);
    return block;
  }
  auto block = std::move(engine.free_blocks.back());
  engine.free_blocks.pop_back();
  return block;
}

void reset_shared(Block& block, const KernelRun& run) {
  Physical& physical = *block.shared->physical;
  physical.device = run.device->id;
  physical.forget(block.shared_used + kPageBytes);  // also what went past the end
  physical.regions.clear();
  block.shared_used = run.operation->dynamic_shared_bytes;
  physical.regions.push_back({0, block.shared_used, "dynamic shared", ~0ull, ~0ull});
  block.static_offsets.clear();
}

void start_thread(Block& block, unsigned index) {
  const KernelRun& run = *block.run;
  Fiber* const fiber = take_fiber();
  fiber->block = &block;
  fiber->index = index;
  fiber->lane = index % kWarpThreads;
  fiber->thread_idx = coordinates(index, run.operation->block);
  fiber->block_idx = coordinates(block.index, run.operation->grid);
  fiber->block_dim = run.operation->block;
  fiber->grid_dim = run.operation->grid;
  fiber->base = run.task->start;
  fiber->slot = run.slots->first() + block.index * run.threads_per_block() + index;
  fiber->clock = run.slots->start();
  if (engine.config.boundary_release) {
    fiber->fences[static_cast<std::size_t>(Scope::kSys)] = snapshot(*fiber, Scope::kSys);
    fiber->has_fence = true;
    ++fiber->clock;
  }
  block.threads[index] = fiber;
  engine.ready.push_back(fiber);
}

void let_dependents_start(Block& block) {
  if (block.lets_dependents_start) return;
  block.lets_dependents_start = true;
  ++block.run->num_letting;
  if (block.run->lets_dependents_start()) release_dependents(*block.run->task);
}

void check_barriers_are_empty(const Block& block) {
  for (unsigned id = 0; id < kNumBarriers; ++id) {
    const Barrier& barrier = block.barriers[id];
    if (barrier.num_threads() == 0) continue;
    report("barrier", "kernel " + block.run->operation->name + " of rank " +
                          std::to_string(block.run->device->id) + " ended while barrier " +
                          std::to_string(id) + " of block " + std::to_string(block.index) +
                          " holds " + std::to_string(barrier.num_threads()) + " of " +
                          std::to_string(barrier.num_expected) + " threads, from " +
                          describe(barrier.loc));
  }
}

/// What the threads knew and did is part of the kernel's end.
void end_threads(Block& block) {
  KernelRun& run = *block.run;
  const VectorClock* last = nullptr;
  for (Fiber* const fiber : block.threads) {
    if (engine.config.race) {
      if (fiber->base != nullptr && fiber->base.get() != last) run.end.join(*fiber->base);
      last = fiber->base.get();
      run.end.raise(fiber->slot, fiber->clock);
      run.last_clock = std::max(run.last_clock, fiber->clock);
    }
    give_back_fiber(fiber);
  }
}

/// The block's places for a next one; its fibers are free already.
void recycle(std::unique_ptr<Block> block) {
  --block->run->device->num_resident;
  block->threads.clear();
  block->meetings.clear();
  for (Barrier& barrier : block->barriers) barrier = {};
  engine.free_blocks.push_back(std::move(block));
}

}  // namespace

std::unique_ptr<KernelRun> start_kernel(Task& task) {
  auto run = std::make_unique<KernelRun>();
  run->task = &task;
  run->device = task.device;
  run->operation = &task.operation;
  const dim3 grid = task.operation.grid;
  run->order.resize(std::size_t{grid.x} * grid.y * grid.z);
  std::iota(run->order.begin(), run->order.end(), 0u);
  if (engine.config.shuffle_blocks) {
    std::shuffle(run->order.begin(), run->order.end(), engine.random);
  }
  const unsigned num_threads = run->threads_per_block();
  run->slots =
      engine.slots.take(static_cast<std::uint32_t>(run->order.size() * num_threads), task.start,
                        {task.operation.name, task.device->id, num_threads, "kernel"});
  ++engine.stats.kernels;
  return run;
}

void issue_block(KernelRun& run) {
  std::unique_ptr<Block> owned = take_block();
  Block& block = *owned;
  block.run = &run;
  block.id = ++engine.num_blocks;
  block.index = run.order[run.num_issued++];
  const unsigned num_threads = run.threads_per_block();
  block.num_alive = num_threads;
  block.num_ended = 0;
  block.lets_dependents_start = false;
  block.meetings.resize((num_threads + kWarpThreads - 1) / kWarpThreads);
  block.threads.assign(num_threads, nullptr);
  reset_shared(block, run);
  for (unsigned i = 0; i < num_threads; ++i) start_thread(block, i);
  ++run.num_live;
  ++run.device->num_resident;
  engine.blocks.push_back(std::move(owned));
}

void end_block(Block& block) {
  KernelRun& run = *block.run;
  check_barriers_are_empty(block);
  end_threads(block);
  --run.num_live;
  let_dependents_start(block);
  auto& blocks = engine.blocks;
  const auto it = std::find_if(blocks.begin(), blocks.end(),
                               [&](const auto& other) { return other.get() == &block; });
  std::swap(*it, blocks.back());
  recycle(std::move(blocks.back()));
  blocks.pop_back();
}

void drop_blocks(Device& device) {
  const auto is_dropped = [&](const Fiber* fiber) { return fiber->block->run->device == &device; };
  for (auto* list : {&engine.ready, &engine.polling}) {
    list->erase(std::remove_if(list->begin(), list->end(), is_dropped), list->end());
  }
  std::vector<std::unique_ptr<Block>> kept;
  for (auto& block : engine.blocks) {
    if (block->run->device != &device) {
      kept.push_back(std::move(block));
      continue;
    }
    end_threads(*block);
    recycle(std::move(block));
  }
  engine.blocks = std::move(kept);
}

void op_launch_dependents(Loc loc) {
  self()->loc = loc;
  let_dependents_start(*self()->block);
  maybe_yield();
}

void op_wait_dependencies(Loc loc) {
  Fiber& fiber = *self();
  fiber.loc = loc;
  const TaskPointer primary = fiber.block->run->task->primary;
  if (primary == nullptr) return;  // launched after the end of all before it
  if (!primary->is_done()) {
    primary->dependency_waiters.push_back(&fiber);
    suspend(FiberState::kDependency);
  }
  fiber.base = joined(fiber.base, primary->end);
}

void* op_dynamic_shared() { return to_pointer(self()->block->shared->address); }

void* op_static_shared(const void* key, std::size_t bytes, std::size_t alignment) {
  Block& block = *self()->block;
  const auto [it, is_new] = block.static_offsets.try_emplace(key, 0);
  if (is_new) {
    const std::size_t begin =
        (block.shared_used + kSharedGapBytes + alignment - 1) / alignment * alignment;
    if (begin + bytes > kSharedRoomBytes) {
      report("oob", "too much shared memory in kernel " + block.run->operation->name);
      op_trap("shared memory", {"shared memory", 0});
    }
    it->second = begin;
    block.shared_used = begin + bytes;
    block.shared->physical->add_region({begin, bytes, "static shared", ~0ull, ~0ull});
  }
  return to_pointer(block.shared->address + it->second);
}

}  // namespace cudasim
