// SPDX-License-Identifier: Apache-2.0
// Allocators that divide the caller's own memory.

#include "memory/own_buffers.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "fanfold/allocator.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/random_bits.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::spawn_ranks;

constexpr std::int64_t kBytes = 64 << 10;

/// Arrays of the caller's, one per rank, full of what nobody wants to read, `head` bytes off any
/// alignment.
class Buffers {
 public:
  Buffers(int num_ranks, std::int64_t bytes, std::int64_t head = 24)
      : head_(head), arrays_(static_cast<std::size_t>(num_ranks)) {
    for (auto& array : arrays_) {
      array.assign(static_cast<std::size_t>(bytes + head), std::byte{0xab});
    }
  }
  std::vector<OwnBuffer> all() {
    std::vector<OwnBuffer> buffers;
    for (auto& array : arrays_) {
      buffers.push_back({array.data() + head_, static_cast<std::int64_t>(array.size()) - head_});
    }
    return buffers;
  }
  bool holds(int rank, const std::byte* data, std::int64_t bytes) const {
    const auto& array = arrays_[static_cast<std::size_t>(rank)];
    return data >= array.data() && data + bytes <= array.data() + array.size();
  }

 private:
  std::int64_t head_;
  std::vector<std::vector<std::byte>> arrays_;
};

TEST(OwnBuffersTest, BlocksLieInTheCallersMemoryAndAreZeroWhereAsked) {
  Buffers buffers(3, kBytes);
  spawn_ranks(3, [&](Communicator& communicator) {
    Allocator allocator(communicator, buffers.all());
    const SymmetricMemory first = allocator.allocate(1000, 1000);
    const SymmetricMemory second = allocator.allocate(5000, 64);
    const int rank = communicator.rank();
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_TRUE(buffers.holds(peer, first.data(peer), first.bytes()));
      EXPECT_TRUE(buffers.holds(peer, second.data(peer), second.bytes()));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.data(peer)) % 128, 0U);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second.data(peer)) % 128, 0U);
      EXPECT_GE(second.data(peer) - first.data(peer), 1000);
    }
    const auto is_zero = [](std::byte value) { return value == std::byte{0}; };
    EXPECT_TRUE(std::all_of(first.data(rank), first.data(rank) + 1000, is_zero));
    EXPECT_TRUE(std::all_of(second.data(rank), second.data(rank) + 64, is_zero));
    communicator.barrier();
    std::memset(second.data((rank + 1) % 3), rank + 1, 5000);
    communicator.barrier();
    EXPECT_EQ(second.data(rank)[4999], static_cast<std::byte>((rank + 2) % 3 + 1));
    const AllocatorStats stats = allocator.stats();
    EXPECT_EQ(stats.num_blocks, 2);
    EXPECT_EQ(stats.in_use, 6000);
    EXPECT_EQ(stats.reserved, 6000);
    communicator.close();
  });
}

TEST(OwnBuffersTest, FreedBlocksAreUsedAgainInAnySize) {
  Buffers buffers(2, kBytes);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, buffers.all());
    testing::RandomBits random(5);
    std::vector<SymmetricMemory> blocks;
    for (int i = 0; i < 200; ++i) {
      if (!blocks.empty() && (blocks.size() == 4 || random.below(2) == 0)) {
        const auto at =
            static_cast<std::size_t>(random.below(static_cast<std::int64_t>(blocks.size())));
        allocator.free(blocks[at]);
        blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(at));
        if (random.below(8) == 0) allocator.trim();
      } else {
        blocks.push_back(allocator.allocate(1 + random.below(8000), 1));
      }
    }
    for (const SymmetricMemory& block : blocks) allocator.free(block);
    blocks.clear();
    allocator.trim();
    EXPECT_EQ(allocator.stats().reserved, 0);
    EXPECT_EQ(allocator.stats().in_use, 0);
    EXPECT_EQ(allocator.stats().num_blocks, 0);
    EXPECT_GE(allocator.allocate(kBytes - 256).bytes(), kBytes - 256);
    communicator.close();
  });
}

TEST(OwnBuffersTest, WhatIsExhaustedSaysHowMuchWasWantedAndIsFree) {
  Buffers buffers(2, kBytes, /*head=*/0);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, buffers.all());
    const SymmetricMemory block = allocator.allocate(kBytes / 2);
    expect_error<CapacityExceeded>({"allocate", "40000 bytes", "free"},
                                   [&] { (void)allocator.allocate(40000); });
    EXPECT_EQ(allocator.stats().num_blocks, 1);
    EXPECT_GE(allocator.allocate(1000).bytes(), 1000);
    communicator.close();
  });
}

TEST(OwnBuffersTest, ABlockThatARankStillLooksAtIsKeptFromAllUntilItLetsGo) {
  Buffers buffers(2, kBytes);
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, buffers.all());
    SymmetricMemory block = allocator.allocate(40000);
    SymmetricMemory view = communicator.rank() == 1 ? block : SymmetricMemory();
    // As an exchange closes: freed where nobody looks, else dropped with the last view.
    if (communicator.rank() == 0) allocator.free(block);
    block = SymmetricMemory();
    expect_error<CapacityExceeded>({"40000 bytes"}, [&] { (void)allocator.allocate(40000); });
    view = SymmetricMemory();
    block = allocator.allocate(40000);
    EXPECT_TRUE(block.has_value());
    EXPECT_EQ(allocator.stats().num_blocks, 1);
    EXPECT_EQ(allocator.stats().reserved, 40000);
    communicator.close();
  });
}

TEST(OwnBuffersTest, TheSmallestBufferCounts) {
  std::vector<std::vector<std::byte>> arrays = {std::vector<std::byte>(kBytes),
                                                std::vector<std::byte>(8192)};
  const std::vector<OwnBuffer> buffers = {{arrays[0].data(), kBytes}, {arrays[1].data(), 8192}};
  spawn_ranks(2, [&](Communicator& communicator) {
    Allocator allocator(communicator, buffers);
    expect_error<CapacityExceeded>({"9000 bytes"}, [&] { (void)allocator.allocate(9000); });
    EXPECT_GE(allocator.allocate(7000).bytes(), 7000);
    communicator.close();
  });
}

TEST(OwnBuffersTest, WrongBuffersAreRefusedHere) {
  Buffers buffers(2, kBytes);
  spawn_ranks(2, [&](Communicator& communicator) {
    std::vector<OwnBuffer> one = buffers.all();
    one.pop_back();
    expect_error<InvalidArgument>({"buffers", "2 (one per rank)", "got 1"},
                                  [&] { Allocator refused(communicator, one); });
    std::vector<OwnBuffer> null = buffers.all();
    null[1].data = nullptr;
    expect_error<InvalidArgument>({"buffers[1]", "null pointer"},
                                  [&] { Allocator refused(communicator, null); });
    std::vector<OwnBuffer> small = buffers.all();
    small[0].bytes = 100;
    expect_error<InvalidArgument>({"buffers[0]", "4096", "got 100"},
                                  [&] { Allocator refused(communicator, small); });
    std::vector<OwnBuffer> overlapping = buffers.all();
    overlapping[1].data = overlapping[0].data + overlapping[0].bytes - 1;
    expect_error<InvalidArgument>({"buffers[1]", "apart from buffers[0]"},
                                  [&] { Allocator refused(communicator, overlapping); });
    Allocator allocator(communicator, buffers.all());
    EXPECT_TRUE(allocator.allocate(128).has_value());
    communicator.close();
  });
}

TEST(OwnBuffersTest, ARankThatDoesNotSeeAnothersMemoryIsNamedOnEveryRank) {
  Buffers buffers(3, kBytes, /*head=*/0);
  Buffers others(3, kBytes, /*head=*/0);
  spawn_ranks(3, [&](Communicator& communicator) {
    std::vector<OwnBuffer> mine = buffers.all();
    if (communicator.rank() == 2) mine[1] = others.all()[1];
    const auto head = [](const OwnBuffer& buffer) {
      return reinterpret_cast<std::uintptr_t>(buffer.data) % 128;
    };
    const bool same_head = head(buffers.all()[1]) == head(others.all()[1]);
    expect_error<InvalidArgument>(
        same_head
            ? std::vector<std::string>{"buffers[1]", "memory of rank 1", "other memory on rank 2"}
            : std::vector<std::string>{"buffers[1]", "differs between ranks", "rank 2"},
        [&] { Allocator refused(communicator, mine); });
    mine = buffers.all();
    if (communicator.rank() == 1) mine[0].bytes -= 128;
    expect_error<InvalidArgument>({"buffers[0]", "bytes differs between ranks", "rank 0", "rank 1"},
                                  [&] { Allocator refused(communicator, mine); });
    Allocator allocator(communicator, buffers.all());
    EXPECT_TRUE(allocator.allocate(128).has_value());
    communicator.close();
  });
}

TEST(PrivateMemoryTest, ComesFromTheCallersSource) {
  spawn_ranks(1, [](Communicator& communicator) {
    Allocator allocator(communicator);
    std::int64_t given = 0;
    Allocator copy = allocator;
    copy.set_private_memory([&](std::int64_t bytes) {
      given += bytes;
      const std::size_t size = static_cast<std::size_t>(bytes + 127) / 128 * 128;
      return std::shared_ptr<std::byte>(static_cast<std::byte*>(std::aligned_alloc(128, size)),
                                        [&given, bytes](std::byte* memory) {
                                          given -= bytes;
                                          std::free(memory);
                                        });
    });
    std::shared_ptr<std::byte> memory = allocator.allocate_private(1000);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(given, 1000);
    memory.reset();
    EXPECT_EQ(given, 0);
    allocator.set_private_memory({});
    memory = allocator.allocate_private(1000);
    EXPECT_EQ(given, 0);
    EXPECT_EQ(memory.get()[999], std::byte{0});
    communicator.close();
  });
}

TEST(PrivateMemoryTest, WhatIsMissingOrCrookedIsRefused) {
  spawn_ranks(1, [](Communicator& communicator) {
    Allocator allocator(communicator);
    allocator.set_private_memory([](std::int64_t) { return std::shared_ptr<std::byte>(); });
    EXPECT_THROW((void)allocator.allocate_private(10), std::bad_alloc);
    const auto block = std::shared_ptr<std::byte>(
        static_cast<std::byte*>(std::aligned_alloc(128, 256)), [](std::byte* p) { std::free(p); });
    allocator.set_private_memory(
        [&](std::int64_t) { return std::shared_ptr<std::byte>(block, block.get() + 16); });
    expect_error<InvalidArgument>({"private memory", "multiple of 128", "16 beyond"},
                                  [&] { (void)allocator.allocate_private(10); });
    communicator.close();
  });
}

}  // namespace
}  // namespace fanfold
