// SPDX-License-Identifier: Apache-2.0

// Strategy two_sided: every rank writes a stream of bytes to each peer, through a bounded ring, and
// reads theirs. Received rows lie in private memory, so the symmetric memory depends on the number
// of ranks and the size of the rings only.
//
// A stream holds the records of all calls, see rank_streams.h. Behind that of a dispatch come the
// indices, unless routing is re-used, then the payloads one after the other; behind that of a
// combine the rows that go home.

#include <algorithm>

#include "comm/communicator_impl.h"
#include "comm/control.h"
#include "exchange/exchange.h"
#include "exchange/rank_streams.h"

namespace fanfold::exchange {
namespace {

using Peer = RankStreams::Peer;
using Record = RankStreams::Record;

class TwoSided final : public Exchange {
 public:
  TwoSided(Setup setup, base::Deadline deadline);

  Capabilities capabilities() const override { return capabilities_of(Strategy::kTwoSided); }
  std::uint32_t generation() const noexcept override { return control().generation(); }
  void settle(Slot&, base::Deadline) override {}  // peers never touch this rank's rows
  void dispatch_send(Slot& slot, const DispatchCall& call) override;
  void dispatch_recv(Slot& slot, base::Deadline deadline) override;
  void combine_send(Slot& slot, const CombineCall& call) override;
  void combine_recv(Slot& slot, const CombineCall& call) override;
  void release(Slot& slot) override;
  void set_active(const std::vector<bool>& active) override {
    Exchange::set_active(active);
    control().set_active(active);
  }
  void abort(const std::string& reason) noexcept override { control().abort(reason); }
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override;
  void check() const override;
  void leave() noexcept override { streams_->window().leave(); }
  void close(base::Deadline deadline) override {
    streams_->window().close(deadline);
    local_.reset();
  }
  bool is_forked_child() const noexcept override {
    return setup_.communicator->group().is_forked_child();
  }
  void use_name() override { control().set_what(what()); }
  std::byte* slot_base(const Slot& slot) const noexcept override {
    return local_.get() + workspace_.slot_offset + slot.index * workspace_.slot_stride;
  }
  std::shared_ptr<const void> memory() const override { return local_; }

 private:
  comm::Control& control() const noexcept { return streams_->window().control(); }
  RankStreams::Call call_of(const char* phase, const Slot& slot, base::Deadline deadline) noexcept {
    return {&what(), phase, slot.round, deadline, &hook_};
  }
  void list_rows_to_send(const Slot& slot, const DispatchInputs& in);
  void list_rows_to_receive(const Slot& slot);
  void pad_ids(const Slot& slot);
  Record combine_record(const Slot& slot, const CombineInputs& in, std::int64_t hidden) const {
    return combine_fields(
        slot, in.release ? exec::CallKind::kCombine : exec::CallKind::kCombineKeep, hidden);
  }

  std::shared_ptr<RankStreams> streams_;
  std::vector<const std::byte*> sources_;  // scratch [R]
};

TwoSided::TwoSided(Setup setup, base::Deadline deadline)
    : Exchange(std::move(setup)),
      streams_(setup_.workspace_of != nullptr
                   ? static_cast<const TwoSided&>(*setup_.workspace_of).streams_
                   : std::make_shared<RankStreams>(setup_, deadline)),
      sources_(static_cast<std::size_t>(num_ranks())) {
  exec::Context context{};
  context.kernels = &base::kernels(base::isa_from_name(setup_.config.test_knobs.isa.c_str()));
  context.hook = &hook_;
  context.rank = rank_;
  context.num_ranks = num_ranks();
  context.streaming = setup_.config.test_knobs.streaming_stores;
  backend_ = setup_.backend(context);
}

// --- Dispatch -----------------------------------------------------------------------------------

void TwoSided::list_rows_to_send(const Slot& slot, const DispatchInputs& in) {
  const plan::SendPlan& plan = slot.plan();
  const std::int64_t entry_bytes = std::int64_t{workspace_.top_k} * 4;
  for (Peer& peer : streams_->peers()) {
    const std::int32_t* tokens = plan.tokens_for(peer.rank);
    const std::int64_t rows = plan.rows_per_rank[static_cast<std::size_t>(peer.rank)];
    peer.sending.clear();
    if (!slot.routing) {
      peer.sending.add({reinterpret_cast<const std::byte*>(tokens), 4, 4, rows, nullptr});
      peer.sending.add({reinterpret_cast<const std::byte*>(plan.ids.data()), entry_bytes,
                        entry_bytes, rows, tokens});
      if (slot.has_weights) {
        peer.sending.add({static_cast<const std::byte*>(in.topk_weights.data),
                          in.topk_weights.strides[0] * 4, entry_bytes, rows, tokens});
      }
    }
    for (const exec::PayloadRows& payload : slot.payload_rows) {
      peer.sending.add({payload.rows, payload.row_stride_bytes, payload.row_bytes, rows, tokens});
    }
  }
}

void TwoSided::list_rows_to_receive(const Slot& slot) {
  std::byte* base = slot_base(slot);
  const std::int64_t entry_bytes = std::int64_t{workspace_.top_k} * 4;
  for (Peer& peer : streams_->peers()) {
    const std::int64_t first = slot.row_begin[static_cast<std::size_t>(peer.rank)];
    const std::int64_t rows = counts(slot)[peer.rank];
    const auto add = [&](std::int64_t offset, std::int64_t stride_bytes, std::int64_t row_bytes) {
      peer.receiving.add(
          {base + offset + first * stride_bytes, stride_bytes, row_bytes, rows, nullptr});
    };
    peer.receiving.clear();
    if (!slot.routing) {
      add(slot.store.source_token_offset, 4, 4);
      add(slot.store.topk_ids_offset, entry_bytes, entry_bytes);
      if (slot.has_weights) add(slot.store.topk_weights_offset, entry_bytes, entry_bytes);
    }
    for (const PayloadSpec& spec : slot.payloads) {
      add(spec.region_offset, spec.stride_bytes, spec.row_bytes);
    }
  }
}

/// rank_major: the caller sees the ids of rows that carry no token.
void TwoSided::pad_ids(const Slot& slot) {
  if (setup_.config.layout != Layout::kRankMajor) return;
  auto* ids = reinterpret_cast<std::int32_t*>(slot_base(slot) + slot.store.topk_ids_offset);
  for (std::int64_t source = 0; source < num_ranks(); ++source) {
    const std::int64_t first = source * slot.round_max_tokens;
    std::fill(ids + (first + counts(slot)[source]) * workspace_.top_k,
              ids + (first + slot.round_max_tokens) * workspace_.top_k, slot.invalid_expert_id);
  }
}

void TwoSided::dispatch_send(Slot& slot, const DispatchCall& call) {
  const RankStreams::Call where = call_of("dispatch", slot, call.deadline);
  slot.sent = dispatch_fields(slot);
  list_rows_to_send(slot, *call.inputs);
  streams_->announce(slot.sent, &slot.plan(), hook_);
  Record& own = streams_->peers()[static_cast<std::size_t>(rank_)].record;
  own = slot.sent;
  own.num_rows =
      static_cast<std::uint32_t>(slot.plan().rows_per_rank[static_cast<std::size_t>(rank_)]);
  streams_->expect(slot.sent, where);
  for (const Peer& peer : streams_->peers()) {
    counts(slot)[peer.rank] = static_cast<std::int32_t>(peer.record.num_rows);
    slot.token_counts[static_cast<std::size_t>(peer.rank)] =
        static_cast<std::int32_t>(peer.record.num_tokens);
  }
  // Where a source's rows lie may depend on the counts of all sources.
  place_rows(slot);
  list_rows_to_receive(slot);
  streams_->move(where);
}

void TwoSided::dispatch_recv(Slot& slot, base::Deadline) {
  if (slot.routing) {
    restore_indices(slot);
  } else {
    pad_ids(slot);
  }
  poison_results(slot);
  arrange(slot);
}

// --- Combine ------------------------------------------------------------------------------------

void TwoSided::combine_send(Slot& slot, const CombineCall& call) {
  const exec::CombineSendParams params = combine_params(slot, *call.inputs);
  backend_->combine_send(params);
  if (call.inputs->release) poison_received(slot);
  const std::int64_t step_bytes = params.row_bytes * workspace_.rows_per_token;
  for (Peer& peer : streams_->peers()) {
    peer.sending.clear();
    if (peer.rank == rank_) continue;
    peer.sending.add(
        {params.rows + slot.row_begin[static_cast<std::size_t>(peer.rank)] * step_bytes, step_bytes,
         step_bytes, counts(slot)[peer.rank], nullptr});
  }
  streams_->announce(combine_record(slot, *call.inputs, params.hidden), nullptr, hook_);
}

void TwoSided::combine_recv(Slot& slot, const CombineCall& call) {
  const RankStreams::Call where = call_of("combine", slot, call.deadline);
  const CombineInputs& in = *call.inputs;
  streams_->expect(combine_record(slot, in, in.out.shape[1]), where);
  exec::SumRowsParams params = sum_params(slot, in);
  const std::int64_t step_bytes = params.row_bytes * workspace_.rows_per_token;
  std::byte* home = local_.get() + workspace_.local_mine_offset;
  for (Peer& peer : streams_->peers()) {
    const auto index = static_cast<std::size_t>(peer.rank);
    peer.receiving.clear();
    if (peer.rank == rank_) {
      sources_[index] =
          slot_base(slot) + slot.store.combine_offset + slot.row_begin[index] * step_bytes;
      continue;
    }
    const std::int64_t rows = slot.plan().rows_per_rank[index];
    peer.receiving.add({home, step_bytes, step_bytes, rows, nullptr});
    sources_[index] = home;
    home += rows * step_bytes;
  }
  streams_->move(where);
  params.sources = sources_.data();
  backend_->sum_rows(params);
}

void TwoSided::release(Slot& slot) {
  poison_received(slot);
  streams_->announce_release(combine_fields(slot, exec::CallKind::kRelease, 0), hook_);
}

// --- State --------------------------------------------------------------------------------------

// This rank writes to no stream while it is in here, and to none of the last generation afterwards.
std::uint64_t TwoSided::reset(std::uint64_t max_epoch, base::Deadline deadline) {
  const std::uint64_t highest = control().reset(max_epoch, deadline);
  streams_->restart();
  return highest + 1;
}

void TwoSided::check() const {
  const comm::WaitFor nobody{rank_, "check", -1};
  control().throw_if_aborted(nobody);
  control().throw_if_lost(nobody);
}

}  // namespace

std::int64_t two_sided_window_bytes(const AllToAllConfig& config, int num_ranks) {
  return StreamWindow(config, num_ranks).bytes;
}

std::shared_ptr<Exchange> make_two_sided(Setup setup, base::Deadline deadline) {
  return std::make_shared<TwoSided>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
