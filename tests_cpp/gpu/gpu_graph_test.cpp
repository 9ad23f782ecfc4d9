// SPDX-License-Identifier: Apache-2.0
// Rounds in CUDA graphs: captured once, replayed with other tokens.

#include <cstring>
#include <memory>
#include <vector>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/gpu_case.h"
#include "gpu/graphed_round.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::gpu_config;
using testing::GraphedRound;
using testing::of_rank;
using testing::RoundRun;
using testing::RoutingKind;
using testing::TensorBuffer;

class GpuGraphTest : public ::testing::TestWithParam<Layout> {};

TEST_P(GpuGraphTest, ACapturedRoundReplaysWithOtherTokensAndTokenCounts) {
  const testing::GpuRanks gpus(3, 3);
  testing::spawn_ranks(3, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(gpu_config(GetParam()), communicator));
    EXPECT_TRUE(all_to_all.capabilities().graph_safe);
    GraphedRound round(all_to_all, 4, 4);
    round.capture();
    for (int i = 0; i < 6; ++i) {
      round.fill((i * 3 + communicator.rank()) % 5, static_cast<std::uint64_t>(i));
      round.replay();
      round.check_out("replay " + std::to_string(i));
    }
    communicator.barrier();  // `check` below tells of peers that have left
    all_to_all.check();
    communicator.barrier();
    all_to_all.close();
  });
}

TEST_P(GpuGraphTest, GraphsOfTwoSizesAndOrdinaryRoundsTakeTurns) {
  const testing::GpuRanks gpus(2, 2);
  AllToAllConfig config = gpu_config(GetParam());
  config.test_knobs.first_epoch = (std::uint64_t{1} << 40) - 3;
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(config, communicator));
    GraphedRound small(all_to_all, 1, 1);
    GraphedRound large(all_to_all, 4, 4);
    small.capture();
    large.capture();
    for (int i = 0; i < 5; ++i) {
      const auto seed = static_cast<std::uint64_t>(i);
      GraphedRound& next = i % 2 == 0 ? small : large;
      next.fill(i % 2 == 0 ? 1 : 1 + i % 3, seed);
      next.replay();
      next.check_out("replay " + std::to_string(i));
      if (i % 2 == 0) continue;
      RoundRun between(all_to_all,
                       testing::make_round(config, 2, RoutingKind::kUneven, 4, 70 + seed));
      between.dispatch();
      between.combine();
    }
    all_to_all.close();
  });
}

TEST_P(GpuGraphTest, NoScheduleOrStaleLoadSpoilsAReplay) {
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) {
    SCOPED_TRACE(seed);
    cudasim::Config devices = testing::devices_for(2, 2);
    devices.seed = seed;
    devices.shuffle_blocks = seed != 3;
    devices.stale = seed % 2 == 0 ? 0.3 : 0.0;
    devices.preempt = seed < 3 ? 0.02 : 0.0;
    devices.resident_blocks = 2 + static_cast<int>(seed % 3);
    const testing::GpuRanks gpus(devices);
    testing::spawn_ranks(2, [&](Communicator& communicator) {
      AllToAllConfig config = of_rank(gpu_config(GetParam()), communicator);
      config.max_in_flight = 2;
      AllToAll all_to_all(communicator, config);
      GraphedRound small(all_to_all, 2, 2);
      GraphedRound large(all_to_all, 4, 4);
      small.capture();
      large.capture();
      for (int i = 0; i < 6; ++i) {
        GraphedRound& next = i % 2 == 0 ? small : large;
        next.fill((i + communicator.rank()) % 3, seed * 10 + static_cast<std::uint64_t>(i));
        next.replay();
        next.check_out("replay " + std::to_string(i));
      }
      communicator.barrier();
      all_to_all.close();
    });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_P(GpuGraphTest, NumTokensOfTheDeviceCountsWithoutAGraph) {
  const testing::GpuRanks gpus(2, 2);
  const AllToAllConfig config = gpu_config(GetParam());
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(config, communicator));
    const int index = communicator.rank();
    const auto plan = testing::make_round(config, 2, RoutingKind::kUniform, 4, 3);
    RoundRun round(all_to_all, plan);
    TensorBuffer word(DType::kInt32, 1, {});
    const std::int32_t count = 1;
    std::memcpy(word.row(0), &count, sizeof count);
    word.move_to(index, round.stream());
    DispatchInputs inputs = round.inputs;
    inputs.num_tokens = word.view();
    const Received received = all_to_all.dispatch(inputs);
    const HostCounts counts = received.host_counts();
    for (const std::int32_t rows : counts.rank_counts) EXPECT_LE(rows, 1);
    EXPECT_EQ(received.num_tokens(), 4);
    EXPECT_EQ(all_to_all.out_shape(received.handle()).first, 4);
    all_to_all.release(received.handle());
    round.synchronize();
    communicator.barrier();
    all_to_all.close();
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, GpuGraphTest,
                         ::testing::Values(Layout::kRankMajor, Layout::kExpertMajor),
                         [](const auto& each) { return std::string(name_of(each.param)); });

TEST(GpuCaptureTest, ARoundEndsWhereItBegan) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    const auto plan = testing::make_round(config, 1, RoutingKind::kUniform, 4, 5);
    RoundRun run(all_to_all, plan);
    testing::Capture capture(0, run.stream());
    // Outside, then inside.
    run.dispatch_send();
    capture.begin();
    expect_error<InvalidState>(
        {"dispatch_recv: round 0 of AllToAll was dispatched outside of a graph capture and cannot "
         "go on in one"},
        [&] { (void)all_to_all.dispatch_recv(run.handle()); });
    capture.end();
    run.dispatch_recv();
    run.combine();
    // Inside, then outside.
    const auto stream = testing::test_device()->make_stream(0);
    testing::Capture other(0, stream.get());
    DispatchInputs inputs = run.inputs;
    inputs.stream = stream.get();
    other.begin();
    const Received received = all_to_all.dispatch(inputs);
    EXPECT_EQ(received.payloads().front().device, DeviceType::kGpu);
    expect_error<InvalidState>({"host_counts: round 1 of AllToAll belongs to a graph"},
                               [&] { (void)received.host_counts(); });
    expect_error<InvalidState>({"routing: round 1 of AllToAll belongs to a graph"},
                               [&] { (void)received.routing(); });
    const auto outside = testing::test_device()->make_stream(0);
    expect_error<InvalidState>(
        {"release: round 1 of AllToAll was dispatched in a graph capture and must end in it"},
        [&] { all_to_all.release(received.handle(), outside.get()); });
    all_to_all.release(received.handle());
    other.end();
    EXPECT_FALSE(all_to_all.is_failed());
    RoundRun after(all_to_all, plan);
    after.dispatch();
    after.combine();
    all_to_all.close();
  });
}

}  // namespace
}  // namespace fanfold
