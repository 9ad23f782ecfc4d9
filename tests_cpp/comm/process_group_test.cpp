// SPDX-License-Identifier: Apache-2.0

// Process groups whose ranks are threads of the test: the same code, without the cost of processes.

#include "comm/process_group.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "comm/group_exchange.h"
#include "comm/rendezvous.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/eventually.h"
#include "support/test_directory.h"

namespace fanfold::comm {
namespace {

using fanfold::testing::eventually;
using fanfold::testing::TestDirectory;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

base::Deadline soon() { return base::Deadline(seconds(20)); }

/// Joins `num_ranks` threads and runs `body(group)` on each. A group dies when its body ends.
void on_each(int num_ranks, const std::function<void(Group&)>& body) {
  const TestDirectory directory;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = join_group({directory.path() + "/socket", rank, num_ranks}, soon());
      body(*group);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ProcessGroupTest, EveryRankMapsEveryWindow) {
  on_each(4, [](Group& group) {
    const Windows windows = group.share_windows(5000, soon());
    ASSERT_EQ(windows.size(), 4U);
    for (int rank = 0; rank < 4; ++rank) {
      const auto& window = windows[static_cast<std::size_t>(rank)];
      EXPECT_EQ(window->bytes(), 8192);
      window->data()[group.rank()] = static_cast<std::byte>(10 * rank + group.rank() + 1);
    }
    (void)group.share_windows(64, soon());  // as a barrier
    for (int source = 0; source < 4; ++source) {
      EXPECT_EQ(windows[static_cast<std::size_t>(group.rank())]->data()[source],
                static_cast<std::byte>(10 * group.rank() + source + 1));
    }
    (void)group.share_windows(64, soon());
  });
}

TEST(ProcessGroupTest, WindowsMayBeLargerThanTheMachineIfTheyAreOnlyReserved) {
  on_each(3, [](Group& group) {
    constexpr std::int64_t kBytes = std::int64_t{1} << 36;
    const Windows windows = group.reserve_windows(kBytes, soon());
    ASSERT_EQ(windows.size(), 3U);
    const int next = (group.rank() + 1) % 3;
    windows[static_cast<std::size_t>(group.rank())]->touch(kBytes - 10, 10);
    windows[static_cast<std::size_t>(next)]->data()[kBytes - 1] = static_cast<std::byte>(next + 1);
    (void)group.share_windows(64, soon());  // as a barrier
    EXPECT_EQ(windows[static_cast<std::size_t>(group.rank())]->data()[kBytes - 1],
              static_cast<std::byte>(group.rank() + 1));
    EXPECT_THROW((void)group.reserve_windows(std::int64_t{1} << 60, soon()), std::bad_alloc);
  });
}

TEST(ProcessGroupTest, DifferentSizesAreTheSameErrorOnEveryRankAndItGoesOn) {
  on_each(3, [](Group& group) {
    try {
      (void)group.share_windows(group.rank() == 2 ? 9000 : 4000, soon());
      ADD_FAILURE() << "expected InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(
          error.what(),
          "expected the same call on every rank, got 'share_windows of 4000 bytes' on rank 0 "
          "and 'share_windows of 9000 bytes' on rank 2");
    }
    EXPECT_EQ(group.share_windows(100, soon()).size(), 3U);
  });
}

TEST(ProcessGroupTest, LackOfMemoryIsBadAllocOnAll) {
  on_each(2, [](Group& group) {
    EXPECT_THROW((void)group.share_windows(std::int64_t{1} << 60, soon()), std::bad_alloc);
    EXPECT_EQ(group.share_windows(100, soon()).size(), 2U);
  });
}

TEST(ProcessGroupTest, ALateRankIsNamedAndTheGroupGoesOn) {
  for (const int late_rank : {0, 2}) {
    std::atomic<int> num_timeouts{0};
    on_each(3, [&](Group& group) {
      if (group.rank() == late_rank) {
        EXPECT_TRUE(eventually([&] { return num_timeouts == 2; }));
        EXPECT_THROW((void)group.share_windows(64, soon()), PeerError);
      } else {
        try {
          (void)group.share_windows(64, base::Deadline(milliseconds(100)));
          ADD_FAILURE() << "expected PeerTimeout";
        } catch (const PeerTimeout& error) {
          EXPECT_EQ(error.rank(), late_rank);
        }
        ++num_timeouts;
      }
      EXPECT_EQ(group.share_windows(64, soon()).size(), 3U);
    });
  }
}

TEST(ProcessGroupTest, ARankThatLeftIsLostForAll) {
  for (const int leaver : {0, 1}) {
    on_each(3, [&](Group& group) {
      if (group.rank() == leaver) {
        group.leave();
        group.leave();
        EXPECT_THROW((void)group.share_windows(64, soon()), InvalidState);
        return;
      }
      try {
        (void)group.share_windows(64, soon());
        ADD_FAILURE() << "expected PeerLost";
      } catch (const PeerLost& error) {
        // Rank 2 may learn it from rank 1, which left next.
        EXPECT_THAT(error.what(), HasSubstr("is gone"));
      }
    });
  }
}

TEST(ProcessGroupTest, SplitMakesGroupsThatWorkOnTheirOwn) {
  on_each(5, [](Group& group) {
    std::vector<int> members;
    if (group.rank() % 2 == 0) members = {4, 0, 2};
    if (group.rank() == 1) members = {1};
    const std::unique_ptr<Group> child = group.split(members, soon());
    if (group.rank() == 3) {
      EXPECT_EQ(child, nullptr);
      return;
    }
    group.leave();
    if (group.rank() == 1) {
      EXPECT_EQ(child->num_ranks(), 1);
      return;
    }
    EXPECT_EQ(child->rank(), group.rank() == 4 ? 0 : group.rank() / 2 + 1);
    EXPECT_EQ(child->share_windows(64, soon()).size(), 3U);
    const std::unique_ptr<Group> grandchild = child->split({2, 1, 0}, soon());
    EXPECT_EQ(grandchild->rank(), 2 - child->rank());
    EXPECT_EQ(grandchild->share_windows(64, soon()).size(), 3U);
    (void)child->share_windows(64, soon());  // nobody leaves before the others are through
  });
}

TEST(ProcessGroupTest, ListsThatContradictEachOtherAreAnErrorOnEveryRankAndItGoesOn) {
  on_each(3, [](Group& group) {
    const std::vector<int> members =
        group.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{1, 2};
    EXPECT_THROW((void)group.split(members, soon()), InvalidArgument);
    EXPECT_THROW((void)group.split({0}, soon()), InvalidArgument);
    EXPECT_EQ(group.share_windows(64, soon()).size(), 3U);
  });
}

TEST(ProcessGroupTest, DifferentCallsAreAnErrorOnEveryRank) {
  on_each(2, [](Group& group) {
    if (group.rank() == 0) {
      EXPECT_THROW((void)group.share_windows(64, soon()), InvalidArgument);
    } else {
      EXPECT_THROW((void)group.split({0, 1}, soon()), InvalidArgument);
    }
    EXPECT_EQ(group.share_windows(64, soon()).size(), 2U);
  });
}

TEST(ProcessGroupTest, MoreDescriptorsThanOneMessageHoldsGetThrough) {
  on_each(20, [](Group& group) {
    EXPECT_EQ(group.share_windows(64, soon()).size(), 20U);
    EXPECT_EQ(group.lost_reason((group.rank() + 1) % 20), "");
    (void)group.share_windows(64, soon());
  });
}

TEST(ProcessGroupTest, EveryRankGetsTheBytesAndDescriptorsOfAll) {
  on_each(3, [](Group& group) {
    expect_everyones_parcel(group);
    (void)group.share_windows(64, soon());  // nobody leaves before the others are through
  });
}

TEST(ProcessGroupTest, AFailureOfOneRankIsThrownOnAllAndTheGroupGoesOn) {
  on_each(3, [](Group& group) {
    expect_one_failure_on_all(group);
    (void)group.share_windows(64, soon());  // nobody leaves before the others are through
  });
}

TEST(ProcessGroupTest, DifferentExchangesAreAnErrorOnEveryRankAndTheGroupGoesOn) {
  on_each(3, [](Group& group) {
    expect_named_difference(group);
    (void)group.share_windows(64, soon());  // nobody leaves before the others are through
  });
}

}  // namespace
}  // namespace fanfold::comm
