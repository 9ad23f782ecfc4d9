// SPDX-License-Identifier: Apache-2.0
#pragma once

// Strategies broadcast, gather_scatter and batched where rows lie on GPUs: the kernels of
// DeviceExchange write to a staging window of this rank instead of the peers' windows, and
// collectives on the caller's stream carry it.
//
//   batched         rows for rank r are packed into block r; all blocks change places
//   gather_scatter  every rank gets all tokens and keeps what concerns it; results change places
//                   as blocks
//   broadcast       likewise, one rank after the other; results are shown to everyone
//
// Flag lines travel ahead of the rows, in a collective of their own whose size does not depend on
// the call: so calls that differ are told in words even where their rows would not fit.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/device_collectives.h"
#include "exchange/device_exchange.h"

namespace fanfold::exchange {

/// A collective whose peers do not come waits in the stream, where no kernel looks at the clock.
/// The host does, in every call of this object: a collective of a round that has not ended when the
/// round's time is over, or when a rank has aborted or is gone, is aborted, and with it all
/// collectives of the communicator. `reset` then makes these anew, which loses what other AllToAlls
/// of the communicator have under way, and graphs that captured them. Rounds of graphs are looked
/// at by calls that wait only.
class DeviceCollective final : public DeviceExchange {
 public:
  DeviceCollective(Setup setup, base::Deadline deadline);
  ~DeviceCollective() override;

  bool kernels_have_failed() const noexcept override;
  void throw_if_kernels_failed() override;
  // Streams are refused here, where that leaves the round as it was.
  void use_stream(Slot& slot, const std::optional<void*>& stream, const char* call) override;
  void dispatch_send(Slot& slot, const DispatchCall& call) override;
  void dispatch_recv(Slot& slot, base::Deadline deadline) override;
  void combine_send(Slot& slot, const CombineCall& call) override;
  /// Peers reach no memory of this rank: nobody needs to know.
  void release(Slot& slot) override { poison_received(slot); }
  void abort(const std::string& reason) noexcept override;
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override;
  void check() const override;
  void close(base::Deadline deadline) override;
  std::function<void()> loss_watch() const override;
  void await_carried() const override;

 private:
  /// A region of every block of a store, from the store's base.
  struct Region {
    std::int64_t offset;
    std::int64_t block_bytes;
  };
  /// Collectives of a phase that may be under way.
  struct Pending {
    std::shared_ptr<void> event;  // behind them in their stream
    bool is_set = false;
    const char* phase = "";
    std::int64_t round = 0;
    std::int64_t end_ns = 0;  // when its time is over
    std::int64_t timeout_ns = 0;
  };
  static constexpr std::size_t kNumPending = 2;  // of a slot: dispatch and combine

  std::byte* staged(const std::byte* home) const noexcept {
    return local_.get() + (home - local_.get()) + workspace_.device.staging_offset;
  }
  bool is_broadcast() const noexcept { return config().strategy == Strategy::kBroadcast; }
  bool gathers() const noexcept { return plan::gathers(config().strategy); }
  std::vector<Region> dispatch_regions(const Slot& slot) const;
  std::int64_t result_block_bytes(const Slot& slot) const noexcept;

  void plan_tokens(Slot& slot, const DispatchCall& call) override;

  // Each enqueues one group of collectives.
  void carry_flags(const Slot& slot, const exec::DeviceFlags& flags);
  void carry_rows(const Slot& slot);
  void carry_results(const Slot& slot);
  /// Block r of `from` goes to rank r, whose block comes to block r of `to`; the own one stays.
  void swap_blocks(const std::byte* from, std::byte* to, std::int64_t block_bytes, void* stream);
  /// Every rank gets each rank's block of `blocks`.
  void gather_blocks(std::byte* blocks, std::int64_t block_bytes, void* stream);
  void compact_rows(Slot& slot);

  // The host's look at what is under way.
  void expect_end(const Slot& slot, bool is_dispatch, base::Deadline deadline);
  void look() const noexcept;
  /// What that found.
  void rethrow_failure() const;
  /// Waits for all work, at most until `deadline`: then the collectives are aborted.
  /// @throws  they cannot be: they are the caller's.
  void drain(base::Deadline deadline) const;
  void await_carried_until(base::Deadline deadline) const;
  void give_up_at(base::Deadline deadline) const noexcept;

  // Under the lock.
  void throw_if_stuck() const;
  const Pending* oldest_pending() const;
  [[noreturn]] void throw_late(const Pending& pending) const;
  void give_up(std::exception_ptr failure) const noexcept;

  comm::DeviceCollectives* collectives_;  // the communicator's
  mutable std::mutex mutex_;              // guards all below
  mutable std::vector<Pending> pending_;  // [F * kNumPending]
  mutable std::int64_t lost_since_ = 0;
  mutable std::exception_ptr failure_;       // why the collectives were aborted
  mutable bool is_told_by_kernels_ = false;  // kernels had reported before: that is why
  bool has_graphs_ = false;                  // whose collectives no event tells of
};

}  // namespace fanfold::exchange
