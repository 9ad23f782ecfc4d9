// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the strategies share whose ranks push rows into their peers' memory and pull results from
// it.
//
// One flag exchange per phase and no other barrier (F = max_in_flight):
//   a dispatch flag of round n + F from p proves that p has pulled my partials of round n;
//   a combine flag of round n from p proves that p has left the rows that I pushed in round n.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/shared_window.h"

namespace fanfold::exchange {

/// A window with a control area and flags. Where the rows lie is up to the strategy.
class WindowExchange : public Exchange {
 public:
  Capabilities capabilities() const override { return capabilities_of(config().strategy); }
  std::uint32_t generation() const noexcept override { return control().generation(); }
  void settle(Slot& slot, base::Deadline deadline) override;
  void combine_send(Slot& slot, const CombineCall& call) override;
  void combine_recv(Slot& slot, const CombineCall& call) override;
  void release(Slot& slot) override;
  void set_active(const std::vector<bool>& active) override;
  void abort(const std::string& reason) noexcept override { control().abort(reason); }
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override {
    return control().reset(max_epoch, deadline) + 1;
  }
  void check() const override;
  void leave() noexcept override { window_->leave(); }
  void close(base::Deadline deadline) override;
  void detach() noexcept override;
  bool is_forked_child() const noexcept override;
  void use_name() override { control().set_what(what()); }
  std::byte* slot_base(const Slot& slot) const noexcept override { return base_of(slot, rank_); }
  bool owns(const void* data) const noexcept override;
  std::shared_ptr<const void> memory() const override { return kept_; }

 protected:
  WindowExchange(Setup setup, base::Deadline deadline);

  /// The slot in `rank`'s memory, as mapped here.
  virtual std::byte* base_of(const Slot& slot, int rank) const noexcept = 0;
  /// The row of `rank`'s store at which this rank's rows begin.
  virtual std::int64_t first_row_on(const Slot& slot, int rank) const noexcept = 0;
  /// Where payload rows go, if each has a place of its own for every expert; else null.
  virtual const plan::PairPlan* pairs_of(const Slot&) const { return nullptr; }
  /// Rows of each source that the store holds, [R].
  virtual const std::int32_t* stored_counts(const Slot& slot) { return counts(slot); }

  /// Of the rows that go home one per received row, from the slot base.
  std::int64_t partials_offset(const Slot& slot) const noexcept {
    return stores_by_expert() ? slot.store.partial_offset : slot.store.combine_offset;
  }
  comm::Control& control() const noexcept { return window_->control(); }
  std::byte* window_of(int rank) const noexcept {
    return window_->bases()[static_cast<std::size_t>(rank)];
  }
  /// The line of `source` for phase `offset` of `slot` in `window`'s window.
  exec::FlagLine* line(const Slot& slot, std::int64_t offset, int window,
                       int source) const noexcept {
    return reinterpret_cast<exec::FlagLine*>(window_of(window) + workspace_.flags_offset +
                                             slot.index * workspace_.flags_stride + offset) +
           source;
  }
  /// Publishes `fields` in every active peer's window.
  void announce(const Slot& slot, std::int64_t offset, const exec::FlagFields& fields);
  /// How the results of this rank go home; `params` are as for a layout that is folded.
  virtual void choose_way_home(const Slot&, exec::CombineSendParams&) {}
  /// How the results of each rank came home, after their flags.
  virtual void find_results(const Slot&, exec::SumRowsParams&) {}
  void wait_for(const Slot& slot, std::int64_t offset, const exec::FlagFields& fields,
                const char* phase, base::Deadline deadline);
  /// Pushes this rank's rows, whose payload regions have their places, and raises the dispatch
  /// flags.
  void push(Slot& slot, const DispatchCall& call);
  /// Waits for the dispatch flags, which say how many rows came.
  void await_rows(Slot& slot, base::Deadline deadline);
  /// Gives the rows that came their layout.
  void finish_dispatch(Slot& slot);
  /// Views keep `memory` mapped, too.
  void keep(std::shared_ptr<const void> memory);

 private:
  struct Kept {  // what views need
    SymmetricMemory window;
    std::shared_ptr<std::byte> local;
    std::shared_ptr<const void> more;
  };
  void collect_lines(const Slot& slot, std::int64_t offset, bool mine);

  std::shared_ptr<SharedWindow> window_;
  std::shared_ptr<const Kept> kept_;
  std::vector<exec::FlagLine*> lines_;         // scratch [R]
  std::vector<std::byte*> bases_;              // scratch [R]
  std::vector<std::int64_t> first_rows_;       // scratch [R]
  std::vector<const std::byte*> sources_;      // scratch [R]
  std::vector<bool> both_;                     // scratch [R]
  std::vector<exec::PeerDistance> distances_;  // [R]
};

}  // namespace fanfold::exchange
