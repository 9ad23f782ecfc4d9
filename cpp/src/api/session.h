// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the AllToAlls of one workspace share: one of them, or several.

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "fanfold/error.h"

namespace fanfold::api {

/// The order of rounds of one workspace, and how it fails. Slots are counted over all its members:
/// round n of any of them uses slot n mod max_in_flight.
///
/// Threads: as AllToAll, except where a function says more.
class Session {
 public:
  using Member = std::shared_ptr<exchange::Exchange>;

  Session(std::uint64_t first_epoch, int max_in_flight)
      : first_epoch_(first_epoch),
        next_epoch_(first_epoch),
        slot_users_(static_cast<std::size_t>(max_in_flight)) {}

  /// A call on one of the members while it lives. Any thread.
  class Call {
   public:
    /// @throws InvalidState  another thread is inside one; `what` names the member.
    Call(Session& session, const std::string& what);
    ~Call() { session_.is_busy_.store(false, std::memory_order_release); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Session& session_;
  };

  /// Runs data movement of `member`; any error leaves the session failed.
  template <class Body>
  void run(exchange::Exchange& member, Body&& body) {
    try {
      body();
    } catch (const CapacityExceeded&) {
      throw;  // on every rank, and the round has begun on none
    } catch (const CudaFailure& error) {
      fail_alone(member, error);
      throw;
    } catch (const Error&) {
      fail(std::current_exception());
      throw;
    } catch (const std::exception& error) {
      fail_alone(member, error);
      throw;
    }
  }

  /// Runs what checks and prepares, after whose errors all goes on, but for those of the device.
  template <class Body>
  void prepare(exchange::Exchange& member, Body&& body) {
    try {
      body();
    } catch (const CudaFailure& error) {
      fail_alone(member, error);
      throw;
    }
  }

  std::int64_t next_round() const noexcept {
    return static_cast<std::int64_t>(next_epoch_ - first_epoch_);
  }
  std::uint64_t next_epoch() const noexcept { return next_epoch_; }
  std::uint64_t first_epoch() const noexcept { return first_epoch_; }
  /// The slot of `member` for the next round.
  /// @throws InvalidState  it holds an open round, of whichever member.
  exchange::Slot& next_slot(const Member& member) const;
  /// Waits for peers that still hold a round that was released in that slot.
  void settle_next_slot(base::Deadline deadline);
  /// The next round begins, as one of `member`.
  void use_next_slot(const Member& member) { slot_users_[next_index()] = member; }
  void count_round() noexcept { ++next_epoch_; }
  /// Forgets all rounds; the next one has `epoch`.
  void end_rounds() noexcept;
  void restart(std::uint64_t epoch) noexcept { next_epoch_ = epoch; }
  /// A slot with an open round, of any member.
  struct OpenRound {
    Member member;
    const exchange::Slot* slot = nullptr;  // null: none is open
  };
  OpenRound open_round() const noexcept;
  /// By slot: whose round is or was the last there; null: none.
  const std::vector<Member>& slot_users() const noexcept { return slot_users_; }

  /// The number of the next member, in order of creation.
  std::uint16_t num_made() const noexcept { return num_made_; }
  // Any thread, these:
  void add(const Member& member);
  /// Returns whether it was the last.
  bool remove(const Member& member) noexcept;
  std::vector<Member> members() const;
  void fail(std::exception_ptr failure) noexcept;
  void heal() noexcept { fail(nullptr); }
  bool has_failed() const noexcept { return has_failed_.load(std::memory_order_acquire); }
  std::exception_ptr failure() const noexcept;

 private:
  /// What peers do not know: they must not wait for this rank.
  void fail_alone(exchange::Exchange& member, const std::exception& error) noexcept {
    member.abort(error.what());
    fail(std::current_exception());
  }
  std::size_t next_index() const noexcept {
    return static_cast<std::size_t>(next_round()) % slot_users_.size();
  }

  std::atomic<bool> is_busy_{false};
  std::uint64_t first_epoch_;
  std::uint64_t next_epoch_;
  std::vector<Member> slot_users_;
  std::uint16_t num_made_ = 0;
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;  // guards members_ and failure_
  std::vector<Member> members_;
  std::exception_ptr failure_;
};

}  // namespace fanfold::api
