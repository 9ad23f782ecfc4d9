// SPDX-License-Identifier: Apache-2.0
// Rounds on GPUs under hard schedules, with more ranks, and next to the same rounds on the CPU.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/gpu_case.h"
#include "support/random_bits.h"

namespace fanfold {
namespace {

using testing::gpu_config;
using testing::of_rank;
using testing::RoundRun;
using testing::RoutingKind;
using testing::TensorBuffer;

testing::RoundPlan plan_of(const AllToAllConfig& config, int num_ranks, std::uint64_t seed) {
  return testing::make_round(config, num_ranks, RoutingKind::kUneven, config.max_tokens_per_rank,
                             seed);
}

/// Every way through a round, two of them open at once.
void run_all_ways(AllToAll& all_to_all) {
  const AllToAllConfig& config = all_to_all.config();
  const int num_ranks = all_to_all.num_ranks();
  RoundRun whole(all_to_all, plan_of(config, num_ranks, 1));
  RoundRun split(all_to_all, plan_of(config, num_ranks, 2));
  whole.dispatch();
  split.dispatch_send();
  whole.combine(/*release=*/false);
  split.dispatch_recv();
  split.combine_send();
  whole.combine();
  split.combine_recv();
  RoundRun released(all_to_all, plan_of(config, num_ranks, 3));
  released.dispatch();
  released.release();
  RoundRun last(all_to_all, plan_of(config, num_ranks, 4));
  last.dispatch();
  last.combine();
}

TEST(GpuRoundsTest, NoScheduleOrStaleLoadSpoilsARound) {
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) {
    cudasim::Config devices = testing::devices_for(2, 2);
    devices.seed = seed;
    devices.shuffle_blocks = true;
    devices.stale = seed % 2 == 0 ? 0.3 : 0.0;
    devices.preempt = seed < 3 ? 0.02 : 0.0;
    devices.resident_blocks = 2 + static_cast<int>(seed % 3);
    const testing::GpuRanks gpus(devices);
    testing::spawn_ranks(2, [&](Communicator& communicator) {
      AllToAllConfig config =
          of_rank(gpu_config(seed < 3 ? Layout::kExpertMajor : Layout::kRankMajor), communicator);
      config.max_in_flight = 2;
      AllToAll all_to_all(communicator, config);
      run_all_ways(all_to_all);
      communicator.barrier();
      all_to_all.close();
    });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(GpuRoundsTest, FiveRanksExchange) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    const testing::GpuRanks gpus(5, 5);
    testing::spawn_ranks(5, [&](Communicator& communicator) {
      AllToAllConfig config = of_rank(gpu_config(layout), communicator);
      config.num_experts = 9;
      config.max_in_flight = 2;
      AllToAll all_to_all(communicator, config);
      run_all_ways(all_to_all);
      communicator.barrier();
      all_to_all.close();
    });
  }
}

TEST(GpuRoundsTest, ManyTokensGoThroughManyBlocks) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    cudasim::Config devices = testing::devices_for(3, 3);
    devices.resident_blocks = 8;
    devices.shuffle_blocks = true;
    devices.seed = 11;
    const testing::GpuRanks gpus(devices);
    testing::spawn_ranks(3, [&](Communicator& communicator) {
      AllToAllConfig config = of_rank(gpu_config(layout), communicator);
      config.num_experts = 40;  // more columns than a warp has lanes
      config.top_k = 6;
      config.max_tokens_per_rank = 100;
      AllToAll all_to_all(communicator, config);
      RoundRun round(all_to_all, plan_of(config, 3, 1));
      round.dispatch();
      round.combine();
      communicator.barrier();
      all_to_all.close();
    });
  }
}

/// One dispatch and combine of an AllToAll on either device, and all that came of it.
class Twin {
 public:
  Twin(Communicator& communicator, const AllToAllConfig& config, DeviceType device)
      : config_(of(config, device)), all_to_all_(communicator, of_rank(config_, communicator)) {}

  void run(std::uint64_t seed) {
    constexpr std::int64_t kTokens = 4;
    const int index = all_to_all_.config().device_index;
    const bool on_gpu = config_.device == DeviceType::kGpu;
    const std::shared_ptr<void> stream =
        on_gpu ? testing::test_device()->make_stream(index) : nullptr;
    const auto place = [&](TensorBuffer& buffer) {
      if (on_gpu) buffer.move_to(index, stream.get());
    };
    TensorBuffer ids(DType::kInt32, kTokens, {config_.top_k});
    TensorBuffer weights(DType::kFloat32, kTokens, {config_.top_k});
    TensorBuffer x(config_.dtype, kTokens, {config_.hidden}, 3);
    testing::RandomBits random(testing::mix(seed, static_cast<std::uint64_t>(all_to_all_.rank())));
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (int k = 0; k < config_.top_k; ++k) {
        const auto id = static_cast<std::int32_t>(random.below(config_.num_experts + 1) - 1);
        std::memcpy(ids.row(token) + 4 * k, &id, sizeof id);
        const auto weight = static_cast<float>(random.below(1000)) * 0x1p-9F;
        std::memcpy(weights.row(token) + 4 * k, &weight, sizeof weight);
      }
      fill_row(random, x.row(token));
    }
    for (TensorBuffer* each : {&ids, &weights, &x}) place(*each);
    DispatchInputs inputs;
    inputs.topk_ids = ids.view();
    inputs.topk_weights = weights.view();
    inputs.payloads = {x.view()};
    if (on_gpu) inputs.stream = stream.get();
    const Received received = all_to_all_.dispatch(inputs);
    counts = received.host_counts();
    const TensorView payload = received.payloads().front();
    keep(payload, stream.get());
    keep(received.topk_weights(), stream.get());
    if (received.scales().has_value()) keep(received.scales(), stream.get());
    TensorBuffer y(DType::kBFloat16, payload.shape[0], {payload.shape[1], config_.hidden});
    for (std::int64_t row = 0; row < payload.shape[0] * payload.shape[1]; ++row) {
      fill_row(random, y.row(0) + row * config_.hidden * 2);
    }
    TensorBuffer out(DType::kFloat32, kTokens, {config_.hidden});
    place(y);
    place(out);
    CombineInputs combine;
    combine.y = y.view();
    combine.out = out.view();
    all_to_all_.combine(combine, received.handle());
    out.fetch(stream.get());
    outputs.emplace_back(out.row(0), out.row(0) + kTokens * config_.hidden * 4);
  }
  void close() { all_to_all_.close(); }

  HostCounts counts;
  /// Rows that came, then `out`.
  std::vector<std::vector<std::byte>> outputs;

 private:
  static AllToAllConfig of(AllToAllConfig config, DeviceType device) {
    config.device = device;
    return config;
  }
  /// Of bfloat16: small and large numbers of both signs.
  void fill_row(testing::RandomBits& random, std::byte* row) const {
    for (std::int64_t i = 0; i < config_.hidden; ++i) {
      const std::uint64_t draw = random.next();
      const auto number =
          static_cast<std::uint16_t>((draw & 0x807f) | (0x3a00 + (draw >> 40) % 0x600));
      std::memcpy(row + 2 * i, &number, sizeof number);
    }
  }
  /// The rows with a token of [L, R * m, ...].
  void keep(const TensorView& view, void* stream) {
    const auto row_bytes = view.strides[1] * size_of(view.dtype);
    const std::int64_t group_bytes = view.shape[1] * row_bytes;
    std::vector<std::byte> bytes(static_cast<std::size_t>(view.shape[0] * group_bytes));
    if (view.device == DeviceType::kGpu) {
      testing::test_device()->download(view.device_index, bytes.data(), view.data,
                                       static_cast<std::int64_t>(bytes.size()), stream);
    } else {
      std::memcpy(bytes.data(), view.data, bytes.size());
    }
    std::vector<std::byte>& kept = outputs.emplace_back();
    for (std::size_t expert = 0; expert < counts.expert_counts.size(); ++expert) {
      const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(expert) * group_bytes;
      kept.insert(kept.end(), begin, begin + counts.expert_counts[expert] * row_bytes);
    }
  }

  AllToAllConfig config_;
  AllToAll all_to_all_;
};

TEST(GpuRoundsTest, WiresGiveTheBitsOfTheCpu) {
  const testing::GpuRanks gpus(2, 2);
  for (const WireScale scale : {WireScale::kFloat32, WireScale::kUe8m0}) {
    for (const Weighting weighting :
         {Weighting::kApplied, Weighting::kCarried, Weighting::kOrigin}) {
      AllToAllConfig config = gpu_config(Layout::kExpertMajor);
      config.dtype = DType::kBFloat16;
      config.hidden = 200;  // a whole block and a short one
      config.strategy = Strategy::kLowLatency;
      config.weighting = weighting;
      config.wire_scale = scale;
      config.dispatch_wire = Wire::kFp8E4M3;
      config.combine_wire = weighting == Weighting::kApplied ? Wire::kNone : Wire::kFp8E4M3;
      testing::spawn_ranks(2, [&](Communicator& communicator) {
        Twin cpu(communicator, config, DeviceType::kCpu);
        Twin gpu(communicator, config, DeviceType::kGpu);
        for (const std::uint64_t seed : {7U, 8U}) {
          cpu.run(seed);
          gpu.run(seed);
          EXPECT_EQ(cpu.counts.expert_counts, gpu.counts.expert_counts);
          EXPECT_EQ(cpu.outputs, gpu.outputs) << name_of(weighting) << ' ' << name_of(scale);
        }
        communicator.barrier();
        cpu.close();
        gpu.close();
      });
    }
  }
}

}  // namespace
}  // namespace fanfold
