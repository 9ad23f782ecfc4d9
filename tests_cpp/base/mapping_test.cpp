// SPDX-License-Identifier: Apache-2.0
#include "base/mapping.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "base/fork_guard.h"
#include "gtest/gtest.h"

namespace fanfold::base {
namespace {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

TEST(MappingTest, TwoMappingsOfOneDescriptorShowTheSameBytes) {
  const FileDescriptor fd = create_shared_memory(8192);
  const Mapping first(fd, 8192);
  const Mapping second(fd, 8192);
  EXPECT_NE(first.data(), second.data());
  first.data()[5000] = std::byte{7};
  EXPECT_EQ(second.data()[5000], std::byte{7});
}

TEST(MappingTest, NewMemoryIsZero) {
  const FileDescriptor fd = create_shared_memory(3 * kHugePage);
  const Mapping mapping(fd, 3 * kHugePage);
  EXPECT_TRUE(std::all_of(mapping.data(), mapping.data() + mapping.bytes(),
                          [](std::byte value) { return value == std::byte{0}; }));
}

TEST(MappingTest, TouchingAgainChangesNothing) {
  const FileDescriptor fd = create_shared_memory(3 * kHugePage);
  const Mapping first(fd, 3 * kHugePage);
  for (std::int64_t i = 0; i < first.bytes(); ++i)
    first.data()[i] = static_cast<std::byte>(i % 251);
  const Mapping second(fd, 3 * kHugePage);
  for (std::int64_t i = 0; i < second.bytes(); ++i) {
    ASSERT_EQ(second.data()[i], static_cast<std::byte>(i % 251));
  }
}

TEST(MappingTest, StartsAtAHugePageBoundary) {
  const FileDescriptor fd = create_shared_memory(4096);
  const Mapping mapping(fd, 4096);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping.data()) % kHugePage, 0U);
}

TEST(MappingTest, SharedMemoryCanNeitherShrinkNorGrow) {
  const FileDescriptor fd = create_shared_memory(8192);
  EXPECT_EQ(::ftruncate(fd.get(), 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(fd.get(), 16384), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
}

TEST(MappingTest, SharedMemoryIsClosedByExecAndIsTheUsersAlone) {
  const FileDescriptor fd = create_shared_memory(4096);
  EXPECT_NE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  struct stat status{};
  ASSERT_EQ(::fstat(fd.get(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
}

TEST(MappingTest, ReservedMemoryTakesUpNoneUntilItIsTouched) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 36;  // more than the machine need have
  const FileDescriptor fd = create_shared_memory(kBytes);
  const Mapping one(fd, kBytes, Pages::kReserved);
  const Mapping other(fd, kBytes, Pages::kReserved);
  const auto taken = [&] {
    struct stat status{};
    EXPECT_EQ(::fstat(fd.get(), &status), 0);
    return std::int64_t{status.st_blocks} * 512;
  };
  EXPECT_EQ(taken(), 0);
  const std::int64_t offset = kBytes / 2 + 100;
  other.data()[offset] = std::byte{7};
  one.touch(offset, 5 * kHugePage);
  EXPECT_EQ(one.data()[offset], std::byte{7}) << "touching changes nothing";
  EXPECT_GE(taken(), 5 * kHugePage);
  EXPECT_LE(taken(), 8 * kHugePage);
  one.touch(offset, 0);
  one.touch(offset, 5 * kHugePage);
  one.touch(kBytes - 1, 1);
  EXPECT_LE(taken(), 9 * kHugePage);
}

TEST(MappingTest, MoreThanTheMachineHasIsBadAlloc) {
  EXPECT_THROW((void)round_to_pages(std::int64_t{1} << 60), std::bad_alloc);
  EXPECT_THROW((void)map_private(std::int64_t{1} << 56), std::bad_alloc);
}

TEST(MappingTest, PrivateMemoryIsZeroAndAligned) {
  const std::shared_ptr<std::byte> memory = map_private(5 * kHugePage / 2);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % kHugePage, 0U);
  EXPECT_EQ(memory.get()[5 * kHugePage / 2 - 1], std::byte{0});
  memory.get()[0] = std::byte{1};
}

TEST(FileDescriptorTest, MovingLeavesTheSourceClosed) {
  FileDescriptor first = create_shared_memory(4096);
  const int number = first.get();
  const FileDescriptor second = std::move(first);
  EXPECT_EQ(second.get(), number);
  EXPECT_FALSE(first.is_open());  // NOLINT: the state after a move is part of the contract
}

TEST(ForkGuardTest, TheProcessThatMadeItIsNoChild) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.is_child());
}

}  // namespace
}  // namespace fanfold::base
