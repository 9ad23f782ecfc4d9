// SPDX-License-Identifier: Apache-2.0
#include "exchange/exchange.h"

#include <algorithm>
#include <cstring>

#include "base/format.h"
#include "base/mapping.h"
#include "comm/channel.h"
#include "comm/communicator_impl.h"
#include "comm/control.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

constexpr std::int64_t kMinLocalBytes = 4096;

/// Offsets of consecutive payload regions of `num_rows` rows each, from `offset`.
template <class Place>
void lay_out(std::vector<PayloadSpec>& payloads, std::int64_t offset, std::int64_t num_rows,
             Place&& place) {
  for (PayloadSpec& spec : payloads) {
    place(spec, offset);
    offset += plan::payload_region_bytes(num_rows, spec.stride_bytes);
  }
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
                              config.strategy == Strategy::kBroadcast
                                  ? comm::Channel::window_bytes(num_ranks)
                                  : comm::Control::bytes(num_ranks));
}

Exchange::Exchange(Setup setup)
    : setup_(std::move(setup)),
      rank_(setup_.communicator->group().rank()),
      hook_(setup_.config.test_knobs, rank_) {
  const int num_ranks = setup_.map.num_ranks;
  workspace_ = workspace_of(setup_.config, num_ranks, setup_.map.max_local_experts);
  local_ = base::map_private(std::max(workspace_.local_bytes, kMinLocalBytes));
  staging_.resize(static_cast<std::size_t>(workspace_.max_tokens_per_rank * workspace_.top_k * 4));
  slots_.resize(static_cast<std::size_t>(setup_.config.max_in_flight));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].index = static_cast<int>(i);
    slots_[i].token_counts.resize(static_cast<std::size_t>(num_ranks));
    plan::reserve_send_plan(slots_[i].own_plan, setup_.map, workspace_.top_k,
                            workspace_.max_tokens_per_rank);
  }
  Exchange::set_active(std::vector<bool>(static_cast<std::size_t>(num_ranks), true));
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

std::byte* Exchange::local_base(const Slot& slot) const noexcept {
  return local_.get() + workspace_.local_slot_offset + slot.index * workspace_.local_slot_stride;
}

bool Exchange::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  return at >= local_.get() && at < local_.get() + workspace_.local_bytes;
}

void Exchange::prepare_dispatch(Slot& slot, const DispatchCall& call) {
  const DispatchInputs& in = *call.inputs;
  const bool routed = in.routing.has_value();
  if (!routed && in.topk_ids.has_value()) {
    const bool drop = setup_.config.check_ids == CheckIds::kDrop;
    const auto bad = plan::build_send_plan(in.topk_ids, call.num_tokens, setup_.map, active_, drop,
                                           slot.own_plan);
    if (bad) {
      throw InvalidArgument(base::str("topk_ids: expected ids below ", setup_.map.num_experts,
                                      " (num_experts), got ", bad->id, " at row ", bad->row,
                                      ", column ", bad->column));
    }
  } else if (!routed) {
    plan::build_full_plan(call.num_tokens, setup_.map, active_, slot.own_plan);
  }
  slot.routing = routed ? in.routing.data() : nullptr;
  slot.has_ids = routed ? slot.routing->has_ids : in.topk_ids.has_value();
  slot.has_weights = routed ? slot.routing->has_weights : in.topk_weights.has_value();
  slot.invalid_expert_id = routed ? slot.routing->invalid_expert_id : call.invalid_expert_id;
  slot.round_max_tokens = call.round_max_tokens;
  slot.num_combines = 0;
  slot.frozen = nullptr;
  slot.has_expert_counts = false;
  slot.has_source_rows = false;
  if (!routed && slot.has_weights && setup_.config.weighting == Weighting::kOrigin) {
    slot.token_weights.resize(static_cast<std::size_t>(call.num_tokens * workspace_.top_k));
    const auto* weights = static_cast<const float*>(in.topk_weights.data);
    for (std::int64_t token = 0; token < call.num_tokens; ++token) {
      std::copy_n(weights + token * in.topk_weights.strides[0], workspace_.top_k,
                  slot.token_weights.data() + token * workspace_.top_k);
    }
  }

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
  }
  const std::int64_t sources = workspace_.num_ranks * workspace_.max_tokens_per_rank;
  const bool by_expert = setup_.config.layout == Layout::kExpertMajor;
  const std::int64_t local_rows = by_expert ? workspace_.max_local_experts * sources : sources;
  lay_out(slot.payloads, workspace_.payload_offset, sources,
          [](PayloadSpec& spec, std::int64_t at) { spec.region_offset = at; });
  lay_out(slot.payloads, workspace_.local_payload_offset, local_rows,
          [](PayloadSpec& spec, std::int64_t at) { spec.local_offset = at; });
  const std::int64_t gathered =
      by_expert ? slot.payloads.back().local_offset +
                      plan::payload_region_bytes(local_rows, slot.payloads.back().stride_bytes)
                : workspace_.local_payload_offset;
  lay_out(slot.payloads, gathered, sources,
          [](PayloadSpec& spec, std::int64_t at) { spec.gathered_offset = at; });
  for (std::size_t i = 0; i < in.payloads.size(); ++i) {
    const PayloadSpec& spec = slot.payloads[i];
    slot.payload_rows[i] = exec::PayloadRows{static_cast<const std::byte*>(in.payloads[i].data),
                                             in.payloads[i].row_stride_bytes(), spec.row_bytes,
                                             spec.region_offset, spec.stride_bytes};
  }
}

exec::RowArrays Exchange::row_arrays(const Slot& slot) const noexcept {
  return exec::RowArrays{workspace_.source_token_offset, workspace_.topk_ids_offset,
                         workspace_.topk_weights_offset, slot.round_max_tokens, workspace_.top_k};
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
  fields.mask_digest = mask_digest_;
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
  return fields;
}

std::vector<plan::SourceRows> Exchange::source_rows(const Slot& slot) const {
  std::vector<plan::SourceRows> sources;
  const std::int32_t* rows = counts(slot);
  const std::int64_t step = slot.round_max_tokens * workspace_.top_k;
  for (int source = 0; source < num_ranks(); ++source) {
    const float* weights = slot.has_weights ? received_weights(slot) + source * step : nullptr;
    sources.push_back({received_ids(slot) + source * step, weights, rows[source]});
  }
  return sources;
}

void Exchange::expand(Slot& slot) {
  std::int32_t* expert_counts = counts(slot) + num_ranks();
  plan::build_expert_rows(source_rows(slot), setup_.map, rank_, workspace_.top_k, expert_counts,
                          slot.expert_rows);
  slot.has_expert_counts = true;
  exec::ExpandRowsParams params;
  params.expert_rows = &slot.expert_rows;
  params.rank_counts = counts(slot);
  params.round_max_tokens = slot.round_max_tokens;
  params.rows_per_expert = num_ranks() * slot.round_max_tokens;
  for (const PayloadSpec& spec : slot.payloads) {
    params.payloads.push_back({slot_base(slot) + spec.region_offset,
                               local_base(slot) + spec.local_offset, spec.row_bytes,
                               spec.stride_bytes});
  }
  params.weights =
      slot.has_weights
          ? reinterpret_cast<float*>(local_base(slot) + workspace_.local_weights_offset)
          : nullptr;
  backend_->expand_rows(params);
}

exec::CombineSendParams Exchange::combine_params(const Slot& slot,
                                                 const CombineInputs& inputs) const {
  exec::CombineSendParams params{};
  params.y = static_cast<const std::byte*>(inputs.y.data);
  params.y_dtype = inputs.y.dtype;
  params.combine_dtype = combine_dtype();
  params.hidden = inputs.y.shape[static_cast<std::size_t>(inputs.y.ndim - 1)];
  params.rank_counts = counts(slot);
  params.round_max_tokens = slot.round_max_tokens;
  if (setup_.config.layout == Layout::kExpertMajor) params.expert_rows = &slot.expert_rows;
  params.rows_per_expert = num_ranks() * slot.round_max_tokens;
  params.carried = setup_.config.weighting == Weighting::kCarried;
  params.origin = setup_.config.weighting == Weighting::kOrigin;
  params.rows_per_token = workspace_.rows_per_token;
  params.rows = slot_base(slot) + workspace_.combine_offset;
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

void Exchange::poison(std::byte* start, std::int64_t bytes, int value) const noexcept {
  if (bytes > 0) std::memset(start, value, static_cast<std::size_t>(bytes));
}

// Before the combine flag leaves: afterwards a peer may push the rows of a later round.
void Exchange::poison_received(const Slot& slot) const noexcept {
  if (!setup_.config.debug_poison) return;
  poison(slot_base(slot) + workspace_.payload_offset, workspace_.payload_bytes, 0xCD);
  poison(local_base(slot) + workspace_.local_payload_offset, workspace_.local_payload_bytes, 0xCD);
}

// When all dispatch flags are there: before that a peer may still pull the last round's rows. All
// bits set is a NaN in every floating type.
void Exchange::poison_results(const Slot& slot) const noexcept {
  if (!setup_.config.debug_poison) return;
  poison(slot_base(slot) + workspace_.combine_offset, workspace_.combine_bytes, 0xFF);
  poison(local_base(slot) + workspace_.local_combine_offset, workspace_.local_combine_bytes, 0xFF);
}

}  // namespace fanfold::exchange
