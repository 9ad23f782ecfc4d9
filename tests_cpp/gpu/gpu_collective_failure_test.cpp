// SPDX-License-Identifier: Apache-2.0
// Rounds over collectives on GPUs whose ranks are late, differ, abort or leave.

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gpu/failed_round.h"
#include "gpu/gpu_case.h"
#include "gpu/graphed_round.h"
#include "gpu/nccl_ranks.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using namespace std::chrono_literals;
using testing::expect_error;
using testing::of_rank;
using testing::plan_of;
using testing::recover;
using testing::RoundRun;
using testing::run_round;
using testing::spawn_nccl_ranks;

class GpuCollectiveFailureTest : public ::testing::TestWithParam<Strategy> {
 protected:
  static AllToAllConfig config(const Communicator& communicator) {
    AllToAllConfig config = testing::gpu_config();
    config.strategy = GetParam();
    return of_rank(config, communicator);
  }
};

TEST_P(GpuCollectiveFailureTest, ALateRankIsNamedWithPhaseAndRound) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    AllToAllConfig own = config(communicator);
    own.max_in_flight = 2;
    AllToAll all_to_all(communicator, own);
    testing::expect_that_a_late_rank_is_named(communicator, all_to_all);
  });
}

TEST_P(GpuCollectiveFailureTest, ALateRankIsFoundByCallsThatDoNotWait) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    const AllToAllConfig own = config(communicator);
    AllToAll all_to_all(communicator, own);
    run_round(all_to_all, 1);
    if (communicator.rank() == 0) {
      RoundRun late(all_to_all, plan_of(own, 2, 4));
      late.inputs.timeout = 20ms;
      const Received received = all_to_all.dispatch(late.inputs);
      EXPECT_FALSE(all_to_all.is_failed());
      std::this_thread::sleep_for(30ms);
      expect_error<PeerTimeout>({"dispatch of round 1"}, [&] { all_to_all.check(); });
      EXPECT_TRUE(all_to_all.is_failed());
      // The stream has been freed.
      EXPECT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(late.stream())), cudaSuccess);
    }
    recover(communicator, all_to_all);
  });
}

TEST_P(GpuCollectiveFailureTest, CallsThatDifferAreToldOnBothSides) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    const AllToAllConfig own = config(communicator);
    AllToAll all_to_all(communicator, own);
    run_round(all_to_all, 1);
    const std::string me = std::to_string(communicator.rank());
    const std::string other = std::to_string(1 - communicator.rank());
    {
      RoundRun round(all_to_all, plan_of(own, 2, 4));
      if (communicator.rank() == 1) round.inputs.topk_weights = TensorView();
      round.inputs.timeout = 1s;  // of collectives that do not fit
      const Received received = all_to_all.dispatch(round.inputs);
      expect_error<InvalidArgument>(
          {"AllToAll: dispatch of round 1 differs between ranks: digest of the payload set (row "
           "bytes, dtypes, weights): rank " +
               me + " has ",
           ", rank " + other + " has ", "; call reset() on every rank"},
          [&] { (void)received.host_counts(); });
    }
    communicator.barrier();
    all_to_all.reset();
    {
      RoundRun round(all_to_all, testing::make_round(own, 2, testing::RoutingKind::kUniform, 2, 4));
      if (communicator.rank() == 1) round.inputs.round_max_tokens = 3;
      round.inputs.timeout = 1s;
      const Received received = all_to_all.dispatch(round.inputs);
      expect_error<InvalidArgument>({"differs between ranks: round_max_tokens: rank " + me},
                                    [&] { (void)received.host_counts(); });
    }
    recover(communicator, all_to_all);
  });
}

TEST_P(GpuCollectiveFailureTest, ACombineMeetsADispatch) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    AllToAllConfig own = config(communicator);
    own.max_in_flight = 2;
    AllToAll all_to_all(communicator, own);
    RoundRun round(all_to_all, plan_of(own, 2, 4));
    round.dispatch();
    if (communicator.rank() == 0) {
      CombineInputs combine = round.prepare_combine();
      combine.timeout = 1s;
      all_to_all.combine(combine, round.handle());
      expect_error<InvalidArgument>({"AllToAll: combine of round 0 differs between ranks: "}, [&] {
        round.synchronize();
        all_to_all.check();
      });
    } else {
      round.release();
      RoundRun next(all_to_all, plan_of(own, 2, 5));
      next.inputs.timeout = 1s;
      const Received received = all_to_all.dispatch(next.inputs);
      expect_error<InvalidArgument>({"AllToAll: dispatch of round 1 differs between ranks: "},
                                    [&] { (void)received.host_counts(); });
    }
    recover(communicator, all_to_all);
  });
}

TEST_P(GpuCollectiveFailureTest, AnAbortEndsCollectivesThatWait) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config(communicator));
    testing::expect_that_an_abort_ends_waits(communicator, all_to_all);
  });
}

TEST_P(GpuCollectiveFailureTest, AStreamOfOneThreadIsRefusedBeforeAnythingIsEnqueued) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    const AllToAllConfig own = config(communicator);
    AllToAll all_to_all(communicator, own);
    run_round(all_to_all, 1);
    RoundRun refused(all_to_all, plan_of(own, 2, 4));
    if (communicator.rank() == 0) {
      refused.inputs.stream = static_cast<void*>(cudaStreamPerThread);
      expect_error<InvalidArgument>({"got cudaStreamPerThread"},
                                    [&] { (void)all_to_all.dispatch(refused.inputs); });
      EXPECT_FALSE(all_to_all.is_failed());
    }
    for (std::uint64_t seed = 2; seed < 5; ++seed) run_round(all_to_all, seed);
    communicator.barrier();
    all_to_all.close();
  });
}

TEST_P(GpuCollectiveFailureTest, AnAbortBetweenRoundsLeavesTheCollectives) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    AllToAll all_to_all(communicator, config(communicator));
    testing::GraphedRound graphed(all_to_all, 4, 4);
    run_round(all_to_all, 1);
    communicator.barrier();
    if (communicator.rank() == 1) all_to_all.abort("a pause");
    communicator.barrier();
    expect_error<PeerAborted>({"rank 1 aborted: a pause"}, [&] { all_to_all.check(); });
    recover(communicator, all_to_all);
  });
}

TEST_P(GpuCollectiveFailureTest, AResetMeetsARankWhoseCollectivesWait) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    AllToAllConfig own = config(communicator);
    own.max_in_flight = 3;
    own.test_knobs.first_epoch = (std::uint64_t{1} << 40) - 2;
    AllToAll all_to_all(communicator, own);
    run_round(all_to_all, 1);
    communicator.barrier();
    RoundRun round(all_to_all, plan_of(own, 2, 4));
    Round handle;
    if (communicator.rank() == 0) handle = all_to_all.dispatch(round.inputs).handle();
    all_to_all.reset();  // one is in a round, the other not
    if (communicator.rank() == 0) {
      expect_error<InvalidState>({"has ended"}, [&] { all_to_all.release(handle); });
    }
    recover(communicator, all_to_all);
  });
}

TEST_P(GpuCollectiveFailureTest, ARankThatLeavesIsToldApartFromALateOne) {
  const testing::GpuRanks gpus(2, 2);
  spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
    const AllToAllConfig own = config(communicator);
    auto all_to_all = std::make_unique<AllToAll>(communicator, own);
    run_round(*all_to_all, 1);
    communicator.barrier();
    if (communicator.rank() == 1) {
      all_to_all.reset();
      communicator.barrier();
      return;
    }
    communicator.barrier();
    RoundRun round(*all_to_all, plan_of(own, 2, 4));
    const auto start = std::chrono::steady_clock::now();
    expect_error<PeerLost>({"rank 1 is gone"}, [&] {
      const Received received = all_to_all->dispatch(round.inputs);
      (void)received.host_counts();
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  });
}

/// As another library would make it.
ncclComm_t make_handle(const ncclUniqueId& id, int num_ranks, int rank) {
  testing::check_cuda(cudaSetDevice(rank), "cudaSetDevice");
  ncclComm_t comm = nullptr;
  EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommInitRankConfig)(&comm, num_ranks, id, rank, nullptr),
            ncclSuccess);
  return comm;
}

TEST(GpuCollectiveHandleTest, WhatWaitsInACommunicatorOfTheCallersIsLeftToHim) {
  const testing::GpuRanks gpus(2, 2);
  ncclUniqueId id{};
  ASSERT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclGetUniqueId)(&id), ncclSuccess);
  testing::spawn_ranks(2, [&](Communicator& bootstrap) {
    NcclOptions options = testing::nccl_options(bootstrap.rank());
    const ncclComm_t handle = make_handle(id, 2, bootstrap.rank());
    options.handle = handle;
    Communicator communicator = Communicator::from_nccl(bootstrap, options);
    AllToAllConfig own = testing::gpu_config();
    own.strategy = Strategy::kBatched;
    AllToAll all_to_all(communicator, of_rank(own, communicator));
    run_round(all_to_all, 1);
    if (communicator.rank() == 0) {
      RoundRun late(all_to_all, plan_of(all_to_all.config(), 2, 4));
      late.inputs.timeout = 50ms;
      const Received received = all_to_all.dispatch(late.inputs);
      expect_error<PeerTimeout>({"dispatch of round 1: rank 1 did not arrive within 50 ms"},
                                [&] { (void)received.host_counts(); });
      EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(late.stream())), cudaErrorNotReady);
      EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommAbort)(handle), ncclSuccess);
      EXPECT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(late.stream())), cudaSuccess);
    }
    communicator.barrier();
    EXPECT_THROW(all_to_all.reset(), Error);
    bootstrap.barrier();
    if (communicator.rank() == 1) {
      EXPECT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommDestroy)(handle), ncclSuccess);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, GpuCollectiveFailureTest,
                         ::testing::Values(Strategy::kBatched, Strategy::kGatherScatter,
                                           Strategy::kBroadcast),
                         [](const auto& each) { return std::string(name_of(each.param)); });

}  // namespace
}  // namespace fanfold
