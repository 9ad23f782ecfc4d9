// SPDX-License-Identifier: Apache-2.0
#pragma once

// What broadcast and gather_scatter share: a dispatch that brings every token's row to every rank,
// each of which keeps what concerns it, and the sum of the rows that come home.
//
// A dispatch is one stream per rank: head, ids, weights, payload rows. Where a row goes depends on
// the ids of all ranks, so the rows follow in a second collective, unless all fits in one step of
// the channel: then the rows are placed straight from the step that brought the ids.
//
// Layout gathered does without most of these copies. Every token's rows, and the results, lie in
// blocks: memory behind the channel in each rank's window, one block per slot. Once the heads have
// told every rank how many tokens each has, a rank writes its rows to their places in all blocks; a
// step of the channel says that they are there. At combine a step says that the results are there,
// and each rank adds those of its tokens where they lie.
//
// Where the ranks share no memory (`has_shared_blocks`), each has only its own block: the rows go
// through the channel as in the other layouts, and at combine a rank sends each other the results
// of that one's tokens, all of them, by token.
//
// Why no block is overwritten while somebody needs it. A rank writes rows into the blocks of a
// slot, or results into its own, once it has the heads of all ranks for this round. A rank that has
// sent that head has left the slot's earlier round, however it ended there: by a combine, after
// which it has pulled all it needs; by release; by reset, which all ranks have come to, each after
// its last write. That holds for whichever member of a workspace had the earlier round. Within a
// round results are written anew only after combine(release=False), which therefore ends with one
// more step.

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
  Gathering(Setup setup, base::Deadline deadline);
  void dispatch_send(Slot& slot, const DispatchCall& call) final;
  void dispatch_recv(Slot& slot, base::Deadline deadline) final;
  void combine_send(Slot& slot, const CombineCall& call) final;
  void combine_recv(Slot& slot, const CombineCall& call) final;
  void release(Slot& slot) final;
  void close(base::Deadline deadline) final;
  void detach() noexcept final;
  bool owns(const void* data) const noexcept final;
  std::byte* block_base(const Slot& slot) const noexcept final { return block_of(slot, rank_); }
  std::shared_ptr<const void> memory() const final { return kept_; }

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
    if (is_gathered()) return slot.token_counts[static_cast<std::size_t>(source)];
    const auto& matrix = slot.routing ? slot.routing->rows_matrix : slot.rows_matrix;
    return matrix[static_cast<std::size_t>(std::int64_t{source} * num_ranks() + destination)];
  }
  /// The combine under way: rows of `source`'s tokens that go home.
  RowSpan partials_of(const Slot& slot, int source) const noexcept;

  std::vector<RowSpan> sent_;  // scratch: the stream of one collective

 private:
  using Incoming = comm::Channel::Incoming;
  struct Kept {  // what views need
    comm::Windows windows;
    SymmetricMemory memory;
    std::shared_ptr<std::byte> local;
    std::shared_ptr<std::byte> own_blocks;
  };

  // Blocks (gathering_blocks.cpp).
  /// Whether rows and results lie in blocks that all ranks reach, rather than going through the
  /// channel.
  bool has_shared_blocks() const noexcept { return is_gathered() && shares_memory_; }
  std::byte* block_of(const Slot& slot, int rank) const noexcept {
    return blocks_[static_cast<std::size_t>(rank)] + slot.index * workspace_.block_stride;
  }
  std::byte* results_of(const Slot& slot, int rank) const noexcept {
    return block_of(slot, rank) + workspace_.block_combine_offset;
  }
  void name_rows_by_token(plan::SendPlan& plan) const;
  void push_payloads(const Slot& slot);
  void push_rows(const RowSpan& rows, std::int64_t stride_bytes, comm::Channel::Copy copy);
  void put_results(const Slot& slot, const exec::CombineSendParams& params);
  void pull_results(const Slot& slot, const CombineCall& call, const CallHead& head,
                    exec::SumRowsParams& params);
  void poison_block(const Slot& slot, std::int64_t begin, std::int64_t end, int value) const;

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
  void exchange_heads(const Slot& slot, const CallHead& head, base::Deadline deadline);
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

  /// Where results that came home through the channel lie.
  std::byte* home() const noexcept { return home_ != nullptr ? home_.get() : mine(); }

  const base::Kernels& kernels_;
  const bool shares_memory_;
  std::shared_ptr<std::byte> home_;  // null: `mine()` has room
  std::vector<std::byte*>
      blocks_;  // of slot 0, by rank, or all this rank's; only in layout gathered
  std::shared_ptr<const Kept> kept_;
  std::vector<std::byte*> push_targets_;  // scratch [R]
};

}  // namespace fanfold::exchange
