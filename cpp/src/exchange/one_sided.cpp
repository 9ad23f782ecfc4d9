// SPDX-License-Identifier: Apache-2.0

// Strategies one_sided and low_latency: every rank pushes rows into its peers' windows, the rows of
// source r from row r * m on, and nobody needs to know anybody's counts before.

#include <utility>

#include "exchange/window_exchange.h"

namespace fanfold::exchange {
namespace {

class OneSided final : public WindowExchange {
 public:
  OneSided(Setup setup, base::Deadline deadline) : WindowExchange(std::move(setup), deadline) {}

  void dispatch_send(Slot& slot, const DispatchCall& call) override { push(slot, call); }
  void dispatch_recv(Slot& slot, base::Deadline deadline) override {
    await_rows(slot, deadline);
    finish_dispatch(slot);
  }

 private:
  std::byte* base_of(const Slot& slot, int rank) const noexcept override {
    return window_of(rank) + workspace_.slot_offset + slot.index * workspace_.slot_stride;
  }
  std::int64_t first_row_on(const Slot& slot, int /*rank*/) const noexcept override {
    return rank_ * slot.round_max_tokens;
  }
};

}  // namespace

std::shared_ptr<Exchange> make_one_sided(Setup setup, base::Deadline deadline) {
  return std::make_shared<OneSided>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
