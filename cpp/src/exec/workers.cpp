// SPDX-License-Identifier: Apache-2.0
#include "exec/workers.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cassert>
#include <cfenv>
#include <climits>
#include <csignal>
#include <memory>
#include <utility>

#include "fanfold/error.h"

namespace fanfold::exec {
namespace {

/// Waking a helper takes the caller 2 us and the helper 5 to 50 us; a core moves 1 MiB in 50 to 200
/// us.
constexpr std::int64_t kMinBytes = std::int64_t{1} << 20;

/// About as long as the last piece of a helper takes; then the caller gives its core away, which
/// the helper may be waiting for.
constexpr int kSpins = 300;
constexpr int kYields = 20;

// Private futexes: the words lie in memory of this process. Without a time limit: a sleeping helper
// waits for nothing that is due, and helpers that the caller waits for depend on no other thread.
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t expected) noexcept {
  (void)::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void wake(std::atomic<std::uint32_t>& word, int count) noexcept {
  (void)::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// Blocks all signals of this thread, and so of threads that it starts, while it lives.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() noexcept {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Workers::Workers(void (*store_fence)(), std::int64_t min_bytes)
    : store_fence_(store_fence),
      min_bytes_(min_bytes < 0 ? kMinBytes : min_bytes),
      pid_(::getpid()) {}

Workers::~Workers() { end_helpers(0); }

bool Workers::is_forked_child() const noexcept { return ::getpid() != pid_; }

void Workers::set_num_workers(int num_workers) {
  assert(num_workers >= 1 && num_workers <= kMaxWorkers);
  const auto num_kept = static_cast<std::size_t>(num_workers) - 1;
  helpers_.reserve(num_kept);
  num_workers_ = num_workers;
  end_helpers(num_kept);
}

void Workers::start_helpers(std::int64_t num_helpers) {
  const auto wanted = static_cast<std::size_t>(num_helpers);
  if (helpers_.size() >= wanted) return;
  const AllSignalsBlocked blocked;
  while (helpers_.size() < wanted) {
    const int index = this->num_helpers();
    auto start = std::make_unique<Start>(Start{this, index});
    num_kept_.store(index + 1, std::memory_order_relaxed);  // the thread's start carries it
    pthread_t helper{};
    if (::pthread_create(&helper, nullptr, &enter_thread, start.get()) != 0) return;
    [[maybe_unused]] const Start* owned_by_helper = start.release();
    ::pthread_setname_np(helper, "fanfold-worker");
    helpers_.push_back(helper);
  }
}

void Workers::end_helpers(std::size_t num_kept) noexcept {
  if (helpers_.size() <= num_kept) return;
  if (!is_forked_child()) {
    num_kept_.store(static_cast<int>(num_kept), std::memory_order_relaxed);
    wake_helpers(INT_MAX);
    for (std::size_t i = num_kept; i < helpers_.size(); ++i) ::pthread_join(helpers_[i], nullptr);
  }
  helpers_.resize(num_kept);
}

void Workers::wake_helpers(std::int64_t num_helpers) noexcept {
  calls_.fetch_add(1, std::memory_order_seq_cst);
  if (num_sleepers_.load(std::memory_order_seq_cst) == 0) return;
  wake(calls_, static_cast<int>(std::min<std::int64_t>(num_helpers, INT_MAX)));
}

void* Workers::enter_thread(void* start) noexcept {
  const std::unique_ptr<Start> mine(static_cast<Start*>(start));
  mine->workers->help(mine->index);
  return nullptr;
}

void Workers::help(int index) noexcept {
  // A thread inherits the modes that its creator happened to have set; sums are promised for these.
  std::fesetenv(FE_DFL_ENV);
  while (true) {
    const std::uint32_t call = calls_.load(std::memory_order_seq_cst);
    if (index >= num_kept_.load(std::memory_order_relaxed)) return;
    if (try_enter()) {
      take_part();
      leave();
      continue;
    }
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    sleep_on(calls_, call);  // returns at once where there was another call meanwhile
    num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
}

/// Acquire: pairs with the release by which `run` opens the gate.
bool Workers::try_enter() noexcept {
  std::uint32_t gate = gate_.load(std::memory_order_relaxed);
  while ((gate & kOpen) != 0) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire,
                                    std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

/// Release: pairs with the acquire in `close_gate`. There is no piece left, so nobody need enter
/// any more.
void Workers::leave() noexcept {
  std::uint32_t gate = gate_.load(std::memory_order_relaxed);
  std::uint32_t left = 0;
  do {
    left = (gate - 1) & ~kOpen;
  } while (!gate_.compare_exchange_weak(gate, left, std::memory_order_release,
                                        std::memory_order_relaxed));
  if (left == kCallerSleeps) wake(gate_, 1);
}

void Workers::take_part() noexcept {
  try {
    while (true) {
      const std::int64_t begin = next_.fetch_add(job_.grain, std::memory_order_relaxed);
      if (begin >= job_.num_items) break;
      (*job_.range)(begin, std::min(begin + job_.grain, job_.num_items));
    }
  } catch (...) {
    if (!has_failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    next_.store(job_.num_items, std::memory_order_relaxed);
  }
  // Streaming stores are ordered by a fence of their own thread only.
  store_fence_();
}

/// Shuts the gate and waits until no helper is inside; acquires what they wrote.
void Workers::close_gate() noexcept {
  std::uint32_t gate = gate_.fetch_and(~kOpen, std::memory_order_acquire) & ~kOpen;
  for (int i = 0; (gate & ~kCallerSleeps) != 0; ++i) {
    if (i < kSpins) {
      pause();
    } else if (i < kSpins + kYields) {
      ::sched_yield();
    } else if ((gate & kCallerSleeps) != 0 ||
               gate_.compare_exchange_strong(gate, gate | kCallerSleeps, std::memory_order_acquire,
                                             std::memory_order_acquire)) {
      sleep_on(gate_, gate | kCallerSleeps);
    }
    gate = gate_.load(std::memory_order_acquire);
  }
  gate_.store(0, std::memory_order_relaxed);
}

void Workers::run(std::int64_t num_items, std::int64_t grain, Range range) {
  assert(grain >= 1);
  if (is_forked_child()) {
    throw InvalidState("workers: expected the process that started them, got a forked child of it");
  }
  const std::int64_t num_pieces = (num_items + grain - 1) / grain;
  const std::int64_t num_helpers = std::min<std::int64_t>(num_workers_, num_pieces) - 1;
  if (num_helpers > 0) start_helpers(num_helpers);
  job_ = Job{num_items, grain, &range};
  next_.store(0, std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  if (num_helpers > 0) wake_helpers(num_helpers);
  take_part();
  close_gate();
  if (!has_failed_.load(std::memory_order_relaxed)) return;
  has_failed_.store(false, std::memory_order_relaxed);
  std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace fanfold::exec
