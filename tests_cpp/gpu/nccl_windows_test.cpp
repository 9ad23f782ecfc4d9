// SPDX-License-Identifier: Apache-2.0

// Symmetric memory of NCCL, and rounds of an AllToAll on it.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fanfold/all_to_all.h"
#include "fanfold/allocator.h"
#include "fanfold/error.h"
#include "gpu/gpu_case.h"
#include "gpu/nccl_ranks.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::GpuRanks;
using testing::spawn_nccl_ranks;

GpuMemoryConfig nccl_memory(const Communicator& communicator) {
  GpuMemoryConfig memory;
  memory.device = communicator.device_index().value_or(-1);
  memory.kinds = {HandleKind::kNccl};
  return memory;
}

TEST(NcclWindowsTest, EveryRankReachesEveryWindow) {
  constexpr int kRanks = 3;
  const GpuRanks gpus(kRanks, kRanks);
  const cudasim::Stats before = cudasim::stats();
  spawn_nccl_ranks(kRanks, kRanks, [](Communicator& communicator) {
    Allocator allocator(communicator, nccl_memory(communicator));
    const SymmetricMemory memory = allocator.allocate(1000);
    EXPECT_EQ(allocator.memory().kind, HandleKind::kNccl);
    ASSERT_GE(memory.bytes(), 1000);
    const auto word = [&](int window, int place) {
      return reinterpret_cast<std::int32_t*>(memory.data(window)) + place;
    };
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_EQ(*word(peer, communicator.rank()), 0);
      *word(peer, communicator.rank()) = 100 + communicator.rank();
    }
    communicator.barrier();
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_EQ(*word(communicator.rank(), peer), 100 + peer);
    }
    communicator.barrier();
  });
  EXPECT_EQ(cudasim::stats().mappings, before.mappings);
  EXPECT_EQ(cudasim::stats().handles, before.handles);
  EXPECT_EQ(cudasim::stats().reservations, before.reservations);
}

TEST(NcclWindowsTest, RoundsOfOneSidedRunOnThem) {
  constexpr int kRanks = 2;
  const GpuRanks gpus(kRanks, kRanks);
  spawn_nccl_ranks(kRanks, kRanks, [](Communicator& communicator) {
    Allocator allocator(communicator, nccl_memory(communicator));
    AllToAll all_to_all(communicator, testing::of_rank(testing::gpu_config(), communicator),
                        &allocator);
    for (std::uint64_t seed = 1; seed < 4; ++seed) testing::run_round(all_to_all, seed);
    EXPECT_EQ(allocator.memory().kind, HandleKind::kNccl);
    communicator.barrier();
    all_to_all.close();
  });
}

TEST(NcclWindowsTest, MemoryMayOutliveTheCommunicator) {
  const GpuRanks gpus(2, 2);
  const cudasim::Stats before = cudasim::stats();
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    SymmetricMemory kept;
    {
      Allocator allocator(communicator, nccl_memory(communicator));
      kept = allocator.allocate(64);
    }
    communicator.close();
    *reinterpret_cast<int*>(kept.data(communicator.rank())) = 1;
  });
  EXPECT_EQ(cudasim::stats().handles, before.handles);
}

TEST(NcclWindowsTest, MemoryOfACommunicatorThatWasResetIsNotUsedAgain) {
  const GpuRanks gpus(2, 2);
  const cudasim::Stats before = cudasim::stats();
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    Allocator allocator(communicator, nccl_memory(communicator));
    allocator.free(allocator.allocate(64));
    allocator.free(allocator.allocate(64));
    EXPECT_EQ(allocator.stats().num_reused, 1);
    SymmetricMemory held = allocator.allocate(64);
    communicator.reset();
    const SymmetricMemory anew = allocator.allocate(64);
    allocator.free(held);
    held = {};
    const SymmetricMemory third = allocator.allocate(64);
    EXPECT_EQ(allocator.stats().num_reused, 2);
    for (const SymmetricMemory* memory : {&anew, &third}) {
      *reinterpret_cast<int*>(memory->data(1 - communicator.rank())) = 1;
    }
    communicator.barrier();
    communicator.close();
  });
  EXPECT_EQ(cudasim::stats().handles, before.handles);
  EXPECT_EQ(cudasim::stats().mappings, before.mappings);
}

TEST(NcclWindowsTest, AnExchangeWhoseMemoryHasEndedRefusesAllButItsClose) {
  const GpuRanks gpus(2, 2);
  const cudasim::Stats before = cudasim::stats();
  for (const bool aborts : {false, true}) {
    spawn_nccl_ranks(2, 2, [&](Communicator& communicator) {
      Allocator allocator(communicator, nccl_memory(communicator));
      const AllToAllConfig config = testing::of_rank(testing::gpu_config(), communicator);
      AllToAll all_to_all(communicator, config, &allocator);
      testing::run_round(all_to_all, 1);
      communicator.barrier();
      if (aborts && communicator.rank() == 0) communicator.abort("enough");
      communicator.reset();
      const auto is_told = [](const std::function<void()>& call) {
        expect_error<InvalidState>({"its memory, of kind nccl, has ended", "make it anew"}, call);
      };
      is_told([&] { testing::run_round(all_to_all, 2); });
      is_told([&] { all_to_all.set_active_mask({true, true}); });
      is_told([&] { all_to_all.reset(); });
      all_to_all.close();
      AllToAll anew(communicator, config, &allocator);
      testing::run_round(anew, 3);
      anew.close();
    });
  }
  EXPECT_EQ(cudasim::stats().handles, before.handles);
  EXPECT_EQ(cudasim::stats().mappings, before.mappings);
}

TEST(NcclWindowsTest, MemoryOnAHandleMayOutliveTheHandle) {
  const GpuRanks gpus(2, 2);
  const cudasim::Stats before = cudasim::stats();
  ncclUniqueId id{};
  ASSERT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclGetUniqueId)(&id), ncclSuccess);
  for (const bool closes : {true, false}) {
    ASSERT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclGetUniqueId)(&id), ncclSuccess);
    testing::spawn_ranks(2, [&](Communicator& bootstrap) {
      const int rank = bootstrap.rank();
      testing::check_cuda(cudaSetDevice(rank), "cudaSetDevice");
      ncclComm_t handle = nullptr;
      ASSERT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommInitRankConfig)(&handle, 2, id, rank, nullptr),
                ncclSuccess);
      NcclOptions options = testing::nccl_options(rank);
      options.handle = handle;
      SymmetricMemory kept;
      {
        Communicator communicator = Communicator::from_nccl(bootstrap, options);
        Allocator allocator(communicator, nccl_memory(communicator));
        kept = allocator.allocate(64);
        if (closes) communicator.close();
      }
      bootstrap.barrier();
      ASSERT_EQ(FANFOLD_NCCL_DOUBLE_CALL(ncclCommDestroy)(handle), ncclSuccess);
      kept = {};
    });
  }
  EXPECT_EQ(cudasim::stats().handles, before.handles);
  EXPECT_EQ(cudasim::stats().mappings, before.mappings);
}

TEST(NcclWindowsTest, ARegistrationThatIsNotDoneInTimeIsSaid) {
  const GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [](Communicator& bootstrap) {
    NcclOptions options = testing::nccl_options(bootstrap.rank());
    options.timeout = std::chrono::milliseconds(500);
    Communicator communicator = Communicator::from_nccl(bootstrap, options);
    Allocator allocator(communicator, nccl_memory(communicator));
    bootstrap.barrier();
    FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLateLooks)(100000000);
    expect_error<PeerTimeout>({"ncclCommWindowRegister: still in progress after 3"},
                              [&] { (void)allocator.allocate(64); });
  });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetLateLooks)(-1);
}

TEST(NcclWindowsTest, WhatItNeedsIsSaid) {
  const GpuRanks gpus(2, 2);
  testing::spawn_ranks(2, [](Communicator& communicator) {
    GpuMemoryConfig memory;
    memory.device = communicator.rank();
    memory.kinds = {HandleKind::kNccl};
    expect_error<InvalidArgument>({"expected a communicator made by from_nccl for nccl"},
                                  [&] { const Allocator allocator(communicator, memory); });
  });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(22809);
  spawn_nccl_ranks(2, 2, [](Communicator& communicator) {
    GpuMemoryConfig memory = nccl_memory(communicator);
    memory.kinds.push_back(HandleKind::kFabric);
    expect_error<InvalidArgument>({"expected nccl alone, got nccl, fabric"},
                                  [&] { const Allocator allocator(communicator, memory); });
    Allocator allocator(communicator, nccl_memory(communicator));
    expect_error<Unsupported>({"addresses of peers' memory: expected version 2.29.0"},
                              [&] { (void)allocator.allocate(64); });
    communicator.close();
  });
  FANFOLD_NCCL_DOUBLE_CALL(ncclDoubleSetVersion)(0);
}

}  // namespace
}  // namespace fanfold
