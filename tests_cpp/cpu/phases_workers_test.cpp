// SPDX-License-Identifier: Apache-2.0
// Each phase, shared out item by item, writes what one thread writes: whole buffers are compared.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/hand_made_ranks.h"
#include "cpu/numbers.h"
#include "exec/workers.h"
#include "gtest/gtest.h"
#include "support/random_bits.h"
#include "support/same_bytes.h"

namespace fanfold::cpu {
namespace {

using testing::Bytes;
using testing::same_bytes;

constexpr std::uint64_t kSeed = 20240311;
constexpr int kNumRanks = 3;
constexpr int kNumExperts = 12;
constexpr int kTopK = 5;
constexpr std::int64_t kMaxTokens = 40;  // m and M
constexpr std::int64_t kNumTokens = 37;
constexpr std::int64_t kHidden = 161;

/// What a phase writes.
using Written = std::vector<Bytes>;
/// Runs a phase with these workers (null: none) and returns all that it may write.
using Phase = std::function<Written(exec::Workers*)>;

void expect_same_with_any_workers(const std::string& what, const Phase& phase) {
  const Written expected = phase(nullptr);
  exec::Workers workers(base::kernels(base::Isa::kAuto).store_fence, 0);
  for (const int num_workers : {1, 2, 3, 8, 2}) {
    workers.set_num_workers(num_workers);
    const Written got = phase(&workers);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(same_bytes(got[i], expected[i]))
          << what << ", buffer " << i << ", " << num_workers << " workers, seed " << kSeed;
    }
  }
  EXPECT_EQ(workers.num_helpers(), 1) << what << " was not shared out";
}

/// The ids of tokens: negative ones, repeats, and neighbours that go to the same ranks.
std::vector<std::int32_t> random_ids(std::int64_t num_tokens, std::uint64_t seed) {
  testing::RandomBits random(seed);
  std::vector<std::int32_t> ids;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const bool anywhere = token / 8 % 2 == 0;
    for (int k = 0; k < kTopK; ++k) {
      ids.push_back(anywhere ? static_cast<std::int32_t>(random.below(kNumExperts + 2)) - 2
                             : 4 * (k % kNumRanks) + static_cast<std::int32_t>(random.below(4)));
    }
  }
  return ids;
}

plan::ExpertMap expert_map() {
  return plan::build_expert_map(Placement::linear(), kNumExperts, kNumRanks);
}

plan::SendPlan send_plan(std::vector<std::int32_t>& ids) {
  plan::SendPlan plan;
  plan::reserve_send_plan(plan, expert_map(), kTopK, kMaxTokens);
  const TensorView view(ids.data(), DType::kInt32, {kNumTokens, kTopK});
  EXPECT_FALSE(plan::build_send_plan(view, kNumTokens, expert_map(),
                                     std::vector<bool>(kNumRanks, true), false, plan));
  return plan;
}

/// Rows of every source as rank 1 has received them: m rows apart.
struct Received {
  std::vector<std::int32_t> rank_counts = {23, 0, 17};
  std::vector<std::int64_t> row_begin = {0, kMaxTokens, 2 * kMaxTokens};
  std::vector<std::int32_t> expert_counts = std::vector<std::int32_t>(4, 0);
  std::vector<std::int64_t> expert_begin = {0};
  plan::ExpertRows expert_rows;

  explicit Received(std::int64_t alignment) {
    std::vector<std::vector<std::int32_t>> ids;
    std::vector<plan::SourceRows> sources;
    const std::vector<float> weights(kMaxTokens * kTopK, 0.25F);
    for (std::size_t source = 0; source < kNumRanks; ++source) {
      ids.push_back(random_ids(kMaxTokens, kSeed + source));
    }
    for (std::size_t source = 0; source < kNumRanks; ++source) {
      sources.push_back({ids[source].data(), weights.data(), rank_counts[source]});
    }
    plan::build_expert_rows(sources, expert_map(), 1, kTopK, expert_counts.data(), expert_rows);
    for (const std::int32_t count : expert_counts) {
      expert_begin.push_back(base::align_up(expert_begin.back() + count, alignment));
    }
  }
  std::int64_t num_rows() const { return expert_begin.back(); }
};

exec::Context context_with(base::StepHook& hook, exec::Workers* workers, bool streaming = false) {
  exec::Context context = context_alone(hook, kNumRanks, 1, streaming);
  context.workers = workers;
  return context;
}

TEST(PhasesWorkersTest, DispatchSend) {
  // In turns, short, packed; dense and not.
  const std::vector<std::int64_t> row_bytes = {4096, 1600, 576, 513, 33, 12};
  std::vector<std::int32_t> ids = random_ids(kNumTokens, kSeed);
  const plan::SendPlan plan = send_plan(ids);
  for (const std::int64_t guard : {0, 64}) {
    for (const bool streaming : {false, true}) {
      const Phase phase = [&](exec::Workers* workers) {
        HandMadeRanks ranks(kNumRanks);
        std::vector<exec::PayloadRows> payloads;
        std::vector<Bytes> inputs;
        exec::DispatchSendParams params{};
        params.arrays = {0, kNumRanks * kMaxTokens * 4, kNumRanks * kMaxTokens * 4 * 6, kMaxTokens,
                         kTopK};
        std::int64_t offset = std::int64_t{kNumRanks} * kMaxTokens * 4 * 11;
        for (const std::int64_t bytes : row_bytes) {
          inputs.push_back(testing::random_bytes(kNumTokens * bytes, kSeed + inputs.size()));
          offset = base::align_up(offset, 128);
          payloads.push_back({inputs.back().data(), bytes, bytes, offset, bytes + guard});
          offset += kNumRanks * kMaxTokens * (bytes + guard);
        }
        Written slots(kNumRanks, testing::untouched_bytes(offset));
        std::vector<std::byte*> bases;
        for (Bytes& slot : slots) bases.push_back(slot.data());
        const std::vector<std::int64_t> first_rows(kNumRanks, kMaxTokens);
        const std::vector<bool> active(kNumRanks, true);
        const auto lines = ranks.lines_written_by(1);
        Bytes staging(kMaxTokens * kTopK * 4);
        params.plan = &plan;
        params.payloads = &payloads;
        params.with_indices = true;
        params.first_rows = first_rows.data();
        params.slot_bases = bases.data();
        params.flags = lines.data();
        params.active = &active;
        params.fields.epoch = 3;
        params.staging = staging.data();
        exec::Context context = ranks.context(1, streaming);
        context.workers = workers;
        dispatch_send(context, params);
        EXPECT_TRUE(exec::has_arrived(ranks.line(0, 1), 3));
        return slots;
      };
      expect_same_with_any_workers("dispatch_send", phase);
    }
  }
}

TEST(PhasesWorkersTest, ExpandRows) {
  for (const std::int64_t alignment : {1, 8}) {
    const Received received(alignment);
    for (const std::int64_t num_rows : {received.num_rows(), received.num_rows() / 2}) {
      for (const std::int64_t row_bytes : {96, 2048}) {
        const Bytes source = testing::random_bytes(kNumRanks * kMaxTokens * row_bytes, kSeed);
        const Phase phase = [&](exec::Workers* workers) {
          Written written = {testing::untouched_bytes(num_rows * row_bytes),
                             testing::untouched_bytes(num_rows * 4)};
          exec::ExpandRowsParams params{};
          params.expert_rows = &received.expert_rows;
          params.rank_counts = received.rank_counts.data();
          params.row_begin = received.row_begin.data();
          params.expert_begin = received.expert_begin.data();
          params.expert_counts = alignment > 1 ? received.expert_counts.data() : nullptr;
          params.num_experts = 4;
          params.num_rows = num_rows;
          params.payloads = {{source.data(), written[0].data(), row_bytes, row_bytes}};
          params.weights = reinterpret_cast<float*>(written[1].data());
          base::StepHook hook(TestKnobs{}, 0);
          expand_rows(context_with(hook, workers), params);
          return written;
        };
        expect_same_with_any_workers("expand_rows", phase);
      }
    }
  }
}

TEST(PhasesWorkersTest, ExpandRowsPastTheCache) {
  // More than 8 MiB in all.
  const Received received(1);
  constexpr std::int64_t kRowBytes = 300'032;
  const Bytes source = testing::random_bytes(kNumRanks * kMaxTokens * kRowBytes, kSeed);
  const Phase phase = [&](exec::Workers* workers) {
    Written written = {testing::untouched_bytes(received.num_rows() * kRowBytes)};
    exec::ExpandRowsParams params{};
    params.expert_rows = &received.expert_rows;
    params.rank_counts = received.rank_counts.data();
    params.row_begin = received.row_begin.data();
    params.expert_begin = received.expert_begin.data();
    params.num_experts = 4;
    params.num_rows = received.num_rows();
    params.payloads = {{source.data(), written[0].data(), kRowBytes, kRowBytes}};
    base::StepHook hook(TestKnobs{}, 0);
    expand_rows(context_with(hook, workers, /*streaming=*/true), params);
    return written;
  };
  expect_same_with_any_workers("expand_rows", phase);
}

TEST(PhasesWorkersTest, MoveRows) {
  const std::vector<std::int32_t> counts = {23, 0, 17};
  const std::vector<std::int64_t> from = {0, kMaxTokens, 2 * kMaxTokens};
  const std::vector<std::int64_t> to = {0, 23, 23};
  for (const std::int64_t guard : {0, 16}) {
    for (const std::int64_t num_rows : {40, 30, 10}) {
      const std::int64_t stride = 1000 + guard;
      const Bytes source = testing::random_bytes(kNumRanks * kMaxTokens * stride, kSeed);
      const Phase phase = [&](exec::Workers* workers) {
        Written written = {testing::untouched_bytes(num_rows * stride),
                           testing::untouched_bytes(num_rows * 4)};
        exec::MoveRowsParams params{counts.data(), from.data(), to.data(), num_rows, {}};
        params.payloads = {{source.data(), written[0].data(), 1000, stride},
                           {source.data(), written[1].data(), 4, 4}};
        base::StepHook hook(TestKnobs{}, 0);
        move_rows(context_with(hook, workers), params);
        return written;
      };
      expect_same_with_any_workers("move_rows", phase);
    }
  }
}

TEST(PhasesWorkersTest, GatherRows) {
  const std::vector<std::int32_t> indices = {9, 0, 3, 3, 38, 1, 2, 11, 12, 13, 14, 30, 7};
  const auto num_rows = static_cast<std::int64_t>(indices.size());
  for (const DType target_dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::int64_t target_bytes = kHidden * size_of(target_dtype);
    const Bytes source = random_numbers(DType::kFloat32, kMaxTokens * kHidden, kSeed);
    const Phase phase = [&](exec::Workers* workers) {
      Written written = {testing::untouched_bytes(num_rows * target_bytes)};
      const exec::GatherRowsParams params{source.data(), kHidden * 4,       indices.data(),
                                          num_rows,      written[0].data(), target_bytes,
                                          kHidden * 4,   DType::kFloat32,   target_dtype};
      base::StepHook hook(TestKnobs{}, 0);
      gather_rows(context_with(hook, workers), params);
      return written;
    };
    expect_same_with_any_workers("gather_rows", phase);
  }
}

enum class Results { kStaged, kRounded, kApplied, kCarried, kOrigin };

/// Results that rank 1 sends home.
Written send_results(Results results, std::int64_t num_y_rows, const Received& received,
                     exec::Workers* workers) {
  const bool per_expert = results >= Results::kApplied;
  const std::int64_t rows_per_token = results == Results::kOrigin ? 4 : 1;
  HandMadeRanks ranks(kNumRanks);
  exec::CombineSendParams params{};
  params.y_dtype = results == Results::kRounded ? DType::kFloat32 : DType::kBFloat16;
  params.combine_dtype = DType::kBFloat16;
  params.hidden = kHidden;
  const Bytes y = random_numbers(params.y_dtype, num_y_rows * kHidden, kSeed);
  params.row_bytes = kHidden * 2;
  Written written = {
      testing::untouched_bytes(kNumRanks * kMaxTokens * rows_per_token * params.row_bytes)};
  const std::vector<std::int64_t> y_begin = {0, 23, 23};
  const std::vector<bool> active(kNumRanks, true);
  const auto lines = ranks.lines_written_by(1);
  params.y = y.data();
  params.rank_counts = received.rank_counts.data();
  params.row_begin = received.row_begin.data();
  params.y_begin = y_begin.data();
  params.num_y_rows = num_y_rows;
  params.expert_rows = per_expert ? &received.expert_rows : nullptr;
  params.expert_begin = received.expert_begin.data();
  params.carried = results == Results::kCarried;
  params.origin = results == Results::kOrigin;
  params.rows_per_token = rows_per_token;
  params.rows = written[0].data();
  params.flags = lines.data();
  params.active = &active;
  params.fields.epoch = 5;
  exec::Context context = ranks.context(1);
  context.workers = workers;
  combine_send(context, params);
  EXPECT_TRUE(exec::has_arrived(ranks.line(0, 1), 5) && exec::has_arrived(ranks.line(2, 1), 5));
  return written;
}

TEST(PhasesWorkersTest, CombineSend) {
  const Received received(4);
  for (const Results results : {Results::kStaged, Results::kRounded, Results::kApplied,
                                Results::kCarried, Results::kOrigin}) {
    const std::int64_t all = results >= Results::kApplied ? received.num_rows() : 40;
    for (const std::int64_t num_y_rows : {all, all / 2}) {
      expect_same_with_any_workers(
          "combine_send of kind " + std::to_string(static_cast<int>(results)),
          [&](exec::Workers* workers) {
            return send_results(results, num_y_rows, received, workers);
          });
    }
  }
}

TEST(PhasesWorkersTest, SumRows) {
  std::vector<std::int32_t> ids = random_ids(kNumTokens, kSeed);
  const plan::SendPlan plan = send_plan(ids);
  const plan::ExpertMap map = expert_map();
  const std::vector<float> weights(kNumTokens * kTopK, 0.375F);
  const std::vector<bool> active(kNumRanks, true);
  for (const bool origin : {false, true}) {
    for (const std::int64_t gap : {0, 6}) {
      const std::int64_t rows_per_token = origin ? 4 : 1;
      const std::int64_t out_stride = kHidden * 2 + gap;
      std::vector<Bytes> homes;
      std::vector<const std::byte*> sources;
      for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
        homes.push_back(
            random_numbers(DType::kFloat32, kMaxTokens * rows_per_token * kHidden, kSeed + rank));
      }
      for (const Bytes& home : homes) sources.push_back(home.data());
      const Phase phase = [&](exec::Workers* workers) {
        Written written = {testing::untouched_bytes(kNumTokens * out_stride)};
        exec::SumRowsParams params{};
        params.plan = &plan;
        params.sources = sources.data();
        params.combine_dtype = DType::kFloat32;
        params.hidden = kHidden;
        params.rows_per_token = rows_per_token;
        params.row_bytes = kHidden * 4;
        params.origin_map = origin ? &map : nullptr;
        params.active = &active;
        params.topk_weights = weights.data();
        params.weights_stride = kTopK;
        params.out = written[0].data();
        params.out_stride_bytes = out_stride;
        params.out_dtype = DType::kBFloat16;
        base::StepHook hook(TestKnobs{}, 0);
        sum_rows(context_with(hook, workers), params);
        return written;
      };
      expect_same_with_any_workers("sum_rows", phase);
    }
  }
}

}  // namespace
}  // namespace fanfold::cpu
