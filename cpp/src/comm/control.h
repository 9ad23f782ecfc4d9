// SPDX-License-Identifier: Apache-2.0
#pragma once

// The head of every shared window: how a rank sleeps and is woken, aborts, leaves and resets.
//
// Memory order. Data of a peer is published by a release store of some word in *my* window (a flag)
// and read after an acquire load of it inside `wait`. The words here follow the same rule:
//   abort_any         release by `abort`      <- acquire by `wait` (the abort line travels with it)
//   AbortLine::word   release by `abort`      <- acquire by `wait`, before and after the reason's
//   words AbortLine::reason release by `abort`      <- acquire by `wait` (a new text shows the new
//   word too) ResetLine::generation  release by `reset` <- acquire by `reset` of each peer (carries
//   max_epoch) left              release by `mark_left`  <- acquire by `wait`
// The doorbell carries no data: a sleeper re-reads its flag, and sleeps at most `kMaxSleepNs`, so a
// wake-up that is lost (the sleeper count is read without a full fence) costs a millisecond at
// most.
//
// Where ranks share no memory, stores into a peer's window go to it as messages
// (transport_group.h), and a wait takes messages in place of sleeping.

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/byte_math.h"
#include "base/clock.h"
#include "base/function_ref.h"
#include "comm/group.h"
#include "comm/remote_windows.h"

namespace fanfold::comm {

/// Whom and what a wait is for; only read when it fails.
struct WaitFor {
  int rank;            // the peer that is waited for
  const char* phase;   // "dispatch", "combine", "barrier", …
  std::int64_t round;  // -1: not part of a round
};

/// One rank's view of the control areas at the start of all windows of one object.
///
/// Threads: one thread at a time, except `abort`, which any thread may call at any time.
class Control {
 public:
  /// Bytes at the start of each window; a multiple of 128.
  static std::int64_t bytes(int num_ranks) noexcept;

  /// `windows` hold zeros at their first `bytes(num_ranks)` bytes when the group first uses them.
  /// `what` names the object in messages: "AllToAll 'moe'", "Communicator".
  Control(const Group& group, const Windows& windows, std::string what);

  const Group& group() const noexcept { return group_; }
  const std::string& what() const noexcept { return what_; }
  /// The name of whoever makes the next calls, where several share the windows.
  void set_what(const std::string& what) { what_ = what; }
  /// Counts resets. Relaxed: only this rank's own thread writes it; `abort` of another thread that
  /// still sees the old one has no effect.
  std::uint32_t generation() const noexcept { return generation_.load(std::memory_order_relaxed); }

  /// Every call of an object that uses this must begin with it: a forked child lacks the windows.
  /// @throws InvalidState  this process is a forked child, or the transport another thread's.
  void check_process() const;

  /// Waits until `ready()`, an inlined acquire load and a comparison. Spins (only while ranks <=
  /// cores), then yields, then sleeps on the doorbell. A flag that has arrived beats every error.
  /// The loss of a rank other than the one waited for counts only after `kBystanderGraceNs`, since
  /// that rank may have finished this phase in good order and left.
  /// @throws PeerTimeout, PeerAborted, PeerLost, named after `target`.
  template <class Ready>
  void wait(Ready&& ready, const WaitFor& target, base::Deadline deadline) {
    if (ready()) return;
    if (group_.may_spin()) {
      for (int i = 0; i < kSpins; ++i) {
        pause();
        if (ready()) return;
      }
    }
    wait_slowly(base::FunctionRef<bool()>(ready), target, deadline, Heed::kAbortsAndLosses);
  }

  /// Wakes `peer` if it sleeps; call after publishing a flag into its window.
  void ring(int peer) noexcept {
    if (words(peer).sleepers.load(std::memory_order_relaxed) != 0) wake(peer);
  }

  /// Makes every peer's present and next wait throw PeerAborted(rank, reason) until `reset`.
  /// `reason` is cut at 111 bytes. This rank's own waits throw too. The first reason that a rank
  /// gives in a generation stays. Nothing happens in a forked child.
  void abort(const std::string& reason) noexcept;
  /// Names the rank that aborted rather than one that has answered with a reset.
  /// @throws PeerAborted  a peer (or this rank) has aborted in this generation.
  void throw_if_aborted(const WaitFor& target) const;
  /// Names a rank that died rather than one that has answered by leaving.
  /// @throws PeerLost  a peer (active, not this rank) has left or ended.
  void throw_if_lost(const WaitFor& target) const;
  /// Whether an active peer ended or left the group without `mark_left`. It may owe flags, while
  /// one that has left this object owes none.
  bool has_peer_died() const;
  /// Who waits otherwise, such as a kernel: `target` did not come within `timeout`.
  /// @throws PeerLost     since it, or if not it another peer, has left or ended.
  /// @throws PeerTimeout  else.
  [[noreturn]] void throw_late(const WaitFor& target, std::chrono::nanoseconds timeout) const;
  /// This rank's word that says 1 + the generation which a rank has aborted, for who waits
  /// otherwise. In this rank's window.
  const std::byte* abort_word() const noexcept {
    return reinterpret_cast<const std::byte*>(&words(group_.rank()).abort_any);
  }
  /// Ends what waits on `abort_word`, of this rank only: peers go on. This rank can only close
  /// then, or reset.
  void stop_own_waits() noexcept;
  /// The abort with which `reset` begins, for who has waits to end before.
  void begin_reset();

  /// Makes the stores in `peer`'s copy of this rank's window. Only where `is_remote`.
  /// @throws what the transport throws.
  void send(int peer, const Stores& stores) { remote_->send(peer, group_.rank(), stores); }
  /// After the last wait of a call: where stores are messages, lets them leave that peers still
  /// wait for. Returns also if somebody aborts, a peer is gone or `deadline` passes.
  /// @throws what the transport throws.
  void flush(base::Deadline deadline);
  /// Whether windows are copies, and stores into them messages.
  bool is_remote() const noexcept { return remote_ != nullptr; }

  /// Collective over the active ranks: a new generation. Every rank gives the highest epoch that it
  /// has used; returns the highest of all. Wakes peers that wait for something else, by an abort.
  /// May be repeated after it timed out; a rank whose reset succeeded meanwhile need not repeat it.
  /// @throws PeerTimeout, PeerLost
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline);

  /// Tells the peers that this rank uses the windows no more. Never waits.
  void mark_left() noexcept;
  /// Collective: waits until every active peer has called `mark_left` too or is gone.
  /// @throws PeerTimeout
  void wait_all_left(base::Deadline deadline);

  /// Ranks that are neither waited for nor checked. Initially none.
  void set_active(const std::vector<bool>& active) { active_ = active; }
  bool is_active(int rank) const noexcept { return active_[static_cast<std::size_t>(rank)]; }

 private:
  static constexpr int kSpins =
      200;  // a few microseconds: a peer that waits for a core pays for more
  static constexpr std::int64_t kYieldNs = 1'000'000;
  static constexpr std::int64_t kMaxSleepNs = 1'000'000;
  static constexpr std::int64_t kLivenessNs = 5'000'000;
  static constexpr std::int64_t kBystanderGraceNs = 400'000'000;
  static constexpr std::size_t kReasonWords = 14;
  static constexpr std::size_t kReasonBytes = 8 * kReasonWords;

  static constexpr std::uint64_t kResetBit = std::uint64_t{1} << 63;  // an abort by `reset`

  enum class Heed : std::uint8_t { kAbortsAndLosses, kLosses, kNothing };
  struct Lost {
    int rank = -1;  // -1: none
    std::string reason;
  };

  struct alignas(base::kCacheLine) Words {  // in each window, written by everyone
    std::atomic<std::uint32_t> doorbell;    // futex word
    std::atomic<std::uint32_t> sleepers;
    std::atomic<std::uint32_t> abort_any;  // 1 + generation of the newest abort, 0 = none
    std::atomic<std::uint32_t> left;       // written by the window's owner
  };
  struct alignas(base::kCacheLine) AbortLine {  // [source] in each window
    std::atomic<std::uint64_t> word;  // 1 + generation, + kResetBit; 0 while the text changes
    std::array<std::atomic<std::uint64_t>, kReasonWords> reason;  // zero-terminated text
  };
  struct alignas(base::kCacheLine) ResetLine {  // [source] in each window
    std::atomic<std::uint64_t> generation;      // the one that the source is ready for
    // By generation mod 2: a rank that is ahead by one does not disturb who still reads the last.
    std::array<std::atomic<std::uint64_t>, 2> max_epoch;
  };

  static void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
  Words& words(int rank) const noexcept { return *reinterpret_cast<Words*>(base(rank)); }
  AbortLine& abort_line(int window, int source) const noexcept;
  ResetLine& reset_line(int window, int source) const noexcept;
  std::byte* base(int rank) const noexcept { return bases_[static_cast<std::size_t>(rank)]; }
  void wake(int peer) noexcept;
  void wait_slowly(base::FunctionRef<bool()> ready, const WaitFor& target, base::Deadline deadline,
                   Heed heed);
  void sleep_on_doorbell(base::FunctionRef<bool()> ready, Heed heed, std::int64_t max_ns) noexcept;
  bool is_aborted() const noexcept;
  void abort_with(const std::string& reason, std::uint64_t flags) noexcept;
  bool read_abort(int source, std::uint64_t flags, std::string* reason) const;
  std::string lost_reason(int peer) const;
  Lost find_lost(int first) const;
  Lost find_dead(int first) const;
  std::int64_t offset_in(int window, const void* word) const noexcept {
    return static_cast<const std::byte*>(word) - base(window);
  }
  using Text = std::array<std::uint64_t, kReasonWords>;
  static void store_line(AbortLine& line, std::uint64_t word, const Text& text) noexcept;
  void add_line(Stores& stores, int source, std::uint64_t word, const Text& text) const;
  void queue_abort(std::uint64_t word, std::uint64_t flags, const Text& text) noexcept;
  bool read_line(int source, std::uint64_t word, Text* text) const;
  void announce_reset(std::uint32_t generation, std::uint64_t max_epoch);
  [[noreturn]] void throw_lost(const WaitFor& target, const Lost& lost) const;
  [[noreturn]] void throw_timeout(const WaitFor& target, base::Deadline deadline) const;
  std::string prefix(const WaitFor& target) const;

  const Group& group_;
  const std::shared_ptr<RemoteWindows> remote_;  // null: windows are shared
  std::string what_;
  std::vector<std::byte*> bases_;
  std::vector<bool> active_;
  std::mutex abort_mutex_;  // guards this rank's abort lines
  std::atomic<std::uint32_t> generation_{0};
};

}  // namespace fanfold::comm
