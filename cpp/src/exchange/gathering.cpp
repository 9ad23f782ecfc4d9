// SPDX-License-Identifier: Apache-2.0
#include "exchange/gathering.h"

#include <algorithm>

namespace fanfold::exchange {

void Gathering::list_spans(const Slot& slot, const DispatchCall& call, const CallHead& head) {
  const DispatchInputs& in = *call.inputs;
  const std::int64_t num_tokens = slot.plan().num_tokens;
  const std::int64_t index_bytes = std::int64_t{workspace_.top_k} * 4;
  std::byte* local = local_base(slot);
  spans_.assign(1, RowSpan::of(head));
  index_targets_.assign(1, nullptr);
  if (!slot.routing && slot.has_ids) {
    spans_.push_back({reinterpret_cast<const std::byte*>(slot.own_plan.ids.data()), num_tokens,
                      index_bytes, index_bytes});
    index_targets_.push_back(local + workspace_.local_ids_offset);
  }
  if (!slot.routing && slot.has_weights) {
    spans_.push_back({static_cast<const std::byte*>(in.topk_weights.data), num_tokens, index_bytes,
                      in.topk_weights.strides[0] * 4});
    index_targets_.push_back(local + workspace_.local_gate_offset);
  }
  for (const exec::PayloadRows& rows : slot.payload_rows) {
    spans_.push_back({rows.rows, num_tokens, rows.row_bytes, rows.row_stride_bytes});
  }
}

std::int64_t Gathering::bytes_of(std::size_t span, int source) const noexcept {
  const std::int64_t rows = span == 0 ? 1
                                      : token_begin_[static_cast<std::size_t>(source) + 1] -
                                            token_begin_[static_cast<std::size_t>(source)];
  return rows * spans_[span].row_bytes;
}

void Gathering::gather(const Slot& slot, std::size_t first, std::size_t last, Take take,
                       base::Deadline deadline) {
  channel_->set_round(slot.round);
  sent_.assign(spans_.begin() + static_cast<std::ptrdiff_t>(first),
               spans_.begin() + static_cast<std::ptrdiff_t>(last));
  const auto put = [&](const comm::Channel::Outgoing& out) {
    put_stream(sent_, out.data, out.begin, out.bytes, out.copy);
  };
  channel_->all_gather_stream("dispatch", stream_bytes(sent_), put, take, deadline);
  hook_.step();
}

void Gathering::dispatch_send(Slot& slot, const DispatchCall& call) {
  const CallHead head = dispatch_head(slot, call);
  if (is_gathered() && !slot.routing) name_rows_by_token(slot.own_plan);
  list_spans(slot, call, head);
  const std::size_t first_payload = index_targets_.size();
  // Equal on all ranks, or the heads differ.
  std::int64_t most_bytes = 0;
  for (std::size_t i = 1; i < spans_.size(); ++i) {
    most_bytes += call.round_max_tokens * spans_[i].row_bytes;
  }
  const bool at_once =
      !has_shared_blocks() && std::int64_t{sizeof head} + most_bytes <= channel_->stream_room();
  const auto take = [&](const Parts& parts) {
    if (take_heads(parts)) {
      accept_dispatch(slot, call);
      find_tokens(slot);
    }
    take_indices(parts, at_once ? spans_.size() : first_payload);
    if (!at_once) return;
    place(slot);
    take_payloads(slot, parts, 0);
  };
  gather(slot, 0, at_once ? spans_.size() : first_payload, take, call.deadline);
  if (at_once) return;
  if (has_shared_blocks()) {
    push_payloads(slot);
    // Release of the rows: this step, which begins with a store fence. Acquire: its end.
    gather(slot, spans_.size(), spans_.size(), [](const Parts&) {}, call.deadline);
    place(slot);
    return;
  }
  place(slot);
  const auto take_rows = [&](const Parts& parts) { take_payloads(slot, parts, first_payload); };
  gather(slot, first_payload, spans_.size(), take_rows, call.deadline);
}

/// Where each source's tokens lie among all, and this rank's own indices among them.
void Gathering::find_tokens(Slot& slot) {
  begin_groups(token_begin_, num_ranks(),
               [&](int source) { return slot.token_counts[static_cast<std::size_t>(source)]; });
  slot.num_gathered = token_begin_.back();
  for (std::size_t i = 1; i < index_targets_.size(); ++i) {
    const std::int64_t first = token_begin_[static_cast<std::size_t>(rank_)] * spans_[i].row_bytes;
    put_rows(spans_[i], index_targets_[i] + first, 0, spans_[i].bytes(), copy_bytes);
  }
}

/// The parts are of the stream of all spans before `last`.
void Gathering::take_indices(const Parts& parts, std::size_t last) {
  for (int source = 0; source < num_ranks(); ++source) {
    if (source == rank_) continue;
    const auto index = static_cast<std::size_t>(source);
    const Incoming& part = parts[index];
    const auto size = [&](std::size_t span) { return bytes_of(span, source); };
    for_each_span(0, last, size, part.begin, part.bytes, [&](const SpanPart& of) {
      if (of.span == 0 || of.span >= index_targets_.size()) return;
      const std::int64_t first = token_begin_[index] * spans_[of.span].row_bytes;
      copy_bytes(index_targets_[of.span] + first + of.begin, part.data + of.offset,
                 of.end - of.begin);
    });
  }
}

/// When all indices are there: decides where every row goes, then moves this rank's own (in shared
/// blocks they have been pushed).
void Gathering::place(Slot& slot) {
  if (!slot.routing && !is_gathered()) count_rows(slot);
  std::int32_t* rank_counts = counts(slot);
  for (int source = 0; source < num_ranks(); ++source) {
    // Gathered rows are all tokens, whether routed here or not.
    rank_counts[source] = is_gathered()
                              ? slot.token_counts[static_cast<std::size_t>(source)]
                              : static_cast<std::int32_t>(rows_between(slot, source, rank_));
  }
  begin_groups(picked_begin_, num_ranks(), [&](int source) { return rank_counts[source]; });
  place_rows(slot);
  if (slot.routing) {
    restore_indices(slot);
  } else {
    keep_routed_rows(slot);
  }
  if (has_shared_blocks()) return;
  for (std::size_t i = 0; i < slot.payloads.size(); ++i) {
    const RowSpan& own = spans_[index_targets_.size() + i];
    copy_payload(slot, slot.payloads[i], rank_, own, 0, own.bytes());
  }
}

/// rows_matrix: how many of a source's tokens have an expert on a destination.
void Gathering::count_rows(Slot& slot) {
  const auto ranks = static_cast<std::size_t>(num_ranks());
  slot.rows_matrix.assign(ranks * ranks, 0);
  const auto* ids =
      reinterpret_cast<const std::int32_t*>(local_base(slot) + workspace_.local_ids_offset);
  last_token_.assign(ranks, -1);
  std::int64_t token = 0;
  for (std::size_t source = 0; source < ranks; ++source) {
    std::int32_t* row = slot.rows_matrix.data() + source * ranks;
    for (std::int32_t i = 0; i < slot.token_counts[source]; ++i, ++token) {
      for (int k = 0; k < workspace_.top_k; ++k) {
        const std::int32_t id = ids[token * workspace_.top_k + k];
        if (id < 0) continue;
        const auto rank = static_cast<std::size_t>(map().rank_of[static_cast<std::size_t>(id)]);
        if (last_token_[rank] != token) ++row[rank];
        last_token_[rank] = token;
      }
    }
  }
}

/// Compacts ids, weights and token numbers of the rows routed here, as one_sided receives them, or
/// (gathered) only lists the rows.
void Gathering::keep_routed_rows(Slot& slot) {
  slot.gathered_rows.clear();
  std::byte* local = local_base(slot);
  const auto* ids = reinterpret_cast<const std::int32_t*>(local + workspace_.local_ids_offset);
  const auto* weights = reinterpret_cast<const float*>(local + workspace_.local_gate_offset);
  std::byte* base = slot_base(slot);
  auto* out_ids = reinterpret_cast<std::int32_t*>(base + slot.store.topk_ids_offset);
  auto* out_weights = reinterpret_cast<float*>(base + slot.store.topk_weights_offset);
  auto* out_tokens = reinterpret_cast<std::int32_t*>(base + slot.store.source_token_offset);
  const int top_k = workspace_.top_k;
  const auto is_here = [&](const std::int32_t* row) {
    return std::any_of(row, row + top_k, [&](std::int32_t id) {
      return id >= 0 && map().rank_of[static_cast<std::size_t>(id)] == rank_;
    });
  };
  std::int64_t token = 0;
  for (int source = 0; source < num_ranks(); ++source) {
    std::int64_t at = slot.row_begin[static_cast<std::size_t>(source)];
    for (std::int32_t i = 0; i < slot.token_counts[static_cast<std::size_t>(source)];
         ++i, ++token) {
      if (slot.has_ids && !is_here(ids + token * top_k)) continue;
      slot.gathered_rows.push_back(static_cast<std::int32_t>(token));
      if (is_gathered()) continue;
      std::copy_n(ids + token * top_k, top_k, out_ids + at * top_k);
      if (slot.has_weights) std::copy_n(weights + token * top_k, top_k, out_weights + at * top_k);
      out_tokens[at++] = i;
    }
    if (is_gathered() || stores_flat()) continue;
    std::fill(out_ids + at * top_k, out_ids + (source + 1) * slot.round_max_tokens * top_k,
              slot.invalid_expert_id);
  }
}

/// The parts are of the stream of the spans from `first` on.
void Gathering::take_payloads(const Slot& slot, const Parts& parts, std::size_t first) {
  for (int i = 1; i < num_ranks(); ++i) {
    const int source = (rank_ + i) % num_ranks();
    const Incoming& part = parts[static_cast<std::size_t>(source)];
    const auto size = [&](std::size_t span) { return bytes_of(span, source); };
    for_each_span(first, spans_.size(), size, part.begin, part.bytes, [&](const SpanPart& of) {
      if (of.span < index_targets_.size()) return;
      RowSpan from = spans_[of.span];
      from.rows = part.data + of.offset;
      from.stride_bytes = from.row_bytes;
      copy_payload(slot, slot.payloads[of.span - index_targets_.size()], source, from, of.begin,
                   of.end);
    });
    hook_.step();
  }
}

/// Copies the bytes [begin, end) of `source`'s rows of one payload, which begin at `from.rows`, to
/// the places of those rows that this rank keeps.
void Gathering::copy_payload(const Slot& slot, const PayloadSpec& spec, int source,
                             const RowSpan& from, std::int64_t begin, std::int64_t end) const {
  const auto index = static_cast<std::size_t>(source);
  const std::int64_t num_rows = picked_begin_[index + 1] - picked_begin_[index];
  const bool keeps_all = num_rows == slot.token_counts[index];
  const std::int32_t* rows = keeps_all ? nullptr : picked(slot).data() + picked_begin_[index];
  const auto token_of = [&](std::int64_t at) {
    return keeps_all ? at : rows[at] - token_begin_[index];
  };
  std::byte* target =
      is_gathered()
          ? block_base(slot) + spec.gathered_offset + token_begin_[index] * spec.stride_bytes
          : slot_base(slot) + spec.region_offset + slot.row_begin[index] * spec.stride_bytes;
  const bool dense = from.is_dense() && spec.stride_bytes == spec.row_bytes;
  const std::int64_t first_token = begin / spec.row_bytes;
  std::int64_t at = first_token;
  if (!keeps_all) {
    at = std::lower_bound(rows, rows + num_rows, token_begin_[index] + first_token) - rows;
  }
  while (at < num_rows && token_of(at) * spec.row_bytes < end) {
    const std::int64_t token = token_of(at);
    std::int64_t run = 1;
    if (dense && keeps_all) run = num_rows - at;
    while (dense && at + run < num_rows && token_of(at + run) == token + run) ++run;
    // A step of the channel may begin and end within a row.
    const std::int64_t row = token * spec.row_bytes;
    const std::int64_t low = std::max(row, begin);
    const std::int64_t high = std::min(row + run * spec.row_bytes, end);
    copy_bytes(target + at * spec.stride_bytes + (low - row),
               from.rows + (token * from.stride_bytes + (low - row) - begin), high - low);
    at += run;
  }
}

void Gathering::dispatch_recv(Slot& slot, base::Deadline) {
  poison_results(slot);
  poison_block(slot, workspace_.block_combine_offset, workspace_.block_stride, 0xFF);
  arrange(slot);
  hook_.step();
}

}  // namespace fanfold::exchange
