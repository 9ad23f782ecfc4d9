// SPDX-License-Identifier: Apache-2.0
#include "exchange/window_exchange.h"

#include <algorithm>
#include <utility>

#include "comm/communicator_impl.h"

namespace fanfold::exchange {

WindowExchange::WindowExchange(Setup setup, base::Deadline deadline) : Exchange(std::move(setup)) {
  if (setup_.workspace_of != nullptr) {
    window_ = static_cast<const WindowExchange&>(*setup_.workspace_of).window_;
  } else {
    // Control words and flags must start as zeros; rows need not.
    window_ = std::make_shared<SharedWindow>(setup_, workspace_.symmetric_bytes,
                                             workspace_.slot_offset, deadline);
  }
  keep(nullptr);
  const auto ranks = static_cast<std::size_t>(num_ranks());
  lines_.resize(ranks);
  bases_.resize(ranks);
  first_rows_.resize(ranks);
  sources_.resize(ranks);
  both_.resize(ranks);
  distances_.resize(ranks);
  exec::Context context{};
  context.kernels = &base::kernels(base::isa_from_name(setup_.config.test_knobs.isa.c_str()));
  context.hook = &hook_;
  context.control = &control();
  context.rank = rank_;
  context.num_ranks = num_ranks();
  context.streaming = setup_.config.test_knobs.streaming_stores;
  context.distances = distances_.data();
  backend_ = setup_.backend(context);
}

void WindowExchange::set_active(const std::vector<bool>& active) {
  Exchange::set_active(active);
  control().set_active(active);
}

bool WindowExchange::is_forked_child() const noexcept {
  return setup_.communicator->group().is_forked_child();
}

void WindowExchange::keep(std::shared_ptr<const void> memory) {
  kept_ = std::make_shared<Kept>(Kept{window_->memory(), local_, std::move(memory)});
}

void WindowExchange::detach() noexcept {
  kept_.reset();
  Exchange::detach();
}

void WindowExchange::close(base::Deadline deadline) {
  kept_.reset();  // what is left of it are the callers' views
  window_->close(deadline);
  local_.reset();
}

void WindowExchange::collect_lines(const Slot& slot, std::int64_t offset, bool mine) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    lines_[static_cast<std::size_t>(rank)] =
        mine ? line(slot, offset, rank_, rank) : line(slot, offset, rank, rank_);
  }
}

void WindowExchange::announce(const Slot& slot, std::int64_t offset,
                              const exec::FlagFields& fields) {
  for (int i = 1; i < num_ranks(); ++i) {
    const int peer = (rank_ + i) % num_ranks();
    if (!active_[static_cast<std::size_t>(peer)]) continue;
    exec::publish(*line(slot, offset, peer, rank_), fields);
    control().ring(peer);
    hook_.step();
  }
}

void WindowExchange::wait_for(const Slot& slot, std::int64_t offset, const exec::FlagFields& fields,
                              const char* phase, base::Deadline deadline) {
  collect_lines(slot, offset, /*mine=*/true);
  backend_->wait_flags({lines_.data(), fields, &active_, phase, slot.round, deadline});
}

void WindowExchange::settle(Slot& slot, base::Deadline deadline) {
  // The mask may have changed since: who was left out then has no flag, who is left out now is
  // gone.
  for (std::size_t rank = 0; rank < both_.size(); ++rank) {
    both_[rank] = active_[rank] && slot.released_to[rank];
  }
  collect_lines(slot, workspace_.combine_flags_offset, /*mine=*/true);
  backend_->wait_flags({lines_.data(), slot.released, &both_, "release", slot.round, deadline});
}

void WindowExchange::push(Slot& slot, const DispatchCall& call) {
  for (exec::PeerDistance& distance : distances_) distance.next_round();
  collect_lines(slot, workspace_.dispatch_flags_offset, /*mine=*/false);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    bases_[static_cast<std::size_t>(rank)] = base_of(slot, rank);
    first_rows_[static_cast<std::size_t>(rank)] = first_row_on(slot, rank);
  }
  const DispatchInputs& in = *call.inputs;
  slot.sent = dispatch_fields(slot);
  exec::DispatchSendParams params{};
  params.plan = &slot.plan();
  params.pairs = pairs_of(slot);
  params.payloads = &slot.payload_rows;
  if (!slot.routing && in.topk_weights.has_value()) {
    params.topk_weights = static_cast<const float*>(in.topk_weights.data);
    params.weights_stride = in.topk_weights.strides[0];
  }
  params.with_indices = !slot.routing;
  params.arrays = row_arrays(slot);
  params.first_rows = first_rows_.data();
  params.slot_bases = bases_.data();
  params.flags = lines_.data();
  params.active = &active_;
  params.fields = slot.sent;
  params.staging = staging_.data();
  backend_->dispatch_send(params);
}

void WindowExchange::await_rows(Slot& slot, base::Deadline deadline) {
  collect_lines(slot, workspace_.dispatch_flags_offset, /*mine=*/true);
  auto* ids = reinterpret_cast<std::int32_t*>(slot_base(slot) + slot.store.topk_ids_offset);
  const bool has_gaps = !slot.routing && !stores_flat();
  exec::DispatchRecvParams params{lines_.data(),
                                  slot.sent,
                                  &slot.plan(),
                                  counts(slot),
                                  slot.token_counts.data(),
                                  has_gaps ? ids : nullptr,
                                  slot.invalid_expert_id,
                                  row_arrays(slot),
                                  slot.round,
                                  deadline};
  backend_->dispatch_recv(params);
}

void WindowExchange::finish_dispatch(Slot& slot) {
  if (slot.routing) restore_indices(slot);
  poison_results(slot);
  place_rows(slot);
  arrange(slot);
}

void WindowExchange::combine_send(Slot& slot, const CombineCall& call) {
  collect_lines(slot, workspace_.combine_flags_offset, /*mine=*/false);
  exec::CombineSendParams params = combine_params(slot, *call.inputs);
  params.rank_counts = stored_counts(slot);
  params.flags = lines_.data();
  choose_way_home(slot, params);
  if (call.inputs->release) poison_received(slot);
  backend_->combine_send(params);
}

void WindowExchange::combine_recv(Slot& slot, const CombineCall& call) {
  const CombineInputs& in = *call.inputs;
  const exec::CallKind kind = in.release ? exec::CallKind::kCombine : exec::CallKind::kCombineKeep;
  wait_for(slot, workspace_.combine_flags_offset, combine_fields(slot, kind, in.out.shape[1]),
           "combine", call.deadline);
  exec::SumRowsParams params = sum_params(slot, in);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    sources_[static_cast<std::size_t>(rank)] =
        base_of(slot, rank) + partials_offset(slot) +
        first_row_on(slot, rank) * workspace_.rows_per_token * params.row_bytes;
  }
  params.sources = sources_.data();
  find_results(slot, params);
  backend_->sum_rows(params);
  if (in.release) return;
  // The round goes on: nobody may write its results anew before everyone has pulled these.
  const exec::FlagFields ack = combine_fields(slot, exec::CallKind::kAck, 0);
  announce(slot, workspace_.ack_flags_offset, ack);
  wait_for(slot, workspace_.ack_flags_offset, ack, "acknowledgement of a combine", call.deadline);
}

void WindowExchange::release(Slot& slot) {
  poison_received(slot);
  slot.released = combine_fields(slot, exec::CallKind::kRelease, 0);
  slot.released_to = active_;
  announce(slot, workspace_.combine_flags_offset, slot.released);
}

void WindowExchange::check() const {
  const comm::WaitFor nobody{rank_, "check", -1};
  control().throw_if_aborted(nobody);
  control().throw_if_lost(nobody);
}

bool WindowExchange::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  const auto inside = [&](const std::byte* window) {
    return at >= window && at < window + workspace_.symmetric_bytes;
  };
  const std::vector<std::byte*>& windows = window_->bases();
  return Exchange::owns(data) || std::any_of(windows.begin(), windows.end(), inside);
}

}  // namespace fanfold::exchange
