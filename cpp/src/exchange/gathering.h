// SPDX-License-Identifier: Apache-2.0
#pragma once

// What broadcast and gather_scatter share: a dispatch that brings every token's row to every rank,
// each of which keeps what concerns it, and the sum of the rows that come home.
//
// A dispatch is one stream per rank: head, ids, weights, payload rows. Where a row goes depends on
// the ids of all ranks, so the rows follow in a second collective, unless all fits in one step of
// the channel: then the rows are placed straight from the step that brought the ids.

#include <cstdint>
#include <vector>

#include "base/function_ref.h"
#include "exchange/collective.h"
#include "exchange/row_stream.h"

namespace fanfold::exchange {

/// [n+1] places of consecutive groups from their sizes.
template <class SizeOf>
void begin_groups(std::vector<std::int64_t>& begin, int num_groups, SizeOf&& size_of) {
  begin.assign(1, 0);
  for (int group = 0; group < num_groups; ++group) {
    begin.push_back(begin.back() + static_cast<std::int64_t>(size_of(group)));
  }
}

class Gathering : public Collective {
 public:
  using Collective::Collective;
  void dispatch_send(Slot& slot, const DispatchCall& call) final;
  void dispatch_recv(Slot& slot, base::Deadline deadline) final;
  void combine_send(Slot& slot, const CombineCall& call) final;
  void combine_recv(Slot& slot, const CombineCall& call) final;

 protected:
  using Parts = std::vector<comm::Channel::Incoming>;
  using Take = base::FunctionRef<void(const Parts& parts)>;

  /// Sends `head` and the partial rows that `partials_of` names; `take` gets every rank's stream.
  virtual void send_partials(const Slot& slot, const CallHead& head, Take take,
                             base::Deadline deadline) = 0;
  /// Rows of other sources' tokens between the head and those of this rank's in the stream of
  /// `root`.
  virtual std::int64_t rows_before_mine(const Slot& slot, int root) const = 0;
  /// Sums `partials`, [sum of T] rows of every rank, over the ranks; returns those of this rank's
  /// tokens.
  virtual const std::byte* reduce(const Slot& slot, std::byte* partials, comm::RowType row,
                                  base::Deadline deadline) = 0;

  /// How many rows of `source`'s tokens `destination` has.
  std::int64_t rows_between(const Slot& slot, int source, int destination) const noexcept {
    const auto& matrix = slot.routing ? slot.routing->rows_matrix : slot.rows_matrix;
    return matrix[static_cast<std::size_t>(std::int64_t{source} * num_ranks() + destination)];
  }
  /// The combine under way: rows of `source`'s tokens that go home.
  RowSpan partials_of(const Slot& slot, int source) const noexcept;

  std::vector<RowSpan> sent_;  // scratch: the stream of one collective

 private:
  using Incoming = comm::Channel::Incoming;

  // Dispatch.
  void list_spans(const Slot& slot, const DispatchCall& call, const CallHead& head);
  std::int64_t bytes_of(std::size_t span, int source) const noexcept;
  void gather(const Slot& slot, std::size_t first, std::size_t last, Take take,
              base::Deadline deadline);
  void find_tokens(Slot& slot);
  void take_indices(const Parts& parts, std::size_t last);
  void place(Slot& slot);
  void count_rows(Slot& slot);
  void keep_routed_rows(Slot& slot);
  void take_payloads(const Slot& slot, const Parts& parts, std::size_t first);
  void copy_payload(const Slot& slot, const PayloadSpec& spec, int source, const RowSpan& from,
                    std::int64_t begin, std::int64_t end) const;
  const std::vector<std::int32_t>& picked(const Slot& slot) const noexcept {
    return slot.routing ? slot.routing->gathered_rows : slot.gathered_rows;
  }

  // Combine.
  void find_partials(const Slot& slot);
  void take_partials(const Slot& slot, const Parts& parts);
  void sum_by_transport(const Slot& slot, const CombineCall& call, const CallHead& head,
                        const exec::SumRowsParams& params);
  std::byte* spread_partials(const Slot& slot);

  // The call under way.
  std::vector<RowSpan> spans_;               // this rank's head, ids, weights, payloads
  std::vector<std::byte*> index_targets_;    // of the spans before the payloads; the head has none
  std::vector<std::int64_t> token_begin_;    // [R+1] of each source's tokens among all
  std::vector<std::int64_t> picked_begin_;   // [R+1] of each source's rows among those kept
  std::vector<std::int64_t> last_token_;     // scratch [R]
  std::int64_t step_bytes_ = 0;              // of the partial rows of one received row
  std::vector<std::int64_t> partial_begin_;  // [R+1] of each source's rows among the partials
  std::vector<std::int64_t> mine_begin_;     // [R+1] of each rank's rows among those that came home
  std::vector<std::int32_t> order_;          // 0, 1, 2, …
};

}  // namespace fanfold::exchange
