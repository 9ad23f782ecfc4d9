// SPDX-License-Identifier: Apache-2.0
#include "comm/thread_group.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "comm/group_exchange.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fanfold::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

base::Deadline soon() { return base::Deadline(seconds(20)); }

void on_each(std::vector<std::unique_ptr<Group>>& ranks, const std::function<void(Group&)>& body) {
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&] { body(*rank); });
  for (auto& thread : threads) thread.join();
}

TEST(ThreadGroupTest, EveryRankGetsTheSameZeroedWindows) {
  auto ranks = ThreadGroup::create(4);
  std::vector<Windows> windows(4);
  on_each(ranks, [&](Group& group) {
    windows[static_cast<std::size_t>(group.rank())] = group.share_windows(5000, soon());
  });
  for (const Windows& own : windows) {
    ASSERT_EQ(own.size(), 4U);
    EXPECT_EQ(own, windows[0]);
    for (const auto& window : own) {
      EXPECT_EQ(window->bytes(), 8192);
      EXPECT_EQ(window->data()[8191], std::byte{0});
    }
  }
}

TEST(ThreadGroupTest, WindowsMayBeLargerThanTheMachineIfTheyAreOnlyReserved) {
  auto ranks = ThreadGroup::create(3);
  std::vector<Windows> windows(3);
  constexpr std::int64_t kBytes = std::int64_t{1} << 36;
  on_each(ranks, [&](Group& group) {
    Windows& own = windows[static_cast<std::size_t>(group.rank())];
    own = group.reserve_windows(kBytes, soon());
    own[static_cast<std::size_t>(group.rank())]->touch(kBytes - 10, 10);
    EXPECT_EQ(own[0]->bytes(), kBytes);
  });
  EXPECT_EQ(windows[1], windows[0]);
  EXPECT_EQ(windows[2], windows[0]);
  on_each(ranks, [](Group& group) {
    EXPECT_THROW((void)group.reserve_windows(std::int64_t{1} << 60, soon()), std::bad_alloc);
    EXPECT_THROW((void)group.reserve_windows(100 + 5000 * group.rank(), soon()), InvalidArgument);
  });
}

TEST(ThreadGroupTest, DifferentSizesAreTheSameErrorOnEveryRank) {
  auto ranks = ThreadGroup::create(3);
  on_each(ranks, [&](Group& group) {
    try {
      (void)group.share_windows(group.rank() == 2 ? 9000 : 4000, soon());
      ADD_FAILURE() << "expected InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "share_windows: bytes: rank 0 gave 4000, rank 2 gave 9000");
    }
    EXPECT_EQ(group.share_windows(100, soon()).size(), 3U);  // the group is still usable
  });
}

TEST(ThreadGroupTest, LackOfMemoryOnOneRankIsBadAllocOnAll) {
  auto ranks = ThreadGroup::create(3);
  on_each(ranks, [&](Group& group) {
    EXPECT_THROW((void)group.share_windows(std::int64_t{1} << 60, soon()), std::bad_alloc);
    EXPECT_EQ(group.share_windows(100, soon()).size(), 3U);
  });
}

TEST(ThreadGroupTest, ALateRankIsNamedAndLearnsThatItIsLate) {
  auto ranks = ThreadGroup::create(2);
  try {
    (void)ranks[0]->share_windows(100, base::Deadline(milliseconds(20)));
    FAIL() << "expected PeerTimeout";
  } catch (const PeerTimeout& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_THAT(error.what(), HasSubstr("share_windows: rank 1 did not arrive within 20 ms"));
  }
  try {
    (void)ranks[1]->share_windows(100, soon());
    FAIL() << "expected PeerAborted";
  } catch (const PeerAborted& error) {
    EXPECT_EQ(error.rank(), 0);
  }
  on_each(ranks, [&](Group& group) { EXPECT_EQ(group.share_windows(1, soon()).size(), 2U); });
}

TEST(ThreadGroupTest, ARankThatLeftEndsTheWaitAtOnce) {
  auto ranks = ThreadGroup::create(2);
  std::thread leaver([&] {
    std::this_thread::sleep_for(milliseconds(10));
    ranks[1]->leave();
  });
  EXPECT_THROW((void)ranks[0]->share_windows(100, soon()), PeerLost);
  leaver.join();
  EXPECT_EQ(ranks[0]->lost_reason(1), "it left the group");
  EXPECT_EQ(ranks[0]->lost_reason(0), "");
}

TEST(ThreadGroupTest, SplitOrdersTheMembersAsListed) {
  auto ranks = ThreadGroup::create(5);
  on_each(ranks, [&](Group& group) {
    std::vector<int> members;
    if (group.rank() % 2 == 0) members = {4, 0, 2};
    if (group.rank() == 1) members = {1};
    const std::unique_ptr<Group> child = group.split(members, soon());
    if (group.rank() == 3) {
      EXPECT_EQ(child, nullptr);
    } else if (group.rank() == 1) {
      EXPECT_EQ(child->num_ranks(), 1);
    } else {
      EXPECT_EQ(child->num_ranks(), 3);
      EXPECT_EQ(child->rank(), group.rank() == 4 ? 0 : group.rank() / 2 + 1);
      EXPECT_EQ(child->share_windows(64, soon()).size(), 3U);
    }
  });
}

TEST(ThreadGroupTest, ListsThatContradictEachOtherAreAnErrorOnEveryRank) {
  auto ranks = ThreadGroup::create(3);
  on_each(ranks, [&](Group& group) {
    const std::vector<int> members =
        group.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{1, 2};
    try {
      (void)group.split(members, soon());
      ADD_FAILURE() << "expected InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "split: members: rank 0 gave [0, 1], rank 1 gave [1, 2]");
    }
  });
}

TEST(ThreadGroupTest, AListWithoutTheCallerIsAnErrorOnEveryRank) {
  auto ranks = ThreadGroup::create(2);
  on_each(ranks,
          [&](Group& group) { EXPECT_THROW((void)group.split({0}, soon()), InvalidArgument); });
}

TEST(ThreadGroupTest, DifferentCallsAreAnErrorOnEveryRank) {
  auto ranks = ThreadGroup::create(2);
  on_each(ranks, [&](Group& group) {
    if (group.rank() == 0) {
      EXPECT_THROW((void)group.share_windows(64, soon()), InvalidArgument);
    } else {
      EXPECT_THROW((void)group.split({0, 1}, soon()), InvalidArgument);
    }
  });
}

TEST(ThreadGroupTest, EveryRankGetsTheBytesAndDescriptorsOfAll) {
  auto ranks = ThreadGroup::create(3);
  on_each(ranks, [](Group& group) {
    expect_everyones_parcel(group);
    (void)group.share_windows(64, soon());  // nobody leaves before the others are through
  });
}

TEST(ThreadGroupTest, AFailureOfOneRankIsThrownOnAllAndTheGroupGoesOn) {
  auto ranks = ThreadGroup::create(3);
  on_each(ranks, [](Group& group) {
    expect_one_failure_on_all(group);
    (void)group.share_windows(64, soon());  // nobody leaves before the others are through
  });
}

TEST(ThreadGroupTest, DifferentExchangesAreAnErrorOnEveryRankAndTheGroupGoesOn) {
  auto ranks = ThreadGroup::create(3);
  on_each(ranks, [](Group& group) {
    expect_named_difference(group);
    (void)group.share_windows(64, soon());  // nobody leaves before the others are through
  });
}

}  // namespace
}  // namespace fanfold::comm
