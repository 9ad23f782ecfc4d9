// SPDX-License-Identifier: Apache-2.0
#include "fanfold/allocator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using testing::spawn_ranks;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

bool is_zero(const std::byte* data, std::int64_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte value) { return value == std::byte{0}; });
}

TEST(AllocatorTest, EveryRankSeesEveryWindow) {
  spawn_ranks(3, [](Communicator& comm) {
    Allocator allocator(comm);
    const SymmetricMemory memory = allocator.allocate(10'000);
    EXPECT_EQ(memory.num_ranks(), 3);
    EXPECT_GE(memory.bytes(), 10'000);
    EXPECT_TRUE(is_zero(memory.data(comm.rank()), memory.bytes()));
    comm.barrier();
    std::memset(memory.data((comm.rank() + 1) % 3), comm.rank() + 1, 10'000);  // into a peer's
    comm.barrier();
    const auto writer = static_cast<std::byte>((comm.rank() + 2) % 3 + 1);
    EXPECT_EQ(memory.data(comm.rank())[0], writer);
    EXPECT_EQ(memory.data(comm.rank())[9'999], writer);
    comm.close();
  });
}

TEST(AllocatorTest, TakesTheSmallestCachedBlockThatFits) {
  spawn_ranks(2, [](Communicator& comm) {
    Allocator allocator(comm);
    const SymmetricMemory large = allocator.allocate(4 * kMiB);
    const SymmetricMemory small = allocator.allocate(kMiB);
    const std::byte* const small_data = small.data(0);
    allocator.free(large);
    allocator.free(small);
    const SymmetricMemory again = allocator.allocate(kMiB / 2);
    EXPECT_EQ(again.data(0), small_data);
    const SymmetricMemory next = allocator.allocate(kMiB / 2);  // only the large one is left
    EXPECT_EQ(next.bytes(), 4 * kMiB);
    EXPECT_EQ(allocator.stats().num_reused, 2);
    comm.close();
  });
}

TEST(AllocatorTest, CountsWhatItHolds) {
  spawn_ranks(2, [](Communicator& comm) {
    Allocator allocator(comm);
    SymmetricMemory first = allocator.allocate(kMiB);
    SymmetricMemory second = allocator.allocate(2 * kMiB);
    AllocatorStats stats = allocator.stats();
    EXPECT_EQ(stats.reserved, 3 * kMiB);
    EXPECT_EQ(stats.in_use, 3 * kMiB);
    EXPECT_EQ(stats.num_blocks, 2);
    allocator.free(first);
    stats = allocator.stats();
    EXPECT_EQ(stats.reserved, 3 * kMiB);
    EXPECT_EQ(stats.in_use, 2 * kMiB);
    allocator.trim();
    stats = allocator.stats();
    EXPECT_EQ(stats.reserved, 2 * kMiB);
    EXPECT_EQ(stats.num_blocks, 1);
    EXPECT_EQ(stats.peak_in_use, 3 * kMiB);
    EXPECT_EQ(stats.num_reused, 0);
    comm.close();
  });
}

TEST(AllocatorTest, ABlockReleasedWithoutFreeIsDroppedNotCached) {
  spawn_ranks(2, [](Communicator& comm) {
    Allocator allocator(comm);
    {
      const SymmetricMemory dropped = allocator.allocate(kMiB);
    }
    EXPECT_EQ(allocator.stats().reserved, 0);
    EXPECT_EQ(allocator.stats().in_use, 0);
    EXPECT_EQ(allocator.stats().num_blocks, 0);
    const SymmetricMemory next = allocator.allocate(kMiB);
    EXPECT_EQ(allocator.stats().num_reused, 0);
    comm.close();
  });
}

TEST(AllocatorTest, AReusedBlockIsZeroedAsFarAsAsked) {
  spawn_ranks(3, [](Communicator& comm) {
    Allocator allocator(comm);
    for (int round = 0; round < 20; ++round) {
      const SymmetricMemory memory = allocator.allocate(kMiB, 4096);
      for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(is_zero(memory.data(rank), 4096));
      comm.barrier();
      std::memset(memory.data((comm.rank() + 1) % 3), 0xcd, kMiB);
      comm.barrier();
      allocator.free(memory);
    }
    EXPECT_EQ(allocator.stats().num_reused, 19);
    comm.close();
  });
}

TEST(AllocatorTest, DifferentSizesAreTheSameErrorOnEveryRank) {
  spawn_ranks(3, [](Communicator& comm) {
    Allocator allocator(comm);
    try {
      (void)allocator.allocate(comm.rank() == 1 ? 2000 : 1000);
      ADD_FAILURE() << "expected InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(),
                   "allocate: bytes: expected the same on every rank, got 1000 on rank 0 and 2000 "
                   "on rank 1");
    }
    EXPECT_TRUE(allocator.allocate(1000).has_value());
    comm.close();
  });
}

TEST(AllocatorTest, RanksThatCachedDifferentBlocksGetANewOne) {
  spawn_ranks(2, [](Communicator& comm) {
    Allocator allocator(comm);
    SymmetricMemory first = allocator.allocate(kMiB);
    SymmetricMemory second = allocator.allocate(kMiB);
    allocator.free(comm.rank() == 0 ? first : second);  // not what the contract asks for
    const SymmetricMemory third = allocator.allocate(kMiB);
    EXPECT_EQ(allocator.stats().num_reused, 0);
    comm.barrier();
    third.data((comm.rank() + 1) % 2)[0] = static_cast<std::byte>(comm.rank() + 1);
    comm.barrier();
    EXPECT_EQ(third.data(comm.rank())[0], static_cast<std::byte>(2 - comm.rank()));
    comm.close();
  });
}

TEST(AllocatorTest, WrongArgumentsAreLocalErrors) {
  auto ranks = Communicator::threads(1);
  Allocator allocator(ranks[0]);
  Allocator other(ranks[0]);
  EXPECT_THROW((void)allocator.allocate(0), InvalidArgument);
  EXPECT_THROW((void)allocator.allocate(10, 11), InvalidArgument);
  EXPECT_THROW((void)allocator.allocate(10, -1), InvalidArgument);
  EXPECT_THROW((void)allocator.allocate(std::int64_t{1} << 60), std::bad_alloc);
  const SymmetricMemory memory = allocator.allocate(100);
  EXPECT_THROW((void)memory.data(1), InvalidArgument);
  EXPECT_THROW(other.free(memory), InvalidArgument);
  EXPECT_THROW(allocator.free(SymmetricMemory()), InvalidArgument);
  EXPECT_THROW((void)SymmetricMemory().bytes(), InvalidState);
  allocator.free(memory);
  EXPECT_THROW(allocator.free(memory), InvalidArgument);
}

TEST(AllocatorTest, AnOldCopyCannotFreeABlockThatIsInUseAgain) {
  auto ranks = Communicator::threads(1);
  Allocator allocator(ranks[0]);
  const SymmetricMemory old = allocator.allocate(kMiB);
  allocator.free(old);
  const SymmetricMemory again = allocator.allocate(kMiB);
  EXPECT_EQ(again.data(0), old.data(0));
  EXPECT_THROW(allocator.free(old), InvalidArgument);
  allocator.free(again);
}

TEST(AllocatorTest, MemoryOutlivesAllocatorAndCommunicator) {
  std::optional<SymmetricMemory> memory;
  {
    auto ranks = Communicator::threads(1);
    Allocator allocator(ranks[0]);
    memory = allocator.allocate(kMiB);
    ranks[0].close();
    EXPECT_THROW((void)allocator.allocate(kMiB), InvalidState);
  }
  memory->data(0)[kMiB - 1] = std::byte{1};
}

TEST(AllocatorTest, ALateRankIsATimeoutThatNamesIt) {
  auto ranks = Communicator::threads(2);
  Allocator allocator(ranks[0]);
  try {
    (void)allocator.allocate(kMiB, 0, milliseconds(20));
    FAIL() << "expected PeerTimeout";
  } catch (const PeerTimeout& error) {
    EXPECT_EQ(error.rank(), 1);
  }
}

}  // namespace
}  // namespace fanfold
