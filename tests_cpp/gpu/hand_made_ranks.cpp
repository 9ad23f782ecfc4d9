// SPDX-License-Identifier: Apache-2.0
#include "gpu/hand_made_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>

#include "fanfold/tensor_view.h"
#include "gpu/hand_made_rank.h"

namespace fanfold::testing {
namespace {

constexpr int kSlotIndex = 1;
constexpr std::uint32_t kGeneration = 3;
constexpr std::int64_t kMaxTiles = 64;

std::int32_t unit_of(std::initializer_list<std::uint64_t> numbers) {
  std::int32_t unit = 16;
  for (const std::uint64_t number : numbers) {
    while (number % static_cast<std::uint64_t>(unit) != 0) unit /= 2;
  }
  return unit;
}

template <typename Id>
std::vector<std::byte> encoded(const std::vector<std::int64_t>& ids, int top_k,
                               std::int64_t stride) {
  const auto num_tokens = static_cast<std::int64_t>(ids.size()) / top_k;
  std::vector<Id> rows(static_cast<std::size_t>(std::max<std::int64_t>(1, num_tokens * stride)),
                       Id{77});
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    rows[static_cast<std::size_t>(at / top_k * stride + at % top_k)] = static_cast<Id>(ids[i]);
  }
  const auto* const bytes = reinterpret_cast<const std::byte*>(rows.data());
  return {bytes, bytes + rows.size() * sizeof(Id)};
}

std::vector<std::byte> encoded(DType dtype, const std::vector<std::int64_t>& ids, int top_k,
                               std::int64_t stride) {
  switch (dtype) {
    case DType::kInt16:
      return encoded<std::int16_t>(ids, top_k, stride);
    case DType::kInt64:
      return encoded<std::int64_t>(ids, top_k, stride);
    case DType::kUInt32:
      return encoded<std::uint32_t>(ids, top_k, stride);
    default:
      return encoded<std::int32_t>(ids, top_k, stride);
  }
}

}  // namespace

HandMadeRanks::HandMadeRanks(const RanksSpec& spec, cudasim::Config config, bool slices)
    : spec_(spec), slices_(slices), active_(spec.active) {
  config.devices = spec.num_ranks;
  cudasim::clear_faults();
  cudasim::configure(config);
  cudasim::clear_reports();
  if (active_.empty()) active_.assign(static_cast<std::size_t>(spec.num_ranks), true);
  map_ = plan::build_expert_map(spec.placement, spec.num_experts, spec.num_ranks);
  const std::int64_t num_rows = spec.num_ranks * spec.max_tokens;
  std::int64_t end = spec.num_ranks * std::int64_t{64};
  const auto part = [&](std::int64_t bytes) {
    const std::int64_t offset = (end + kGap + 127) / 128 * 128;
    end = offset + bytes;
    return offset;
  };
  store_offset_ = part(0);
  tokens_offset_ = part(num_rows * 4) - store_offset_;
  ids_offset_ = part(num_rows * spec.top_k * 4) - store_offset_;
  weights_offset_ = part(num_rows * spec.top_k * 4) - store_offset_;
  for (const std::int64_t bytes : spec.row_bytes) {
    payload_offsets_.push_back(part(num_rows * bytes) - store_offset_);
  }
  window_bytes_ = end + kGap;
  std::vector<std::byte*> windows;
  for (int r = 0; r < spec.num_ranks; ++r) {
    ranks_.push_back(std::make_unique<Rank>(r));
    Rank& rank = *ranks_.back();
    check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    for (int peer = 0; peer < spec.num_ranks; ++peer) {
      if (peer == r) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
      if (error != cudaErrorPeerAccessAlreadyEnabled) check(error);  // by an earlier test
    }
    void* memory = nullptr;
    check(cudaMalloc(&memory, static_cast<std::size_t>(window_bytes_)));
    rank.owned.push_back(memory);
    rank.window = static_cast<std::byte*>(memory);
    windows.push_back(rank.window);
    check(cudaMemset(rank.window, 0, static_cast<std::size_t>(spec.num_ranks) * 64));
    const auto name_part = [&](std::int64_t offset, std::int64_t row_bytes, const char* name) {
      std::byte* const at = rank.window + offset;
      for (int source = 0; slices && source < spec.num_ranks; ++source) {
        const auto bytes = static_cast<std::size_t>(spec.max_tokens * row_bytes);
        const std::uint64_t own = std::uint64_t{1} << r;
        cudasim::annotate(at + source * spec.max_tokens * row_bytes, bytes, name,
                          own | (std::uint64_t{1} << source), own);
      }
      if (!slices) cudasim::annotate(at, static_cast<std::size_t>(num_rows * row_bytes), name);
    };
    for (int source = 0; source < spec.num_ranks; ++source) {
      cudasim::annotate(rank.window + source * 64, 64, "flag line", std::uint64_t{1} << source,
                        std::uint64_t{1} << r);
    }
    name_part(store_offset_ + tokens_offset_, 4, "source tokens");
    name_part(store_offset_ + ids_offset_, spec.top_k * 4, "received ids");
    name_part(store_offset_ + weights_offset_, spec.top_k * 4, "received weights");
    for (std::size_t i = 0; i < spec.row_bytes.size(); ++i) {
      name_part(store_offset_ + payload_offsets_[i], spec.row_bytes[i], "received payload");
    }

    rank.rank_of = rank.put(map_.rank_of, "rank_of");
    rank.local_of = rank.put(map_.local_of, "local_of");
    if (map_.has_replicas()) {
      rank.copy_begin = rank.put(map_.copy_begin, "copy_begin");
      rank.copies = rank.put(map_.copies, "copies");
    }
    rank.is_active =
        rank.put(std::vector<std::int32_t>(active_.begin(), active_.end()), "is_active");
    exec::DeviceControl control{};
    control.generation = kGeneration;
    control.placement_version = 5;
    control.mask_digest = 9;
    rank.control = rank.put(std::vector<exec::DeviceControl>{control}, "control");
    rank.slot = rank.zeros<exec::DeviceSlot>(1, "slot");
    rank.report = rank.pin<exec::DeviceReport>();
    rank.abort_word = rank.pin<std::uint32_t>();
    rank.tiles.stride = kMaxTiles;
    const std::int64_t num_columns = std::max(spec.num_ranks, map_.max_local_experts);
    rank.tiles.words = rank.zeros<std::uint64_t>(num_columns * kMaxTiles, "tile words");
    const std::int64_t per_token = std::min(spec.top_k, spec.num_ranks);
    const std::int64_t max_pairs = std::min(spec.top_k, map_.max_local_experts);
    const std::int64_t num_local = map_.max_local_experts;
    rank.sent_ids = rank.take<std::int32_t>(spec.max_tokens * spec.top_k, "sent_ids");
    rank.sent_weights = rank.take<float>(spec.max_tokens * spec.top_k, "sent_weights");
    rank.targets = rank.take<plan::Target>(spec.max_tokens * per_token, "targets");
    rank.rows_per_rank = rank.take<std::int32_t>(spec.num_ranks, "rows_per_rank");
    rank.routed_ids = rank.take<std::int32_t>(num_rows * spec.top_k, "routed_ids");
    rank.routed_weights = rank.take<float>(num_rows * spec.top_k, "routed_weights");
    rank.routed_tokens = rank.take<std::int32_t>(num_rows, "routed_tokens");
    rank.rank_counts = rank.take<std::int32_t>(spec.num_ranks, "rank_counts");
    rank.token_counts = rank.take<std::int32_t>(spec.num_ranks, "token_counts");
    rank.num_rows = rank.take<std::int32_t>(1, "num_rows");
    rank.expert_counts = rank.take<std::int32_t>(num_local, "expert_counts");
    rank.offsets = rank.take<std::int32_t>(num_local + 1, "offsets");
    rank.pairs = rank.take<plan::ExpertRow>(num_rows * max_pairs, "pairs");
    rank.expert_weights = rank.take<float>(num_local * num_rows, "expert_weights");
    for (const std::int64_t bytes : spec.row_bytes) {
      rank.expanded.push_back(rank.take<std::byte>(num_local * num_rows * bytes, "expanded rows"));
    }
    rank.source_rank =
        rank.take<std::int32_t>(std::max<std::int64_t>(1, num_local) * num_rows, "source_rank");
    rank.source_token =
        rank.take<std::int32_t>(std::max<std::int64_t>(1, num_local) * num_rows, "source_token");
  }
  for (int r = 0; r < spec.num_ranks; ++r) {
    Rank& rank = *ranks_[static_cast<std::size_t>(r)];
    check(cudaSetDevice(r));
    rank.windows = rank.put(windows, "windows");
  }
}

HandMadeRanks::~HandMadeRanks() { ranks_.clear(); }

void HandMadeRanks::prepare(const RoundSpec& round) {
  round_ = round;
  ++epoch_;
  plans_.resize(ranks_.size());
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = *ranks_[r];
    const RankTokens& tokens = round.tokens[r];
    check(cudaSetDevice(rank.device));
    rank.num_given = tokens.num_tokens;
    const std::int64_t num_tokens =
        round.words.empty() ? tokens.num_tokens
                            : std::clamp<std::int64_t>(round.words[r], 0, tokens.num_tokens);
    rank.word =
        round.words.empty() ? nullptr : rank.put(std::vector<std::int32_t>{round.words[r]}, "word");
    rank.payloads.clear();
    for (std::size_t i = 0; i < spec_.row_bytes.size(); ++i) {
      const std::int64_t stride = spec_.row_bytes[i] + spec_.source_gap;
      std::vector<std::byte> rows(
          static_cast<std::size_t>(spec_.source_shift + tokens.num_tokens * stride));
      for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
        for (std::int64_t at = 0; at < spec_.row_bytes[i]; ++at) {
          rows[static_cast<std::size_t>(spec_.source_shift + token * stride + at)] =
              payload_byte(rank.device, token + static_cast<std::int64_t>(epoch_) * 100, i, at);
        }
      }
      rank.payloads.push_back(rank.put(rows, "payload") + spec_.source_shift);
    }
    if (round.is_routed) {
      const std::int64_t num_rows = spec_.num_ranks * round.round_max_tokens;
      const auto keep = [&](auto* to, std::int64_t offset, std::int64_t count) {
        check(cudaMemcpy(to, rank.window + store_offset_ + offset,
                         static_cast<std::size_t>(count * 4), cudaMemcpyDefault));
      };
      keep(rank.routed_tokens, tokens_offset_, num_rows);
      keep(rank.routed_ids, ids_offset_, num_rows * spec_.top_k);
      keep(rank.routed_weights, weights_offset_, num_rows * spec_.top_k);
      // What a dispatch along a routing must bring back.
      for (const std::int64_t offset : {ids_offset_, weights_offset_}) {
        check(cudaMemset(rank.window + store_offset_ + offset, 0xee,
                         static_cast<std::size_t>(num_rows * spec_.top_k * 4)));
      }
      continue;
    }
    rank.ids_stride = spec_.top_k + 3;
    const std::vector<std::byte> ids =
        encoded(spec_.id_dtype, tokens.topk_ids, spec_.top_k, rank.ids_stride);
    rank.topk_ids = rank.put(ids, "topk_ids");
    rank.weights_stride = spec_.top_k + 1;
    std::vector<float> weights(static_cast<std::size_t>(tokens.num_tokens * rank.weights_stride),
                               1e30F);
    for (std::size_t i = 0; i < tokens.topk_weights.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      weights[static_cast<std::size_t>(at / spec_.top_k * rank.weights_stride + at % spec_.top_k)] =
          tokens.topk_weights[i];
    }
    rank.topk_weights = spec_.has_weights ? rank.put(weights, "topk_weights") : nullptr;
    TensorView view;
    view.data = const_cast<std::byte*>(ids.data());
    view.dtype = spec_.id_dtype;
    view.ndim = 2;
    view.shape = {tokens.num_tokens, spec_.top_k};
    view.strides = {rank.ids_stride, 1};
    plan::SendPlan& plan = plans_[r];
    plan.source_rank = rank.device;
    plan::reserve_send_plan(plan, map_, spec_.top_k, spec_.max_tokens);
    ASSERT_FALSE(plan::build_send_plan(view, num_tokens, map_, active_, true, plan).has_value());
    if (active_[r]) rank.num_dropped += static_cast<std::uint64_t>(plan.num_dropped);
  }
}

exec::DeviceRound HandMadeRanks::device_round(int r) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
  exec::DeviceRound round{};
  round.windows = rank.windows;
  round.rank_of = rank.rank_of;
  round.local_of = rank.local_of;
  round.copy_begin = rank.copy_begin;
  round.copies = rank.copies;
  round.is_active = rank.is_active;
  round.control = rank.control;
  round.slot = rank.slot;
  round.report = rank.report;
  round.abort_any = rank.abort_word;
  round.store_offset = store_offset_;
  round.round_max_tokens = round_.round_max_tokens;
  round.timeout_ns = spec_.timeout_ns;
  round.rank = r;
  round.num_ranks = spec_.num_ranks;
  round.num_experts = spec_.num_experts;
  round.num_logical = map_.num_logical;
  round.num_local_experts =
      static_cast<std::int32_t>(map_.experts_of[static_cast<std::size_t>(r)].size());
  round.top_k = spec_.top_k;
  round.slot_index = kSlotIndex;
  return round;
}

exec::DeviceDispatchSendParams HandMadeRanks::dispatch_params(int r) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
  exec::DeviceDispatchSendParams params{};
  params.round = device_round(r);
  params.flags.offset = flags_offset_;
  params.flags.phase = exec::DevicePhase::kDispatch;
  params.flags.fields.kind =
      round_.is_routed ? exec::CallKind::kDispatchRouted : exec::CallKind::kDispatch;
  params.flags.fields.round_max_tokens = static_cast<std::uint32_t>(round_.round_max_tokens);
  params.flags.fields.num_payloads = static_cast<std::uint32_t>(spec_.row_bytes.size());
  params.flags.fields.digest = 0x1234;
  params.waits = !round_.is_split;
  params.counts = {rank.rows_per_rank, rank.rank_counts, rank.token_counts, rank.num_rows};
  params.is_routed = round_.is_routed;
  params.topk_ids = rank.topk_ids;
  params.id_dtype = spec_.id_dtype;
  params.ids_stride = rank.ids_stride;
  params.topk_weights = rank.topk_weights;
  params.weights_stride = rank.weights_stride;
  params.num_tokens = rank.num_given;
  params.num_tokens_word = rank.word;
  params.sent_ids = rank.sent_ids;
  params.sent_weights = spec_.has_weights && round_.keeps_weights ? rank.sent_weights : nullptr;
  params.targets = rank.targets;
  params.rows_per_rank = rank.rows_per_rank;
  params.source_token_offset = tokens_offset_;
  params.topk_ids_offset = ids_offset_;
  params.topk_weights_offset = weights_offset_;
  params.num_payloads = static_cast<std::int32_t>(spec_.row_bytes.size());
  for (std::size_t i = 0; i < spec_.row_bytes.size(); ++i) {
    exec::DevicePayload& payload = params.payloads[i];
    payload.rows = rank.payloads[i];
    payload.row_bytes = spec_.row_bytes[i];
    payload.row_stride_bytes = spec_.row_bytes[i] + spec_.source_gap;
    payload.region_offset = payload_offsets_[i];
    payload.region_stride_bytes = spec_.row_bytes[i];
    payload.unit = unit_of({reinterpret_cast<std::uintptr_t>(payload.rows),
                            static_cast<std::uint64_t>(payload.row_stride_bytes),
                            static_cast<std::uint64_t>(payload.row_bytes)});
  }
  params.tiles = rank.tiles;
  return params;
}

exec::DeviceSignalParams HandMadeRanks::signal_params(int r) const {
  const exec::DeviceDispatchSendParams sent = dispatch_params(r);
  exec::DeviceSignalParams params{};
  params.round = sent.round;
  params.flags = sent.flags;
  params.waits = true;
  params.counts = sent.counts;
  return params;
}

exec::DeviceArrangeParams HandMadeRanks::arrange_params(int r) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
  std::byte* const store = rank.window + store_offset_;
  exec::DeviceArrangeParams params{};
  params.round = device_round(r);
  params.rank_counts = rank.rank_counts;
  params.topk_ids = reinterpret_cast<std::int32_t*>(store + ids_offset_);
  auto* const weights = reinterpret_cast<float*>(store + weights_offset_);
  params.topk_weights = spec_.has_weights ? weights : nullptr;
  params.pads_ids = true;
  params.invalid_expert_id = kInvalid;
  if (round_.is_routed) {
    params.routed_ids = rank.routed_ids;
    params.routed_weights = spec_.has_weights ? rank.routed_weights : nullptr;
    params.routed_tokens = rank.routed_tokens;
    params.source_tokens = reinterpret_cast<std::int32_t*>(store + tokens_offset_);
    params.restored_weights = weights;
  }
  if (round_.is_expert_major) {
    params.expert_counts = rank.expert_counts;
    params.offsets = rank.offsets;
    params.pairs = rank.pairs;
    params.max_pairs = std::min(spec_.top_k, map_.max_local_experts);
    params.expert_weights = spec_.has_weights ? rank.expert_weights : nullptr;
    params.num_payloads = static_cast<std::int32_t>(spec_.row_bytes.size());
    for (std::size_t i = 0; i < spec_.row_bytes.size(); ++i) {
      params.payloads[i] = {store + payload_offsets_[i], rank.expanded[i], spec_.row_bytes[i],
                            spec_.row_bytes[i],
                            unit_of({static_cast<std::uint64_t>(spec_.row_bytes[i])})};
    }
  }
  params.tiles = rank.tiles;
  return params;
}

exec::DeviceDescribeParams HandMadeRanks::describe_params(int r) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
  exec::DeviceDescribeParams params{};
  params.round = device_round(r);
  params.rank_counts = rank.rank_counts;
  params.source_tokens =
      reinterpret_cast<const std::int32_t*>(rank.window + store_offset_ + tokens_offset_);
  params.pairs = round_.is_expert_major ? rank.pairs : nullptr;
  params.max_pairs = std::min(spec_.top_k, map_.max_local_experts);
  params.source_rank = rank.source_rank;
  params.source_token = rank.source_token;
  return params;
}

cudaStream_t HandMadeRanks::stream(int rank) const {
  check(cudaSetDevice(rank));
  return ranks_[static_cast<std::size_t>(rank)]->stream;
}

void HandMadeRanks::sync() const {
  for (int r = 0; r < spec_.num_ranks; ++r) check(cudaStreamSynchronize(stream(r)));
}

exec::DeviceReport& HandMadeRanks::report(int rank) const {
  return *ranks_[static_cast<std::size_t>(rank)]->report;
}
std::uint32_t& HandMadeRanks::abort_word(int rank) const {
  return *ranks_[static_cast<std::size_t>(rank)]->abort_word;
}
exec::DeviceSlot HandMadeRanks::slot(int rank) const {
  return read(ranks_[static_cast<std::size_t>(rank)]->slot, 1)[0];
}
exec::DeviceControl HandMadeRanks::control(int rank) const {
  return read(ranks_[static_cast<std::size_t>(rank)]->control, 1)[0];
}

void HandMadeRanks::run(const RoundSpec& round) {
  prepare(round);
  const std::int64_t num_rows = spec_.num_ranks * round.round_max_tokens;
  for (int r = 0; r < spec_.num_ranks; ++r) {
    const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
    check(cudaSetDevice(r));
    exec::DeviceSlot slot = this->slot(r);
    slot.num_combines = 2;  // of the round before
    check(cudaMemcpy(rank.slot, &slot, sizeof(slot), cudaMemcpyDefault));
    const std::int64_t num_described =
        round.is_expert_major ? num_rows * map_.max_local_experts : num_rows;
    for (std::int32_t* const memory : {rank.source_rank, rank.source_token}) {
      check(cudaMemset(memory, 0xff, static_cast<std::size_t>(num_described * 4)));
    }
    check(cudaDeviceSynchronize());  // a memset itself does not wait
  }
  const gpu::LaunchLimits limit{round.max_blocks};
  for (int r = 0; r < spec_.num_ranks; ++r) {
    if (!is_active(r)) continue;
    const cudaStream_t stream = this->stream(r);
    check(gpu::dispatch_send(dispatch_params(r), limit, stream));
    if (round.is_split) check(gpu::signal(signal_params(r), limit, stream));
    check(gpu::arrange(arrange_params(r), limit, stream));
    check(gpu::describe_rows(describe_params(r), limit, stream));
  }
  sync();
  for (int r = 0; r < spec_.num_ranks; ++r) {
    if (is_active(r)) compare(r);
  }
  expect_no_reports();
}

}  // namespace fanfold::testing
