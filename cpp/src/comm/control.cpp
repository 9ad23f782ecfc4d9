// SPDX-License-Identifier: Apache-2.0
#include "comm/control.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/format.h"
#include "comm/raise_to.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

using base::str;

constexpr const char* kResetAdvice = "; call reset() on every rank";

/// Sleeps until `word` is woken or differs from `expected`, or `max_ns` have passed.
void futex_wait(std::atomic<std::uint32_t>* word, std::uint32_t expected,
                std::int64_t max_ns) noexcept {
  const timespec limit{max_ns / 1'000'000'000, max_ns % 1'000'000'000};
  // Not FUTEX_PRIVATE_FLAG: the word lies in memory that other processes map.
  (void)::syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>* word) noexcept {
  (void)::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

std::int64_t Control::bytes(int num_ranks) noexcept {
  constexpr auto kPerRank = static_cast<std::int64_t>(sizeof(AbortLine) + sizeof(ResetLine));
  return base::align_up(static_cast<std::int64_t>(sizeof(Words)) + num_ranks * kPerRank, 128);
}

Control::Control(const Group& group, const Windows& windows, std::string what)
    : group_(group),
      remote_(group.remote_windows(windows)),
      what_(std::move(what)),
      active_(static_cast<std::size_t>(group.num_ranks()), true) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  bases_.reserve(windows.size());
  for (const auto& window : windows) bases_.push_back(window->data());
}

Control::AbortLine& Control::abort_line(int window, int source) const noexcept {
  return reinterpret_cast<AbortLine*>(base(window) + sizeof(Words))[source];
}

Control::ResetLine& Control::reset_line(int window, int source) const noexcept {
  const std::size_t before =
      sizeof(Words) + static_cast<std::size_t>(group_.num_ranks()) * sizeof(AbortLine);
  return reinterpret_cast<ResetLine*>(base(window) + before)[source];
}

void Control::check_process() const {
  if (group_.is_forked_child()) {
    throw InvalidState(str(what_,
                           ": expected to be used in the process that made it, got a call in a "
                           "forked child; make communicators after fork, or start with exec"));
  }
  if (remote_ != nullptr) remote_->check_thread(what_.c_str());
}

void Control::wake(int peer) noexcept {
  // Release: pairs with the acquire load in `sleep_on_doorbell`; a sleeper that sees the new number
  // sees the flag that was published before it.
  words(peer).doorbell.fetch_add(1, std::memory_order_release);
  futex_wake(&words(peer).doorbell);
}

void Control::sleep_on_doorbell(base::FunctionRef<bool()> ready, Heed heed,
                                std::int64_t max_ns) noexcept {
  Words& own = words(group_.rank());
  // A full barrier as far as the processor has one; see the head of the header for what is left.
  own.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t number = own.doorbell.load(std::memory_order_acquire);
  const bool aborted = heed == Heed::kAbortsAndLosses && is_aborted();
  if (!ready() && !aborted) futex_wait(&own.doorbell, number, max_ns);
  own.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Control::wait_slowly(base::FunctionRef<bool()> ready, const WaitFor& target,
                          base::Deadline deadline, Heed heed) {
  const std::int64_t start = base::now_ns();
  std::int64_t next_liveness = start + kYieldNs;
  std::int64_t bystander_lost_at = INT64_MAX;
  if (remote_ != nullptr) remote_->progress(0);  // even if there is no time to wait
  for (;;) {
    if (ready()) return;
    if (heed == Heed::kAbortsAndLosses && is_aborted() && !ready()) throw_if_aborted(target);
    const std::int64_t now = base::now_ns();
    const bool late = now >= deadline.at_ns();
    if (heed != Heed::kNothing && (now >= next_liveness || late)) {
      next_liveness = now + kLivenessNs;
      const Lost lost = find_lost(target.rank);
      if (lost.rank >= 0) {
        bystander_lost_at = std::min(bystander_lost_at, now);
        const bool counts =
            late || lost.rank == target.rank || now - bystander_lost_at > kBystanderGraceNs;
        if (counts && !ready()) throw_if_lost(target);
      }
    }
    if (late && !ready()) throw_timeout(target, deadline);
    if (remote_ != nullptr) {
      remote_->progress(std::min(kMaxSleepNs, deadline.remaining_ns()));
    } else if (now - start < kYieldNs) {
      ::sched_yield();
    } else {
      sleep_on_doorbell(ready, heed, std::min(kMaxSleepNs, deadline.remaining_ns()));
    }
  }
}

void Control::abort(const std::string& reason) noexcept { abort_with(reason, 0); }

void Control::abort_with(const std::string& reason, std::uint64_t flags) noexcept {
  if (group_.is_forked_child()) return;
  std::unique_lock<std::mutex> lock(abort_mutex_);
  const std::uint32_t word = 1 + generation();
  const AbortLine& own = abort_line(group_.rank(), group_.rank());
  if ((own.word.load(std::memory_order_relaxed) & ~kResetBit) == word) return;
  Text text{};
  std::size_t size = std::min(reason.size(), kReasonBytes - 1);
  while (size < reason.size() && size > 0 &&
         (static_cast<unsigned char>(reason[size]) & 0xc0U) == 0x80U) {
    --size;  // not inside a UTF-8 character
  }
  std::memcpy(text.data(), reason.data(), size);
  for (int rank = 0; rank < group_.num_ranks(); ++rank) {
    if (is_remote() && rank != group_.rank()) continue;
    store_line(abort_line(rank, group_.rank()), word | flags, text);
  }
  if (is_remote()) queue_abort(word, flags, text);
  // Only now, so that a rank that wakes and resets cannot be taken for the one that began.
  for (int rank = 0; rank < group_.num_ranks(); ++rank) {
    if (is_remote() && rank != group_.rank()) continue;
    raise_to(words(rank).abort_any, word);  // acquire: is_aborted
    ring(rank);
  }
  if (!is_remote()) return;
  // Without the lock, for which a thread may wait that holds what the transport needs to send.
  lock.unlock();
  remote_->send_queued();
}

void Control::store_line(AbortLine& line, std::uint64_t word, const Text& text) noexcept {
  line.word.store(0, std::memory_order_relaxed);
  // Release, each: who reads a new text also reads the 0 above, and drops it.
  for (std::size_t i = 0; i < kReasonWords; ++i) {
    line.reason[i].store(text[i], std::memory_order_release);
  }
  line.word.store(word, std::memory_order_release);  // acquire: read_line
}

/// `store_line` for the line of `source` in a peer's window. An older one of the source itself may
/// come later than a newer one that another rank passes on.
void Control::add_line(Stores& stores, int source, std::uint64_t word, const Text& text) const {
  const AbortLine& line = abort_line(group_.rank(), source);  // at the same place in every window
  const auto at = [&](const void* place) { return offset_in(group_.rank(), place); };
  stores.if_lower(at(&line.word), word & ~kResetBit, 2 + std::uint32_t{kReasonWords});
  stores.set64(at(&line.word), 0);
  for (std::size_t i = 0; i < kReasonWords; ++i) stores.set64(at(&line.reason[i]), text[i]);
  stores.set64(at(&line.word), word);
}

/// Who answers an abort by a reset tells whom it has from: its message may arrive first.
void Control::queue_abort(std::uint64_t word, std::uint64_t flags, const Text& text) noexcept try {
  constexpr int kMaxOthers = 4;  // as many lines as fit into any message
  Stores stores;
  Text other{};
  int num_others = 0;
  for (int rank = 0; flags != 0 && rank < group_.num_ranks(); ++rank) {
    if (rank == group_.rank() || !read_line(rank, word, &other)) continue;
    add_line(stores, rank, word, other);
    if (++num_others == kMaxOthers) break;
  }
  add_line(stores, group_.rank(), word | flags, text);
  const Words& own = words(group_.rank());
  stores.raise32(offset_in(group_.rank(), &own.abort_any), static_cast<std::uint32_t>(word));
  for (int rank = 0; rank < group_.num_ranks(); ++rank) {
    if (rank != group_.rank()) remote_->queue(rank, rank, stores);
  }
} catch (...) {
  remote_->defer_current();
}

bool Control::is_aborted() const noexcept {
  return words(group_.rank()).abort_any.load(std::memory_order_acquire) == 1 + generation();
}

bool Control::read_line(int source, std::uint64_t word, Text* text) const {
  const AbortLine& line = abort_line(group_.rank(), source);
  if (line.word.load(std::memory_order_acquire) != word) return false;
  for (std::size_t i = 0; i < kReasonWords; ++i) {
    (*text)[i] = line.reason[i].load(std::memory_order_acquire);
  }
  return line.word.load(std::memory_order_relaxed) == word;
}

bool Control::read_abort(int source, std::uint64_t flags, std::string* reason) const {
  Text text{};
  if (!read_line(source, (1 + std::uint64_t{generation()}) | flags, &text)) return false;
  std::array<char, kReasonBytes + 1> bytes{};
  std::memcpy(bytes.data(), text.data(), kReasonBytes);
  *reason = bytes.data();
  return true;
}

void Control::flush(base::Deadline deadline) {
  if (!is_remote()) return;
  std::int64_t next_liveness = base::now_ns() + kLivenessNs;
  const auto give_up = [&] {
    if (is_aborted()) return true;
    const std::int64_t now = base::now_ns();
    if (now < next_liveness) return false;
    next_liveness = now + kLivenessNs;
    return find_lost(group_.rank()).rank >= 0;
  };
  remote_->flush(deadline, give_up);
}

void Control::throw_if_aborted(const WaitFor& target) const {
  if (remote_ != nullptr) remote_->progress(0);
  if (!is_aborted()) return;
  std::string reason;
  for (const std::uint64_t flags : {std::uint64_t{0}, kResetBit}) {
    for (int rank = 0; rank < group_.num_ranks(); ++rank) {
      if (!read_abort(rank, flags, &reason)) continue;
      throw PeerAborted(str(prefix(target), "rank ", rank, " aborted: ", reason, kResetAdvice),
                        rank, reason);
    }
  }
}

std::string Control::lost_reason(int peer) const {
  if (words(peer).left.load(std::memory_order_acquire) != 0) return "it closed its end";
  return group_.lost_reason(peer);
}

/// The first lost peer, counting from `first`.
Control::Lost Control::find_lost(int first) const {
  for (int i = 0; i < group_.num_ranks(); ++i) {
    const int rank = (first + i) % group_.num_ranks();
    if (rank == group_.rank() || !is_active(rank)) continue;
    std::string reason = lost_reason(rank);
    if (!reason.empty()) return {rank, std::move(reason)};
  }
  return {};
}

/// As `find_lost`, only of those who did not leave this object.
Control::Lost Control::find_dead(int first) const {
  if (!group_.tells_deaths()) return {};
  for (int i = 0; i < group_.num_ranks(); ++i) {
    const int rank = (first + i) % group_.num_ranks();
    if (rank == group_.rank() || !is_active(rank)) continue;
    // Looked at first: who leaves in good order leaves this object before the group.
    std::string reason = group_.lost_reason(rank);
    const bool has_left = words(rank).left.load(std::memory_order_acquire) != 0;
    if (!reason.empty() && !has_left) return {rank, std::move(reason)};
  }
  return {};
}

bool Control::has_peer_died() const { return find_dead(group_.rank()).rank >= 0; }

void Control::throw_if_lost(const WaitFor& target) const {
  const Lost dead = find_dead(target.rank);
  if (dead.rank >= 0) throw_lost(target, dead);
  const Lost lost = find_lost(target.rank);
  if (lost.rank >= 0) throw_lost(target, lost);
}

void Control::throw_late(const WaitFor& target, std::chrono::nanoseconds timeout) const {
  throw_if_lost(target);
  throw_timeout(target, base::Deadline(timeout));
}

void Control::stop_own_waits() noexcept {
  if (group_.is_forked_child()) return;
  raise_to(words(group_.rank()).abort_any, 1 + generation());
}

void Control::begin_reset() { abort_with(str("rank ", group_.rank(), " called reset"), kResetBit); }

std::string Control::prefix(const WaitFor& target) const {
  if (target.round < 0) return str(what_, ": ", target.phase, ": ");
  return str(what_, ": ", target.phase, " of round ", target.round, ": ");
}

void Control::throw_lost(const WaitFor& target, const Lost& lost) const {
  throw PeerLost(str(prefix(target), "rank ", lost.rank, " is gone: ", lost.reason,
                     "; close the communicator and all that was made from it"),
                 lost.rank);
}

void Control::throw_timeout(const WaitFor& target, base::Deadline deadline) const {
  throw PeerTimeout(
      str(prefix(target), "rank ", target.rank, " did not arrive within ",
          base::format_duration(deadline.timeout_ns()), "; it is late or frozen", kResetAdvice),
      target.rank);
}

void Control::announce_reset(std::uint32_t generation, std::uint64_t max_epoch) {
  for (int rank = 0; rank < group_.num_ranks(); ++rank) {
    ResetLine& line = reset_line(rank, group_.rank());
    if (is_remote() && rank != group_.rank()) {
      Stores stores;
      stores.set64(offset_in(rank, &line.max_epoch[generation % 2]), max_epoch);
      stores.set64(offset_in(rank, &line.generation), generation);
      remote_->post(rank, rank, stores);
      continue;
    }
    line.max_epoch[generation % 2].store(max_epoch, std::memory_order_relaxed);
    line.generation.store(generation, std::memory_order_release);  // acquire: reset of `rank`
    ring(rank);
  }
}

std::uint64_t Control::reset(std::uint64_t max_epoch, base::Deadline deadline) {
  check_process();
  begin_reset();
  const auto announced = [this](int peer) {
    return reset_line(group_.rank(), peer).generation.load(std::memory_order_acquire);
  };
  // A peer that is further ahead finished a reset that timed out here, and has begun the next one.
  std::uint64_t target = std::uint64_t{generation()} + 1;
  for (int peer = 0; peer < group_.num_ranks(); ++peer) {
    if (is_active(peer)) target = std::max(target, announced(peer));
  }
  announce_reset(static_cast<std::uint32_t>(target), max_epoch);
  for (int peer = 0; peer < group_.num_ranks(); ++peer) {
    if (peer == group_.rank() || !is_active(peer)) continue;
    // More than `target`: the peer is through and resets once more, which our next reset will meet.
    const auto ready = [&] { return announced(peer) >= target; };
    if (!ready()) wait_slowly(ready, {peer, "reset", -1}, deadline, Heed::kLosses);
  }
  std::uint64_t highest = max_epoch;
  for (int peer = 0; peer < group_.num_ranks(); ++peer) {
    if (peer == group_.rank() || !is_active(peer)) continue;
    const ResetLine& line = reset_line(group_.rank(), peer);
    highest = std::max(highest, line.max_epoch[target % 2].load(std::memory_order_relaxed));
  }
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  generation_.store(static_cast<std::uint32_t>(target), std::memory_order_relaxed);
  return highest;
}

void Control::mark_left() noexcept {
  if (group_.is_forked_child()) return;
  Words& own = words(group_.rank());
  own.left.store(1, std::memory_order_release);  // acquire: lost_reason
  if (is_remote()) {
    try {
      Stores stores;
      stores.raise32(offset_in(group_.rank(), &own.left), 1);
      for (int rank = 0; rank < group_.num_ranks(); ++rank) {
        if (rank != group_.rank()) remote_->post(rank, group_.rank(), stores);
      }
    } catch (...) {
      remote_->defer_current();
    }
  }
  for (int rank = 0; rank < group_.num_ranks(); ++rank) ring(rank);
}

void Control::wait_all_left(base::Deadline deadline) {
  check_process();
  for (int peer = 0; peer < group_.num_ranks(); ++peer) {
    if (peer == group_.rank() || !is_active(peer)) continue;
    const auto left = [&] { return !lost_reason(peer).empty(); };
    if (!left()) wait_slowly(left, {peer, "close", -1}, deadline, Heed::kNothing);
  }
}

}  // namespace fanfold::comm
