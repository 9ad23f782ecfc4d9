// SPDX-License-Identifier: Apache-2.0

// From received rows, which strategies keep by source (but for rows that their senders place by
// expert), to the layout. Shared by all strategies.

#include <algorithm>

#include "base/byte_math.h"
#include "exchange/exchange.h"

namespace fanfold::exchange {

std::vector<plan::SourceRows> Exchange::source_rows(const Slot& slot) const {
  std::vector<plan::SourceRows> sources;
  const std::int32_t* rows = counts(slot);
  for (std::size_t source = 0; source < static_cast<std::size_t>(num_ranks()); ++source) {
    const std::int64_t first = slot.row_begin[source] * workspace_.top_k;
    const float* weights = slot.has_weights ? received_weights(slot) + first : nullptr;
    std::int64_t num_rows = rows[source];
    if (setup_.config.layout == Layout::kFlat) num_rows = kept_rows(slot, source);
    sources.push_back({received_ids(slot) + first, weights, num_rows});
  }
  return sources;
}

/// flat: rows of `source` that the layout has room for.
std::int64_t Exchange::kept_rows(const Slot& slot, std::size_t source) const noexcept {
  return std::clamp(slot.num_kept_rows - slot.layout_begin[source], std::int64_t{0},
                    std::int64_t{counts(slot)[source]});
}

void Exchange::place_rows(Slot& slot) {
  const auto ranks = static_cast<std::size_t>(num_ranks());
  const std::int32_t* rows = counts(slot);
  slot.row_begin.resize(ranks + 1);
  slot.layout_begin.resize(ranks + 1);
  std::int64_t total = 0;
  for (std::size_t source = 0; source <= ranks; ++source) {
    const std::int64_t padded = static_cast<std::int64_t>(source) * slot.round_max_tokens;
    slot.row_begin[source] = stores_flat() ? total : padded;
    slot.layout_begin[source] = setup_.config.layout == Layout::kFlat ? total : padded;
    if (source < ranks) total += rows[source];
  }
}

void Exchange::place_experts(Slot& slot) {
  const bool is_flat = setup_.config.layout == Layout::kFlatByExpert;
  const std::int32_t* expert_counts = counts(slot) + num_ranks();
  const std::int64_t padded = num_ranks() * slot.round_max_tokens;
  slot.expert_begin.clear();
  std::int64_t begin = 0;
  for (int expert = 0; expert < num_local_experts(); ++expert) {
    slot.expert_begin.push_back(begin);
    begin +=
        is_flat ? base::align_up(expert_counts[expert], setup_.config.expert_alignment) : padded;
  }
  slot.expert_begin.push_back(begin);
}

void Exchange::arrange(Slot& slot) {
  const Layout layout = setup_.config.layout;
  const auto ranks = static_cast<std::size_t>(num_ranks());
  if (layout == Layout::kGathered) {
    slot.num_layout_rows = slot.num_gathered;
    slot.num_kept_rows = slot.num_gathered;
    return;
  }
  if (is_per_expert(layout)) {
    std::int32_t* expert_counts = counts(slot) + num_ranks();
    plan::build_expert_rows(source_rows(slot), setup_.map, rank_, workspace_.top_k, expert_counts,
                            slot.expert_rows);
    slot.has_expert_counts = true;
    place_experts(slot);
    slot.num_layout_rows = slot.expert_begin.back();
  } else {
    slot.num_layout_rows = slot.layout_begin[ranks];
  }
  slot.num_kept_rows = slot.num_layout_rows;
  if (setup_.config.max_recv_rows) {
    slot.num_kept_rows = std::min(slot.num_layout_rows, *setup_.config.max_recv_rows);
    num_dropped_rows_ += slot.num_layout_rows - slot.num_kept_rows;
  }
  if (is_per_expert(layout)) {
    expand(slot);
  } else if (layout == Layout::kFlat) {
    move_to_layout(slot);
  }
}

void Exchange::expand(Slot& slot) {
  exec::ExpandRowsParams params;
  params.expert_rows = &slot.expert_rows;
  params.rank_counts = counts(slot);
  params.row_begin = slot.row_begin.data();
  params.expert_begin = slot.expert_begin.data();
  const bool has_gaps = setup_.config.layout == Layout::kFlatByExpert;
  params.expert_counts = has_gaps ? counts(slot) + num_ranks() : nullptr;
  params.num_experts = num_local_experts();
  params.num_rows = slot.num_kept_rows;
  params.in_place = stores_by_expert();
  for (const PayloadSpec& spec : slot.payloads) {
    std::byte* stored = slot_base(slot) + spec.region_offset;
    std::byte* target = params.in_place ? stored : local_base(slot) + spec.local_offset;
    params.payloads.push_back(
        {params.in_place ? nullptr : stored, target, spec.row_bytes, spec.stride_bytes});
  }
  params.weights =
      slot.has_weights
          ? reinterpret_cast<float*>(local_base(slot) + workspace_.local_weights_offset)
          : nullptr;
  backend_->expand_rows(params);
  if (!setup_.config.max_recv_rows) return;
  // What the caller sees of the groups ends where the rows end.
  std::int32_t* expert_counts = counts(slot) + num_ranks();
  for (std::size_t expert = 0; expert < slot.expert_begin.size() - 1; ++expert) {
    const std::int64_t room =
        std::max(slot.num_kept_rows - slot.expert_begin[expert], std::int64_t{0});
    expert_counts[expert] =
        static_cast<std::int32_t>(std::min<std::int64_t>(expert_counts[expert], room));
  }
}

/// flat: closes the gaps between the sources, unless the store has none; then marks the rows
/// without a token.
void Exchange::move_to_layout(Slot& slot) {
  const std::int64_t top_k = workspace_.top_k;
  std::byte* store = slot_base(slot);
  std::byte* local = local_base(slot);
  if (!stores_flat()) {
    exec::MoveRowsParams params{};
    params.rank_counts = counts(slot);
    params.source_begin = slot.row_begin.data();
    params.target_begin = slot.layout_begin.data();
    params.num_rows = slot.num_kept_rows;
    for (const PayloadSpec& spec : slot.payloads) {
      params.payloads.push_back({store + spec.region_offset, local + spec.local_offset,
                                 spec.row_bytes, spec.stride_bytes});
    }
    if (slot.has_ids) {
      params.payloads.push_back({store + slot.store.topk_ids_offset,
                                 local + workspace_.local_ids_offset, top_k * 4, top_k * 4});
    }
    if (slot.has_weights) {
      params.payloads.push_back({store + slot.store.topk_weights_offset,
                                 local + workspace_.local_gate_offset, top_k * 4, top_k * 4});
    }
    backend_->move_rows(params);
  }
  if (!slot.has_ids || !setup_.config.max_recv_rows) return;
  std::int32_t* ids = layout_ids(slot);
  std::fill(ids + slot.num_kept_rows * top_k, ids + *setup_.config.max_recv_rows * top_k,
            slot.invalid_expert_id);
}

}  // namespace fanfold::exchange
