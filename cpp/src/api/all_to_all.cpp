// SPDX-License-Identifier: Apache-2.0
#include "fanfold/all_to_all.h"

#include <algorithm>

#include "api/all_to_all_impl.h"
#include "api/check.h"
#include "api/config.h"
#include "api/received_state.h"
#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold {

using base::str;
using exchange::Slot;
using exchange::SlotState;

AllToAll::AllToAll(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator,
                   const AllToAll* workspace_of)
    : impl_(std::make_unique<Impl>(communicator, config, allocator,
                                   workspace_of == nullptr ? nullptr : &workspace_of->impl())) {}

AllToAll::~AllToAll() = default;

AllToAll::AllToAll(AllToAll&&) noexcept = default;
AllToAll& AllToAll::operator=(AllToAll&&) noexcept = default;

AllToAll::Impl& AllToAll::impl() const {
  if (!impl_) throw InvalidState("AllToAll: was moved from");
  return *impl_;
}

std::int64_t AllToAll::required_bytes(int num_ranks, const AllToAllConfig& config) {
  const api::ResolvedConfig resolved = api::resolve(config, num_ranks);
  const plan::ExpertMap map =
      plan::build_expert_map(config.placement, config.num_experts, num_ranks);
  return exchange::workspace_of(resolved.config, num_ranks, map.max_local_experts).total_bytes();
}

const AllToAllConfig& AllToAll::config() const { return impl().config(); }
int AllToAll::rank() const { return impl().exchange().rank(); }
int AllToAll::num_ranks() const { return impl().exchange().num_ranks(); }
int AllToAll::num_local_experts() const { return impl().exchange().num_local_experts(); }

const std::vector<std::int32_t>& AllToAll::local_experts() const {
  return impl().exchange().map().experts_of[static_cast<std::size_t>(rank())];
}

Received AllToAll::dispatch(const DispatchInputs& inputs) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  exchange::DispatchCall call = api::check_dispatch(impl().exchange(), inputs);
  call.is_whole = true;
  const Round round = impl().dispatch_send(call);
  return impl().dispatch_recv(round, call.deadline);
}

Round AllToAll::dispatch_send(const DispatchInputs& inputs) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("dispatch_send");
  const exchange::DispatchCall call = api::check_dispatch(impl().exchange(), inputs);
  return impl().dispatch_send(call);
}

Received AllToAll::dispatch_recv(const Round& round,
                                 std::optional<std::chrono::nanoseconds> timeout,
                                 std::optional<void*> stream) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("dispatch_recv");
  Slot& slot = impl().slot_of(round, SlotState::kSent, "dispatch_recv");
  impl().use_stream(slot, stream, "dispatch_recv");
  if (stream) slot.stream = *stream;
  return impl().dispatch_recv(round, impl().deadline(timeout));
}

TensorView AllToAll::combine_buffer(const Round& round, std::optional<std::int64_t> hidden,
                                    std::optional<DType> dtype) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  const Slot& slot = impl().slot_of(round, SlotState::kReceived, "combine_buffer");
  const AllToAllConfig& config = impl().config();
  const DType travels = config.combine_dtype.value_or(config.dtype);
  const DType type = dtype.value_or(travels);
  const std::int64_t width = hidden.value_or(config.hidden);
  api::check_combine_row(impl().exchange(), width, type);
  if (impl().exchange().combines_in_place() && type != travels) {
    throw InvalidArgument(str("dtype of the combine buffer: expected ", name_of(travels),
                              " (combine_dtype; layout ", name_of(config.layout),
                              " sends it as it is), got ", name_of(type)));
  }
  return impl().exchange().combine_view(slot, width, type);
}

std::pair<std::int64_t, std::int64_t> AllToAll::out_shape(const Round& round) const {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  const Slot& slot = impl().slot_of(round, "out_shape");
  const bool sent = slot.state == SlotState::kCombineSent;
  return {slot.plan().num_tokens, sent ? slot.hidden : impl().config().hidden};
}

void AllToAll::combine(const CombineInputs& inputs, const Round& round) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  Slot& slot = impl().slot_of(round, SlotState::kReceived, "combine");
  api::check_results(impl().exchange(), slot, inputs);
  api::check_combine_out(impl().exchange(), slot, inputs,
                         inputs.y.shape[static_cast<std::size_t>(inputs.y.ndim - 1)]);
  const exchange::CombineCall call{&inputs, impl().deadline(inputs.timeout), /*is_whole=*/true};
  impl().use_stream(slot, inputs.stream, "combine");
  impl().combine_send(slot, call);
  impl().combine_recv(slot, call);
}

void AllToAll::combine_send(const CombineInputs& inputs, const Round& round) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("combine_send");
  Slot& slot = impl().slot_of(round, SlotState::kReceived, "combine_send");
  api::check_results(impl().exchange(), slot, inputs);
  impl().use_stream(slot, inputs.stream, "combine_send");
  impl().combine_send(slot, {&inputs, impl().deadline(inputs.timeout)});
}

void AllToAll::combine_recv(const CombineInputs& inputs, const Round& round) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("combine_recv");
  Slot& slot = impl().slot_of(round, SlotState::kCombineSent, "combine_recv");
  api::check_combine_out(impl().exchange(), slot, inputs, slot.hidden);
  impl().use_stream(slot, inputs.stream, "combine_recv");
  CombineInputs resolved = inputs;
  resolved.release = !slot.keeps_open;  // as combine_send said
  impl().combine_recv(slot, {&resolved, impl().deadline(inputs.timeout)});
}

void AllToAll::release(const Round& round, std::optional<void*> stream) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  Slot& ended = impl().slot_of(round, "release");
  if (ended.is_open() && impl().exchange().has_lost_capture(ended)) {
    ended.state = SlotState::kFree;
    return;
  }
  Slot& slot = impl().slot_of(round, SlotState::kReceived, "release");
  impl().use_stream(slot, stream, "release");
  impl().run([&] { impl().exchange().release(slot); });
  slot.state = SlotState::kReleased;
}

void AllToAll::sanitize(const TensorView& ids, const TensorView& counts,
                        std::int64_t invalid_expert_id, SanitizePolicy policy,
                        const TensorView& out, std::optional<void*> stream) const {
  const Impl::Call guard(impl());
  impl().require_usable();
  exchange::Exchange& exchange = impl().exchange();
  api::check_sanitize(exchange, ids, counts, invalid_expert_id, out);
  api::check_stream(exchange.config(), stream);
  exchange.sanitize({ids, counts, invalid_expert_id, policy, out, stream.value_or(exec::Stream{})});
}

void AllToAll::set_active_mask(const std::vector<bool>& active) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().set_active(active);
}

std::vector<bool> AllToAll::active_mask() const { return impl().exchange().active(); }

void AllToAll::set_placement(const Placement& placement,
                             std::optional<std::chrono::nanoseconds> timeout) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().set_placement(placement, impl().deadline(timeout));
}

void AllToAll::set_num_workers(int num_workers) {
  const Impl::Call guard(impl());
  impl().require_usable();
  constexpr int kMaxWorkers = 256;
  if (num_workers < 1 || num_workers > kMaxWorkers) {
    throw InvalidArgument(
        str("num_workers: expected 1 to ", kMaxWorkers, " threads, got ", num_workers));
  }
  impl().exchange().set_num_workers(num_workers);
}

int AllToAll::num_workers() const { return impl().exchange().num_workers(); }

void AllToAll::abort(const std::string& reason) { impl().abort(reason); }

void AllToAll::reset(std::optional<std::chrono::nanoseconds> timeout) {
  const Impl::Call guard(impl());
  impl().require_usable();
  impl().reset(impl().deadline(timeout));
}

void AllToAll::close(std::optional<std::chrono::nanoseconds> timeout) {
  if (impl().is_closed()) return;
  const Impl::Call guard(impl());
  impl().require_usable();
  impl().close(impl().deadline(timeout));
}

bool AllToAll::is_closed() const noexcept { return impl_ == nullptr || impl_->is_closed(); }
bool AllToAll::is_failed() const noexcept {
  return impl_ != nullptr &&
         (impl_->session().has_failed() || impl_->exchange().kernels_have_failed());
}

void AllToAll::check() const {
  const Impl::Call guard(impl());
  impl().require_usable();
  if (impl().session().has_failed()) std::rethrow_exception(impl().session().failure());
  impl().run([&] { impl().exchange().throw_if_kernels_failed(); });
  impl().exchange().check();
}

std::int64_t AllToAll::num_dropped_ids() const noexcept {
  if (impl_ == nullptr) return 0;
  return impl_->num_dropped() + impl_->exchange().num_ids_dropped_by_kernels();
}
const Metainfo& AllToAll::metainfo() const { return impl().metainfo(); }

std::int64_t AllToAll::workspace_bytes() const { return impl().exchange().workspace_bytes(); }

Capacities AllToAll::capacities() const { return impl().exchange().capacities(); }

std::int64_t AllToAll::num_dropped_rows() const noexcept {
  return impl_ == nullptr ? 0 : impl_->exchange().num_dropped_rows();
}

Capabilities AllToAll::capabilities() const { return impl().exchange().capabilities(); }
std::string AllToAll::choice() const { return impl().choice(); }

Feasibility AllToAll::feasible(std::int64_t round_max_tokens, std::int64_t row_bytes,
                               Layout layout) const {
  const AllToAllConfig& config = impl().config();
  if (layout != config.layout) {
    return {false,
            str("layout: this AllToAll gives ", name_of(config.layout), ", got ", name_of(layout))};
  }
  if (round_max_tokens < 0 || round_max_tokens > config.max_tokens_per_rank) {
    return {false, str("round_max_tokens: expected at most ", config.max_tokens_per_rank,
                       " (max_tokens_per_rank), got ", round_max_tokens)};
  }
  const std::int64_t room = impl().exchange().workspace().dispatch_row_bytes;
  if (row_bytes < 1 || row_bytes > room) {
    return {false,
            str("row_bytes: expected 1 to ", room, " (dispatch_row_bytes), got ", row_bytes)};
  }
  return {true, "fits"};
}

std::shared_ptr<const void> AllToAll::memory() const { return impl().exchange().memory(); }

}  // namespace fanfold
