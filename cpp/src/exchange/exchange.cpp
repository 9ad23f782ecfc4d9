// SPDX-License-Identifier: Apache-2.0
#include "exchange/exchange.h"

#include <algorithm>
#include <cstring>

#include "base/format.h"
#include "comm/channel.h"
#include "comm/communicator_impl.h"
#include "comm/control.h"
#include "fanfold/error.h"
#include "plan/wire.h"

namespace fanfold::exchange {
namespace {

/// Offsets of consecutive payload regions of `num_rows` rows each, from `offset`.
template <class Place>
void lay_out(std::vector<PayloadSpec>& payloads, std::int64_t offset, std::int64_t num_rows,
             Place&& place) {
  for (PayloadSpec& spec : payloads) {
    place(spec, offset);
    offset += plan::payload_region_bytes(num_rows, spec.stride_bytes);
  }
}

/// Of the control area, or of all symmetric memory where rows are private.
std::int64_t control_bytes(const AllToAllConfig& config, int num_ranks) {
  if (config.device == DeviceType::kGpu) return 0;  // it lies in windows of the host
  if (config.strategy == Strategy::kTwoSided) return two_sided_window_bytes(config, num_ranks);
  return plan::store_kind(config.strategy) == plan::StoreKind::kPrivate
             ? comm::Channel::window_bytes(num_ranks)
             : comm::Control::bytes(num_ranks);
}

std::uint64_t digest_of(const std::vector<PayloadSpec>& payloads, bool has_ids, bool has_weights) {
  std::uint64_t digest =
      base::mix_digest(base::kDigestSeed, (has_ids ? 2U : 0U) + (has_weights ? 1U : 0U));
  for (const PayloadSpec& spec : payloads) {
    digest = base::mix_digest(digest, static_cast<std::uint64_t>(spec.row_bytes));
    digest = base::mix_digest(digest, static_cast<std::uint64_t>(spec.dtype));
  }
  return digest;
}

}  // namespace

const char* name_of(SlotState state) noexcept {
  switch (state) {
    case SlotState::kFree:
      return "ended";
    case SlotState::kSent:
      return "sent, not received";
    case SlotState::kReceived:
      return "received";
    case SlotState::kCombineSent:
      return "combine sent, not received";
    case SlotState::kReleased:
      return "released";
  }
  return "unknown";
}

plan::Workspace workspace_of(const AllToAllConfig& config, int num_ranks, int max_local_experts) {
  return plan::walk_workspace(config, num_ranks, max_local_experts,
                              control_bytes(config, num_ranks));
}

Exchange::Exchange(Setup setup)
    : setup_(std::move(setup)),
      rank_(setup_.communicator->group().rank()),
      hook_(setup_.config.test_knobs, rank_) {
  on_all_ranks([this] { take_memory(); });
  const auto ranks = static_cast<std::size_t>(setup_.map.num_ranks);
  Exchange::set_active(setup_.workspace_of == nullptr ? std::vector<bool>(ranks, true)
                                                      : setup_.workspace_of->active());
}

Exchange::~Exchange() = default;

int Exchange::num_local_experts() const noexcept {
  return static_cast<int>(setup_.map.experts_of[static_cast<std::size_t>(rank_)].size());
}

void Exchange::set_active(const std::vector<bool>& active) {
  active_ = active;
  std::uint64_t digest = base::kDigestSeed;
  for (const bool is_active : active) digest = base::mix_digest(digest, is_active ? 1U : 0U);
  mask_digest_ = static_cast<std::uint32_t>(digest ^ (digest >> 32));
}

void Exchange::set_num_workers(int num_workers) {
  if (num_workers == this->num_workers()) return;
  if (workers_ == nullptr) {
    const TestKnobs& knobs = setup_.config.test_knobs;
    const base::Kernels& kernels = base::kernels(base::isa_from_name(knobs.isa.c_str()));
    workers_ = std::make_unique<exec::Workers>(kernels.store_fence, knobs.min_worker_bytes);
    backend_->use_workers(workers_.get());
  }
  workers_->set_num_workers(num_workers);
}

int Exchange::num_workers() const noexcept {
  return workers_ == nullptr ? 1 : workers_->num_workers();
}

std::byte* Exchange::local_base(const Slot& slot) const noexcept {
  return local_.get() + workspace_.local_slot_offset + slot.index * workspace_.local_slot_stride;
}

bool Exchange::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  return at >= local_.get() && at < local_.get() + workspace_.local_bytes;
}

Capacities Exchange::capacities() const {
  Capacities record;
  record.tokens_per_rank = workspace_.max_tokens_per_rank;
  record.experts_per_token = std::min(workspace_.top_k, num_local_experts());
  record.rows_per_expert = num_ranks() * workspace_.max_tokens_per_rank;
  const bool exact =
      !setup_.config.max_recv_rows &&
      (setup_.config.layout == Layout::kFlat || setup_.config.layout == Layout::kFlatByExpert);
  record.rows = exact ? 0
                : setup_.config.layout == Layout::kExpertMajor
                    ? num_local_experts() * record.rows_per_expert
                    : workspace_.max_layout_rows;
  return record;
}

std::int64_t Exchange::combine_row_bytes(std::int64_t hidden) const noexcept {
  return setup_.config.combine_wire == Wire::kNone
             ? hidden * size_of(combine_dtype())
             : plan::packed_row_bytes(hidden, setup_.config.wire_scale);
}

void Exchange::plan_tokens(Slot& slot, const DispatchCall& call) {
  const DispatchInputs& in = *call.inputs;
  const bool routed = in.routing.has_value();
  if (!routed && in.topk_ids.has_value()) {
    const bool drop = setup_.config.check_ids == CheckIds::kDrop;
    const auto bad = plan::build_send_plan(in.topk_ids, call.num_tokens, setup_.map, active_, drop,
                                           slot.own_plan);
    if (bad) {
      throw InvalidArgument(
          base::str("topk_ids: expected ids below ", setup_.map.num_logical,
                    setup_.map.has_replicas() ? " (logical experts" : " (num_experts", "), got ",
                    bad->id, " at row ", bad->row, ", column ", bad->column));
    }
  } else if (!routed) {
    plan::build_full_plan(call.num_tokens, setup_.map, active_, slot.own_plan);
  }
  if (!routed && in.topk_weights.has_value() && setup_.config.weighting == Weighting::kOrigin) {
    slot.token_weights.resize(static_cast<std::size_t>(call.num_tokens * workspace_.top_k));
    const auto* weights = static_cast<const float*>(in.topk_weights.data);
    for (std::int64_t token = 0; token < call.num_tokens; ++token) {
      std::copy_n(weights + token * in.topk_weights.strides[0], workspace_.top_k,
                  slot.token_weights.data() + token * workspace_.top_k);
    }
  }
}

void Exchange::prepare_dispatch(Slot& slot, const DispatchCall& call) {
  plan_tokens(slot, call);
  const DispatchInputs& in = *call.inputs;
  const bool routed = in.routing.has_value();
  slot.routing = routed ? in.routing.data() : nullptr;
  slot.has_ids = routed ? slot.routing->has_ids : in.topk_ids.has_value();
  slot.has_weights = routed ? slot.routing->has_weights : in.topk_weights.has_value();
  slot.invalid_expert_id = routed ? slot.routing->invalid_expert_id : call.invalid_expert_id;
  slot.round_max_tokens = call.round_max_tokens;
  slot.num_combines = 0;
  slot.frozen = nullptr;
  slot.has_expert_counts = false;
  slot.has_source_rows = false;
  slot.has_scales = setup_.config.dispatch_wire != Wire::kNone;

  slot.payloads.resize(in.payloads.size());
  slot.payload_rows.resize(in.payloads.size());
  for (std::size_t i = 0; i < in.payloads.size(); ++i) {
    const TensorView& view = in.payloads[i];
    PayloadSpec& spec = slot.payloads[i];
    spec.dtype = view.dtype;
    spec.ndim = view.ndim;
    spec.shape = view.shape;
    spec.row_bytes = view.row_bytes();
    spec.stride_bytes = spec.row_bytes + workspace_.row_guard_bytes;
    slot.payload_rows[i] =
        exec::PayloadRows{static_cast<const std::byte*>(view.data), view.row_stride_bytes(),
                          spec.row_bytes, 0, spec.stride_bytes};
  }
  if (setup_.config.dispatch_wire != Wire::kNone) pack_payload(slot, in);
  // A block of high_throughput is chosen when the counts are known; until then nothing arrives.
  if (plan::store_kind(setup_.config.strategy) != plan::StoreKind::kBlocks) {
    slot.store = workspace_.store;
  }
  place_payloads(slot);
  const std::int64_t sources = workspace_.num_ranks * workspace_.max_tokens_per_rank;
  lay_out(slot.payloads, workspace_.local_payload_offset, workspace_.max_layout_rows,
          [](PayloadSpec& spec, std::int64_t at) { spec.local_offset = at; });
  lay_out(slot.payloads, 0, sources,
          [](PayloadSpec& spec, std::int64_t at) { spec.gathered_offset = at; });
}

void Exchange::place_payloads(Slot& slot) const {
  lay_out(slot.payloads, slot.store.payload_offset, slot.store.num_places,
          [](PayloadSpec& spec, std::int64_t at) { spec.region_offset = at; });
  for (std::size_t i = 0; i < slot.payloads.size(); ++i) {
    slot.payload_rows[i].region_offset = slot.payloads[i].region_offset;
  }
}

/// Payload 0 becomes FP8 rows, and its scales a last payload.
void Exchange::pack_payload(Slot& slot, const DispatchInputs& in) {
  const AllToAllConfig& config = setup_.config;
  const TensorView& view = in.payloads[0];
  exec::PackRowsParams params{};
  params.rows = static_cast<const std::byte*>(view.data);
  params.row_stride_bytes = view.row_stride_bytes();
  params.dtype = view.dtype;
  params.hidden = view.shape[1];
  params.num_rows = slot.plan().num_tokens;
  params.wire_scale = config.wire_scale;
  params.packed = local_base(slot) + workspace_.local_wire_offset;
  params.scales = local_base(slot) + workspace_.local_wire_scales_offset;
  pack_rows(slot, in, params);
  PayloadSpec& packed = slot.payloads[0];
  packed.dtype = DType::kFloat8E4M3;
  packed.row_bytes = params.hidden;
  PayloadSpec scales = packed;
  scales.dtype = plan::dtype_of(config.wire_scale);
  scales.shape[1] = plan::num_wire_blocks(params.hidden);
  scales.row_bytes = scales.shape[1] * size_of(scales.dtype);
  for (PayloadSpec* spec : {&packed, &scales}) {
    spec->stride_bytes = spec->row_bytes + workspace_.row_guard_bytes;
  }
  slot.payload_rows[0] = {params.packed, packed.row_bytes, packed.row_bytes, 0,
                          packed.stride_bytes};
  slot.payload_rows.push_back(
      {params.scales, scales.row_bytes, scales.row_bytes, 0, scales.stride_bytes});
  slot.payloads.push_back(scales);
}

exec::RowArrays Exchange::row_arrays(const Slot& slot) const noexcept {
  return exec::RowArrays{slot.store.source_token_offset, slot.store.topk_ids_offset,
                         slot.store.topk_weights_offset, slot.round_max_tokens, workspace_.top_k};
}

exec::FlagFields Exchange::dispatch_fields(const Slot& slot) const noexcept {
  exec::FlagFields fields;
  fields.epoch = slot.epoch;
  fields.generation = slot.generation;
  fields.kind = slot.routing ? exec::CallKind::kDispatchRouted : exec::CallKind::kDispatch;
  fields.round_max_tokens = static_cast<std::uint32_t>(slot.round_max_tokens);
  fields.num_tokens = static_cast<std::uint32_t>(slot.plan().num_tokens);
  fields.num_payloads = static_cast<std::uint32_t>(slot.payloads.size());
  fields.digest = digest_of(slot.payloads, slot.has_ids, slot.has_weights);
  fields.member = setup_.member;
  fields.mask_digest = mask_digest_;
  fields.placement_version = placement_version_;
  fields.routing = slot.routing ? slot.routing->id : 0;
  return fields;
}

exec::FlagFields Exchange::combine_fields(const Slot& slot, exec::CallKind kind,
                                          std::int64_t hidden) const noexcept {
  exec::FlagFields fields;
  fields.epoch = slot.combine_epoch();
  fields.generation = slot.generation;
  fields.kind = kind;
  fields.num_payloads = static_cast<std::uint32_t>(hidden);
  fields.mask_digest = mask_digest_;
  fields.placement_version = placement_version_;
  return fields;
}

exec::CombineSendParams Exchange::combine_params(const Slot& slot,
                                                 const CombineInputs& inputs) const {
  exec::CombineSendParams params{};
  params.y = static_cast<const std::byte*>(inputs.y.data);
  params.y_dtype = inputs.y.dtype;
  params.combine_dtype = combine_dtype();
  params.hidden = inputs.y.shape[static_cast<std::size_t>(inputs.y.ndim - 1)];
  params.rank_counts = counts(slot);
  params.row_begin = slot.row_begin.data();
  params.y_begin = slot.layout_begin.data();
  params.num_y_rows = slot.num_kept_rows;
  if (is_per_expert(setup_.config.layout)) params.expert_rows = &slot.expert_rows;
  params.expert_begin = slot.expert_begin.data();
  params.carried = setup_.config.weighting == Weighting::kCarried;
  params.origin = setup_.config.weighting == Weighting::kOrigin;
  params.rows_per_token = workspace_.rows_per_token;
  params.wire = setup_.config.combine_wire;
  params.wire_scale = setup_.config.wire_scale;
  params.row_bytes = combine_row_bytes(params.hidden);
  params.rows = slot_base(slot) + slot.store.combine_offset;
  params.active = &active_;
  params.fields =
      combine_fields(slot, inputs.release ? exec::CallKind::kCombine : exec::CallKind::kCombineKeep,
                     params.hidden);
  return params;
}

exec::SumRowsParams Exchange::sum_params(const Slot& slot, const CombineInputs& inputs) const {
  exec::SumRowsParams params{};
  params.plan = &slot.plan();
  params.combine_dtype = combine_dtype();
  params.hidden = inputs.out.shape[1];
  params.rows_per_token = workspace_.rows_per_token;
  params.wire = setup_.config.combine_wire;
  params.wire_scale = setup_.config.wire_scale;
  params.row_bytes = combine_row_bytes(params.hidden);
  params.active = &active_;
  if (setup_.config.weighting == Weighting::kOrigin) {
    params.origin_map = &setup_.map;
    const bool given = inputs.topk_weights.has_value();
    params.topk_weights =
        given ? static_cast<const float*>(inputs.topk_weights.data) : slot.weights_of_tokens();
    params.weights_stride = given ? inputs.topk_weights.strides[0] : workspace_.top_k;
  }
  params.out = static_cast<std::byte*>(inputs.out.data);
  params.out_stride_bytes = inputs.out.row_stride_bytes();
  params.out_dtype = inputs.out.dtype;
  return params;
}

void Exchange::check_token_counts(const Slot& slot) {
  if (!slot.num_tokens_per_rank) return;
  const auto& known = *slot.num_tokens_per_rank;
  for (std::size_t rank = 0; rank < known.size(); ++rank) {
    if (!active_[rank] || known[rank] == slot.token_counts[rank]) continue;
    const std::string text = base::str("num_tokens_per_rank: expected ", slot.token_counts[rank],
                                       " tokens of rank ", rank, " in round ", slot.round, ", got ",
                                       known[rank], "; call reset() on every rank");
    abort(text);  // only this rank knows
    throw InvalidArgument(text);
  }
}

void Exchange::poison(std::byte* start, std::int64_t bytes, int value) const noexcept {
  if (bytes > 0) std::memset(start, value, static_cast<std::size_t>(bytes));
}

// Before the combine flag leaves: afterwards a peer may push the rows of a later round.
void Exchange::poison_received(const Slot& slot) const noexcept {
  if (!setup_.config.debug_poison) return;
  poison(slot_base(slot) + slot.store.payload_offset, slot.store.payload_bytes, 0xCD);
  poison(local_base(slot) + workspace_.local_payload_offset, workspace_.local_payload_bytes, 0xCD);
}

// When all dispatch flags are there: before that a peer may still pull the last round's rows. All
// bits set is a NaN in every floating type.
void Exchange::poison_results(const Slot& slot) const noexcept {
  if (!setup_.config.debug_poison) return;
  poison(slot_base(slot) + slot.store.combine_offset, slot.store.combine_bytes, 0xFF);
  poison(local_base(slot) + workspace_.local_combine_offset, workspace_.local_combine_bytes, 0xFF);
}

}  // namespace fanfold::exchange
