// SPDX-License-Identifier: Apache-2.0

// Views of a received round: what Received hands out.

#include <algorithm>

#include "base/byte_math.h"
#include "exchange/exchange.h"

namespace fanfold::exchange {
namespace {

/// The leading dimensions of the layout, then the tail of the payload's shape.
TensorView with_shape(TensorView view, const Extents& leading, const PayloadSpec& spec) {
  const auto num_leading = static_cast<std::size_t>(leading.ndim);
  view.dtype = spec.dtype;
  view.ndim = leading.ndim + spec.ndim - 1;
  std::copy_n(leading.shape.begin(), num_leading, view.shape.begin());
  std::int64_t stride = 1;
  for (int i = spec.ndim - 1; i > 0; --i) {
    const std::size_t at = num_leading + static_cast<std::size_t>(i) - 1;
    view.shape[at] = spec.shape[static_cast<std::size_t>(i)];
    view.strides[at] = stride;
    stride *= view.shape[at];
  }
  stride = spec.stride_bytes / size_of(spec.dtype);  // one row, guard included
  for (std::size_t i = num_leading; i-- > 0;) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

/// [leading..., tail...] of dense elements.
TensorView dense(const void* data, DType dtype, const Extents& leading,
                 std::initializer_list<std::int64_t> tail) {
  TensorView view(data, dtype, {});
  view.ndim = leading.ndim + static_cast<int>(tail.size());
  const auto end = std::copy_n(leading.shape.begin(), leading.ndim, view.shape.begin());
  std::copy(tail.begin(), tail.end(), end);
  std::int64_t stride = 1;
  for (auto i = static_cast<std::size_t>(view.ndim); i-- > 0;) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

}  // namespace

TensorView Exchange::on_device(TensorView view) const noexcept {
  if (!is_on_gpu() || !view.has_value()) return view;
  view.device = DeviceType::kGpu;
  view.device_index = setup_.config.device_index;
  return view;
}

std::int32_t* Exchange::counts(const Slot& slot) const noexcept {
  return reinterpret_cast<std::int32_t*>(local_base(slot) + workspace_.local_counts_offset);
}

const std::int32_t* Exchange::received_ids(const Slot& slot) const noexcept {
  const std::byte* base = is_gathered() ? local_base(slot) + workspace_.local_ids_offset
                                        : slot_base(slot) + slot.store.topk_ids_offset;
  return reinterpret_cast<const std::int32_t*>(base);
}

const float* Exchange::received_weights(const Slot& slot) const noexcept {
  const std::byte* base = is_gathered() ? local_base(slot) + workspace_.local_gate_offset
                                        : slot_base(slot) + slot.store.topk_weights_offset;
  return reinterpret_cast<const float*>(base);
}

const std::int32_t* Exchange::received_tokens(const Slot& slot) const noexcept {
  return reinterpret_cast<const std::int32_t*>(slot_base(slot) + slot.store.source_token_offset);
}

std::int32_t* Exchange::layout_ids(const Slot& slot) const noexcept {
  const bool copied = setup_.config.layout == Layout::kFlat && !stores_flat();
  std::byte* base = copied || is_gathered() ? local_base(slot) + workspace_.local_ids_offset
                                            : slot_base(slot) + slot.store.topk_ids_offset;
  return reinterpret_cast<std::int32_t*>(base);
}

float* Exchange::layout_weights(const Slot& slot) const noexcept {
  const bool copied = setup_.config.layout == Layout::kFlat && !stores_flat();
  std::byte* base = slot_base(slot) + slot.store.topk_weights_offset;
  if (copied || is_gathered()) base = local_base(slot) + workspace_.local_gate_offset;
  if (is_per_expert(setup_.config.layout))
    base = local_base(slot) + workspace_.local_weights_offset;
  return reinterpret_cast<float*>(base);
}

std::int64_t Exchange::store_rows(const Slot& slot) const noexcept {
  if (is_gathered()) return slot.num_gathered;
  if (!stores_flat()) return num_ranks() * slot.round_max_tokens;
  return std::min(slot.row_begin.back(), slot.store.num_rows);
}

// Views must not point into a Routing: it is shared, immutable, and may die before they do.
void Exchange::restore_indices(const Slot& slot) {
  const Routing::Data& data = *slot.routing;
  std::copy(data.topk_ids.begin(), data.topk_ids.end(),
            const_cast<std::int32_t*>(received_ids(slot)));
  std::copy(data.topk_weights.begin(), data.topk_weights.end(),
            const_cast<float*>(received_weights(slot)));
  std::copy(data.source_token.begin(), data.source_token.end(),
            const_cast<std::int32_t*>(received_tokens(slot)));
}

Slot* Exchange::slot_of_ids(const TensorView& ids) noexcept {
  const auto* data = static_cast<const std::byte*>(ids.data);
  for (Slot& slot : slots_) {
    if (slot.state != SlotState::kReceived || !slot.has_ids) continue;
    if (slot.frozen || slot.ids_changed) continue;
    const auto* first = reinterpret_cast<const std::byte*>(received_ids(slot));
    if (data >= first && data < first + store_rows(slot) * workspace_.top_k * 4) return &slot;
  }
  return nullptr;
}

void Exchange::sanitize(const SanitizeCall& call) {
  if (Slot* const slot = slot_of_ids(call.out)) {
    count_experts(*slot);
    slot->frozen = copy_routing(*slot);
  }
  backend_->sanitize({call.ids, static_cast<const std::int32_t*>(call.counts.data), call.out,
                      call.invalid_expert_id, call.policy, &setup_.map, rank_});
}

HostCounts Exchange::host_counts(Slot& slot) {
  count_experts(slot);
  const std::int32_t* ranks = counts(slot);
  const std::int32_t* experts = ranks + num_ranks();
  HostCounts host;
  host.rank_counts.assign(ranks, ranks + num_ranks());
  host.expert_counts.assign(experts, experts + num_local_experts());
  host.num_rows = num_rows(slot);
  return host;
}

std::int64_t Exchange::num_rows(const Slot& slot) const noexcept {
  if (is_gathered()) return slot.num_gathered;
  if (setup_.config.layout == Layout::kFlatByExpert) return slot.num_layout_rows;
  const std::int32_t* rows = counts(slot);
  std::int64_t total = 0;
  for (int source = 0; source < num_ranks(); ++source) total += rows[source];
  return total;
}

bool Exchange::combines_in_place() const noexcept {
  return setup_.config.layout == Layout::kRankMajor ||
         (setup_.config.layout == Layout::kFlat && stores_flat());
}

/// Leading dimensions of the layout's tensors.
Extents Exchange::leading(const Slot& slot) const noexcept {
  const std::int64_t m = slot.round_max_tokens;
  switch (setup_.config.layout) {
    case Layout::kRankMajor:
      return {2, {num_ranks(), m}};
    case Layout::kExpertMajor:
      return {2, {num_local_experts(), num_ranks() * m}};
    case Layout::kGathered:
      return {1, {slot.num_gathered, 0}};
    case Layout::kFlat:
    case Layout::kFlatByExpert:
      return {1, {setup_.config.max_recv_rows.value_or(slot.num_layout_rows), 0}};
  }
  return {};
}

TensorView Exchange::payload_view(const Slot& slot, const PayloadSpec& spec) const {
  TensorView view;
  if (is_gathered()) {
    view.data = block_base(slot) + spec.gathered_offset;
  } else if (combines_in_place() || stores_by_expert()) {
    view.data = slot_base(slot) + spec.region_offset;
  } else {
    view.data = local_base(slot) + spec.local_offset;
  }
  return on_device(with_shape(view, leading(slot), spec));
}

std::vector<TensorView> Exchange::payload_views(const Slot& slot) const {
  std::vector<TensorView> views;
  views.reserve(slot.payloads.size());
  for (const PayloadSpec& spec : slot.payloads) views.push_back(payload_view(slot, spec));
  if (slot.has_scales) views.pop_back();
  return views;
}

TensorView Exchange::scales_view(const Slot& slot) const {
  return slot.has_scales ? payload_view(slot, slot.payloads.back()) : TensorView();
}

TensorView Exchange::rank_counts_view(const Slot& slot) const {
  return on_device(TensorView(counts(slot), DType::kInt32, {num_ranks()}));
}

void Exchange::count_experts(Slot& slot) {
  if (slot.has_expert_counts) return;
  std::int32_t* expert_counts = counts(slot) + num_ranks();
  if (!slot.has_ids) {
    // Every token goes to every rank: the count of each expert is unknown, not zero.
    std::fill_n(expert_counts, num_local_experts(), -1);
  } else if (is_gathered()) {
    const plan::SourceRows all{received_ids(slot), nullptr, slot.num_gathered};
    plan::count_expert_rows({all}, setup_.map, rank_, workspace_.top_k, expert_counts);
  } else if (!is_per_expert(setup_.config.layout)) {
    plan::count_expert_rows(source_rows(slot), setup_.map, rank_, workspace_.top_k, expert_counts);
  }
  slot.has_expert_counts = true;
}

TensorView Exchange::expert_counts_view(Slot& slot) {
  count_experts(slot);
  return on_device(TensorView(counts(slot) + num_ranks(), DType::kInt32, {num_local_experts()}));
}

void Exchange::fill_offsets(const Slot& slot) const {
  const std::int32_t* expert_counts = counts(slot) + num_ranks();
  std::int32_t* offsets = counts(slot) + num_ranks() + workspace_.max_local_experts;
  if (setup_.config.layout == Layout::kFlatByExpert) {
    std::transform(slot.expert_begin.begin(), slot.expert_begin.end(), offsets,
                   [&](std::int64_t begin) {
                     return static_cast<std::int32_t>(std::min(begin, slot.num_kept_rows));
                   });
    return;
  }
  offsets[0] = 0;
  for (int expert = 0; expert < num_local_experts(); ++expert) {
    offsets[expert + 1] = offsets[expert] + expert_counts[expert];
  }
}

TensorView Exchange::offsets_view(Slot& slot) {
  count_experts(slot);
  fill_offsets(slot);
  const std::int32_t* offsets = counts(slot) + num_ranks() + workspace_.max_local_experts;
  return on_device(TensorView(offsets, DType::kInt32, {num_local_experts() + 1}));
}

std::int32_t* Exchange::total_rows(const Slot& slot) const noexcept {
  return counts(slot) + num_ranks() + std::int64_t{2} * workspace_.max_local_experts + 1;
}

void Exchange::fill_num_rows(const Slot& slot) const {
  *total_rows(slot) = static_cast<std::int32_t>(num_rows(slot));
}

TensorView Exchange::num_rows_view(const Slot& slot) const {
  fill_num_rows(slot);
  return on_device(TensorView(total_rows(slot), DType::kInt32, {1}));
}

TensorView Exchange::topk_ids_view(const Slot& slot) const {
  if (!slot.has_ids || is_per_expert(setup_.config.layout)) return {};
  return on_device(dense(layout_ids(slot), DType::kInt32, leading(slot), {workspace_.top_k}));
}

TensorView Exchange::topk_weights_view(const Slot& slot) const {
  if (!slot.has_weights) return {};
  if (is_per_expert(setup_.config.layout)) {
    return on_device(dense(layout_weights(slot), DType::kFloat32, leading(slot), {}));
  }
  return on_device(dense(layout_weights(slot), DType::kFloat32, leading(slot), {workspace_.top_k}));
}

void Exchange::fill_source_rows(Slot& slot) {
  if (slot.has_source_rows) return;
  slot.has_source_rows = true;
  auto* ranks =
      reinterpret_cast<std::int32_t*>(local_base(slot) + workspace_.local_source_rank_offset);
  auto* tokens =
      reinterpret_cast<std::int32_t*>(local_base(slot) + workspace_.local_source_token_offset);
  if (is_gathered()) {
    std::int64_t row = 0;
    for (int source = 0; source < num_ranks(); ++source) {
      for (std::int32_t token = 0; token < slot.token_counts[static_cast<std::size_t>(source)];
           ++token, ++row) {
        ranks[row] = source;
        tokens[row] = token;
      }
    }
    return;
  }
  const bool by_expert = is_per_expert(setup_.config.layout);
  const Extents extents = leading(slot);
  const std::int64_t total =
      extents.ndim == 1 ? extents.shape[0] : extents.shape[0] * extents.shape[1];
  std::fill_n(ranks, total, -1);
  std::fill_n(tokens, total, -1);
  const std::int32_t* rows = counts(slot);
  const std::int32_t* source_tokens = received_tokens(slot);
  std::size_t received = 0;
  for (int source = 0; source < num_ranks(); ++source) {
    const auto index = static_cast<std::size_t>(source);
    for (std::int64_t i = 0; i < rows[source]; ++i, ++received) {
      const std::int64_t from = slot.row_begin[index] + i;
      if (!by_expert) {
        const std::int64_t at = slot.layout_begin[index] + i;
        if (at >= slot.num_kept_rows) continue;
        ranks[at] = source;
        tokens[at] = source_tokens[from];
        continue;
      }
      for (std::int64_t pair = slot.expert_rows.begin[received];
           pair < slot.expert_rows.begin[received + 1]; ++pair) {
        const plan::ExpertRow& row = slot.expert_rows.rows[static_cast<std::size_t>(pair)];
        const std::int64_t at =
            slot.expert_begin[static_cast<std::size_t>(row.local_expert)] + row.position;
        if (at >= slot.num_kept_rows) continue;
        ranks[at] = source;
        tokens[at] = source_tokens[from];
      }
    }
  }
}

TensorView Exchange::source_rank_view(Slot& slot) {
  fill_source_rows(slot);
  return on_device(dense(local_base(slot) + workspace_.local_source_rank_offset, DType::kInt32,
                         leading(slot), {}));
}

TensorView Exchange::source_token_view(Slot& slot) {
  fill_source_rows(slot);
  return on_device(dense(local_base(slot) + workspace_.local_source_token_offset, DType::kInt32,
                         leading(slot), {}));
}

TensorView Exchange::combine_view(const Slot& slot, std::int64_t hidden, DType dtype) const {
  std::byte* data = local_base(slot) + workspace_.local_combine_offset;
  // Gathered results of another type are rounded before peers read them.
  if (is_gathered() && dtype == combine_dtype()) {
    data = block_base(slot) + workspace_.block_combine_offset;
  } else if (is_gathered() || combines_in_place() || stores_by_expert()) {
    data = slot_base(slot) + slot.store.combine_offset;
  }
  return on_device(dense(data, dtype, leading(slot), {hidden}));
}

std::shared_ptr<Routing::Data> Exchange::start_routing(const Slot& slot) const {
  auto data = std::make_shared<Routing::Data>();
  data->id = base::mix_digest(setup_.identity, slot.epoch);
  data->config_digest = setup_.config_digest;
  data->rank = rank_;
  data->device_index = setup_.config.device_index;
  data->mask_digest = mask_digest_;
  data->round_max_tokens = slot.round_max_tokens;
  data->has_ids = slot.has_ids;
  data->has_weights = slot.has_weights;
  data->invalid_expert_id = slot.invalid_expert_id;
  data->placement_version = placement_version_;
  data->generation = slot.generation;
  return data;
}

std::shared_ptr<const Routing::Data> Exchange::copy_routing(Slot& slot) {
  if (slot.routing) return slot.routing;
  if (slot.frozen) return slot.frozen;
  std::shared_ptr<Routing::Data> data = start_routing(slot);
  data->plan = slot.own_plan;
  data->token_weights = slot.token_weights;
  data->rank_counts.assign(counts(slot), counts(slot) + num_ranks());
  data->token_counts = slot.token_counts;
  data->rows_matrix = slot.rows_matrix;
  data->gathered_rows = slot.gathered_rows;
  if (stores_by_expert()) {
    data->pairs = slot.own_pairs;
    data->pairs_matrix = slot.pairs_matrix;
  }
  const std::int64_t rows = store_rows(slot);
  if (slot.has_ids) {
    data->topk_ids.assign(received_ids(slot), received_ids(slot) + rows * workspace_.top_k);
  }
  if (slot.has_weights) {
    data->topk_weights.assign(received_weights(slot),
                              received_weights(slot) + rows * workspace_.top_k);
  }
  if (!is_gathered()) {
    data->source_token.assign(received_tokens(slot), received_tokens(slot) + rows);
  }
  return data;
}

}  // namespace fanfold::exchange
