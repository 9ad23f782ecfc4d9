// SPDX-License-Identifier: Apache-2.0
// What a GPU's AllToAll refuses, and in which words.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/config.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_case.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::gpu_config;
using testing::of_rank;
using testing::RoundRun;
using testing::RoutingKind;
using testing::TensorBuffer;

template <class Error>
std::string refused(int num_ranks, const std::function<void(AllToAllConfig&)>& change) {
  AllToAllConfig config = gpu_config();
  change(config);
  return expect_error<Error>({}, [&] { (void)api::resolve(config, num_ranks); });
}

TEST(GpuConfigTest, WhatKernelsCannotDoIsRefusedAtCreation) {
  EXPECT_EQ(refused<Unsupported>(2, [](AllToAllConfig& c) { c.strategy = Strategy::kTwoSided; }),
            "strategy: expected one_sided, low_latency, broadcast, gather_scatter or batched "
            "(device 'cuda' has these), got two_sided");
  EXPECT_EQ(refused<Unsupported>(2, [](AllToAllConfig& c) { c.layout = Layout::kFlat; }),
            "layout: strategy one_sided gives rank_major, expert_major on device 'cuda'; got flat");
  EXPECT_EQ(refused<InvalidArgument>(2, [](AllToAllConfig& c) { c.check_ids = CheckIds::kRaise; }),
            "check_ids: expected drop on device 'cuda' (its ids cannot be looked at without "
            "waiting), got raise");
  EXPECT_EQ(refused<InvalidArgument>(2, [](AllToAllConfig& c) { c.top_k = 129; }),
            "top_k on device 'cuda': expected a value in [1, 128], got 129");
  EXPECT_EQ(refused<InvalidArgument>(257, [](AllToAllConfig&) {}),
            "num_ranks on device 'cuda': expected a value in [1, 256], got 257");
  EXPECT_EQ(refused<InvalidArgument>(
                2, [](AllToAllConfig& c) { c.max_tokens_per_rank = std::int64_t{1} << 27; }),
            "max_tokens_per_rank * num_ranks on device 'cuda': expected a value in [1, 268435455], "
            "got 268435456");
  EXPECT_EQ(refused<InvalidArgument>(
                2, [](AllToAllConfig& c) { c.combine_row_bytes = (std::int64_t{1} << 30) + 4; }),
            "combine_row_bytes on device 'cuda': expected a value in [1, 1073741824], got "
            "1073741828");
  EXPECT_EQ(refused<InvalidArgument>(2, [](AllToAllConfig& c) { c.device_index = -1; }),
            "device_index: expected a value in [0, 32767], got -1");
}

TEST(GpuConfigTest, AutoTakesWhatAGpuHas) {
  AllToAllConfig config = gpu_config();
  config.strategy = Strategy::kAuto;
  EXPECT_EQ(api::resolve(config, 2).config.strategy, Strategy::kOneSided);
  EXPECT_EQ(api::resolve(config, 2).config.check_ids, CheckIds::kDrop);
  config.dispatch_wire = Wire::kFp8E4M3;
  EXPECT_EQ(api::resolve(config, 2).config.strategy, Strategy::kLowLatency);
  config.layout = Layout::kGathered;
  expect_error<Unsupported>({"got gathered"}, [&] { (void)api::resolve(config, 2); });
}

TEST(GpuErrorsTest, RequiredBytesAreThoseThatAreHeld) {
  const testing::GpuRanks gpus(2, 2);
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    testing::spawn_ranks(2, [&](Communicator& communicator) {
      AllToAllConfig config = of_rank(gpu_config(layout), communicator);
      config.max_in_flight = 3;
      AllToAll all_to_all(communicator, config);
      EXPECT_EQ(all_to_all.workspace_bytes(), AllToAll::required_bytes(2, config));
      EXPECT_EQ(all_to_all.metainfo().at("workspace_bytes"), all_to_all.workspace_bytes());
      all_to_all.close();
    });
  }
}

TEST(GpuErrorsTest, TheDeviceIsPartOfWhatRanksShare) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAllConfig config = of_rank(gpu_config(), communicator);
    if (communicator.rank() == 1) config.device = DeviceType::kCpu;
    expect_error<InvalidArgument>(
        {"AllToAll: device differs between ranks: rank 0 has cuda, rank 1 has cpu"},
        [&] { const AllToAll all_to_all(communicator, config); });
  });
}

TEST(GpuErrorsTest, AnAllocatorGivesMemoryOfTheDevice) {
  const testing::GpuRanks gpus(1, 2);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    GpuMemoryConfig gpu;
    gpu.device = 1;
    Allocator other(communicator, gpu);
    Allocator host(communicator);
    expect_error<InvalidArgument>(
        {"allocator: expected memory of cuda:0 (device_index), got memory of cuda:1"},
        [&] { const AllToAll all_to_all(communicator, gpu_config(), &other); });
    expect_error<InvalidArgument>(
        {"allocator: expected memory of cuda:0 (device_index), got the host's"},
        [&] { const AllToAll all_to_all(communicator, gpu_config(), &host); });
    AllToAllConfig on_cpu = gpu_config();
    on_cpu.device = DeviceType::kCpu;
    expect_error<InvalidArgument>(
        {"allocator: expected host memory for device 'cpu', got memory of cuda:1"},
        [&] { const AllToAll all_to_all(communicator, on_cpu, &other); });
    AllToAllConfig second = gpu_config();
    second.device_index = 1;
    AllToAll all_to_all(communicator, second, &other);
    RoundRun round(all_to_all, testing::make_round(second, 1, RoutingKind::kUniform, 4, 1));
    round.dispatch();
    EXPECT_EQ(round.received().payloads().front().device_index, 1);
    round.combine();
    expect_error<Unsupported>({"workspace_of: expected none on device 'cuda'"}, [&] {
      const AllToAll member(communicator, second, nullptr, &all_to_all);
    });
    all_to_all.close();
  });
}

TEST(GpuErrorsTest, ArgumentsAreCheckedBeforeAnythingIsEnqueued) {
  const testing::GpuRanks gpus(1, 2);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    const auto plan = testing::make_round(config, 1, RoutingKind::kUniform, 4, 1);
    RoundRun round(all_to_all, plan);
    const auto dispatch = [&](const std::function<void(DispatchInputs&)>& change,
                              const std::string& text) {
      DispatchInputs inputs = round.inputs;
      change(inputs);
      expect_error<InvalidArgument>({text}, [&] { (void)all_to_all.dispatch(inputs); });
    };
    dispatch([](DispatchInputs& in) { in.stream.reset(); },
             "stream: expected a CUDA stream for device 'cuda', got none");
    dispatch([](DispatchInputs& in) { in.topk_ids.device = DeviceType::kCpu; },
             "topk_ids: expected a tensor on cuda:0, got int64 [4, 2] on cpu");
    dispatch([](DispatchInputs& in) { in.payloads[0].device_index = 1; },
             "payloads[0]: expected a tensor on cuda:0, got float32 [4, 12] on cuda:1");
    std::int32_t count = 1;
    dispatch([&](DispatchInputs& in) { in.num_tokens = TensorView(&count, DType::kInt32, {1}); },
             "num_tokens: expected a tensor on cuda:0, got int32 [1] on cpu");
    const auto foreign = testing::test_device()->make_stream(1);
    dispatch([&](DispatchInputs& in) { in.stream = foreign.get(); },
             "stream: expected a CUDA stream of device 0, got another's");
    round.dispatch();
    const TensorView ids = round.received().topk_ids();
    const TensorView counts = round.received().rank_counts();
    expect_error<InvalidArgument>(
        {"stream: expected a CUDA stream for device 'cuda', got none"},
        [&] { all_to_all.sanitize(ids, counts, -1, SanitizePolicy::kPadding, ids); });
    CombineInputs combine = round.prepare_combine();
    combine.y.device = DeviceType::kCpu;
    expect_error<InvalidArgument>({"y: expected a tensor on cuda:0, got "},
                                  [&] { all_to_all.combine(combine, round.handle()); });
    round.combine();
    EXPECT_FALSE(all_to_all.is_failed());
    all_to_all.close();
  });
}

TEST(GpuErrorsTest, SanitizedIdsAreCountedAsTheyCame) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    AllToAll all_to_all(communicator, config);
    const auto plan = testing::make_round(config, 2, RoutingKind::kUneven, 4, 3);
    RoundRun round(all_to_all, plan);
    const Received received = all_to_all.dispatch(round.inputs);
    const TensorView ids = received.topk_ids();
    all_to_all.sanitize(ids, received.rank_counts(), 77, SanitizePolicy::kToLocal, ids,
                        round.stream());
    const HostCounts counts = received.host_counts();
    EXPECT_EQ(counts.expert_counts,
              testing::expected_rows(plan.exchange, all_to_all.rank()).expert_counts);
    expect_error<InvalidState>(
        {"routing: the received ids of round 0 of AllToAll were overwritten"},
        [&] { (void)received.routing(); });
    all_to_all.release(received.handle());
    round.synchronize();
    communicator.barrier();
    all_to_all.close();
  });
}

TEST(GpuErrorsTest, KnownTokenCountsAreComparedWhenTheHostLooks) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    AllToAll all_to_all(communicator, config);
    const auto plan = testing::make_round(config, 2, RoutingKind::kUniform, 4, 3);
    RoundRun round(all_to_all, plan);
    round.inputs.num_tokens_per_rank = std::vector<std::int64_t>{4, 4};
    if (communicator.rank() == 0) (*round.inputs.num_tokens_per_rank)[1] = 3;
    const Received received = all_to_all.dispatch(round.inputs);
    if (communicator.rank() == 0) {
      expect_error<InvalidArgument>(
          {"num_tokens_per_rank: expected 4 tokens of rank 1 in round 0, got 3"},
          [&] { (void)received.host_counts(); });
      EXPECT_TRUE(all_to_all.is_failed());
      expect_error<InvalidState>({"has failed", "call reset() on every rank"},
                                 [&] { all_to_all.release(received.handle()); });
    } else {
      (void)received.host_counts();
    }
    communicator.barrier();
    all_to_all.reset();
    all_to_all.close();
  });
}

}  // namespace
}  // namespace fanfold
