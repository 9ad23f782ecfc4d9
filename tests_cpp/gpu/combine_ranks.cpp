// SPDX-License-Identifier: Apache-2.0
#include "gpu/combine_ranks.h"

#include <limits>

namespace fanfold::testing {

namespace {

constexpr int kGuard = 16;  // bytes behind each row of out, and before the first

const base::Kernels& portable() { return *base::portable_kernels(); }

template <class T>
T* host_word() {
  void* data = nullptr;
  EXPECT_EQ(cudaHostAlloc(&data, sizeof(T), cudaHostAllocMapped), cudaSuccess);
  std::memset(data, 0, sizeof(T));
  return static_cast<T*>(data);
}

}  // namespace

CombineRanks::CombineRanks(const CombineShape& shape, int max_blocks)
    : shape_(shape),
      max_blocks_(max_blocks),
      max_targets_(std::min(shape.top_k, shape.num_ranks)),
      max_pairs_(std::min(shape.top_k, shape.num_local_experts)) {
  rows_per_token_ = shape_.fold == Fold::kOrigin ? max_pairs_ : 1;
  row_bytes_ = is_packed() ? plan::packed_row_bytes(shape_.hidden, shape_.wire_scale)
                           : shape_.hidden * size_of(shape_.combine);
  flags_bytes_ = 2 * shape_.num_ranks * exec::kFlagWords * 8;  // combine flags, acknowledgements
  region_bytes_ = shape_.num_ranks * shape_.round_max_tokens * rows_per_token_ * row_bytes_;
  y_rows_ = shape_.num_ranks * shape_.round_max_tokens *
            (shape_.fold == Fold::kStaged ? 1 : shape_.num_local_experts);
  out_stride_ = (shape_.hidden * size_of(shape_.out) + kGuard + 15) / 16 * 16;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    if (is_active(rank)) active_.push_back(rank);
    ranks_.push_back(std::make_unique<Rank>());
    choose_experts(rank);
  }
  number_rows();
  for (int rank = 0; rank < shape_.num_ranks; ++rank) place(rank);
  for (int rank = 0; rank < shape_.num_ranks; ++rank) make_params(rank);
  make_results(shape_.seed);
}

CombineRanks::~CombineRanks() {
  for (const auto& rank : ranks_) {
    (void)cudaStreamDestroy(rank->stream);
    (void)cudaFreeHost(rank->report);
    (void)cudaFreeHost(rank->abort_any);
  }
}

/// Ids with repeats, dropped ones, and weights of both signs.
void CombineRanks::choose_experts(int rank) {
  Rank& mine = *ranks_[index(rank)];
  RandomBits random(mix(shape_.seed, 1, static_cast<std::uint64_t>(rank)));
  const std::int64_t num_experts = std::int64_t{shape_.num_ranks} * shape_.num_local_experts;
  for (int i = 0; i < num_tokens(rank) * shape_.top_k; ++i) {
    const auto id = static_cast<std::int32_t>(random.below(num_experts + 1)) - 1;
    mine.ids.push_back(id);
    mine.weights.push_back(random.unit() - 0.25F);
  }
}

/// Who sends which row where, by the definition: tokens in turn, ranks ascending; at the receiver
/// sources in turn, then rows, then columns.
void CombineRanks::number_rows() {
  const auto num_ranks = static_cast<std::size_t>(shape_.num_ranks);
  const auto num_slots =
      static_cast<std::size_t>(shape_.num_ranks * shape_.round_max_tokens * max_pairs_);
  std::vector<std::vector<std::int32_t>> positions(
      num_ranks, std::vector<std::int32_t>(static_cast<std::size_t>(shape_.num_local_experts), 0));
  for (const auto& rank : ranks_) {
    rank->rank_counts.assign(num_ranks, 0);
    rank->rows_per_rank.assign(num_ranks, 0);
    rank->pairs.assign(num_slots, plan::ExpertRow{-1, 0, 0});
  }
  for (int source = 0; source < shape_.num_ranks; ++source) {
    Rank& mine = *ranks_[index(source)];
    for (int token = 0; token < num_tokens(source); ++token) {
      const std::int32_t* ids = mine.ids.data() + token * shape_.top_k;
      const float* weights = mine.weights.data() + token * shape_.top_k;
      int num_targets = 0;
      for (int rank = 0; rank < shape_.num_ranks; ++rank) {
        Rank& theirs = *ranks_[index(rank)];
        if (!is_active(rank) || !is_active(source)) continue;
        const std::int32_t row = mine.rows_per_rank[index(rank)];
        plan::ExpertRow* pair =
            theirs.pairs.data() + (source * shape_.round_max_tokens + row) * max_pairs_;
        bool is_hit = false;
        for (int k = 0; k < shape_.top_k; ++k) {
          if (ids[k] < 0 || ids[k] / shape_.num_local_experts != rank) continue;
          is_hit = true;
          if (plan::is_repeat(ids, k)) continue;
          const std::int32_t local = ids[k] % shape_.num_local_experts;
          *pair++ = {local, positions[index(rank)][index(local)]++,
                     plan::merged_weight(ids, weights, k, shape_.top_k)};
        }
        if (!is_hit) continue;
        ++num_targets;
        mine.targets.push_back({rank, row});
        ++mine.rows_per_rank[index(rank)];
        ++theirs.rank_counts[index(source)];
      }
      for (; num_targets < max_targets_; ++num_targets) mine.targets.push_back({-1, -1});
    }
  }
}

void CombineRanks::place(int rank) {
  Rank& mine = *ranks_[index(rank)];
  EXPECT_EQ(cudaSetDevice(device_of(rank)), cudaSuccess);
  EXPECT_EQ(cudaStreamCreateWithFlags(&mine.stream, cudaStreamNonBlocking), cudaSuccess);
  mine.window = std::make_unique<DeviceMemory>(device_of(rank), flags_bytes_ + region_bytes_);
  const Bytes zeros(static_cast<std::size_t>(flags_bytes_));
  mine.window->put(0, zeros.data(), flags_bytes_);
  cudasim::annotate(mine.window->at(), static_cast<std::size_t>(flags_bytes_), "flags");
  if (region_bytes_ > 0) {
    cudasim::annotate(mine.window->at(flags_bytes_), static_cast<std::size_t>(region_bytes_),
                      "rows", std::uint64_t{1} << device_of(rank));
  }
  std::vector<std::int32_t> rank_of;
  std::vector<std::int32_t> local_of;
  for (int expert = 0; expert < shape_.num_ranks * shape_.num_local_experts; ++expert) {
    rank_of.push_back(expert / shape_.num_local_experts);
    local_of.push_back(expert % shape_.num_local_experts);
  }
  std::vector<std::int32_t> active;
  for (int peer = 0; peer < shape_.num_ranks; ++peer) active.push_back(is_active(peer) ? 1 : 0);
  mine.rank_of = std::make_unique<DeviceMemory>(device_of(rank), rank_of);
  mine.local_of = std::make_unique<DeviceMemory>(device_of(rank), local_of);
  mine.active = std::make_unique<DeviceMemory>(device_of(rank), active);
  exec::DeviceControl control{};
  control.generation = 3;
  mine.control =
      std::make_unique<DeviceMemory>(device_of(rank), std::vector<exec::DeviceControl>{control});
  exec::DeviceSlot slot{};
  slot.epoch = kEpoch;
  slot.num_tokens = num_tokens(rank);
  mine.slot = std::make_unique<DeviceMemory>(device_of(rank), std::vector<exec::DeviceSlot>{slot});
  mine.device_targets = std::make_unique<DeviceMemory>(device_of(rank), mine.targets);
  mine.sent_ids = std::make_unique<DeviceMemory>(device_of(rank), mine.ids);
  mine.topk_weights = std::make_unique<DeviceMemory>(device_of(rank), mine.weights);
  mine.counts = std::make_unique<DeviceMemory>(device_of(rank), mine.rank_counts);
  mine.device_pairs = std::make_unique<DeviceMemory>(device_of(rank), mine.pairs);
  mine.device_y = std::make_unique<DeviceMemory>(device_of(rank),
                                                 (y_rows_ * shape_.hidden + 1) * size_of(shape_.y));
  mine.out = std::make_unique<DeviceMemory>(
      device_of(rank), kGuard + (num_tokens(rank) + shape_.rows_behind) * out_stride_);
  mine.report = host_word<exec::DeviceReport>();
  mine.abort_any = host_word<std::uint32_t>();
}

void CombineRanks::make_params(int rank) {
  Rank& mine = *ranks_[index(rank)];
  std::vector<std::byte*> windows;
  for (const auto& peer : ranks_) windows.push_back(peer->window->at());
  mine.windows = std::make_unique<DeviceMemory>(device_of(rank), windows);
  exec::DeviceRound round{};
  round.windows = mine.windows->at<std::byte*>();
  round.rank_of = mine.rank_of->at<std::int32_t>();
  round.local_of = mine.local_of->at<std::int32_t>();
  round.is_active = mine.active->at<std::int32_t>();
  round.control = mine.control->at<exec::DeviceControl>();
  round.slot = mine.slot->at<exec::DeviceSlot>();
  round.report = mine.report;
  round.abort_any = mine.abort_any;
  round.store_offset = flags_bytes_ / 2;
  round.round_max_tokens = shape_.round_max_tokens;
  round.timeout_ns = kTimeoutNs;
  round.rank = rank;
  round.num_ranks = shape_.num_ranks;
  round.num_experts = round.num_logical = shape_.num_ranks * shape_.num_local_experts;
  round.num_local_experts = shape_.num_local_experts;
  round.top_k = shape_.top_k;
  exec::FlagFields fields;
  fields.kind = exec::CallKind::kCombine;
  fields.round_max_tokens = static_cast<std::uint32_t>(shape_.round_max_tokens);
  fields.num_payloads = static_cast<std::uint32_t>(shape_.hidden);

  exec::DeviceCombineSendParams& send = mine.send;
  send.round = round;
  send.flags = {0, fields, exec::DevicePhase::kCombine};
  send.waits = true;
  const std::int64_t y_shift = shape_.misaligned ? size_of(shape_.y) : 0;
  send.y = mine.device_y->at(y_shift);
  send.y_dtype = shape_.y;
  send.combine_dtype = shape_.combine;
  send.hidden = shape_.hidden;
  send.rank_counts = mine.counts->at<std::int32_t>();
  if (shape_.fold != Fold::kStaged) send.pairs = mine.device_pairs->at<plan::ExpertRow>();
  send.max_pairs = max_pairs_;
  send.carried = shape_.fold == Fold::kCarried;
  send.origin = shape_.fold == Fold::kOrigin;
  send.wire = shape_.wire;
  send.wire_scale = shape_.wire_scale;
  send.rows_per_token = rows_per_token_;
  send.row_bytes = row_bytes_;
  send.rows = mine.window->at(flags_bytes_);

  exec::DeviceSumParams& sum = mine.sum;
  sum.round = round;
  sum.targets = mine.device_targets->at<plan::Target>();
  sum.sent_ids = mine.sent_ids->at<std::int32_t>();
  sum.num_tokens = num_tokens(rank) + shape_.rows_behind;
  sum.combine_offset = flags_bytes_ - round.store_offset;
  sum.combine_dtype = shape_.combine;
  sum.hidden = shape_.hidden;
  sum.rows_per_token = rows_per_token_;
  sum.row_bytes = row_bytes_;
  sum.wire = shape_.wire;
  sum.wire_scale = shape_.wire_scale;
  sum.origin = send.origin;
  sum.topk_weights = mine.topk_weights->at<float>();
  sum.weights_stride = shape_.top_k;
  sum.out = mine.out->at(shape_.misaligned ? size_of(shape_.out) : kGuard);
  sum.out_stride_bytes = out_stride_;
  sum.out_dtype = shape_.out;
  fields.kind = exec::CallKind::kAck;
  sum.ack = {flags_bytes_ / 2, fields, exec::DevicePhase::kAck};
}

void CombineRanks::send(int rank) {
  Rank& mine = *ranks_[index(rank)];
  ASSERT_EQ(cudaSetDevice(device_of(rank)), cudaSuccess);
  ASSERT_EQ(gpu::combine_send(mine.send, {max_blocks_}, mine.stream), cudaSuccess);
}

void CombineRanks::signal(int rank, const exec::DeviceFlags& flags, bool announces, bool waits) {
  Rank& mine = *ranks_[index(rank)];
  ASSERT_EQ(cudaSetDevice(device_of(rank)), cudaSuccess);
  ASSERT_EQ(gpu::signal({mine.send.round, flags, announces, waits, {}}, {1}, mine.stream),
            cudaSuccess);
}

void CombineRanks::sum(int rank) {
  Rank& mine = *ranks_[index(rank)];
  ASSERT_EQ(cudaSetDevice(device_of(rank)), cudaSuccess);
  ASSERT_EQ(gpu::sum_rows(mine.sum, {max_blocks_}, mine.stream), cudaSuccess);
}

void CombineRanks::wait() {
  for (const auto& rank : ranks_) EXPECT_EQ(cudaStreamSynchronize(rank->stream), cudaSuccess);
}

exec::DeviceSlot CombineRanks::slot(int rank) const {
  const Bytes bytes = ranks_[index(rank)]->slot->get(0, sizeof(exec::DeviceSlot));
  exec::DeviceSlot slot;
  std::memcpy(&slot, bytes.data(), sizeof slot);
  return slot;
}

/// Numbers of very different size, so that the order of additions shows.
Bytes CombineRanks::numbers(DType dtype, std::int64_t count, std::uint64_t seed) const {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float specials[] = {0.0F,      -0.0F,      kInfinity, -kInfinity, kInfinity - kInfinity,
                            0x1p-149F, -0x1p-130F, 0x1p-24F,  0x1p-15F,   3.4e38F,
                            -65504.0F, 448.0F};
  RandomBits random(seed);
  Bytes bytes(static_cast<std::size_t>(count * size_of(dtype)));
  for (std::int64_t i = 0; i < count; ++i) {
    const float scale = random.below(3) == 0 ? 4000.0F : 1.0F;
    float number = scale * (random.unit() - 0.5F);
    if (shape_.specials && random.below(6) == 0) number = specials[random.below(12)];
    encode(dtype, number, bytes.data() + i * size_of(dtype));
  }
  return bytes;
}

void CombineRanks::make_results(std::uint64_t seed) {
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    Rank& mine = *ranks_[index(rank)];
    mine.y =
        numbers(shape_.y, y_rows_ * shape_.hidden, mix(seed, static_cast<std::uint64_t>(rank)));
    const std::int64_t shift = shape_.misaligned ? size_of(shape_.y) : 0;
    mine.device_y->put(shift, mine.y.data(), static_cast<std::int64_t>(mine.y.size()));
    const Bytes untouched = untouched_bytes(mine.out->bytes());
    mine.out->put(0, untouched.data(), mine.out->bytes());
    if (mine.rows.empty())
      mine.rows = Bytes(static_cast<std::size_t>(region_bytes_), std::byte{0xcd});
    expect_rows(rank);
  }
  for (int rank = 0; rank < shape_.num_ranks; ++rank) expect_out(rank);
}

/// What travels home from `rank`.
void CombineRanks::expect_rows(int rank) {
  Rank& mine = *ranks_[index(rank)];
  const std::int64_t y_row = shape_.hidden * size_of(shape_.y);
  const std::int64_t expert_rows = shape_.num_ranks * shape_.round_max_tokens;
  const bool power_of_two = shape_.wire_scale == WireScale::kUe8m0;
  const auto write = [&](std::byte* out, const std::vector<const void*>& rows,
                         const float* weights) {
    const auto count = static_cast<std::int64_t>(rows.size());
    if (is_packed()) {
      portable().sum_pack_fp8(out, out + plan::packed_scales_offset(shape_.hidden), power_of_two,
                              rows.data(), weights, count, shape_.y, shape_.hidden);
    } else {
      portable().sum_rows(out, shape_.combine, rows.data(), weights, count, shape_.y,
                          shape_.hidden);
    }
  };
  for (int source = 0; source < shape_.num_ranks; ++source) {
    for (std::int32_t i = 0; i < mine.rank_counts[index(source)]; ++i) {
      const std::int64_t row = source * shape_.round_max_tokens + i;
      std::byte* out = mine.rows.data() + row * rows_per_token_ * row_bytes_;
      if (shape_.fold == Fold::kStaged) {
        const std::byte* from = mine.y.data() + row * y_row;
        if (shape_.y == shape_.combine && !is_packed()) {
          std::copy(from, from + y_row, out);
        } else {
          write(out, {from}, nullptr);
        }
        continue;
      }
      std::vector<const void*> rows;
      std::vector<float> weights;
      const plan::ExpertRow* pairs = mine.pairs.data() + row * max_pairs_;
      for (int j = 0; j < max_pairs_ && pairs[j].local_expert >= 0; ++j) {
        rows.push_back(mine.y.data() +
                       (pairs[j].local_expert * expert_rows + pairs[j].position) * y_row);
        weights.push_back(pairs[j].weight);
      }
      if (shape_.fold == Fold::kOrigin) {
        for (std::size_t j = 0; j < rows.size(); ++j) {
          write(out + static_cast<std::int64_t>(j) * row_bytes_, {rows[j]}, nullptr);
        }
      } else {
        write(out, rows, shape_.fold == Fold::kCarried ? weights.data() : nullptr);
      }
    }
  }
}

/// What `rank` adds up.
void CombineRanks::expect_out(int rank) {
  Rank& mine = *ranks_[index(rank)];
  mine.expected = untouched_bytes(mine.out->bytes());
  const std::int64_t begin = shape_.misaligned ? size_of(shape_.out) : kGuard;
  for (int token = 0; token < num_tokens(rank) + shape_.rows_behind; ++token) {
    std::vector<const void*> rows;
    std::vector<float> weights;
    const bool is_token = token < num_tokens(rank);
    const plan::Target* targets = mine.targets.data() + token * max_targets_;
    const std::int32_t* ids = mine.ids.data() + token * shape_.top_k;
    const auto row_of = [&](const plan::Target& target, std::int64_t place) {
      const std::int64_t row = rank * shape_.round_max_tokens + target.row;
      return ranks_[index(target.rank)]->rows.data() + (row * rows_per_token_ + place) * row_bytes_;
    };
    if (is_token && shape_.fold != Fold::kOrigin) {
      for (int i = 0; i < max_targets_ && targets[i].rank >= 0; ++i) {
        rows.push_back(row_of(targets[i], 0));
      }
    }
    std::vector<std::int64_t> places(index(shape_.num_ranks), 0);
    for (int k = 0; is_token && shape_.fold == Fold::kOrigin && k < shape_.top_k; ++k) {
      if (ids[k] < 0 || plan::is_repeat(ids, k)) continue;
      const std::int32_t hosts = ids[k] / shape_.num_local_experts;
      const plan::Target* const end = targets + max_targets_;
      const plan::Target* const target =
          std::find_if(targets, end, [&](const plan::Target& t) { return t.rank == hosts; });
      if (target == end) continue;
      rows.push_back(row_of(*target, places[index(hosts)]++));
      weights.push_back(
          plan::merged_weight(ids, mine.weights.data() + token * shape_.top_k, k, shape_.top_k));
    }
    std::byte* out = mine.expected.data() + begin + token * out_stride_;
    const float* factors = weights.empty() ? nullptr : weights.data();
    const auto count = static_cast<std::int64_t>(rows.size());
    if (is_packed()) {
      portable().sum_unpack_fp8(
          out, shape_.out, rows.data(), plan::packed_scales_offset(shape_.hidden),
          shape_.wire_scale == WireScale::kUe8m0, factors, count, shape_.hidden);
    } else {
      portable().sum_rows(out, shape_.out, rows.data(), factors, count, shape_.combine,
                          shape_.hidden);
    }
  }
}

/// One bit pattern for all NaN.
void CombineRanks::forget_nans(Bytes& bytes, std::int64_t offset, DType dtype,
                               std::int64_t count) const {
  for (std::int64_t i = 0; i < count; ++i) {
    std::byte* at = bytes.data() + offset + i * size_of(dtype);
    if (dtype == DType::kFloat8E4M3) {
      if ((*at & std::byte{0x7f}) == std::byte{0x7f}) *at = std::byte{0x7f};
    } else if (const float number = decode(dtype, at); number != number) {
      std::memset(at, 0xff, static_cast<std::size_t>(size_of(dtype)));
    }
  }
}

void CombineRanks::forget_nans_of_rows(int rank, Bytes& rows) const {
  const Rank& mine = *ranks_[index(rank)];
  const DType dtype = is_packed() ? DType::kFloat8E4M3 : shape_.combine;
  for (int source = 0; source < shape_.num_ranks; ++source) {
    for (std::int64_t i = 0; i < mine.rank_counts[index(source)] * rows_per_token_; ++i) {
      const std::int64_t row = source * shape_.round_max_tokens * rows_per_token_ + i;
      forget_nans(rows, row * row_bytes_, dtype, shape_.hidden);
    }
  }
}

void CombineRanks::expect_results() const {
  for (const int rank : active_) {
    const Rank& mine = *ranks_[index(rank)];
    Bytes rows = mine.window->get(flags_bytes_, region_bytes_);
    Bytes expected_rows = mine.rows;
    forget_nans_of_rows(rank, rows);
    forget_nans_of_rows(rank, expected_rows);
    EXPECT_TRUE(same_bytes(rows, expected_rows))
        << "rows of rank " << rank << ", " << shape_.describe();
    Bytes got = out(rank);
    Bytes expected = mine.expected;
    const std::int64_t begin = shape_.misaligned ? size_of(shape_.out) : kGuard;
    for (int token = 0; token < num_tokens(rank) + shape_.rows_behind; ++token) {
      forget_nans(got, begin + token * out_stride_, shape_.out, shape_.hidden);
      forget_nans(expected, begin + token * out_stride_, shape_.out, shape_.hidden);
    }
    EXPECT_TRUE(same_bytes(got, expected)) << "out of rank " << rank << ", " << shape_.describe();
    EXPECT_EQ(report(rank).failure, 0U) << shape_.describe();
  }
}

}  // namespace fanfold::testing
