// SPDX-License-Identifier: Apache-2.0

// Strategy gather_scatter: every rank gets every token and keeps what concerns it, as in broadcast;
// partial rows go only to the rank of their token, by an all-to-all, and are added there. That
// takes the bytes of a reduce-scatter but keeps the stated order. With `deterministic = false` it
// is the channel's reduce-scatter over all tokens.

#include "exchange/gathering.h"

namespace fanfold::exchange {
namespace {

class GatherScatter final : public Gathering {
 public:
  using Gathering::Gathering;
  Capabilities capabilities() const override { return capabilities_of(Strategy::kGatherScatter); }

 private:
  void send_partials(const Slot& slot, const CallHead& head, Take take,
                     base::Deadline deadline) override {
    lengths_.assign(static_cast<std::size_t>(num_ranks()), 0);
    for (int to = 0; to < num_ranks(); ++to) {
      if (to == rank_) continue;
      lengths_[static_cast<std::size_t>(to)] =
          std::int64_t{sizeof head} + partials_of(slot, to).bytes();
    }
    sent_.assign(2, RowSpan::of(head));
    const auto put = [&](int to, const comm::Channel::Outgoing& out) {
      sent_[1] = partials_of(slot, to);
      put_stream(sent_, out.data, out.begin, out.bytes, out.copy);
    };
    channel_->all_to_all_stream("combine", lengths_, put, take, deadline);
  }

  std::int64_t rows_before_mine(const Slot&, int) const override { return 0; }

  const std::byte* reduce(const Slot& slot, std::byte* partials, comm::RowType row,
                          base::Deadline deadline) override {
    lengths_.assign(slot.token_counts.begin(), slot.token_counts.end());
    channel_->reduce_scatter_v(partials, mine(), row, lengths_, deadline);
    return mine();
  }

  comm::Channel::Counts lengths_;  // scratch [R]
};

}  // namespace

std::shared_ptr<Exchange> make_gather_scatter(Setup setup, base::Deadline deadline) {
  return std::make_shared<GatherScatter>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
