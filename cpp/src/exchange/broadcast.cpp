// SPDX-License-Identifier: Apache-2.0

// Strategy broadcast: every rank gets every token and keeps what concerns it; every rank sends its
// partial rows to everyone and each keeps its own tokens'. Simple, and what the others are compared
// with. All data goes through a private channel of the group, so that a failure here leaves the
// communicator usable.

#include <algorithm>
#include <cstring>

#include "base/format.h"
#include "comm/channel.h"
#include "comm/communicator_impl.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

class Broadcast final : public Exchange {
 public:
  Broadcast(Setup setup, base::Deadline deadline);
  ~Broadcast() override = default;

  Capabilities capabilities() const override { return broadcast_capabilities(); }
  std::uint32_t generation() const noexcept override { return channel_->control().generation(); }
  void settle(Slot&, base::Deadline) override {}  // peers never touch this rank's memory
  void dispatch_send(Slot& slot, const DispatchCall& call) override;
  void dispatch_recv(Slot& slot, base::Deadline deadline) override;
  void combine_send(Slot& slot, const CombineCall& call) override;
  void combine_recv(Slot& slot, const CombineCall& call) override;
  void release(Slot& slot) override { poison_received(slot); }
  void abort(const std::string& reason) noexcept override { channel_->abort(reason); }
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override;
  void check() const override;
  void leave() noexcept override { channel_->control().mark_left(); }
  void close(base::Deadline deadline) override { channel_->close(deadline); }
  bool is_forked_child() const noexcept override {
    return setup_.communicator->group().is_forked_child();
  }
  std::byte* slot_base(const Slot& slot) const noexcept override {
    return local_.get() + workspace_.slot_offset + slot.index * workspace_.slot_stride;
  }
  std::shared_ptr<const void> memory() const override { return local_; }

 private:
  bool is_gathered() const noexcept { return config().layout == Layout::kGathered; }
  void exchange_headers(Slot& slot, const DispatchCall& call);
  void gather_everything(Slot& slot, const DispatchCall& call);
  void gather(const std::byte* rows, std::int64_t stride_bytes, std::int64_t row_bytes,
              std::byte* out, std::int64_t out_stride_bytes, const Slot& slot,
              base::Deadline deadline);
  void count_rows(Slot& slot);
  void keep_routed_rows(Slot& slot);
  void compact_payloads(Slot& slot);
  const std::vector<std::int32_t>& matrix(const Slot& slot) const noexcept {
    return slot.routing ? slot.routing->rows_matrix : slot.rows_matrix;
  }
  std::int64_t rows_between(const Slot& slot, int source, int destination) const noexcept {
    return matrix(slot)[static_cast<std::size_t>(std::int64_t{source} * num_ranks() + destination)];
  }

  std::unique_ptr<comm::Channel> channel_;
  std::vector<std::byte> packed_;  // scratch: this rank's rows, dense
  std::vector<std::byte> spread_;  // scratch: everyone's rows, dense
};

Broadcast::Broadcast(Setup setup, base::Deadline deadline) : Exchange(std::move(setup)) {
  channel_ = comm::Channel::create(setup_.communicator->group(), setup_.what, deadline);
  exec::Context context{};
  context.kernels = &base::kernels(base::isa_from_name(setup_.config.test_knobs.isa.c_str()));
  context.hook = &hook_;
  context.rank = rank_;
  context.num_ranks = num_ranks();
  backend_ = setup_.backend(context);
}

// The flag line's contents, compared as one_sided compares them.
void Broadcast::exchange_headers(Slot& slot, const DispatchCall& call) {
  slot.sent = dispatch_fields(slot);
  const exec::FlagFields& mine = slot.sent;
  const auto as_signed = [](std::uint64_t word) { return static_cast<std::int64_t>(word); };
  const auto values = channel_->all_gather_values(
      {static_cast<std::int64_t>(mine.kind), mine.round_max_tokens, mine.num_tokens,
       mine.num_payloads, as_signed(mine.digest), as_signed(mine.routing)},
      call.deadline, "dispatch");
  std::string first_difference;
  for (int peer = 0; peer < num_ranks(); ++peer) {
    const std::int64_t* theirs = values.data() + std::int64_t{peer} * 6;
    exec::FlagFields got = mine;
    got.kind = static_cast<exec::CallKind>(theirs[0]);
    got.round_max_tokens = static_cast<std::uint32_t>(theirs[1]);
    got.num_payloads = static_cast<std::uint32_t>(theirs[3]);
    got.digest = static_cast<std::uint64_t>(theirs[4]);
    got.routing = static_cast<std::uint64_t>(theirs[5]);
    slot.token_counts[static_cast<std::size_t>(peer)] = static_cast<std::int32_t>(theirs[2]);
    if (first_difference.empty()) first_difference = exec::difference(mine, rank_, got, peer);
  }
  // Where two ranks differ every rank differs from one of them, so all of them throw.
  if (first_difference.empty()) return;
  throw InvalidArgument(base::str(what(), ": dispatch of round ", slot.round,
                                  " differs between ranks: ", first_difference,
                                  "; call reset() on every rank"));
}

void Broadcast::gather(const std::byte* rows, std::int64_t stride_bytes, std::int64_t row_bytes,
                       std::byte* out, std::int64_t out_stride_bytes, const Slot& slot,
                       base::Deadline deadline) {
  const std::int64_t num_tokens = slot.plan().num_tokens;
  const std::byte* dense = rows;
  if (stride_bytes != row_bytes && num_tokens > 0) {
    packed_.resize(static_cast<std::size_t>(num_tokens * row_bytes));
    for (std::int64_t i = 0; i < num_tokens; ++i) {
      std::memcpy(packed_.data() + i * row_bytes, rows + i * stride_bytes,
                  static_cast<std::size_t>(row_bytes));
    }
    dense = packed_.data();
  }
  const comm::Channel::Counts token_counts(slot.token_counts.begin(), slot.token_counts.end());
  const comm::RowType row{DType::kUInt8, row_bytes};
  if (out_stride_bytes == row_bytes) {
    channel_->all_gather_v(dense, out, row, token_counts, deadline);
    return;
  }
  spread_.resize(static_cast<std::size_t>(slot.num_gathered * row_bytes));
  channel_->all_gather_v(dense, spread_.data(), row, token_counts, deadline);
  for (std::int64_t i = 0; i < slot.num_gathered; ++i) {
    std::memcpy(out + i * out_stride_bytes, spread_.data() + i * row_bytes,
                static_cast<std::size_t>(row_bytes));
  }
}

void Broadcast::gather_everything(Slot& slot, const DispatchCall& call) {
  const DispatchInputs& in = *call.inputs;
  slot.num_gathered = 0;
  for (const std::int32_t num_tokens : slot.token_counts) slot.num_gathered += num_tokens;
  std::byte* local = local_base(slot);
  const std::int64_t index_bytes = std::int64_t{workspace_.top_k} * 4;
  if (!slot.routing && slot.has_ids) {
    gather(reinterpret_cast<const std::byte*>(slot.own_plan.ids.data()), index_bytes, index_bytes,
           local + workspace_.local_ids_offset, index_bytes, slot, call.deadline);
  }
  if (!slot.routing && slot.has_weights) {
    gather(static_cast<const std::byte*>(in.topk_weights.data), in.topk_weights.strides[0] * 4,
           index_bytes, local + workspace_.local_gate_offset, index_bytes, slot, call.deadline);
  }
  for (std::size_t i = 0; i < slot.payloads.size(); ++i) {
    const PayloadSpec& spec = slot.payloads[i];
    const exec::PayloadRows& rows = slot.payload_rows[i];
    gather(rows.rows, rows.row_stride_bytes, rows.row_bytes, local + spec.gathered_offset,
           spec.stride_bytes, slot, call.deadline);
    hook_.step();
  }
}

void Broadcast::dispatch_send(Slot& slot, const DispatchCall& call) {
  channel_->set_round(slot.round);
  exchange_headers(slot, call);
  hook_.step();
  gather_everything(slot, call);
}

/// rows_matrix: how many of a source's tokens have an expert on a destination.
void Broadcast::count_rows(Slot& slot) {
  const auto ranks = static_cast<std::size_t>(num_ranks());
  slot.rows_matrix.assign(ranks * ranks, 0);
  const auto* ids =
      reinterpret_cast<const std::int32_t*>(local_base(slot) + workspace_.local_ids_offset);
  std::vector<std::int64_t> last_token(ranks, -1);
  std::int64_t token = 0;
  for (std::size_t source = 0; source < ranks; ++source) {
    std::int32_t* row = slot.rows_matrix.data() + source * ranks;
    if (!slot.has_ids) {
      std::fill_n(row, ranks, slot.token_counts[source]);
      continue;
    }
    for (std::int32_t i = 0; i < slot.token_counts[source]; ++i, ++token) {
      for (int k = 0; k < workspace_.top_k; ++k) {
        const std::int32_t id = ids[token * workspace_.top_k + k];
        if (id < 0) continue;
        const auto rank = static_cast<std::size_t>(map().rank_of[static_cast<std::size_t>(id)]);
        if (last_token[rank] != token) ++row[rank];
        last_token[rank] = token;
      }
    }
  }
}

/// Compacts ids, weights and token numbers of the rows routed here: rank-major arrays as one_sided
/// receives them, or (gathered) the list of rows.
void Broadcast::keep_routed_rows(Slot& slot) {
  slot.gathered_rows.clear();
  std::byte* local = local_base(slot);
  const auto* ids = reinterpret_cast<const std::int32_t*>(local + workspace_.local_ids_offset);
  const auto* weights = reinterpret_cast<const float*>(local + workspace_.local_gate_offset);
  std::byte* base = slot_base(slot);
  auto* out_ids = reinterpret_cast<std::int32_t*>(base + workspace_.topk_ids_offset);
  auto* out_weights = reinterpret_cast<float*>(base + workspace_.topk_weights_offset);
  auto* out_tokens = reinterpret_cast<std::int32_t*>(base + workspace_.source_token_offset);
  const int top_k = workspace_.top_k;
  const auto is_here = [&](const std::int32_t* row) {
    return std::any_of(row, row + top_k, [&](std::int32_t id) {
      return id >= 0 && map().rank_of[static_cast<std::size_t>(id)] == rank_;
    });
  };
  std::int64_t token = 0;
  for (int source = 0; source < num_ranks(); ++source) {
    std::int64_t at = source * slot.round_max_tokens;
    for (std::int32_t i = 0; i < slot.token_counts[static_cast<std::size_t>(source)];
         ++i, ++token) {
      if (slot.has_ids && !is_here(ids + token * top_k)) continue;
      slot.gathered_rows.push_back(static_cast<std::int32_t>(token));
      if (is_gathered()) continue;
      std::copy_n(ids + token * top_k, top_k, out_ids + at * top_k);
      if (slot.has_weights) std::copy_n(weights + token * top_k, top_k, out_weights + at * top_k);
      out_tokens[at++] = i;
    }
    if (is_gathered()) continue;
    std::fill(out_ids + at * top_k, out_ids + (source + 1) * slot.round_max_tokens * top_k,
              slot.invalid_expert_id);
  }
}

void Broadcast::compact_payloads(Slot& slot) {
  const std::int32_t* rows = counts(slot);
  const std::vector<std::int32_t>& picked =
      slot.routing ? slot.routing->gathered_rows : slot.gathered_rows;
  std::int64_t first = 0;
  for (int source = 0; source < num_ranks(); ++source) {
    for (const PayloadSpec& spec : slot.payloads) {
      exec::GatherRowsParams params{};
      params.source = local_base(slot) + spec.gathered_offset;
      params.source_stride_bytes = spec.stride_bytes;
      params.indices = picked.data() + first;
      params.num_rows = rows[source];
      params.target =
          slot_base(slot) + spec.region_offset + source * slot.round_max_tokens * spec.stride_bytes;
      params.target_stride_bytes = spec.stride_bytes;
      params.row_bytes = spec.row_bytes;
      backend_->gather_rows(params);
    }
    first += rows[source];
  }
}

void Broadcast::dispatch_recv(Slot& slot, base::Deadline) {
  if (slot.routing) {
    restore_indices(slot);
  } else {
    count_rows(slot);
    keep_routed_rows(slot);
  }
  std::int32_t* rank_counts = counts(slot);
  for (int source = 0; source < num_ranks(); ++source) {
    // Gathered rows are all tokens, whether routed here or not.
    rank_counts[source] = is_gathered()
                              ? slot.token_counts[static_cast<std::size_t>(source)]
                              : static_cast<std::int32_t>(rows_between(slot, source, rank_));
  }
  poison_results(slot);
  if (is_gathered()) return;
  compact_payloads(slot);
  if (config().layout == Layout::kExpertMajor) expand(slot);
  hook_.step();
}

void Broadcast::combine_send(Slot& slot, const CombineCall& call) {
  exec::CombineSendParams params = combine_params(slot, *call.inputs);
  if (is_gathered()) {
    const std::vector<std::int32_t>& picked =
        slot.routing ? slot.routing->gathered_rows : slot.gathered_rows;
    exec::GatherRowsParams gather{};
    gather.source = params.y;
    gather.row_bytes = params.hidden * size_of(params.y_dtype);
    gather.source_stride_bytes = gather.row_bytes;
    gather.indices = picked.data();
    gather.num_rows = static_cast<std::int64_t>(picked.size());
    gather.target = params.rows;
    gather.target_stride_bytes = params.hidden * size_of(params.combine_dtype);
    gather.source_dtype = params.y_dtype;
    gather.target_dtype = params.combine_dtype;
    backend_->gather_rows(gather);
  } else {
    backend_->combine_send(params);
  }
  if (call.inputs->release) poison_received(slot);
}

// Each rank's rows go to everyone, one rank after the other; what belongs to this rank's tokens is
// one block of them.
void Broadcast::combine_recv(Slot& slot, const CombineCall& call) {
  channel_->set_round(slot.round);
  exec::SumRowsParams params = sum_params(slot, *call.inputs);
  const auto kind = static_cast<std::int64_t>(call.inputs->release);
  const auto values = channel_->all_gather_values({params.hidden, kind}, call.deadline, "combine");
  for (int peer = 0; peer < num_ranks(); ++peer) {
    const std::int64_t* theirs = values.data() + std::int64_t{peer} * 2;
    if (theirs[0] == params.hidden && theirs[1] == kind) continue;
    const bool hidden = theirs[0] != params.hidden;
    throw InvalidArgument(
        base::str(what(), ": combine of round ", slot.round,
                  " differs between ranks: ", hidden ? "hidden of the combine" : "release",
                  ": rank ", rank_, " has ", hidden ? params.hidden : kind, ", rank ", peer,
                  " has ", theirs[hidden ? 0 : 1], "; call reset() on every rank"));
  }
  const std::int64_t row_bytes = params.hidden * size_of(params.combine_dtype);
  const std::int64_t step_bytes = row_bytes * workspace_.rows_per_token;
  std::byte* scratch = local_.get() + workspace_.local_scratch_offset;
  std::byte* mine = local_.get() + workspace_.local_mine_offset;
  std::vector<const std::byte*> sources(static_cast<std::size_t>(num_ranks()), nullptr);
  for (int root = 0; root < num_ranks(); ++root) {
    std::int64_t total = 0;
    std::int64_t before_mine = 0;
    for (int source = 0; source < num_ranks(); ++source) {
      const std::int64_t rows = rows_between(slot, source, root);
      if (root == rank_) {
        const std::int64_t at = is_gathered() ? total : source * slot.round_max_tokens;
        std::memcpy(scratch + total * step_bytes,
                    slot_base(slot) + workspace_.combine_offset + at * step_bytes,
                    static_cast<std::size_t>(rows * step_bytes));
      }
      if (source < rank_) before_mine += rows;
      total += rows;
    }
    if (total == 0) continue;
    channel_->broadcast(scratch, {DType::kUInt8, total * step_bytes}, root, call.deadline);
    hook_.step();
    const std::int64_t bytes = rows_between(slot, rank_, root) * step_bytes;
    std::memcpy(mine, scratch + before_mine * step_bytes, static_cast<std::size_t>(bytes));
    sources[static_cast<std::size_t>(root)] = mine;
    mine += bytes;
  }
  params.sources = sources.data();
  backend_->sum_rows(params);
}

std::uint64_t Broadcast::reset(std::uint64_t max_epoch, base::Deadline deadline) {
  channel_->set_round(-1);
  channel_->reset(deadline);
  const auto epochs = channel_->all_gather_values({static_cast<std::int64_t>(max_epoch)}, deadline,
                                                  "reset of an AllToAll");
  return static_cast<std::uint64_t>(*std::max_element(epochs.begin(), epochs.end())) + 1;
}

void Broadcast::check() const {
  const comm::WaitFor nobody{rank_, "check", -1};
  channel_->control().throw_if_aborted(nobody);
  channel_->control().throw_if_lost(nobody);
}

}  // namespace

std::shared_ptr<Exchange> make_broadcast(Setup setup, base::Deadline deadline) {
  return std::make_shared<Broadcast>(std::move(setup), deadline);
}

Capabilities broadcast_capabilities() {
  Capabilities record;
  record.strategy = Strategy::kBroadcast;
  record.layouts = {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor};
  record.id_dtypes = {DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt32};
  record.max_payloads = AllToAll::kMaxPayloads;
  record.max_top_k = AllToAll::kMaxTopK;
  record.max_ranks = AllToAll::kMaxRanks;
  return record;
}

}  // namespace fanfold::exchange
