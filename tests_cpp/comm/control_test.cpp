// SPDX-License-Identifier: Apache-2.0
#include "comm/control.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/thread_group.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fanfold::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

base::Deadline soon() { return base::Deadline(seconds(20)); }
base::Deadline at_once() { return base::Deadline(milliseconds(20)); }
constexpr auto kNever = [] { return false; };

/// One Control per rank, all in this thread; the test plays the ranks in turn.
class ControlTest : public testing::Test {
 protected:
  void make(int num_ranks) {
    groups_ = ThreadGroup::create(num_ranks);
    windows_ = ThreadGroup::make_windows(num_ranks, Control::bytes(num_ranks) + 128);
    for (const auto& group : groups_) {
      ranks_.push_back(std::make_unique<Control>(*group, windows_, "AllToAll 'moe'"));
    }
  }
  Control& rank(int number) { return *ranks_[static_cast<std::size_t>(number)]; }
  /// Runs `body` for the ranks given, each on a thread.
  template <class Body>
  void together(const std::vector<int>& numbers, Body body) {
    std::vector<std::thread> threads;
    for (const int number : numbers) threads.emplace_back([&, number] { body(number); });
    for (auto& thread : threads) thread.join();
  }

  std::vector<std::unique_ptr<Group>> groups_;
  Windows windows_;
  std::vector<std::unique_ptr<Control>> ranks_;
};

TEST_F(ControlTest, AFlagThatIsThereEndsTheWaitAtOnce) {
  make(2);
  rank(0).wait([] { return true; }, {1, "dispatch", 0}, base::Deadline(milliseconds(0)));
}

TEST_F(ControlTest, ARankThatSleepsIsWokenByTheBell) {
  make(2);
  std::atomic<bool> flag{false};
  std::thread peer([&] {
    std::this_thread::sleep_for(milliseconds(20));  // past the spin and yield phases
    flag.store(true, std::memory_order_release);
    rank(1).ring(0);
  });
  rank(0).wait([&] { return flag.load(std::memory_order_acquire); }, {1, "dispatch", 0}, soon());
  peer.join();
}

TEST_F(ControlTest, ATimeoutNamesRankPhaseRoundAndWhatToDo) {
  make(3);
  try {
    rank(0).wait(kNever, {2, "dispatch", 17}, base::Deadline(milliseconds(10)));
    FAIL() << "expected PeerTimeout";
  } catch (const PeerTimeout& error) {
    EXPECT_EQ(error.rank(), 2);
    EXPECT_STREQ(error.what(),
                 "AllToAll 'moe': dispatch of round 17: rank 2 did not arrive within 10 ms; it is "
                 "late or frozen; call reset() on every rank");
  }
}

TEST_F(ControlTest, AnAbortWakesEveryRankWithTheReason) {
  make(3);
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(10));
    rank(1).abort("out of tokens");
  });
  together({0, 2}, [&](int number) {
    try {
      rank(number).wait(kNever, {1, "combine", 3}, soon());
      ADD_FAILURE() << "expected PeerAborted";
    } catch (const PeerAborted& error) {
      EXPECT_EQ(error.rank(), 1);
      EXPECT_EQ(error.reason(), "out of tokens");
      EXPECT_THAT(error.what(), HasSubstr("combine of round 3: rank 1 aborted: out of tokens"));
    }
  });
  aborter.join();
}

TEST_F(ControlTest, AnAbortEndsTheOwnWaitsToo) {
  make(2);
  rank(0).abort("mine");
  EXPECT_THROW(rank(0).wait(kNever, {1, "dispatch", 0}, soon()), PeerAborted);
}

TEST_F(ControlTest, AFlagThatHasArrivedBeatsAnAbort) {
  make(2);
  rank(1).abort("late");
  EXPECT_NO_THROW(rank(0).wait([] { return true; }, {1, "dispatch", 0}, soon()));
}

TEST_F(ControlTest, TheFirstReasonOfAGenerationStays) {
  make(2);
  rank(1).abort("first");
  rank(1).abort("second");
  try {
    rank(0).throw_if_aborted({1, "dispatch", 0});
    FAIL() << "expected PeerAborted";
  } catch (const PeerAborted& error) {
    EXPECT_EQ(error.reason(), "first");
  }
}

TEST_F(ControlTest, ALongReasonIsCutBetweenCharacters) {
  make(2);
  rank(1).abort(std::string(110, 'x') + "\xc3\xa9 and more");  // a character of two bytes at 110
  try {
    rank(0).throw_if_aborted({1, "dispatch", 0});
    FAIL() << "expected PeerAborted";
  } catch (const PeerAborted& error) {
    EXPECT_EQ(error.reason(), std::string(110, 'x'));
  }
}

TEST_F(ControlTest, ResetAgreesOnTheHighestEpochAndForgetsAborts) {
  make(3);
  rank(2).abort("broken");
  together({0, 1, 2}, [&](int number) {
    const auto own = 10 * static_cast<std::uint64_t>(number) + 1;
    EXPECT_EQ(rank(number).reset(own, soon()), 21U);
    EXPECT_EQ(rank(number).generation(), 1U);
    EXPECT_NO_THROW(rank(number).throw_if_aborted({0, "dispatch", 0}));
  });
}

TEST_F(ControlTest, ResetWakesAPeerThatWaitsForSomethingElse) {
  make(2);
  std::thread peer([&] {
    EXPECT_THROW(rank(1).wait(kNever, {0, "dispatch", 0}, soon()), PeerAborted);
    rank(1).reset(0, soon());
  });
  rank(0).reset(0, soon());
  peer.join();
}

TEST_F(ControlTest, ResetThatTimedOutNamesTheLateRankAndCanBeRepeated) {
  make(3);
  together({0, 1}, [&](int number) {
    try {
      rank(number).reset(5, base::Deadline(milliseconds(50)));
      ADD_FAILURE() << "expected PeerTimeout";
    } catch (const PeerTimeout& error) {
      EXPECT_EQ(error.rank(), 2);
      EXPECT_THAT(error.what(), HasSubstr("reset: rank 2 did not arrive"));
    }
  });
  together({0, 1, 2},
           [&](int number) { EXPECT_EQ(rank(number).reset(number == 2 ? 9 : 5, soon()), 9U); });
  for (int number = 0; number < 3; ++number) EXPECT_EQ(rank(number).generation(), 1U);
}

TEST_F(ControlTest, ALateRankCatchesUpWithPeersThatHaveResetTwice) {
  make(2);
  EXPECT_THROW(rank(0).reset(3, at_once()), PeerTimeout);  // rank 1 is late
  EXPECT_EQ(rank(1).reset(7, soon()), 7U);                 // and finds rank 0's word
  EXPECT_THROW(rank(1).reset(7, at_once()), PeerTimeout);  // and resets again, alone
  EXPECT_EQ(rank(0).reset(3, soon()), 7U);
  EXPECT_EQ(rank(1).reset(7, soon()), 7U);
  EXPECT_EQ(rank(0).generation(), 2U);
  EXPECT_EQ(rank(1).generation(), 2U);
}

TEST_F(ControlTest, ResetsInARowMeetEachOther) {
  make(2);
  together({0, 1}, [&](int number) {
    for (std::uint64_t i = 1; i <= 200; ++i) {
      const std::uint64_t epoch = number == 0 ? i : 2 * i;
      ASSERT_EQ(rank(number).reset(epoch, soon()), 2 * i);
    }
  });
}

TEST_F(ControlTest, AnAbortOfAnEarlierGenerationIsIgnored) {
  make(2);
  together({0, 1}, [&](int number) { rank(number).reset(0, soon()); });
  EXPECT_THROW(rank(0).wait(kNever, {1, "dispatch", 0}, at_once()), PeerTimeout);
}

TEST_F(ControlTest, ARankThatLeavesIsLost) {
  make(2);
  rank(1).mark_left();
  try {
    rank(0).wait(kNever, {1, "dispatch", 4}, soon());
    FAIL() << "expected PeerLost";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_THAT(error.what(), HasSubstr("dispatch of round 4: rank 1 is gone: it closed its end"));
  }
}

TEST_F(ControlTest, ABystanderThatLeftInGoodOrderDoesNotEndAWait) {
  make(3);
  std::atomic<bool> flag{false};
  rank(2).mark_left();
  std::thread peer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    flag.store(true, std::memory_order_release);
  });
  EXPECT_NO_THROW(rank(0).wait([&] { return flag.load(std::memory_order_acquire); },
                               {1, "dispatch", 0}, soon()));
  peer.join();
}

TEST_F(ControlTest, ALostBystanderEndsAWaitWithinASecond) {
  make(3);
  rank(2).mark_left();
  const std::int64_t start = base::now_ns();
  EXPECT_THROW(rank(0).wait(kNever, {1, "dispatch", 0}, soon()), PeerLost);
  EXPECT_LT(base::now_ns() - start, 1'000'000'000);
}

TEST_F(ControlTest, AnInactiveRankIsNeitherWaitedForNorChecked) {
  make(3);
  rank(2).mark_left();
  for (int number : {0, 1}) rank(number).set_active({true, true, false});
  EXPECT_NO_THROW(rank(0).throw_if_lost({1, "dispatch", 0}));
  together({0, 1}, [&](int number) { EXPECT_EQ(rank(number).reset(4, soon()), 4U); });
}

TEST_F(ControlTest, ClosingWaitsUntilAllHaveLeft) {
  make(3);
  together({0, 1, 2}, [&](int number) {
    rank(number).mark_left();
    rank(number).wait_all_left(soon());
  });
}

TEST_F(ControlTest, ClosingNamesTheRankThatDoesNotCome) {
  make(2);
  rank(0).mark_left();
  try {
    rank(0).wait_all_left(at_once());
    FAIL() << "expected PeerTimeout";
  } catch (const PeerTimeout& error) {
    EXPECT_EQ(error.rank(), 1);
  }
}

}  // namespace
}  // namespace fanfold::comm
