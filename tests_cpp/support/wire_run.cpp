// SPDX-License-Identifier: Apache-2.0
#include "support/wire_run.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "gtest/gtest.h"
#include "support/number_codec.h"
#include "support/random_bits.h"

namespace fanfold::testing {
namespace {

constexpr std::uint64_t kPayloadSalt = 0x11;
constexpr std::uint64_t kResultSalt = 0x22;
constexpr std::uint64_t kWeightSalt = 0x33;

std::uint64_t word(std::int64_t value) { return static_cast<std::uint64_t>(value); }

/// Twenty binades: some become subnormal, some zero. Each is one that `dtype` holds.
std::vector<float> random_row(std::uint64_t seed, std::int64_t hidden, bool specials, DType dtype) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  RandomBits random(seed);
  std::vector<float> row(static_cast<std::size_t>(hidden));
  for (float& value : row) {
    value = std::ldexp(random.unit() - 0.5F, 4 - static_cast<int>(random.below(20)));
    if (specials && random.below(100) == 0) {
      const float choices[] = {kInfinity, -kInfinity, std::nanf(""), -0.0F};
      value = choices[random.below(4)];
    }
    value = round_to(dtype, value);
  }
  return row;
}

void write_row(std::byte* to, DType dtype, const std::vector<float>& row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    encode(dtype, row[i], to + i * static_cast<std::size_t>(size_of(dtype)));
  }
}

void add_row(std::vector<float>& sum, const std::vector<float>& row) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = add(sum[i], row[i]);
}

void scale_row(std::vector<float>& row, float weight) {
  for (float& value : row) value = multiply(weight, value);
}

/// `row` after its way home.
void send_home(std::vector<float>& row, const WirePlan& plan) {
  if (plan.combine_wire != Wire::kNone) {
    row = trip(row, plan.wire_scale);
  } else {
    for (float& value : row) value = round_to(plan.combine_dtype, value);
  }
}

int tag_of(int source, std::int64_t token) { return source * 10'000 + static_cast<int>(token); }

}  // namespace

WirePlan make_wire_plan(const AllToAllConfig& config, int num_ranks, RoutingKind kind,
                        std::int64_t round_max_tokens, std::uint64_t seed) {
  WirePlan plan;
  plan.exchange = make_round(config, num_ranks, kind, round_max_tokens, seed).exchange;
  plan.dispatch_wire = config.dispatch_wire;
  plan.combine_wire = config.combine_wire;
  plan.wire_scale = config.wire_scale;
  plan.dtype = config.dtype;
  plan.combine_dtype = config.combine_dtype.value_or(config.dtype);
  plan.y_dtype = plan.combine_dtype;
  plan.out_dtype = plan.combine_dtype;
  plan.hidden = config.hidden;
  plan.y_hidden = config.hidden;
  plan.seed = seed;
  return plan;
}

WireRun::WireRun(AllToAll& all_to_all, WirePlan plan)
    : all_to_all_(all_to_all), plan_(std::move(plan)), rank_(all_to_all.rank()) {
  const RankTokens& tokens = plan_.exchange.tokens_of(rank_);
  const int top_k = plan_.exchange.top_k;
  ids_ = TensorBuffer(DType::kInt64, tokens.num_tokens, {top_k});
  weights_ = TensorBuffer(DType::kFloat32, tokens.num_tokens, {top_k});
  new_weights_ = TensorBuffer(DType::kFloat32, tokens.num_tokens, {top_k});
  rows_ = TensorBuffer(plan_.dtype, tokens.num_tokens, {plan_.hidden}, 3);
  tags_ = TensorBuffer(DType::kInt32, tokens.num_tokens, {1});
  RandomBits random(mix(plan_.seed, kWeightSalt, word(rank_)));
  for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
    for (int k = 0; k < top_k; ++k) {
      const auto at = static_cast<std::size_t>(token * top_k + k);
      std::memcpy(ids_.row(token) + 8 * k, &tokens.topk_ids[at], 8);
      encode(DType::kFloat32, tokens.topk_weights[at], weights_.row(token) + 4 * k);
      encode(DType::kFloat32, random.unit(), new_weights_.row(token) + 4 * k);
    }
    write_row(rows_.row(token), plan_.dtype, payload_row(rank_, token));
    const int tag = tag_of(rank_, token);
    std::memcpy(tags_.row(token), &tag, sizeof tag);
  }
  rows_.remember();
  inputs.topk_ids = ids_.view();
  if (plan_.exchange.has_weights) inputs.topk_weights = weights_.view();
  inputs.payloads = {rows_.view()};
  if (plan_.has_tags) inputs.payloads.push_back(tags_.view());
  inputs.round_max_tokens = plan_.exchange.round_max_tokens;
}

std::vector<float> WireRun::payload_row(int source, std::int64_t token) const {
  return random_row(mix(plan_.seed, kPayloadSalt, word(source), word(token)), plan_.hidden,
                    plan_.specials, plan_.dtype);
}

std::vector<float> WireRun::result_row(int rank, std::int32_t expert, int source,
                                       std::int64_t token) const {
  const std::uint64_t seed = mix(plan_.seed, kResultSalt + num_combines_, word(rank), word(expert),
                                 word(source), word(token));
  return random_row(seed, plan_.y_hidden, plan_.specials, plan_.y_dtype);
}

void WireRun::dispatch() {
  received_ = all_to_all_.dispatch(inputs);
  round_ = received_.handle();
  check_received();
}

void WireRun::dispatch_send() { round_ = all_to_all_.dispatch_send(inputs); }

void WireRun::dispatch_recv() {
  received_ = all_to_all_.dispatch_recv(round_);
  check_received();
}

void WireRun::check_received() const {
  const ExpectedRows rows = expected_rows(plan_.exchange, rank_);
  const bool is_packed = plan_.dispatch_wire != Wire::kNone;
  const TensorView& numbers = received_.payloads().front();
  ASSERT_EQ(received_.payloads().size(), plan_.has_tags ? 2U : 1U);
  EXPECT_EQ(numbers.dtype, is_packed ? DType::kFloat8E4M3 : plan_.dtype);
  const auto last = static_cast<std::size_t>(numbers.ndim - 1);
  EXPECT_EQ(numbers.shape[last], plan_.hidden);
  ASSERT_EQ(received_.scales().has_value(), is_packed);
  if (is_packed) {
    const TensorView& scales = received_.scales();
    ASSERT_EQ(scales.ndim, numbers.ndim);
    for (std::size_t i = 0; i < last; ++i) EXPECT_EQ(scales.shape[i], numbers.shape[i]);
    EXPECT_EQ(scales.shape[last], (plan_.hidden + 127) / 128);
    EXPECT_EQ(scales.dtype,
              plan_.wire_scale == WireScale::kFloat32 ? DType::kFloat32 : DType::kUInt8);
  }
  const HostCounts counts = received_.host_counts();
  EXPECT_EQ(counts.rank_counts, rows.rank_counts);
  EXPECT_EQ(counts.expert_counts, rows.expert_counts);
  const Layout layout = plan_.exchange.layout;
  for (std::size_t i = 0; i < rows.source_rank.size(); ++i) {
    const int source = rows.source_rank[i];
    if (source < 0) continue;
    const auto row = static_cast<std::int64_t>(i);
    SCOPED_TRACE("row " + std::to_string(row) + " of rank " + std::to_string(rank_));
    check_numbers(row_of(numbers, layout, row),
                  is_packed ? row_of(received_.scales(), layout, row) : nullptr, source,
                  rows.source_token[i]);
    if (::testing::Test::HasFatalFailure()) return;
    if (!plan_.has_tags) continue;
    int tag = 0;
    std::memcpy(&tag, row_of(received_.payloads()[1], layout, row), sizeof tag);
    EXPECT_EQ(tag, tag_of(source, rows.source_token[i]));
  }
}

void WireRun::check_numbers(const std::byte* row, const std::byte* scales, int source,
                            std::int64_t token) const {
  const std::vector<float> sent = payload_row(source, token);
  if (scales == nullptr) {
    for (std::size_t i = 0; i < sent.size(); ++i) {
      const auto size = static_cast<std::size_t>(size_of(plan_.dtype));
      std::byte expected[4];
      encode(plan_.dtype, sent[i], expected);
      ASSERT_TRUE(same_number(plan_.dtype, row + i * size, expected)) << "column " << i;
    }
    return;
  }
  const Fp8Row expected = pack_row(sent, plan_.wire_scale);
  for (std::size_t i = 0; i < expected.scales.size(); ++i) {
    ASSERT_EQ(scale_at(scales, plan_.wire_scale, static_cast<std::int64_t>(i)), expected.scales[i])
        << "block " << i;
  }
  for (std::size_t i = 0; i < sent.size(); ++i) {
    ASSERT_TRUE(same_e4m3(static_cast<std::uint8_t>(row[i]), expected.elements[i]))
        << "column " << i << ": " << sent[i];
  }
}

void WireRun::fill_results() {
  ++num_combines_;
  const Exchange& exchange = plan_.exchange;
  const TensorView& like = received_.payloads().front();
  combine_inputs_ = CombineInputs();
  if (plan_.zero_copy) {
    combine_inputs_.y = all_to_all_.combine_buffer(round_, plan_.y_hidden, plan_.y_dtype);
  } else {
    std::vector<std::int64_t> shape(like.shape.begin() + 1, like.shape.begin() + like.ndim - 1);
    shape.push_back(plan_.y_hidden);
    results_ = TensorBuffer(plan_.y_dtype, like.shape[0], shape);
    combine_inputs_.y = results_.view();
  }
  const ExpectedRows rows = expected_rows(exchange, rank_);
  for (std::size_t i = 0; i < rows.source_rank.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    std::byte* out = row_of(combine_inputs_.y, exchange.layout, row);
    if (rows.source_rank[i] < 0) {  // must never be read: NaN in every type
      std::memset(out, 0xff, static_cast<std::size_t>(plan_.y_hidden * size_of(plan_.y_dtype)));
      continue;
    }
    write_row(out, plan_.y_dtype,
              result_row(rank_, rows.expert[i], rows.source_rank[i], rows.source_token[i]));
  }
  out_ = TensorBuffer(plan_.out_dtype, exchange.tokens_of(rank_).num_tokens, {plan_.y_hidden});
  combine_inputs_.out = out_.view();
  if (plan_.new_weights) combine_inputs_.topk_weights = new_weights_.view();
}

void WireRun::combine(bool release) {
  fill_results();
  combine_inputs_.release = release;
  all_to_all_.combine(combine_inputs_, round_);
  check_out();
}

void WireRun::combine_send(bool release) {
  fill_results();
  combine_inputs_.release = release;
  all_to_all_.combine_send(combine_inputs_, round_);
}

void WireRun::combine_recv(bool release) {
  combine_inputs_.release = release;
  all_to_all_.combine_recv(combine_inputs_, round_);
  check_out();
}

std::vector<float> WireRun::partial(int rank, std::int64_t token) const {
  const Exchange& exchange = plan_.exchange;
  std::vector<float> sum(static_cast<std::size_t>(plan_.y_hidden), 0.0F);
  if (!is_per_expert(exchange.layout)) {
    add_row(sum, result_row(rank, -1, rank_, token));
  } else {
    for (const std::int32_t expert : exchange.experts_of_token(rank_, token)) {
      if (exchange.rank_of_expert[static_cast<std::size_t>(expert)] != rank) continue;
      std::vector<float> row = result_row(rank, expert, rank_, token);
      if (exchange.weighting == Weighting::kCarried) {
        const std::vector<float>& weights = exchange.tokens_of(rank_).topk_weights;
        scale_row(row, exchange.merged_weight(rank_, token, expert, weights));
      }
      add_row(sum, row);
    }
  }
  send_home(sum, plan_);
  return sum;
}

std::vector<float> WireRun::expected_row(std::int64_t token) const {
  const Exchange& exchange = plan_.exchange;
  std::vector<float> sum(static_cast<std::size_t>(plan_.y_hidden), 0.0F);
  if (exchange.weighting != Weighting::kOrigin) {
    for (int rank = 0; rank < exchange.num_ranks; ++rank) {
      if (exchange.is_routed(rank_, token, rank)) add_row(sum, partial(rank, token));
    }
    return sum;
  }
  std::vector<float> weights = exchange.tokens_of(rank_).topk_weights;
  if (plan_.new_weights) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto top_k = static_cast<std::size_t>(exchange.top_k);
      weights[i] = decode(DType::kFloat32,
                          new_weights_.row(static_cast<std::int64_t>(i / top_k)) + 4 * (i % top_k));
    }
  }
  for (const std::int32_t expert : exchange.experts_of_token(rank_, token)) {
    const int rank = exchange.rank_of_expert[static_cast<std::size_t>(expert)];
    std::vector<float> row(sum.size(), 0.0F);
    add_row(row, result_row(rank, expert, rank_, token));
    send_home(row, plan_);
    scale_row(row, exchange.merged_weight(rank_, token, expert, weights));
    add_row(sum, row);
  }
  return sum;
}

void WireRun::check_out() const {
  const std::int64_t size = size_of(plan_.out_dtype);
  for (std::int64_t token = 0; token < plan_.exchange.tokens_of(rank_).num_tokens; ++token) {
    const std::vector<float> expected = expected_row(token);
    for (std::int64_t column = 0; column < plan_.y_hidden; ++column) {
      std::byte bytes[4];
      encode(plan_.out_dtype, expected[static_cast<std::size_t>(column)], bytes);
      const std::byte* got = out_.row(token) + column * size;
      ASSERT_TRUE(same_number(plan_.out_dtype, got, bytes))
          << "out[" << token << ", " << column << "] of rank " << rank_ << ": expected "
          << decode(plan_.out_dtype, bytes) << ", got " << decode(plan_.out_dtype, got) << ", seed "
          << plan_.seed;
    }
  }
  EXPECT_TRUE(rows_.is_unchanged());
}

}  // namespace fanfold::testing
