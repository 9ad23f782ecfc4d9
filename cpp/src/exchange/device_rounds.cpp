// SPDX-License-Identifier: Apache-2.0

// The phases of a round on a GPU: what each enqueues.

#include <algorithm>
#include <cstdint>

#include "base/format.h"
#include "exchange/access_unit.h"
#include "exchange/device_exchange.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

using exec::CallKind;
using exec::DevicePhase;

}  // namespace

// --- What kernels are told ----------------------------------------------------------------------

std::int32_t* DeviceExchange::rows_per_rank(const Slot& slot) const noexcept {
  const DeviceRouting* const routing = routing_of(slot);
  return routing != nullptr ? routing->rows_per_rank
                            : local_at<std::int32_t>(slot, workspace_.device.rows_per_rank_offset);
}

std::int32_t* DeviceExchange::token_counts(const Slot& slot) const noexcept {
  return total_rows(slot) + 1;
}

exec::DeviceRound DeviceExchange::round_of(const Slot& slot, DevicePhase phase) const noexcept {
  const plan::DeviceRegions& d = workspace_.device;
  exec::DeviceRound round{};
  round.windows = shared_at<std::byte*>(d.windows_offset);
  if (is_staged()) round.staging = shared_at<std::byte>(d.staging_offset);
  round.route = route_;
  round.rank_of = shared_at<std::int32_t>(d.rank_of_offset);
  round.local_of = shared_at<std::int32_t>(d.local_of_offset);
  if (setup_.map.has_replicas()) {
    round.copy_begin = shared_at<std::int32_t>(d.copy_begin_offset);
    round.copies = shared_at<std::int32_t>(d.copies_offset);
  }
  round.is_active = shared_at<std::int32_t>(d.is_active_offset);
  round.control = shared_at<exec::DeviceControl>(d.control_offset);
  round.slot = shared_at<exec::DeviceSlot>(d.slots_offset) + slot.index;
  round.report = reinterpret_cast<exec::DeviceReport*>(report_.device);
  round.abort_any = reinterpret_cast<const std::uint32_t*>(
      own_control_.device + (control().abort_word() - own_control_.host.get()));
  round.store_offset = workspace_.slot_offset + slot.index * workspace_.slot_stride;
  round.round_max_tokens = slot.round_max_tokens;
  round.rank = rank_;
  round.num_ranks = num_ranks();
  round.num_experts = setup_.map.num_experts;
  round.num_logical = setup_.map.num_logical;
  round.num_local_experts = num_local_experts();
  round.top_k = workspace_.top_k;
  round.slot_index = slot.index;
  round.timeout_ns = word(timeout_of(slot.index, phase));
  return round;
}

void DeviceExchange::set_timeout(const Slot& slot, DevicePhase phase,
                                 base::Deadline deadline) noexcept {
  timeouts_[static_cast<std::size_t>(slot.index)][static_cast<std::size_t>(phase)] =
      deadline.timeout_ns();
}

exec::DeviceCounts DeviceExchange::counts_of(const Slot& slot) const noexcept {
  return {rows_per_rank(slot), counts(slot), token_counts(slot), total_rows(slot)};
}

exec::TileWords DeviceExchange::tiles_of(const Slot& slot) const noexcept {
  return {local_at<std::uint64_t>(slot, workspace_.device.tiles_offset),
          workspace_.device.num_tiles};
}

exec::DeviceFlags DeviceExchange::flags_of(const Slot& slot, DevicePhase phase,
                                           const exec::FlagFields& fields) const noexcept {
  // A release says so in the line of the combine that does not come.
  std::int64_t offset = workspace_.combine_flags_offset;
  if (phase == DevicePhase::kDispatch) offset = workspace_.dispatch_flags_offset;
  if (phase == DevicePhase::kAck) offset = workspace_.ack_flags_offset;
  return {workspace_.flags_offset + slot.index * workspace_.flags_stride + offset, fields, phase};
}

exec::DeviceFlags DeviceExchange::combine_flags(const Slot& slot, bool release,
                                                std::int64_t hidden) const noexcept {
  const CallKind kind = release ? CallKind::kCombine : CallKind::kCombineKeep;
  return flags_of(slot, DevicePhase::kCombine, combine_fields(slot, kind, hidden));
}

void DeviceExchange::signal(const Slot& slot, const exec::DeviceFlags& flags, bool announces,
                            bool waits) {
  exec::DeviceSignalParams params{};
  params.round = round_of(slot, flags.phase);
  params.flags = flags;
  params.announces = announces;
  params.waits = waits;
  if (waits && flags.phase == DevicePhase::kDispatch) params.counts = counts_of(slot);
  device_->signal(params, slot.call_stream);
}

// --- Dispatch -----------------------------------------------------------------------------------

void DeviceExchange::plan_tokens(Slot& slot, const DispatchCall& call) {
  const exec::Stream stream = call.inputs->stream.value_or(nullptr);  // was checked
  slot.capture = device_->capture_of(stream);
  slot.stream = stream;
  slot.call_stream = stream;
  slot.has_late_work = false;
  slot.ids_changed = false;
  slot.own_plan.num_tokens = call.num_tokens;
  forget_routing(slot);
}

void DeviceExchange::pack_rows(const Slot& slot, const DispatchInputs& in,
                               const exec::PackRowsParams& params) {
  device_->pack_rows({params.rows, params.row_stride_bytes, params.dtype, params.hidden,
                      params.num_rows, static_cast<const std::int32_t*>(in.num_tokens.data),
                      params.wire_scale, params.packed, params.scales},
                     slot.call_stream);
}

void DeviceExchange::dispatch_send(Slot& slot, const DispatchCall& call) {
  send_rows(slot, call, /*waits=*/call.is_whole);
}

void DeviceExchange::send_rows(Slot& slot, const DispatchCall& call, bool waits) {
  const DispatchInputs& in = *call.inputs;
  const plan::DeviceRegions& d = workspace_.device;
  slot.sent = dispatch_fields(slot);
  slot.has_waited = waits;
  set_timeout(slot, DevicePhase::kDispatch, call.deadline);
  exec::DeviceDispatchSendParams params{};
  params.round = round_of(slot, DevicePhase::kDispatch);
  params.flags = flags_of(slot, DevicePhase::kDispatch, slot.sent);
  params.waits = waits;
  params.counts.rows_per_rank = rows_per_rank(slot);
  if (waits) params.counts = counts_of(slot);
  params.num_tokens = call.num_tokens;
  if (const DeviceRouting* const routing = routing_of(slot)) {
    params.is_routed = true;
    params.num_tokens_word = routing->num_tokens;
    params.sent_ids = routing->sent_ids;
    params.targets = routing->targets;
  } else {
    params.topk_ids = in.topk_ids.data;
    params.id_dtype = in.topk_ids.dtype;
    params.ids_stride = in.topk_ids.strides[0];
    if (in.topk_weights.has_value()) {
      params.topk_weights = static_cast<const float*>(in.topk_weights.data);
      params.weights_stride = in.topk_weights.strides[0];
    }
    params.num_tokens_word = static_cast<const std::int32_t*>(in.num_tokens.data);
    params.sent_ids = local_at<std::int32_t>(slot, d.sent_ids_offset);
    if (slot.has_weights && setup_.config.weighting == Weighting::kOrigin) {
      params.sent_weights = local_at<float>(slot, d.sent_weights_offset);
    }
    params.targets = local_at<plan::Target>(slot, d.targets_offset);
  }
  params.rows_per_rank = rows_per_rank(slot);
  params.source_token_offset = slot.store.source_token_offset;
  params.topk_ids_offset = slot.store.topk_ids_offset;
  params.topk_weights_offset = slot.store.topk_weights_offset;
  params.num_payloads = static_cast<std::int32_t>(slot.payload_rows.size());
  for (std::size_t i = 0; i < slot.payload_rows.size(); ++i) {
    const exec::PayloadRows& rows = slot.payload_rows[i];
    exec::DevicePayload& payload = params.payloads[i];
    payload = {rows.rows,          rows.row_stride_bytes,    rows.row_bytes,
               rows.region_offset, rows.region_stride_bytes, 0};
    payload.unit =
        unit_of({address(payload.rows), word(payload.row_stride_bytes), word(payload.row_bytes),
                 word(payload.region_offset), word(payload.region_stride_bytes)});
  }
  params.tiles = tiles_of(slot);
  device_->dispatch_send(params, slot.call_stream);
}

void DeviceExchange::dispatch_recv(Slot& slot, base::Deadline deadline) {
  if (!slot.has_waited) {
    set_timeout(slot, DevicePhase::kDispatch, deadline);
    signal(slot, flags_of(slot, DevicePhase::kDispatch, slot.sent), /*announces=*/false,
           /*waits=*/true);
  }
  poison_results(slot);
  arrange_rows(slot);
}

exec::DeviceArrangeParams DeviceExchange::arrange_params(const Slot& slot) const noexcept {
  exec::DeviceArrangeParams params{};
  params.round = round_of(slot, DevicePhase::kDispatch);
  params.rank_counts = counts(slot);
  params.topk_ids = const_cast<std::int32_t*>(received_ids(slot));
  if (slot.has_weights) params.topk_weights = received_weights(slot);
  params.tiles = tiles_of(slot);
  return params;
}

void DeviceExchange::add_counts(const Slot& slot,
                                exec::DeviceArrangeParams& params) const noexcept {
  params.expert_counts = counts(slot) + num_ranks();
  params.offsets = params.expert_counts + workspace_.max_local_experts;
  params.max_pairs = plan::max_pairs(workspace_.top_k, workspace_.max_local_experts);
}

void DeviceExchange::arrange_rows(Slot& slot) {
  exec::DeviceArrangeParams params = arrange_params(slot);
  if (const DeviceRouting* const routing = routing_of(slot)) {
    params.routed_ids = routing->topk_ids;
    params.routed_weights = routing->topk_weights;
    params.routed_tokens = routing->source_tokens;
    params.source_tokens = const_cast<std::int32_t*>(received_tokens(slot));
    params.restored_weights = const_cast<float*>(received_weights(slot));
  }
  if (!is_per_expert(setup_.config.layout)) {
    params.pads_ids = true;  // those of layouts per expert are not seen
    params.invalid_expert_id = slot.invalid_expert_id;
  } else {
    add_counts(slot, params);
    slot.has_expert_counts = true;
    params.pairs = local_at<plan::ExpertRow>(slot, workspace_.device.pairs_offset);
    if (slot.has_weights) params.expert_weights = layout_weights(slot);
    params.num_payloads = static_cast<std::int32_t>(slot.payloads.size());
    for (std::size_t i = 0; i < slot.payloads.size(); ++i) {
      const PayloadSpec& spec = slot.payloads[i];
      exec::DeviceExpansion& rows = params.payloads[i];
      rows = {stored_at<std::byte>(slot, spec.region_offset),
              local_at<std::byte>(slot, spec.local_offset), spec.row_bytes, spec.stride_bytes, 0};
      rows.unit = unit_of({address(rows.source), address(rows.target), word(rows.row_bytes),
                           word(rows.stride_bytes)});
    }
  }
  device_->arrange(params, slot.call_stream);
}

// --- Combine ------------------------------------------------------------------------------------

void DeviceExchange::combine_send(Slot& slot, const CombineCall& call) {
  send_results(slot, call, /*waits=*/call.is_whole);
}

void DeviceExchange::send_results(Slot& slot, const CombineCall& call, bool waits) {
  const CombineInputs& in = *call.inputs;
  const std::int64_t hidden = slot.hidden;
  set_timeout(slot, DevicePhase::kCombine, call.deadline);
  set_timeout(slot, DevicePhase::kAck, call.deadline);
  slot.has_waited = waits;
  if (in.release) poison_received(slot);
  const exec::DeviceFlags flags = combine_flags(slot, in.release, hidden);
  const bool by_expert = is_per_expert(setup_.config.layout);
  std::byte* const rows = stored_at<std::byte>(slot, slot.store.combine_offset);
  if (!by_expert && (in.y.data == rows || in.y.num_elements() == 0)) {
    signal(slot, flags, /*announces=*/true, waits);
    return;
  }
  exec::DeviceCombineSendParams params{};
  params.round = round_of(slot, DevicePhase::kCombine);
  params.flags = flags;
  params.waits = waits;
  params.y = static_cast<const std::byte*>(in.y.data);
  params.y_dtype = in.y.dtype;
  params.combine_dtype = combine_dtype();
  params.hidden = hidden;
  params.rank_counts = counts(slot);
  if (by_expert) {
    params.pairs = local_at<plan::ExpertRow>(slot, workspace_.device.pairs_offset);
    params.max_pairs = plan::max_pairs(workspace_.top_k, workspace_.max_local_experts);
  }
  params.carried = setup_.config.weighting == Weighting::kCarried;
  params.origin = setup_.config.weighting == Weighting::kOrigin;
  params.wire = setup_.config.combine_wire;
  params.wire_scale = setup_.config.wire_scale;
  params.rows_per_token = workspace_.rows_per_token;
  params.row_bytes = combine_row_bytes(hidden);
  params.rows = rows;
  device_->combine_send(params, slot.call_stream);
}

void DeviceExchange::combine_recv(Slot& slot, const CombineCall& call) {
  const CombineInputs& in = *call.inputs;
  const plan::DeviceRegions& d = workspace_.device;
  const std::int64_t hidden = in.out.shape[1];
  if (!slot.has_waited) {
    set_timeout(slot, DevicePhase::kCombine, call.deadline);
    set_timeout(slot, DevicePhase::kAck, call.deadline);
    signal(slot, combine_flags(slot, in.release, hidden), /*announces=*/false, /*waits=*/true);
  }
  const DeviceRouting* const routing = routing_of(slot);
  exec::DeviceSumParams params{};
  params.round = round_of(slot, DevicePhase::kAck);
  params.targets =
      routing != nullptr ? routing->targets : local_at<plan::Target>(slot, d.targets_offset);
  params.sent_ids =
      routing != nullptr ? routing->sent_ids : local_at<std::int32_t>(slot, d.sent_ids_offset);
  params.num_tokens = slot.plan().num_tokens;
  params.combine_offset = slot.store.combine_offset;
  params.combine_dtype = combine_dtype();
  params.hidden = hidden;
  params.rows_per_token = workspace_.rows_per_token;
  params.row_bytes = combine_row_bytes(hidden);
  params.wire = setup_.config.combine_wire;
  params.wire_scale = setup_.config.wire_scale;
  params.origin = setup_.config.weighting == Weighting::kOrigin;
  if (params.origin) {
    params.topk_weights =
        routing != nullptr ? routing->sent_weights : local_at<float>(slot, d.sent_weights_offset);
    params.weights_stride = workspace_.top_k;
    if (in.topk_weights.has_value()) {
      params.topk_weights = static_cast<const float*>(in.topk_weights.data);
      params.weights_stride = in.topk_weights.strides[0];
    }
  }
  params.out = static_cast<std::byte*>(in.out.data);
  params.out_stride_bytes = in.out.row_stride_bytes();
  params.out_dtype = in.out.dtype;
  params.acks = !in.release && !is_staged();  // else what comes home is this rank's own
  params.ack = flags_of(slot, DevicePhase::kAck, combine_fields(slot, CallKind::kAck, 0));
  device_->sum_rows(params, slot.call_stream);
}

void DeviceExchange::release(Slot& slot) {
  set_timeout(slot, DevicePhase::kRelease, base::Deadline(setup_.config.timeout));
  poison_received(slot);
  signal(slot, flags_of(slot, DevicePhase::kRelease, combine_fields(slot, CallKind::kRelease, 0)),
         /*announces=*/true, /*waits=*/true);
}

// --- Poison, in the places that exchange.cpp gives reasons for ----------------------------------

void DeviceExchange::poison_received(const Slot& slot) {
  if (!setup_.config.debug_poison) return;
  device_->fill(stored_at<std::byte>(slot, slot.store.payload_offset), 0xCD,
                slot.store.payload_bytes, slot.call_stream);
  device_->fill(local_at<std::byte>(slot, workspace_.local_payload_offset), 0xCD,
                workspace_.local_payload_bytes, slot.call_stream);
}

void DeviceExchange::poison_results(const Slot& slot) {
  if (!setup_.config.debug_poison) return;
  device_->fill(stored_at<std::byte>(slot, slot.store.combine_offset), 0xFF,
                slot.store.combine_bytes, slot.call_stream);
  device_->fill(local_at<std::byte>(slot, workspace_.local_combine_offset), 0xFF,
                workspace_.local_combine_bytes, slot.call_stream);
}

}  // namespace fanfold::exchange
