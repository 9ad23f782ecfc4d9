// SPDX-License-Identifier: Apache-2.0

// Strategy one_sided: every rank pushes rows into its peers' windows and pulls results from them.
//
// One flag exchange per phase and no other barrier (F = max_in_flight):
//   a dispatch flag of round n + F from p proves that p has pulled my partials of round n;
//   a combine flag of round n from p proves that p has left the rows that I pushed in round n.

#include <algorithm>

#include "base/format.h"
#include "comm/communicator_impl.h"
#include "comm/control.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"
#include "memory/symmetric_block.h"

namespace fanfold::exchange {
namespace {

class OneSided final : public Exchange {
 public:
  OneSided(Setup setup, base::Deadline deadline);
  ~OneSided() override { leave(); }

  Capabilities capabilities() const override { return one_sided_capabilities(); }
  std::uint32_t generation() const noexcept override { return control_->generation(); }
  void settle(Slot& slot, base::Deadline deadline) override;
  void dispatch_send(Slot& slot, const DispatchCall& call) override;
  void dispatch_recv(Slot& slot, base::Deadline deadline) override;
  void combine_send(Slot& slot, const CombineCall& call) override;
  void combine_recv(Slot& slot, const CombineCall& call) override;
  void release(Slot& slot) override;
  void set_active(const std::vector<bool>& active) override {
    Exchange::set_active(active);
    control_->set_active(active);
  }
  void abort(const std::string& reason) noexcept override { control_->abort(reason); }
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override {
    return control_->reset(max_epoch, deadline) + 1;
  }
  void check() const override;
  void leave() noexcept override;
  void close(base::Deadline deadline) override;
  bool is_forked_child() const noexcept override {
    return setup_.communicator->group().is_forked_child();
  }
  std::byte* slot_base(const Slot& slot) const noexcept override { return base_of(slot, rank_); }
  bool owns(const void* data) const noexcept override;
  std::shared_ptr<const void> memory() const override;

 private:
  struct Kept {  // what views need
    SymmetricMemory window;
    std::shared_ptr<std::byte> local;
  };
  std::byte* base_of(const Slot& slot, int rank) const noexcept {
    return windows_[static_cast<std::size_t>(rank)] + workspace_.slot_offset +
           slot.index * workspace_.slot_stride;
  }
  /// The line of `source` for phase `offset` of `slot` in `window`'s window.
  exec::FlagLine* line(const Slot& slot, std::int64_t offset, int window,
                       int source) const noexcept {
    return reinterpret_cast<exec::FlagLine*>(windows_[static_cast<std::size_t>(window)] +
                                             workspace_.flags_offset +
                                             slot.index * workspace_.flags_stride + offset) +
           source;
  }
  void collect_lines(const Slot& slot, std::int64_t offset, bool mine);
  void announce(const Slot& slot, std::int64_t offset, const exec::FlagFields& fields);
  void wait_for(const Slot& slot, std::int64_t offset, const exec::FlagFields& fields,
                const char* phase, base::Deadline deadline);

  Allocator allocator_;
  SymmetricMemory memory_;
  std::vector<std::byte*> windows_;
  std::unique_ptr<comm::Control> control_;
  std::vector<exec::FlagLine*> lines_;         // scratch [R]
  std::vector<std::byte*> bases_;              // scratch [R]
  std::vector<const std::byte*> sources_;      // scratch [R]
  std::vector<exec::PeerDistance> distances_;  // [R]
  bool left_ = false;
};

OneSided::OneSided(Setup setup, base::Deadline deadline)
    : Exchange(std::move(setup)),
      allocator_(setup_.allocator != nullptr ? *setup_.allocator : Allocator(*setup_.handle)) {
  // Control words and flags must start as zeros; rows need not.
  memory_ = allocator_.allocate(workspace_.symmetric_bytes, workspace_.slot_offset,
                                std::chrono::nanoseconds(deadline.remaining_ns()));
  for (int rank = 0; rank < num_ranks(); ++rank) windows_.push_back(memory_.data(rank));
  const auto ranks = static_cast<std::size_t>(num_ranks());
  lines_.resize(ranks);
  bases_.resize(ranks);
  sources_.resize(ranks);
  distances_.resize(ranks);
  control_ = std::make_unique<comm::Control>(setup_.communicator->group(), memory_.block()->windows,
                                             setup_.what);
  exec::Context context{};
  context.kernels = &base::kernels(base::isa_from_name(setup_.config.test_knobs.isa.c_str()));
  context.hook = &hook_;
  context.control = control_.get();
  context.rank = rank_;
  context.num_ranks = num_ranks();
  context.streaming = setup_.config.test_knobs.streaming_stores;
  context.distances = distances_.data();
  backend_ = setup_.backend(context);
}

void OneSided::collect_lines(const Slot& slot, std::int64_t offset, bool mine) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    lines_[static_cast<std::size_t>(rank)] =
        mine ? line(slot, offset, rank_, rank) : line(slot, offset, rank, rank_);
  }
}

void OneSided::announce(const Slot& slot, std::int64_t offset, const exec::FlagFields& fields) {
  for (int i = 1; i < num_ranks(); ++i) {
    const int peer = (rank_ + i) % num_ranks();
    if (!active_[static_cast<std::size_t>(peer)]) continue;
    exec::publish(*line(slot, offset, peer, rank_), fields);
    control_->ring(peer);
    hook_.step();
  }
}

void OneSided::wait_for(const Slot& slot, std::int64_t offset, const exec::FlagFields& fields,
                        const char* phase, base::Deadline deadline) {
  collect_lines(slot, offset, /*mine=*/true);
  backend_->wait_flags({lines_.data(), fields, &active_, phase, slot.round, deadline});
}

void OneSided::settle(Slot& slot, base::Deadline deadline) {
  // The mask may have changed since: who was left out then has no flag, who is left out now is
  // gone.
  std::vector<bool> both = active_;
  for (std::size_t rank = 0; rank < both.size(); ++rank) {
    both[rank] = both[rank] && slot.released_to[rank];
  }
  collect_lines(slot, workspace_.combine_flags_offset, /*mine=*/true);
  backend_->wait_flags({lines_.data(), slot.released, &both, "release", slot.round, deadline});
}

void OneSided::dispatch_send(Slot& slot, const DispatchCall& call) {
  for (exec::PeerDistance& distance : distances_) distance.next_round();
  collect_lines(slot, workspace_.dispatch_flags_offset, /*mine=*/false);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    bases_[static_cast<std::size_t>(rank)] = base_of(slot, rank);
  }
  const DispatchInputs& in = *call.inputs;
  slot.sent = dispatch_fields(slot);
  exec::DispatchSendParams params{};
  params.plan = &slot.plan();
  params.payloads = &slot.payload_rows;
  if (!slot.routing && in.topk_weights.has_value()) {
    params.topk_weights = static_cast<const float*>(in.topk_weights.data);
    params.weights_stride = in.topk_weights.strides[0];
  }
  params.with_indices = !slot.routing;
  params.arrays = row_arrays(slot);
  params.slot_bases = bases_.data();
  params.flags = lines_.data();
  params.active = &active_;
  params.fields = slot.sent;
  params.staging = staging_.data();
  backend_->dispatch_send(params);
}

void OneSided::dispatch_recv(Slot& slot, base::Deadline deadline) {
  collect_lines(slot, workspace_.dispatch_flags_offset, /*mine=*/true);
  auto* ids = reinterpret_cast<std::int32_t*>(slot_base(slot) + workspace_.topk_ids_offset);
  exec::DispatchRecvParams params{lines_.data(),
                                  slot.sent,
                                  &slot.plan(),
                                  counts(slot),
                                  slot.token_counts.data(),
                                  slot.routing ? nullptr : ids,
                                  slot.invalid_expert_id,
                                  row_arrays(slot),
                                  slot.round,
                                  deadline};
  backend_->dispatch_recv(params);
  if (slot.routing) restore_indices(slot);
  poison_results(slot);
  if (setup_.config.layout == Layout::kExpertMajor) expand(slot);
}

void OneSided::combine_send(Slot& slot, const CombineCall& call) {
  collect_lines(slot, workspace_.combine_flags_offset, /*mine=*/false);
  exec::CombineSendParams params = combine_params(slot, *call.inputs);
  params.flags = lines_.data();
  if (call.inputs->release) poison_received(slot);
  backend_->combine_send(params);
}

void OneSided::combine_recv(Slot& slot, const CombineCall& call) {
  const CombineInputs& in = *call.inputs;
  const exec::CallKind kind = in.release ? exec::CallKind::kCombine : exec::CallKind::kCombineKeep;
  wait_for(slot, workspace_.combine_flags_offset, combine_fields(slot, kind, in.out.shape[1]),
           "combine", call.deadline);
  exec::SumRowsParams params = sum_params(slot, in);
  const std::int64_t row_bytes = params.hidden * size_of(params.combine_dtype);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    sources_[static_cast<std::size_t>(rank)] =
        base_of(slot, rank) + workspace_.combine_offset +
        rank_ * slot.round_max_tokens * workspace_.rows_per_token * row_bytes;
  }
  params.sources = sources_.data();
  backend_->sum_rows(params);
  if (in.release) return;
  // The round goes on: nobody may write its results anew before everyone has pulled these.
  const exec::FlagFields ack = combine_fields(slot, exec::CallKind::kAck, 0);
  announce(slot, workspace_.ack_flags_offset, ack);
  wait_for(slot, workspace_.ack_flags_offset, ack, "acknowledgement of a combine", call.deadline);
}

void OneSided::release(Slot& slot) {
  poison_received(slot);
  slot.released = combine_fields(slot, exec::CallKind::kRelease, 0);
  slot.released_to = active_;
  announce(slot, workspace_.combine_flags_offset, slot.released);
}

void OneSided::check() const {
  const comm::WaitFor nobody{rank_, "check", -1};
  control_->throw_if_aborted(nobody);
  control_->throw_if_lost(nobody);
}

void OneSided::leave() noexcept {
  if (left_ || is_forked_child()) return;
  left_ = true;
  control_->mark_left();
}

void OneSided::close(base::Deadline deadline) {
  leave();
  control_->wait_all_left(deadline);
  // A window that somebody still looks at is not handed out again: it goes with its last view.
  if (memory_.block().use_count() == 1) allocator_.free(memory_);
  memory_ = SymmetricMemory();
  local_.reset();
  if (setup_.allocator == nullptr) allocator_.trim();
}

bool OneSided::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  const auto inside = [&](const std::byte* window) {
    return at >= window && at < window + workspace_.symmetric_bytes;
  };
  return Exchange::owns(data) || std::any_of(windows_.begin(), windows_.end(), inside);
}

std::shared_ptr<const void> OneSided::memory() const {
  return std::make_shared<Kept>(Kept{memory_, local_});
}

}  // namespace

std::shared_ptr<Exchange> make_one_sided(Setup setup, base::Deadline deadline) {
  return std::make_shared<OneSided>(std::move(setup), deadline);
}

Capabilities one_sided_capabilities() {
  Capabilities record;
  record.strategy = Strategy::kOneSided;
  record.layouts = {Layout::kRankMajor, Layout::kExpertMajor};
  record.id_dtypes = {DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt32};
  record.two_phase = true;
  record.rank_mask = true;
  record.max_payloads = AllToAll::kMaxPayloads;
  record.max_top_k = AllToAll::kMaxTopK;
  record.max_ranks = AllToAll::kMaxRanks;
  return record;
}

}  // namespace fanfold::exchange
