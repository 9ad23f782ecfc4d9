// SPDX-License-Identifier: Apache-2.0

// Strategy batched: everything goes through equal-split all-to-alls of fixed capacity, m rows for
// each rank whether used or not, so that any transport will do and no size depends on the routing.
// What arrives lies where the store wants it: the rows of source r from row r * m on.

#include <algorithm>

#include "exchange/collective.h"
#include "exchange/row_stream.h"

namespace fanfold::exchange {
namespace {

class Batched final : public Collective {
 public:
  Batched(Setup setup, base::Deadline deadline) : Collective(std::move(setup), deadline) {
    sent_heads_.resize(heads_.size());
  }
  Capabilities capabilities() const override { return capabilities_of(Strategy::kBatched); }
  void dispatch_send(Slot& slot, const DispatchCall& call) override;
  void dispatch_recv(Slot& slot, base::Deadline deadline) override;
  void combine_send(Slot& slot, const CombineCall& call) override;
  void combine_recv(Slot& slot, const CombineCall& call) override;

 private:
  void exchange_heads(const CallHead& head, base::Deadline deadline);
  void exchange_indices(Slot& slot, const DispatchCall& call);
  void exchange_payload(const Slot& slot, std::size_t payload, base::Deadline deadline);
  void exchange_results(const Slot& slot, std::int64_t row_bytes, base::Deadline deadline);
  void all_to_all(const std::byte* send, std::byte* recv, std::int64_t block_bytes,
                  base::Deadline deadline) {
    channel_->all_to_all(send, recv, {DType::kUInt8, block_bytes}, deadline);
    hook_.step();
  }
  /// Of one row of ids, or of weights.
  std::int64_t index_bytes() const noexcept { return std::int64_t{workspace_.top_k} * 4; }

  std::vector<CallHead> sent_heads_;  // [R] all alike
  std::vector<std::byte> received_;   // blocks of indices
  comm::Channel::Counts lengths_;     // scratch [R]
};

/// In a call of its own: the sizes of the others follow from what it compares.
void Batched::exchange_heads(const CallHead& head, base::Deadline deadline) {
  std::fill(sent_heads_.begin(), sent_heads_.end(), head);
  all_to_all(reinterpret_cast<const std::byte*>(sent_heads_.data()),
             reinterpret_cast<std::byte*>(heads_.data()), sizeof(CallHead), deadline);
}

void Batched::dispatch_send(Slot& slot, const DispatchCall& call) {
  channel_->set_round(slot.round, "dispatch");
  exchange_heads(dispatch_head(slot, call), call.deadline);
  accept_dispatch(slot, call);
  if (slot.routing) {
    std::copy(slot.routing->rank_counts.begin(), slot.routing->rank_counts.end(), counts(slot));
    restore_indices(slot);
  } else {
    exchange_indices(slot, call);
  }
  place_rows(slot);
  for (std::size_t i = 0; i < slot.payloads.size(); ++i) {
    exchange_payload(slot, i, call.deadline);
  }
}

/// One block per rank: the numbers of the tokens, -1 in rows without one, then their ids, then
/// their weights.
void Batched::exchange_indices(Slot& slot, const DispatchCall& call) {
  const plan::SendPlan& plan = slot.own_plan;
  const TensorView& weights = call.inputs->topk_weights;
  const std::int64_t m = slot.round_max_tokens;
  const std::int64_t ids_at = m * 4;
  const std::int64_t weights_at = ids_at + m * index_bytes();
  const std::int64_t block_bytes = weights_at + (slot.has_weights ? m * index_bytes() : 0);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    std::byte* block = scratch() + rank * block_bytes;
    const std::int64_t num_rows = plan.rows_per_rank[static_cast<std::size_t>(rank)];
    const std::int32_t* tokens = plan.tokens_for(rank);
    auto* out_tokens = reinterpret_cast<std::int32_t*>(block);
    std::copy_n(tokens, num_rows, out_tokens);
    std::fill(out_tokens + num_rows, out_tokens + m, -1);
    auto* out_ids = reinterpret_cast<std::int32_t*>(block + ids_at);
    auto* out_weights = reinterpret_cast<float*>(block + weights_at);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      std::copy_n(plan.ids_of(tokens[row]), plan.top_k, out_ids + row * plan.top_k);
      if (!slot.has_weights) continue;
      std::copy_n(static_cast<const float*>(weights.data) + tokens[row] * weights.strides[0],
                  plan.top_k, out_weights + row * plan.top_k);
    }
    std::fill(out_ids + num_rows * plan.top_k, out_ids + m * plan.top_k, -1);
    if (slot.has_weights) {
      std::fill(out_weights + num_rows * plan.top_k, out_weights + m * plan.top_k, 0.0F);
    }
  }
  received_.resize(static_cast<std::size_t>(num_ranks() * block_bytes));
  all_to_all(scratch(), received_.data(), block_bytes, call.deadline);

  std::byte* base = slot_base(slot);
  std::int32_t* rank_counts = counts(slot);
  const auto copy = [&](std::int64_t offset, int source, const std::byte* from,
                        std::int64_t row_bytes) {
    copy_bytes(base + offset + source * m * row_bytes, from, m * row_bytes);
  };
  for (int source = 0; source < num_ranks(); ++source) {
    const std::byte* block = received_.data() + source * block_bytes;
    copy(slot.store.source_token_offset, source, block, 4);
    copy(slot.store.topk_ids_offset, source, block + ids_at, index_bytes());
    if (slot.has_weights) {
      copy(slot.store.topk_weights_offset, source, block + weights_at, index_bytes());
    }
    const std::int32_t* tokens = received_tokens(slot) + source * m;
    rank_counts[source] = static_cast<std::int32_t>(std::find(tokens, tokens + m, -1) - tokens);
    auto* ids = reinterpret_cast<std::int32_t*>(base + slot.store.topk_ids_offset);
    std::fill(ids + (source * m + rank_counts[source]) * workspace_.top_k,
              ids + (source + 1) * m * workspace_.top_k, slot.invalid_expert_id);
  }
}

/// Blocks of m rows, of which those without a token are sent as they are found. Rows go straight
/// from the caller's tensor into the transport's memory, and from there to their places.
void Batched::exchange_payload(const Slot& slot, std::size_t payload, base::Deadline deadline) {
  const PayloadSpec& spec = slot.payloads[payload];
  const exec::PayloadRows& rows = slot.payload_rows[payload];
  const plan::SendPlan& plan = slot.plan();
  const std::int64_t m = slot.round_max_tokens;
  std::byte* region = slot_base(slot) + spec.region_offset;
  const auto put = [&](int to, const comm::Channel::Outgoing& out) {
    const std::int32_t* tokens = plan.tokens_for(to);
    const std::int64_t used = plan.rows_per_rank[static_cast<std::size_t>(to)] * spec.row_bytes;
    for_each_row(spec.row_bytes, out.begin, std::min(out.begin + out.bytes, used),
                 [&](std::int64_t row, std::int64_t within, std::int64_t at, std::int64_t bytes) {
                   out.copy(out.data + (at - out.begin),
                            rows.rows + tokens[row] * rows.row_stride_bytes + within, bytes);
                 });
  };
  const auto take = [&](const std::vector<comm::Channel::Incoming>& parts) {
    for (int source = 0; source < num_ranks(); ++source) {
      if (source == rank_) continue;
      const comm::Channel::Incoming& part = parts[static_cast<std::size_t>(source)];
      std::byte* block = region + source * m * spec.stride_bytes;
      const std::int64_t end =
          std::min(part.begin + part.bytes, counts(slot)[source] * spec.row_bytes);
      if (spec.stride_bytes == spec.row_bytes) {
        copy_bytes(block + part.begin, part.data, end - part.begin);
        continue;
      }
      for_each_row(spec.row_bytes, part.begin, end,
                   [&](std::int64_t row, std::int64_t within, std::int64_t at, std::int64_t bytes) {
                     copy_bytes(block + row * spec.stride_bytes + within,
                                part.data + (at - part.begin), bytes);
                   });
    }
    hook_.step();
  };
  lengths_.assign(static_cast<std::size_t>(num_ranks()), m * spec.row_bytes);
  channel_->all_to_all_stream("all_to_all", lengths_, put, take, deadline);
  const std::int32_t* tokens = plan.tokens_for(rank_);
  for (std::int64_t row = 0; row < counts(slot)[rank_]; ++row) {
    copy_bytes(region + (rank_ * m + row) * spec.stride_bytes,
               rows.rows + tokens[row] * rows.row_stride_bytes, spec.row_bytes);
  }
}

void Batched::dispatch_recv(Slot& slot, base::Deadline) {
  poison_results(slot);
  arrange(slot);
  hook_.step();
}

void Batched::combine_send(Slot& slot, const CombineCall& call) {
  backend_->combine_send(combine_params(slot, *call.inputs));
  if (call.inputs->release) poison_received(slot);
}

/// Brings home what this rank's tokens got on every other, `row_bytes` for each received row.
void Batched::exchange_results(const Slot& slot, std::int64_t row_bytes, base::Deadline deadline) {
  const std::int64_t block_bytes = slot.round_max_tokens * row_bytes;
  const auto put = [&](int to, const comm::Channel::Outgoing& out) {
    const std::int64_t end = std::min(out.begin + out.bytes, counts(slot)[to] * row_bytes);
    if (end <= out.begin) return;
    out.copy(out.data, combine_rows(slot) + to * block_bytes + out.begin, end - out.begin);
  };
  const auto take = [&](const std::vector<comm::Channel::Incoming>& parts) {
    for (int root = 0; root < num_ranks(); ++root) {
      if (root == rank_) continue;
      const auto index = static_cast<std::size_t>(root);
      const comm::Channel::Incoming& part = parts[index];
      if (part.is_last && part.begin == 0) {  // in one step: summed where it lies
        sources_[index] = part.data;
        continue;
      }
      std::byte* home = mine() + root * block_bytes;
      sources_[index] = home;
      const std::int64_t used = slot.plan().rows_per_rank[index] * row_bytes;
      const std::int64_t end = std::min(part.begin + part.bytes, used);
      copy_bytes(home + part.begin, part.data, end - part.begin);
    }
    hook_.step();
  };
  lengths_.assign(static_cast<std::size_t>(num_ranks()), block_bytes);
  channel_->all_to_all_stream("all_to_all", lengths_, put, take, deadline);
  sources_[static_cast<std::size_t>(rank_)] = combine_rows(slot) + rank_ * block_bytes;
}

void Batched::combine_recv(Slot& slot, const CombineCall& call) {
  channel_->set_round(slot.round, "combine");
  exec::SumRowsParams params = sum_params(slot, *call.inputs);
  const CallHead head = combine_head(slot, *call.inputs, params.hidden);
  exchange_heads(head, call.deadline);
  compare_heads(slot, "combine", head.fields);
  exchange_results(slot, workspace_.rows_per_token * params.row_bytes, call.deadline);
  params.sources = sources_.data();
  backend_->sum_rows(params);
}

}  // namespace

std::shared_ptr<Exchange> make_batched(Setup setup, base::Deadline deadline) {
  return std::make_shared<Batched>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
