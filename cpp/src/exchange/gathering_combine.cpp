// SPDX-License-Identifier: Apache-2.0

// The way home of broadcast and gather_scatter.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "exchange/gathering.h"

namespace fanfold::exchange {
void Gathering::combine_send(Slot& slot, const CombineCall& call) {
  const exec::CombineSendParams params = combine_params(slot, *call.inputs);
  if (is_gathered()) {
    put_results(slot, params);
  } else {
    backend_->combine_send(params);
  }
  if (call.inputs->release) release(slot);
}

/// Where the partial rows lie that go through the channel.
void Gathering::find_partials(const Slot& slot) {
  if (is_gathered()) {
    begin_groups(partial_begin_, num_ranks(),
                 [&](int source) { return slot.token_counts[static_cast<std::size_t>(source)]; });
  } else {
    partial_begin_ = slot.row_begin;
  }
  begin_groups(mine_begin_, num_ranks(), [&](int root) {
    return root == rank_ ? std::int64_t{0} : rows_between(slot, rank_, root);
  });
}

RowSpan Gathering::partials_of(const Slot& slot, int source) const noexcept {
  const std::int64_t first = partial_begin_[static_cast<std::size_t>(source)];
  std::byte* const rows = is_gathered() ? results_of(slot, rank_) : combine_rows(slot);
  return {rows + first * step_bytes_, rows_between(slot, source, rank_), step_bytes_, step_bytes_};
}

/// If one step brought all, the rows are summed where they lie: nobody writes there before this
/// rank's next collective.
void Gathering::take_partials(const Slot& slot, const Parts& parts) {
  for (int i = 1; i < num_ranks(); ++i) {
    const int root = (rank_ + i) % num_ranks();
    const auto index = static_cast<std::size_t>(root);
    const Incoming& part = parts[index];
    const std::int64_t first =
        std::int64_t{sizeof(CallHead)} + rows_before_mine(slot, root) * step_bytes_;
    if (part.is_last && part.begin == 0) {
      sources_[index] = part.data + first;
      continue;
    }
    std::byte* place = home() + mine_begin_[index] * step_bytes_;
    sources_[index] = place;
    const std::int64_t last = first + rows_between(slot, rank_, root) * step_bytes_;
    const std::int64_t low = std::max(first, part.begin);
    const std::int64_t high = std::min(last, part.begin + part.bytes);
    if (low < high) copy_bytes(place + (low - first), part.data + (low - part.begin), high - low);
  }
}

void Gathering::combine_recv(Slot& slot, const CombineCall& call) {
  channel_->set_round(slot.round);
  exec::SumRowsParams params = sum_params(slot, *call.inputs);
  const CallHead head = combine_head(slot, *call.inputs, params.hidden);
  heads_[static_cast<std::size_t>(rank_)] = head;
  step_bytes_ = params.row_bytes * workspace_.rows_per_token;
  if (!has_shared_blocks()) find_partials(slot);
  // Weighting origin adds single rows in a stated order; there is no partial to reduce.
  if (!config().deterministic && config().weighting != Weighting::kOrigin) {
    sum_by_transport(slot, call, head, params);
    return;
  }
  if (has_shared_blocks()) {
    pull_results(slot, call, head, params);
    return;
  }
  const auto take = [&](const Parts& parts) {
    if (take_heads(parts)) compare_heads(slot, "combine", head.fields);
    take_partials(slot, parts);
    hook_.step();
  };
  send_partials(slot, head, take, call.deadline);
  sources_[static_cast<std::size_t>(rank_)] = partials_of(slot, rank_).rows;
  params.sources = sources_.data();
  backend_->sum_rows(params);
}

/// A step in which every rank's head is compared with this rank's.
void Gathering::exchange_heads(const Slot& slot, const CallHead& head, base::Deadline deadline) {
  const auto put = [&](const comm::Channel::Outgoing& out) {
    put_rows(RowSpan::of(head), out.data, out.begin, out.begin + out.bytes, out.copy);
  };
  const auto take = [&](const Parts& parts) {
    if (take_heads(parts)) compare_heads(slot, "combine", head.fields);
  };
  channel_->all_gather_stream("combine", sizeof head, put, take, deadline);
  hook_.step();
}

/// [sum of T] rows: this rank's partials at their tokens, zeros elsewhere.
std::byte* Gathering::spread_partials(const Slot& slot) {
  const std::vector<std::int32_t>& tokens = picked(slot);
  std::byte* out = scratch();
  std::int64_t token = 0;
  std::size_t next = 0;
  const auto zero_up_to = [&](std::int64_t end) {
    std::memset(out + token * step_bytes_, 0,
                static_cast<std::size_t>((end - token) * step_bytes_));
    token = end;
  };
  if (is_gathered()) {
    for (const std::int32_t at : tokens) {
      zero_up_to(at);
      copy_bytes(out + token * step_bytes_, results_of(slot, rank_) + token * step_bytes_,
                 step_bytes_);
      ++token;
    }
  } else {
    for (int source = 0; source < num_ranks(); ++source) {
      const RowSpan rows = partials_of(slot, source);
      for (std::int64_t i = 0; i < rows.num_rows; ++i, ++next) {
        zero_up_to(tokens[next]);
        copy_bytes(out + token * step_bytes_, rows.rows + i * step_bytes_, step_bytes_);
        ++token;
      }
    }
  }
  zero_up_to(slot.num_gathered);
  return out;
}

void Gathering::sum_by_transport(const Slot& slot, const CombineCall& call, const CallHead& head,
                                 const exec::SumRowsParams& params) {
  exchange_heads(slot, head, call.deadline);
  exec::GatherRowsParams rows{};
  rows.source =
      reduce(slot, spread_partials(slot), {params.combine_dtype, params.hidden}, call.deadline);
  hook_.step();
  rows.source_stride_bytes = step_bytes_;
  rows.num_rows = slot.plan().num_tokens;
  if (order_.empty()) {
    order_.resize(static_cast<std::size_t>(workspace_.max_tokens_per_rank));
    std::iota(order_.begin(), order_.end(), 0);
  }
  rows.indices = order_.data();
  rows.target = params.out;
  rows.target_stride_bytes = params.out_stride_bytes;
  rows.row_bytes = step_bytes_;
  rows.source_dtype = params.combine_dtype;
  rows.target_dtype = params.out_dtype;
  backend_->gather_rows(rows);
}

}  // namespace fanfold::exchange
