// SPDX-License-Identifier: Apache-2.0
// Ranks that are late, differ, abort or leave, and what comes after.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/failed_round.h"
#include "gpu/gpu_case.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using namespace std::chrono_literals;
using testing::expect_error;
using testing::gpu_config;
using testing::of_rank;
using testing::plan_of;
using testing::recover;
using testing::RoundRun;
using testing::run_round;

TEST(GpuFailureTest, ALateRankIsNamedWithPhaseAndRound) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAllConfig config = of_rank(gpu_config(), communicator);
    config.max_in_flight = 2;
    AllToAll all_to_all(communicator, config);
    testing::expect_that_a_late_rank_is_named(communicator, all_to_all);
  });
}

TEST(GpuFailureTest, ALateCombineIsNamed) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(Layout::kExpertMajor), communicator);
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 2, 4));
    round.dispatch();
    communicator.barrier();
    if (communicator.rank() == 0) {
      CombineInputs combine = round.prepare_combine();
      combine.timeout = 50ms;
      all_to_all.combine(combine, round.handle());
      expect_error<PeerTimeout>(
          {"AllToAll: combine of round 0: rank 1 did not arrive within 50 ms"},
          [&] { round.synchronize(); });
    }
    recover(communicator, all_to_all);
  });
}

TEST(GpuFailureTest, CallsThatDifferAreToldOnBothSides) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    AllToAll all_to_all(communicator, config);
    run_round(all_to_all, 1);
    RoundRun round(all_to_all, plan_of(config, 2, 4));
    if (communicator.rank() == 1) {
      round.inputs.topk_weights = TensorView();  // another set of what travels
    }
    const Received received = all_to_all.dispatch(round.inputs);
    const int other = 1 - communicator.rank();
    expect_error<InvalidArgument>(
        {"AllToAll: dispatch of round 1 differs between ranks: digest of the payload set (row "
         "bytes, dtypes, weights): rank " +
             std::to_string(communicator.rank()) + " has ",
         ", rank " + std::to_string(other) + " has ", "; call reset() on every rank"},
        [&] { (void)received.host_counts(); });
    recover(communicator, all_to_all);
  });
}

TEST(GpuFailureTest, AnAbortEndsKernelsThatWait) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, of_rank(gpu_config(), communicator));
    testing::expect_that_an_abort_ends_waits(communicator, all_to_all);
  });
}

TEST(GpuFailureTest, AResetMeetsARankWhoseKernelsWait) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAllConfig config = of_rank(gpu_config(), communicator);
    config.max_in_flight = 3;
    config.test_knobs.first_epoch = (std::uint64_t{1} << 40) - 2;
    AllToAll all_to_all(communicator, config);
    run_round(all_to_all, 1);
    communicator.barrier();
    RoundRun round(all_to_all, plan_of(config, 2, 4));
    if (communicator.rank() == 0) round.dispatch_send();
    all_to_all.reset();  // one is in a round, the other not
    if (communicator.rank() == 0) {
      expect_error<InvalidState>({"has ended"}, [&] { all_to_all.release(round.handle()); });
    }
    recover(communicator, all_to_all);
  });
}

TEST(GpuFailureTest, ARankThatLeavesIsToldApartFromALateOne) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    const AllToAllConfig config = of_rank(gpu_config(), communicator);
    auto all_to_all = std::make_unique<AllToAll>(communicator, config);
    run_round(*all_to_all, 1);
    communicator.barrier();
    if (communicator.rank() == 1) {
      all_to_all.reset();
      communicator.barrier();
      return;
    }
    communicator.barrier();
    RoundRun round(*all_to_all, plan_of(config, 2, 4));
    const Received received = all_to_all->dispatch(round.inputs);
    const auto start = std::chrono::steady_clock::now();
    expect_error<PeerLost>({"rank 1 is gone: it closed its end"}, [&] { all_to_all->check(); });
    // The kernel that waits for 60 seconds has been stopped.
    expect_error<PeerLost>({"dispatch of round 1: rank 1 is gone"},
                           [&] { (void)received.host_counts(); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
    expect_error<PeerLost>({"rank 1 is gone"}, [&] { all_to_all->release(received.handle()); });
  });
}

TEST(GpuFailureTest, APlacementTakesEffectBetweenRounds) {
  const testing::GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [&](Communicator& communicator) {
    AllToAllConfig config = of_rank(gpu_config(Layout::kExpertMajor), communicator);
    config.max_local_experts = 5;
    AllToAll all_to_all(communicator, config);
    run_round(all_to_all, 1);
    const auto open = [&] {
      RoundRun round(all_to_all, plan_of(config, 2, 2));
      round.dispatch();
      expect_error<InvalidState>({"set_placement while round 1 is received"},
                                 [&] { all_to_all.set_placement(Placement::round_robin()); });
      round.combine();
    };
    open();
    const std::vector<Placement> placements = {
        Placement::round_robin(), Placement::from_table({1, 1, 1, 1, 1}),
        Placement::from_replicas({0, 1, 0, 1, 0}, {0, 0, 1, 2, 1}), Placement::linear()};
    for (const Placement& placement : placements) {
      all_to_all.set_placement(placement);
      run_round(all_to_all, 3);
    }
    communicator.barrier();
    all_to_all.close();
  });
}

TEST(GpuFailureTest, AFailedLaunchFailsTheRound) {
  const testing::GpuRanks gpus(1, 1);
  testing::spawn_ranks(1, [&](Communicator& communicator) {
    const AllToAllConfig config = gpu_config();
    AllToAll all_to_all(communicator, config);
    RoundRun round(all_to_all, plan_of(config, 1));
    cudasim::fail_call("launch", cudaErrorLaunchOutOfResources, 1);
    expect_error<CudaFailure>({"launch of dispatch_send"},
                              [&] { (void)all_to_all.dispatch(round.inputs); });
    EXPECT_TRUE(all_to_all.is_failed());
    cudasim::clear_faults();
    all_to_all.reset();
    run_round(all_to_all, 2);
    all_to_all.close();
  });
}

}  // namespace
}  // namespace fanfold
