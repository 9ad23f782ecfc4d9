// SPDX-License-Identifier: Apache-2.0
#include "support/round_run.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "support/number_codec.h"
#include "support/random_bits.h"
#include "support/test_device.h"

namespace fanfold::testing {
namespace {

constexpr std::uint64_t kPayloadSalt = 0x9a71;
constexpr std::uint64_t kResultSalt = 0x4e57;
constexpr std::uint64_t kWeightSalt = 0x3e16;

std::uint64_t word(std::int64_t value) { return static_cast<std::uint64_t>(value); }

std::vector<std::byte> payload_row(std::uint64_t seed, std::size_t payload, int source,
                                   std::int64_t token, std::int64_t row_bytes) {
  RandomBits random(mix(seed, kPayloadSalt, payload, word(source), word(token)));
  std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next() & 0xff);
  return bytes;
}

/// Numbers that break careless sums; which of them a type can hold is up to the rounding.
float special_number(std::uint64_t draw) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float choices[] = {0.0F,
                           -0.0F,
                           std::numeric_limits<float>::denorm_min(),
                           -0x1.fp-130F,  // subnormal in float32 and bfloat16
                           0x1p-24F,      // the smallest float16
                           -0x1.8p-15F,   // subnormal in float16
                           65504.0F,      // the largest float16
                           -65519.0F,     // rounds to the largest float16
                           0x1.fep127F,   // the largest bfloat16
                           -0x1.fffffep127F,
                           kInfinity,
                           -kInfinity,
                           std::numeric_limits<float>::quiet_NaN(),
                           0x1.01p0F,  // half way between two bfloat16
                           0x1.03p0F,
                           0x1.002p0F};  // half way between two float16
  return choices[draw % (sizeof choices / sizeof choices[0])];
}

float made_up_number(std::uint64_t draw, Values values) {
  if (values == Values::kSpecial && draw % 3 == 0) return special_number(draw >> 8);
  // Sixteen binades, so that the order of a sum shows in its bits.
  const float mantissa = static_cast<float>(draw >> 40) * 0x1p-23F - 1.0F;
  return mantissa * static_cast<float>(1U << ((draw >> 4) & 0xf)) * 0x1p-8F;
}

void store_id(DType dtype, std::int64_t id, std::byte* bytes) {
  // Two's complement little-endian and big-endian differ; conversions do not.
  if (dtype == DType::kInt16) {
    const auto value = static_cast<std::int16_t>(id);
    std::memcpy(bytes, &value, sizeof value);
  } else if (dtype == DType::kInt32 || dtype == DType::kUInt32) {
    const auto value = static_cast<std::int32_t>(id);
    std::memcpy(bytes, &value, sizeof value);
  } else {
    std::memcpy(bytes, &id, sizeof id);
  }
}

std::vector<std::int32_t> placement_of(const AllToAllConfig& config, int num_ranks) {
  switch (config.placement.kind) {
    case Placement::Kind::kLinear:
      return linear_placement(config.num_experts, num_ranks);
    case Placement::Kind::kRoundRobin:
      return round_robin_placement(config.num_experts, num_ranks);
    case Placement::Kind::kTable:
      return config.placement.table;
  }
  return {};
}

/// Bytes from the first element to behind the last.
std::int64_t span_of(const TensorView& view) {
  if (view.num_elements() == 0) return 0;
  std::int64_t last = 0;
  for (int i = 0; i < view.ndim; ++i) {
    const auto dim = static_cast<std::size_t>(i);
    last += (view.shape[dim] - 1) * view.strides[dim];
  }
  return (last + 1) * size_of(view.dtype);
}

}  // namespace

RoundPlan make_round(const AllToAllConfig& config, int num_ranks, RoutingKind kind,
                     std::int64_t round_max_tokens, std::uint64_t seed) {
  RoundPlan plan;
  plan.exchange.num_ranks = num_ranks;
  plan.exchange.num_experts = config.num_experts;
  plan.exchange.top_k = config.top_k;
  plan.exchange.rank_of_expert = placement_of(config, num_ranks);
  plan.exchange.logical_of_expert = config.placement.logical_of_expert;
  plan.exchange.active.assign(static_cast<std::size_t>(num_ranks), true);
  plan.exchange.layout = config.layout;
  plan.exchange.weighting = config.weighting;
  plan.exchange.round_max_tokens = round_max_tokens;
  plan.exchange.expert_alignment = config.expert_alignment;
  plan.exchange.max_recv_rows = config.max_recv_rows;
  plan.exchange.ranks = make_tokens(
      {kind, num_ranks, plan.exchange.num_logical_experts(), config.top_k, round_max_tokens, seed});
  plan.payloads.push_back({config.dtype, {config.hidden}});
  if (config.extra_bytes_per_token > 0) plan.payloads.push_back({DType::kUInt8, {1}});
  plan.seed = seed;
  plan.hidden = config.hidden;
  plan.combine_dtype = config.combine_dtype.value_or(config.dtype);
  plan.y_dtype = plan.combine_dtype;
  plan.out_dtype = plan.combine_dtype;
  plan.label = name_of(kind);
  return plan;
}

TensorBuffer::TensorBuffer(DType dtype, std::int64_t num_rows,
                           const std::vector<std::int64_t>& row_shape, std::int64_t row_padding) {
  view_.dtype = dtype;
  view_.ndim = 1 + static_cast<int>(row_shape.size());
  view_.shape[0] = num_rows;
  std::int64_t stride = 1;
  for (std::size_t i = row_shape.size(); i > 0; --i) {
    view_.shape[i] = row_shape[i - 1];
    view_.strides[i] = stride;
    stride *= row_shape[i - 1];
  }
  view_.strides[0] = stride + row_padding;
  bytes_.assign(static_cast<std::size_t>(num_rows * view_.strides[0] * size_of(dtype)),
                std::byte{0xab});
  view_.data = bytes_.data();
}

std::byte* TensorBuffer::row(std::int64_t index) {
  return bytes_.data() + index * view_.row_stride_bytes();
}

const std::byte* TensorBuffer::row(std::int64_t index) const {
  return bytes_.data() + index * view_.row_stride_bytes();
}

void TensorBuffer::move_to(int device_index, void* stream) {
  const auto size = static_cast<std::int64_t>(bytes_.size());
  device_bytes_ = test_device()->allocate(device_index, size);
  test_device()->upload(device_index, device_bytes_.get(), bytes_.data(), size, stream);
  view_.data = device_bytes_.get();
  view_.device = DeviceType::kGpu;
  view_.device_index = device_index;
}

void TensorBuffer::fetch(void* stream) {
  if (view_.device != DeviceType::kGpu) return;
  test_device()->download(view_.device_index, bytes_.data(), view_.data,
                          static_cast<std::int64_t>(bytes_.size()), stream);
}

bool has_groups(Layout layout) noexcept {
  return layout == Layout::kRankMajor || layout == Layout::kExpertMajor;
}

std::int64_t num_rows_of(const TensorView& view, Layout layout) {
  return has_groups(layout) ? view.shape[0] * view.shape[1] : view.shape[0];
}

bool results_travel_in_place(const AllToAllConfig& config) {
  if (config.layout == Layout::kRankMajor) return true;
  return config.layout == Layout::kFlat && config.strategy != Strategy::kOneSided &&
         config.strategy != Strategy::kLowLatency && config.strategy != Strategy::kBatched;
}

std::byte* row_of(const TensorView& view, Layout layout, std::int64_t index) {
  auto* data = static_cast<std::byte*>(view.data);
  if (!has_groups(layout)) return data + index * view.strides[0] * size_of(view.dtype);
  const std::int64_t outer = index / view.shape[1];
  const std::int64_t inner = index % view.shape[1];
  return data + (outer * view.strides[0] + inner * view.strides[1]) * size_of(view.dtype);
}

RoundRun::RoundRun(AllToAll& all_to_all, RoundPlan plan)
    : all_to_all_(all_to_all), plan_(std::move(plan)), rank_(all_to_all.rank()) {
  if (all_to_all.config().device == DeviceType::kGpu) {
    stream_ = test_device()->make_stream(all_to_all.config().device_index);
    inputs.stream = stream_.get();
  }
  fill_inputs();
}

void RoundRun::synchronize() const {
  if (!is_on_gpu()) return;
  test_device()->synchronize(all_to_all_.config().device_index, stream_.get());
  try {
    all_to_all_.check();
  } catch (const PeerLost& lost) {
    // A peer may be through with its last round and gone; what kernels missed is told otherwise.
    if (std::string(lost.what()).find(": check: ") == std::string::npos) throw;
  }
}

void RoundRun::place(TensorBuffer& buffer) const {
  if (is_on_gpu()) buffer.move_to(all_to_all_.config().device_index, stream_.get());
}

TensorView RoundRun::on_host(const TensorView& view) const {
  if (view.device != DeviceType::kGpu) return view;
  copied_.resize(static_cast<std::size_t>(span_of(view)));
  test_device()->download(view.device_index, copied_.data(), view.data,
                          static_cast<std::int64_t>(copied_.size()), stream_.get());
  TensorView copy = view;
  copy.data = copied_.data();
  return copy;
}

std::vector<std::int32_t> RoundRun::ints_of(const TensorView& view) const {
  const TensorView copy = on_host(view);
  const auto* values = static_cast<const std::int32_t*>(copy.data);
  return {values, values + copy.num_elements()};
}

std::string RoundRun::where() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(plan_.exchange.num_ranks) +
         ", round " + std::to_string(round_.number) + ", " + plan_.label + ", seed " +
         std::to_string(plan_.seed);
}

void RoundRun::fill_inputs() {
  const Exchange& exchange = plan_.exchange;
  const RankTokens& tokens = exchange.tokens_of(rank_);
  const std::int64_t num_tokens = tokens.num_tokens;
  for (std::size_t i = 0; i < plan_.payloads.size(); ++i) {
    const PayloadSpec& spec = plan_.payloads[i];
    TensorBuffer buffer(spec.dtype, num_tokens, spec.row_shape, plan_.row_padding);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const auto bytes = payload_row(plan_.seed, i, rank_, token, buffer.view().row_bytes());
      std::memcpy(buffer.row(token), bytes.data(), bytes.size());
    }
    buffer.remember();
    place(buffer);
    payloads_.push_back(std::move(buffer));
    inputs.payloads.push_back(payloads_.back().view());
  }
  ids_ = TensorBuffer(plan_.id_dtype, num_tokens, {exchange.top_k}, plan_.row_padding);
  weights_ = TensorBuffer(DType::kFloat32, num_tokens, {exchange.top_k}, plan_.row_padding);
  new_weights_ = TensorBuffer(DType::kFloat32, num_tokens, {exchange.top_k}, plan_.row_padding);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (int k = 0; k < exchange.top_k; ++k) {
      const auto at = static_cast<std::size_t>(token * exchange.top_k + k);
      store_id(plan_.id_dtype, tokens.topk_ids[at], ids_.row(token) + k * size_of(plan_.id_dtype));
      encode(DType::kFloat32, tokens.topk_weights[at], weights_.row(token) + k * 4);
      const float changed =
          made_up_number(mix(plan_.seed, kWeightSalt, word(rank_), at), Values::kOrdinary);
      encode(DType::kFloat32, changed, new_weights_.row(token) + k * 4);
    }
  }
  ids_.remember();
  weights_.remember();
  place(ids_);
  place(weights_);
  place(new_weights_);
  if (exchange.has_ids) inputs.topk_ids = ids_.view();
  if (exchange.has_weights) inputs.topk_weights = weights_.view();
  inputs.round_max_tokens = exchange.round_max_tokens;
  if (exchange.invalid_expert_id != -1) inputs.invalid_expert_id = exchange.invalid_expert_id;
}

void RoundRun::dispatch() {
  received_ = all_to_all_.dispatch(inputs);
  round_ = received_.handle();
  check_received();
}

void RoundRun::dispatch_send() { round_ = all_to_all_.dispatch_send(inputs); }

void RoundRun::dispatch_recv() {
  received_ = all_to_all_.dispatch_recv(round_);
  check_received();
}

void RoundRun::check_received() const {
  SCOPED_TRACE(where());
  const ExpectedRows rows = expected_rows(plan_.exchange, rank_);
  EXPECT_TRUE(received_.is_open());
  synchronize();
  EXPECT_EQ(received_.round_max_tokens(), plan_.exchange.round_max_tokens);
  EXPECT_EQ(received_.num_tokens(), plan_.exchange.tokens_of(rank_).num_tokens);
  ASSERT_EQ(received_.payloads().size(), plan_.payloads.size());
  for (std::size_t i = 0; i < plan_.payloads.size(); ++i) check_payload(i, rows);
  check_side_tensors(rows);
}

void RoundRun::check_payload(std::size_t index, const ExpectedRows& rows) const {
  const Exchange& exchange = plan_.exchange;
  const TensorView view = on_host(received_.payloads()[index]);
  const auto num_rows = static_cast<std::int64_t>(rows.source_rank.size());
  std::vector<std::int64_t> shape;
  if (exchange.layout == Layout::kRankMajor) {
    shape = {exchange.num_ranks, exchange.round_max_tokens};
  } else if (exchange.layout == Layout::kExpertMajor) {
    shape = {static_cast<std::int64_t>(rows.expert_counts.size()),
             exchange.num_ranks * exchange.round_max_tokens};
  } else {
    shape = {num_rows};
  }
  const std::vector<std::int64_t>& row_shape = plan_.payloads[index].row_shape;
  shape.insert(shape.end(), row_shape.begin(), row_shape.end());
  EXPECT_EQ(view.dtype, plan_.payloads[index].dtype);
  ASSERT_EQ(std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + view.ndim), shape)
      << "payload " << index;
  const std::int64_t row_bytes = payloads_[index].view().row_bytes();
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const int source = rows.source_rank[static_cast<std::size_t>(row)];
    if (rows.is_zero[static_cast<std::size_t>(row)]) {
      const std::byte* got = row_of(view, exchange.layout, row);
      ASSERT_TRUE(std::all_of(got, got + row_bytes, [](std::byte b) { return b == std::byte{0}; }))
          << "payload " << index << ", row " << row << " should be zeros";
    }
    if (source < 0) continue;
    const std::int64_t token = rows.source_token[static_cast<std::size_t>(row)];
    const auto expected = payload_row(plan_.seed, index, source, token, row_bytes);
    ASSERT_EQ(std::memcmp(row_of(view, exchange.layout, row), expected.data(), expected.size()), 0)
        << "payload " << index << ", row " << row << " should be token " << token << " of rank "
        << source;
  }
}

void RoundRun::check_side_tensors(const ExpectedRows& rows) const {
  EXPECT_EQ(ints_of(received_.rank_counts()), rows.rank_counts);
  EXPECT_EQ(ints_of(received_.expert_counts()), rows.expert_counts);
  EXPECT_EQ(ints_of(received_.num_rows()), std::vector<std::int32_t>{rows.num_rows});
  if (!rows.offsets.empty()) {
    EXPECT_EQ(ints_of(received_.offsets()), rows.offsets);
  }
  EXPECT_EQ(ints_of(received_.source_rank()), rows.source_rank);
  EXPECT_EQ(ints_of(received_.source_token()), rows.source_token);
  const HostCounts counts = received_.host_counts();
  EXPECT_EQ(counts.rank_counts, rows.rank_counts);
  EXPECT_EQ(counts.expert_counts, rows.expert_counts);
  EXPECT_EQ(counts.num_rows, rows.num_rows);
  const bool by_expert = is_per_expert(plan_.exchange.layout);
  const bool has_ids = plan_.exchange.has_ids && !by_expert;
  EXPECT_EQ(received_.topk_ids().has_value(), has_ids);
  if (has_ids) {
    EXPECT_EQ(ints_of(received_.topk_ids()), rows.topk_ids);
  }
  EXPECT_EQ(received_.topk_weights().has_value(), plan_.exchange.has_weights);
  if (!plan_.exchange.has_weights) return;
  const TensorView weights = on_host(received_.topk_weights());
  ASSERT_EQ(weights.num_elements(), static_cast<std::int64_t>(rows.topk_weights.size()));
  const std::size_t per_row = by_expert ? 1 : static_cast<std::size_t>(plan_.exchange.top_k);
  for (std::size_t i = 0; i < rows.topk_weights.size(); ++i) {
    if (rows.source_rank[i / per_row] < 0 && !rows.is_zero[i / per_row]) continue;
    std::byte expected[4];
    encode(DType::kFloat32, rows.topk_weights[i], expected);
    ASSERT_TRUE(
        same_number(DType::kFloat32, static_cast<const std::byte*>(weights.data) + 4 * i, expected))
        << "topk_weights[" << i << "]";
  }
}

float RoundRun::element(const ResultIndex& index) const {
  const std::uint64_t draw =
      mix(plan_.seed, kResultSalt + num_combines_, word(index.rank), word(index.expert),
          word(index.source), word(index.token), word(index.column));
  return round_to(plan_.y_dtype, made_up_number(draw, plan_.values));
}

void RoundRun::fill_y(const TensorView& y) const {
  const Exchange& exchange = plan_.exchange;
  const ExpectedRows rows = expected_rows(exchange, rank_);
  const std::int64_t size = size_of(plan_.y_dtype);
  for (std::size_t i = 0; i < rows.source_rank.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    std::byte* out = row_of(y, exchange.layout, row);
    const int source = rows.source_rank[i];
    if (source < 0) {  // must never be read: NaN in every type
      std::memset(out, 0xff, static_cast<std::size_t>(plan_.hidden * size));
      continue;
    }
    ResultIndex index{rank_, rows.expert[i], source, rows.source_token[i], 0};
    const bool is_zero = exchange.layout == Layout::kGathered && exchange.has_ids &&
                         !exchange.is_routed(source, index.token, rank_);
    for (; index.column < plan_.hidden; ++index.column) {
      encode(plan_.y_dtype, is_zero ? 0.0F : element(index), out + index.column * size);
    }
  }
}

CombineInputs RoundRun::prepare_combine(bool release) {
  ++num_combines_;
  const Exchange& exchange = plan_.exchange;
  const std::int64_t num_tokens = exchange.tokens_of(rank_).num_tokens;
  out_ = TensorBuffer(plan_.out_dtype, num_tokens, {plan_.hidden});
  combine_inputs_ = CombineInputs();
  if (plan_.zero_copy) {
    combine_inputs_.y = all_to_all_.combine_buffer(round_, plan_.hidden, plan_.y_dtype);
  } else {
    const TensorView& like = received_.payloads().front();
    std::vector<std::int64_t> shape;
    if (has_groups(exchange.layout)) shape.push_back(like.shape[1]);
    shape.push_back(plan_.hidden);
    staged_y_ = TensorBuffer(plan_.y_dtype, like.shape[0], shape);
    place(staged_y_);
    combine_inputs_.y = staged_y_.view();
  }
  const TensorView y = combine_inputs_.y;
  if (is_on_gpu()) {
    // Written on the host first: the device's checks do not see what the host writes to it.
    std::vector<std::byte> rows(static_cast<std::size_t>(span_of(y)));
    TensorView host = y;
    host.data = rows.data();
    fill_y(host);
    test_device()->upload(y.device_index, y.data, rows.data(),
                          static_cast<std::int64_t>(rows.size()), stream_.get());
    staged_y_.fetch(stream_.get());
  } else {
    fill_y(y);
  }
  staged_y_.remember();
  place(out_);
  combine_inputs_.out = out_.view();
  if (plan_.new_weights_at_combine) combine_inputs_.topk_weights = new_weights_.view();
  combine_inputs_.release = release;
  return combine_inputs_;
}

void RoundRun::combine(bool release) {
  all_to_all_.combine(prepare_combine(release), round_);
  check_out();
}

void RoundRun::combine_send(bool release) {
  all_to_all_.combine_send(prepare_combine(release), round_);
}

void RoundRun::combine_recv(bool release) {
  combine_inputs_.release = release;
  all_to_all_.combine_recv(combine_inputs_, round_);
  check_out();
}

void RoundRun::release() {
  all_to_all_.release(round_);
  synchronize();
}

void RoundRun::check_out() {
  SCOPED_TRACE(where());
  synchronize();
  for (TensorBuffer* buffer : {&out_, &ids_, &weights_, &staged_y_}) buffer->fetch(stream_.get());
  for (TensorBuffer& payload : payloads_) payload.fetch(stream_.get());
  const Exchange& exchange = plan_.exchange;
  const std::int64_t num_tokens = exchange.tokens_of(rank_).num_tokens;
  CombineTypes types{plan_.hidden, plan_.combine_dtype, plan_.out_dtype, {}};
  if (plan_.new_weights_at_combine) {
    for (std::int64_t i = 0; i < num_tokens * exchange.top_k; ++i) {
      const std::int64_t token = i / exchange.top_k;
      types.weights.push_back(
          decode(DType::kFloat32, new_weights_.row(token) + 4 * (i % exchange.top_k)));
    }
  }
  const auto expected = expected_out(exchange, rank_, types,
                                     [this](const ResultIndex& index) { return element(index); });
  const std::int64_t size = size_of(plan_.out_dtype);
  for (std::int64_t i = 0; i < num_tokens * plan_.hidden; ++i) {
    const std::byte* got = out_.row(i / plan_.hidden) + i % plan_.hidden * size;
    ASSERT_TRUE(same_number(plan_.out_dtype, got, expected.data() + i * size))
        << "out[" << i / plan_.hidden << ", " << i % plan_.hidden << "]: expected "
        << decode(plan_.out_dtype, expected.data() + i * size) << ", got "
        << decode(plan_.out_dtype, got);
  }
  for (const TensorBuffer& payload : payloads_) EXPECT_TRUE(payload.is_unchanged());
  EXPECT_TRUE(ids_.is_unchanged());
  EXPECT_TRUE(weights_.is_unchanged());
  EXPECT_TRUE(staged_y_.is_unchanged());
}

}  // namespace fanfold::testing
