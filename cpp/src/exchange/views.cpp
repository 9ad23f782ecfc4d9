// SPDX-License-Identifier: Apache-2.0

// Views of a received round: what Received hands out.

#include <algorithm>

#include "base/byte_math.h"
#include "exchange/exchange.h"

namespace fanfold::exchange {
namespace {

TensorView with_shape(TensorView view, std::initializer_list<std::int64_t> leading,
                      const PayloadSpec& spec) {
  // The tail of the payload's shape after the leading dimensions of the layout.
  view.dtype = spec.dtype;
  view.ndim = static_cast<int>(leading.size()) + spec.ndim - 1;
  std::size_t dim = 0;
  for (const std::int64_t extent : leading) view.shape[dim++] = extent;
  std::int64_t stride = 1;
  for (int i = spec.ndim - 1; i > 0; --i) {
    const std::size_t at = leading.size() + static_cast<std::size_t>(i) - 1;
    view.shape[at] = spec.shape[static_cast<std::size_t>(i)];
    view.strides[at] = stride;
    stride *= view.shape[at];
  }
  stride = spec.stride_bytes / size_of(spec.dtype);  // one row, guard included
  for (std::size_t i = leading.size(); i-- > 0;) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

}  // namespace

std::int32_t* Exchange::counts(const Slot& slot) const noexcept {
  return reinterpret_cast<std::int32_t*>(local_base(slot) + workspace_.local_counts_offset);
}

const std::int32_t* Exchange::received_ids(const Slot& slot) const noexcept {
  const std::byte* base = setup_.config.layout == Layout::kGathered
                              ? local_base(slot) + workspace_.local_ids_offset
                              : slot_base(slot) + workspace_.topk_ids_offset;
  return reinterpret_cast<const std::int32_t*>(base);
}

const float* Exchange::received_weights(const Slot& slot) const noexcept {
  const std::byte* base = setup_.config.layout == Layout::kGathered
                              ? local_base(slot) + workspace_.local_gate_offset
                              : slot_base(slot) + workspace_.topk_weights_offset;
  return reinterpret_cast<const float*>(base);
}

const std::int32_t* Exchange::received_tokens(const Slot& slot) const noexcept {
  return reinterpret_cast<const std::int32_t*>(slot_base(slot) + workspace_.source_token_offset);
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

void Exchange::freeze_indices(const void* ids) {
  for (Slot& slot : slots_) {
    if (slot.state != SlotState::kReceived || !slot.has_ids || slot.frozen) continue;
    if (ids != received_ids(slot)) continue;
    count_experts(slot);
    slot.frozen = copy_routing(slot);
  }
}

std::int64_t Exchange::num_rows(const Slot& slot) const noexcept {
  if (setup_.config.layout == Layout::kGathered) return slot.num_gathered;
  const std::int32_t* rows = counts(slot);
  std::int64_t total = 0;
  for (int source = 0; source < num_ranks(); ++source) total += rows[source];
  return total;
}

std::vector<TensorView> Exchange::payload_views(const Slot& slot) const {
  std::vector<TensorView> views;
  views.reserve(slot.payloads.size());
  const std::int64_t m = slot.round_max_tokens;
  for (const PayloadSpec& spec : slot.payloads) {
    TensorView view;
    switch (setup_.config.layout) {
      case Layout::kRankMajor:
        view.data = slot_base(slot) + spec.region_offset;
        views.push_back(with_shape(view, {num_ranks(), m}, spec));
        break;
      case Layout::kExpertMajor:
        view.data = local_base(slot) + spec.local_offset;
        views.push_back(with_shape(view, {num_local_experts(), num_ranks() * m}, spec));
        break;
      case Layout::kGathered:
        view.data = local_base(slot) + spec.gathered_offset;
        views.push_back(with_shape(view, {slot.num_gathered}, spec));
        break;
    }
  }
  return views;
}

TensorView Exchange::rank_counts_view(const Slot& slot) const {
  return TensorView(counts(slot), DType::kInt32, {num_ranks()});
}

void Exchange::count_experts(Slot& slot) {
  if (slot.has_expert_counts) return;
  std::int32_t* expert_counts = counts(slot) + num_ranks();
  if (!slot.has_ids) {
    // Every token goes to every rank: the count of each expert is unknown, not zero.
    std::fill_n(expert_counts, num_local_experts(), -1);
  } else if (setup_.config.layout == Layout::kGathered) {
    const plan::SourceRows all{received_ids(slot), nullptr, slot.num_gathered};
    plan::count_expert_rows({all}, setup_.map, rank_, workspace_.top_k, expert_counts);
  } else if (setup_.config.layout == Layout::kRankMajor) {
    plan::count_expert_rows(source_rows(slot), setup_.map, rank_, workspace_.top_k, expert_counts);
  }
  slot.has_expert_counts = true;
}

TensorView Exchange::expert_counts_view(Slot& slot) {
  count_experts(slot);
  return TensorView(counts(slot) + num_ranks(), DType::kInt32, {num_local_experts()});
}

TensorView Exchange::offsets_view(Slot& slot) {
  count_experts(slot);
  const std::int32_t* expert_counts = counts(slot) + num_ranks();
  std::int32_t* offsets = counts(slot) + num_ranks() + workspace_.max_local_experts;
  offsets[0] = 0;
  for (int expert = 0; expert < num_local_experts(); ++expert) {
    offsets[expert + 1] = offsets[expert] + expert_counts[expert];
  }
  return TensorView(offsets, DType::kInt32, {num_local_experts() + 1});
}

TensorView Exchange::num_rows_view(const Slot& slot) const {
  std::int32_t* total =
      counts(slot) + num_ranks() + std::int64_t{2} * workspace_.max_local_experts + 1;
  *total = static_cast<std::int32_t>(num_rows(slot));
  return TensorView(total, DType::kInt32, {1});
}

TensorView Exchange::topk_ids_view(const Slot& slot) const {
  const std::int64_t k = workspace_.top_k;
  if (!slot.has_ids || setup_.config.layout == Layout::kExpertMajor) return {};
  const std::int32_t* ids = received_ids(slot);
  if (setup_.config.layout == Layout::kGathered) {
    return TensorView(static_cast<const void*>(ids), DType::kInt32, {slot.num_gathered, k});
  }
  return TensorView(static_cast<const void*>(ids), DType::kInt32,
                    {num_ranks(), slot.round_max_tokens, k});
}

TensorView Exchange::topk_weights_view(const Slot& slot) const {
  const std::int64_t k = workspace_.top_k;
  if (!slot.has_weights) return {};
  if (setup_.config.layout == Layout::kExpertMajor) {
    return TensorView(static_cast<void*>(local_base(slot) + workspace_.local_weights_offset),
                      DType::kFloat32, {num_local_experts(), num_ranks() * slot.round_max_tokens});
  }
  const void* weights = received_weights(slot);
  if (setup_.config.layout == Layout::kGathered) {
    return TensorView(weights, DType::kFloat32, {slot.num_gathered, k});
  }
  return TensorView(weights, DType::kFloat32, {num_ranks(), slot.round_max_tokens, k});
}

void Exchange::fill_source_rows(Slot& slot) {
  if (slot.has_source_rows) return;
  slot.has_source_rows = true;
  auto* ranks =
      reinterpret_cast<std::int32_t*>(local_base(slot) + workspace_.local_source_rank_offset);
  auto* tokens =
      reinterpret_cast<std::int32_t*>(local_base(slot) + workspace_.local_source_token_offset);
  const std::int64_t m = slot.round_max_tokens;
  if (setup_.config.layout == Layout::kGathered) {
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
  const bool by_expert = setup_.config.layout == Layout::kExpertMajor;
  const std::int64_t per_expert = num_ranks() * m;
  const std::int64_t total = by_expert ? num_local_experts() * per_expert : per_expert;
  std::fill_n(ranks, total, -1);
  std::fill_n(tokens, total, -1);
  const std::int32_t* rows = counts(slot);
  const std::int32_t* source_tokens = received_tokens(slot);
  std::size_t received = 0;
  for (int source = 0; source < num_ranks(); ++source) {
    for (std::int64_t i = 0; i < rows[source]; ++i, ++received) {
      const std::int64_t from = source * m + i;
      if (!by_expert) {
        ranks[from] = source;
        tokens[from] = source_tokens[from];
        continue;
      }
      for (std::int64_t pair = slot.expert_rows.begin[received];
           pair < slot.expert_rows.begin[received + 1]; ++pair) {
        const plan::ExpertRow& row = slot.expert_rows.rows[static_cast<std::size_t>(pair)];
        const std::int64_t at = row.local_expert * per_expert + row.position;
        ranks[at] = source;
        tokens[at] = source_tokens[from];
      }
    }
  }
}

namespace {

TensorView per_row(std::byte* data, Layout layout, std::int64_t num_local, std::int64_t num_ranks,
                   std::int64_t m, std::int64_t num_gathered) {
  switch (layout) {
    case Layout::kExpertMajor:
      return TensorView(static_cast<void*>(data), DType::kInt32, {num_local, num_ranks * m});
    case Layout::kGathered:
      return TensorView(static_cast<void*>(data), DType::kInt32, {num_gathered});
    case Layout::kRankMajor:
      return TensorView(static_cast<void*>(data), DType::kInt32, {num_ranks, m});
  }
  return {};
}

}  // namespace

TensorView Exchange::source_rank_view(Slot& slot) {
  fill_source_rows(slot);
  return per_row(local_base(slot) + workspace_.local_source_rank_offset, setup_.config.layout,
                 num_local_experts(), num_ranks(), slot.round_max_tokens, slot.num_gathered);
}

TensorView Exchange::source_token_view(Slot& slot) {
  fill_source_rows(slot);
  return per_row(local_base(slot) + workspace_.local_source_token_offset, setup_.config.layout,
                 num_local_experts(), num_ranks(), slot.round_max_tokens, slot.num_gathered);
}

TensorView Exchange::combine_view(const Slot& slot, std::int64_t hidden, DType dtype) const {
  std::byte* local = local_base(slot) + workspace_.local_combine_offset;
  const std::int64_t m = slot.round_max_tokens;
  switch (setup_.config.layout) {
    case Layout::kRankMajor:
      return TensorView(static_cast<void*>(slot_base(slot) + workspace_.combine_offset), dtype,
                        {num_ranks(), m, hidden});
    case Layout::kExpertMajor:
      return TensorView(static_cast<void*>(local), dtype,
                        {num_local_experts(), num_ranks() * m, hidden});
    case Layout::kGathered:
      return TensorView(static_cast<void*>(local), dtype, {slot.num_gathered, hidden});
  }
  return {};
}

std::shared_ptr<const Routing::Data> Exchange::copy_routing(const Slot& slot) const {
  if (slot.routing) return slot.routing;
  if (slot.frozen) return slot.frozen;
  auto data = std::make_shared<Routing::Data>();
  data->id = base::mix_digest(setup_.identity, slot.epoch);
  data->config_digest = setup_.config_digest;
  data->mask_digest = mask_digest_;
  data->round_max_tokens = slot.round_max_tokens;
  data->has_ids = slot.has_ids;
  data->has_weights = slot.has_weights;
  data->invalid_expert_id = slot.invalid_expert_id;
  data->plan = slot.own_plan;
  data->token_weights = slot.token_weights;
  data->rank_counts.assign(counts(slot), counts(slot) + num_ranks());
  data->token_counts = slot.token_counts;
  data->rows_matrix = slot.rows_matrix;
  data->gathered_rows = slot.gathered_rows;
  const bool gathered = setup_.config.layout == Layout::kGathered;
  const std::int64_t rows = gathered ? slot.num_gathered : num_ranks() * slot.round_max_tokens;
  if (slot.has_ids) {
    data->topk_ids.assign(received_ids(slot), received_ids(slot) + rows * workspace_.top_k);
  }
  if (slot.has_weights) {
    data->topk_weights.assign(received_weights(slot),
                              received_weights(slot) + rows * workspace_.top_k);
  }
  if (!gathered) {
    data->source_token.assign(received_tokens(slot), received_tokens(slot) + rows);
  }
  return data;
}

}  // namespace fanfold::exchange
