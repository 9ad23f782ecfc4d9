// SPDX-License-Identifier: Apache-2.0
#include "fanfold/memory_pool.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using fanfold::testing::spawn_ranks;

constexpr std::int64_t kBytes = 64 * MemoryPool::kAlignment;

TEST(MemoryPoolTest, EqualCallsGiveEqualOffsetsOnEveryRank) {
  spawn_ranks(3, [](Communicator& communicator) {
    Allocator allocator(communicator);
    const SymmetricMemory memory = allocator.allocate(kBytes);
    MemoryPool pool(memory, communicator.rank());
    std::byte* const first = pool.allocate(100);
    std::byte* const second = pool.allocate(5000);
    pool.free(first);
    std::byte* const third = pool.allocate(600);
    EXPECT_EQ(pool.offset_of(second + 17), MemoryPool::kAlignment + 17);
    EXPECT_EQ(pool.num_in_use(), 2);
    EXPECT_EQ(pool.bytes_in_use(), 5120 + 1024);
    // Each writes into its next neighbour's part at the same offset.
    const int next = (communicator.rank() + 1) % 3;
    memory.data(next)[pool.offset_of(third)] = static_cast<std::byte>(next + 1);
    communicator.barrier();
    EXPECT_EQ(*third, static_cast<std::byte>(communicator.rank() + 1));
    communicator.barrier();
  });
}

TEST(MemoryPoolTest, NoRoomIsNullAndAFreedPartIsGivenAgain) {
  spawn_ranks(1, [](Communicator& communicator) {
    Allocator allocator(communicator);
    MemoryPool pool(allocator.allocate(kBytes), 0);
    std::byte* const all = pool.allocate(pool.bytes());
    ASSERT_NE(all, nullptr);
    EXPECT_EQ(pool.allocate(1), nullptr);
    EXPECT_EQ(pool.allocate(0), nullptr);
    EXPECT_EQ(pool.allocate(-1), nullptr);
    EXPECT_EQ(pool.allocate(INT64_MAX), nullptr);
    pool.free(all);
    EXPECT_EQ(pool.bytes_in_use(), 0);
    EXPECT_NE(pool.allocate(0), nullptr);
  });
}

TEST(MemoryPoolTest, ForeignAddressesAreRefused) {
  spawn_ranks(1, [](Communicator& communicator) {
    Allocator allocator(communicator);
    MemoryPool pool(allocator.allocate(kBytes), 0);
    std::byte* const part = pool.allocate(10);
    try {
      pool.free(part + 1);
      ADD_FAILURE() << "expected InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "free: expected a part of this pool in use, got another address");
    }
    EXPECT_THROW((void)pool.offset_of(part + MemoryPool::kAlignment), InvalidArgument);
    EXPECT_THROW((void)pool.offset_of(part - 1), InvalidArgument);
    pool.free(part);
    EXPECT_THROW(pool.free(part), InvalidArgument);
    EXPECT_THROW(MemoryPool(pool.memory(), 1), InvalidArgument);
    EXPECT_THROW(MemoryPool(SymmetricMemory(), 0), InvalidState);
  });
}

TEST(MemoryPoolTest, ThreadsGetPartsOfTheirOwn) {
  spawn_ranks(1, [](Communicator& communicator) {
    Allocator allocator(communicator);
    MemoryPool pool(allocator.allocate(std::int64_t{1} << 20), 0);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&pool, i] {
        for (int round = 0; round < 200; ++round) {
          const std::int64_t bytes = 100 + 37 * i + round;
          std::byte* const part = pool.allocate(bytes);
          ASSERT_NE(part, nullptr);
          std::memset(part, i, static_cast<std::size_t>(bytes));
          EXPECT_EQ(part[bytes - 1], static_cast<std::byte>(i));
          pool.free(part);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(pool.num_in_use(), 0);
  });
}

}  // namespace
}  // namespace fanfold
