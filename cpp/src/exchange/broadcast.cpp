// SPDX-License-Identifier: Apache-2.0

// Strategy broadcast: every rank gets every token and keeps what concerns it; every rank shows its
// partial rows to everyone else and each adds its own tokens'. Simple, and what the others are
// compared with. With `deterministic = false` the sum is an all-reduce over all tokens.

#include <numeric>

#include "exchange/gathering.h"

namespace fanfold::exchange {
namespace {

class Broadcast final : public Gathering {
 public:
  using Gathering::Gathering;
  Capabilities capabilities() const override { return capabilities_of(Strategy::kBroadcast); }

 private:
  void send_partials(const Slot& slot, const CallHead& head, Take take,
                     base::Deadline deadline) override {
    sent_.assign(1, RowSpan::of(head));
    for (int source = 0; source < num_ranks(); ++source) {
      if (source != rank_) sent_.push_back(partials_of(slot, source));
    }
    const auto put = [&](const comm::Channel::Outgoing& out) {
      put_stream(sent_, out.data, out.begin, out.bytes, out.copy);
    };
    channel_->all_gather_stream("combine", stream_bytes(sent_), put, take, deadline);
  }

  std::int64_t rows_before_mine(const Slot& slot, int root) const override {
    std::int64_t rows = 0;
    for (int source = 0; source < rank_; ++source) {
      if (source != root) rows += rows_between(slot, source, root);
    }
    return rows;
  }

  const std::byte* reduce(const Slot& slot, std::byte* partials, comm::RowType row,
                          base::Deadline deadline) override {
    const comm::RowType all{row.dtype, slot.num_gathered * row.num_elements};
    channel_->all_reduce(partials, partials, all, deadline);
    const auto mine = slot.token_counts.begin() + rank_;
    return partials +
           std::accumulate(slot.token_counts.begin(), mine, std::int64_t{0}) * row.bytes();
  }
};

}  // namespace

std::shared_ptr<Exchange> make_broadcast(Setup setup, base::Deadline deadline) {
  return std::make_shared<Broadcast>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
