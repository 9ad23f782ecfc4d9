// SPDX-License-Identifier: Apache-2.0
#pragma once

// Threads that share the moving of rows in large rounds.
//
// Memory order. The caller describes a job and opens the gate (release); a helper enters by an
// acquire of the gate, works, fences its streaming stores and leaves (release); the caller acquires
// the gate once all helpers have left. So whatever the caller publishes after `run`, such as a flag
// to a peer, follows every helper's stores, those past the cache included. A helper that wakes up
// late finds the gate closed: nobody waits for a thread that sleeps.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "base/byte_math.h"
#include "base/function_ref.h"

namespace fanfold::exec {

/// The calling thread and `num_workers - 1` helpers, which are started when first needed and sleep
/// while there is nothing to do. Helpers block all signals and use the default rounding mode.
///
/// Threads: one call at a time. In a forked child `run` throws, the rest does nothing.
class Workers {
 public:
  static constexpr int kMaxWorkers = 256;

  /// `store_fence` as in base::Kernels. Phases of fewer than `min_bytes` (-1: a default that was
  /// measured) are left to the caller.
  Workers(void (*store_fence)(), std::int64_t min_bytes);
  /// Waits for the helpers to end, which is at once.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// 1 to kMaxWorkers. Helpers beyond it have ended when this returns.
  void set_num_workers(int num_workers);
  int num_workers() const noexcept { return num_workers_; }
  /// Helpers that run now; fewer than asked for while none were needed, or where the system has
  /// refused a thread, which is done without.
  int num_helpers() const noexcept { return static_cast<int>(helpers_.size()); }

  /// Whether a phase that moves `bytes` bytes is worth sharing.
  bool takes(std::int64_t bytes) const noexcept { return num_workers_ > 1 && bytes >= min_bytes_; }
  /// Items of `item_bytes` bytes that a thread takes at a time: the smallest shared phase has eight
  /// such pieces, so that no thread is woken for less, and threads end nearly together.
  std::int64_t grain(std::int64_t item_bytes) const noexcept {
    return std::max<std::int64_t>(1, min_bytes_ / 8 / std::max<std::int64_t>(1, item_bytes));
  }

  using Range = base::FunctionRef<void(std::int64_t begin, std::int64_t end)>;
  /// Calls `range` for pieces of at most `grain` items that cover [0, num_items), each once, in any
  /// order, on any of the threads; returns when all are done. `range` waits for nobody and must not
  /// call `run`. After an exception pieces may be left out; the first one is thrown here.
  /// @throws InvalidState  this process is a forked child
  void run(std::int64_t num_items, std::int64_t grain, Range range);

 private:
  struct Job {
    std::int64_t num_items = 0;
    std::int64_t grain = 1;
    const Range* range = nullptr;
  };
  struct Start {
    Workers* workers;
    int index;
  };

  static void* enter_thread(void* start) noexcept;
  bool is_forked_child() const noexcept;
  void start_helpers(std::int64_t num_helpers);
  void end_helpers(std::size_t num_kept) noexcept;
  void wake_helpers(std::int64_t num_helpers) noexcept;
  void help(int index) noexcept;
  bool try_enter() noexcept;
  void leave() noexcept;
  void take_part() noexcept;
  void close_gate() noexcept;

  // Bits of the gate; below them the number of helpers inside.
  static constexpr std::uint32_t kOpen = std::uint32_t{1} << 31;
  static constexpr std::uint32_t kCallerSleeps = std::uint32_t{1} << 30;

  void (*store_fence_)();
  std::int64_t min_bytes_;
  int num_workers_ = 1;
  std::int64_t pid_;  // of the process that has the helpers
  std::vector<pthread_t> helpers_;

  // Of the present job: written by the caller while the gate is shut and nobody is inside.
  Job job_;
  std::exception_ptr error_;  // written by whoever sets has_failed_, read by the caller at the end
  std::atomic<bool> has_failed_{false};

  alignas(base::kCacheLine) std::atomic<std::int64_t> next_{0};  // item that nobody has taken yet
  alignas(base::kCacheLine) std::atomic<std::uint32_t> gate_{0};
  // Counts calls to the helpers; what they sleep on. Each of the two sides writes one word and then
  // reads the other's, in one order of all (seq_cst): a wake-up cannot be lost.
  alignas(base::kCacheLine) std::atomic<std::uint32_t> calls_{0};
  std::atomic<std::int32_t> num_sleepers_{0};
  std::atomic<int> num_kept_{0};  // helpers from this index on end; read after an acquire of calls_
};

/// Calls `range(begin, end)` for pieces that cover [0, num_items), each moving `item_bytes` bytes
/// per item: on the workers where there are some and the bytes are worth it, else [0, num_items)
/// on this thread. Pieces must not write the same bytes.
template <class F>
void for_ranges(Workers* workers, std::int64_t num_items, std::int64_t item_bytes, F&& range) {
  if (workers == nullptr || !workers->takes(num_items * item_bytes)) {
    range(std::int64_t{0}, num_items);
    return;
  }
  workers->run(num_items, workers->grain(item_bytes), range);
}

}  // namespace fanfold::exec
