// SPDX-License-Identifier: Apache-2.0
#pragma once

// Kernels that run, their blocks, and where the threads of a block meet.

#include <array>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "fiber.h"
#include "shadow.h"
#include "slots.h"
#include "task.h"

namespace cudasim {

constexpr unsigned kWarpThreads = 32;
constexpr unsigned kNumBarriers = 16;
constexpr unsigned kMaxBlockThreads = 1024;
/// What one block may ask for on sm_90, and what it may have without asking (cudaFuncSetAttribute).
constexpr std::size_t kMaxSharedBytes = 227 << 10;
constexpr std::size_t kDefaultSharedBytes = 48 << 10;

/// One barrier of a block, between two of its completions.
struct Barrier {
  unsigned num_expected = 0;  // 0: all threads that have not left
  std::vector<Fiber*> waiting;
  std::vector<Fiber*> arrived;  // bar.arrive: these do not wait
  std::vector<Release> arrivals;
  unsigned num_true = 0;
  Loc loc{};  // of the first

  std::size_t num_threads() const { return waiting.size() + arrived.size(); }
};

/// Lanes that meet in one warp operation.
struct WarpMeeting {
  unsigned mask = 0;
  unsigned arrived = 0;
  WarpOp op{};
  Loc loc{};
  std::array<std::uint64_t, kWarpThreads> values{};
  std::array<int, kWarpThreads> sources{};
  std::vector<Fiber*> waiting;
};

struct Block {
  KernelRun* run = nullptr;
  std::uint64_t id = 0;
  unsigned index = 0;  // in the grid
  std::vector<Fiber*> threads;
  unsigned num_alive = 0;
  unsigned num_ended = 0;  // threads whose fiber has come to its end
  bool lets_dependents_start = false;

  Mapping* shared = nullptr;
  std::size_t shared_used = 0;
  std::map<const void*, std::size_t> static_offsets;  // offsets

  std::array<Barrier, kNumBarriers> barriers;
  std::vector<std::list<WarpMeeting>> meetings;  // by warp
};

struct KernelRun {
  Task* task = nullptr;
  Device* device = nullptr;
  const Operation* operation = nullptr;
  std::vector<unsigned> order;  // of its blocks
  std::size_t num_issued = 0;
  std::size_t num_live = 0;
  std::size_t num_letting = 0;  // blocks that let dependents start, or have ended
  SlotRange* slots = nullptr;
  ClockValue last_clock = 0;
  VectorClock end;

  bool is_over() const { return num_issued == order.size() && num_live == 0; }
  bool lets_dependents_start() const { return num_letting == order.size(); }
  unsigned threads_per_block() const {
    return operation->block.x * operation->block.y * operation->block.z;
  }
};

std::unique_ptr<KernelRun> start_kernel(Task& task);
/// Makes the next block resident.
void issue_block(KernelRun& run);
void end_block(Block& block);
/// Drops the blocks of a device that has failed, and all their threads.
void drop_blocks(Device& device);
/// What ends with a thread: barriers may complete, others may wait for it in vain.
void thread_left(Fiber& fiber);

/// Joins what the fibers know, and what the arrivals published.
void join_clocks(const std::vector<Fiber*>& fibers, const std::vector<Release>& arrivals);
/// The fiber learns what the release published.
void acquire(Fiber& fiber, const Release& release);
Release snapshot(const Fiber& fiber, Scope scope);

}  // namespace cudasim
