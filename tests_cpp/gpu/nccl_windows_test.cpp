// SPDX-License-Identifier: Apache-2.0

// Symmetric memory of NCCL, and rounds of an AllToAll on it.

#include <cstdint>
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
  memory.device = *communicator.device_index();
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
