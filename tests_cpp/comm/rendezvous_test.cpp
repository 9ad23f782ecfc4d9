// SPDX-License-Identifier: Apache-2.0
#include "comm/rendezvous.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/socket.h"
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
using ::testing::IsEmpty;

base::Deadline soon() { return base::Deadline(seconds(20)); }

/// Runs `body(place)` for each of `num` threads.
void together(int num, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < num; ++i) threads.emplace_back([&body, i] { body(i); });
  for (auto& thread : threads) thread.join();
}

/// Text of the error that joining ends with.
template <class Error>
std::string error_of(const RendezvousConfig& config, base::Deadline deadline, int* rank = nullptr) {
  try {
    (void)join_group(config, deadline);
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    if constexpr (std::is_base_of_v<PeerError, Error>) {
      if (rank != nullptr) *rank = error.rank();
    }
    return error.what();
  }
  return "";
}

class RendezvousTest : public ::testing::Test {
 protected:
  std::string path() const { return directory_.path() + "/socket"; }
  TestDirectory directory_;
};

TEST_F(RendezvousTest, RanksOfOneProcessMayJoinAndNothingIsLeft) {
  together(3, [&](int rank) {
    const std::unique_ptr<Group> group = join_group({path(), rank, 3}, soon());
    EXPECT_EQ(group->rank(), rank);
    EXPECT_EQ(group->num_ranks(), 3);
    EXPECT_STREQ(group->kind(), "processes");
    EXPECT_THAT(directory_.entries(), IsEmpty());
    // Both ways through memory, so that nobody leaves early.
    const Windows windows = group->share_windows(64, soon());
    for (int other = 0; other < 3; ++other) EXPECT_EQ(group->lost_reason(other), "");
    (void)group->share_windows(64, soon());
  });
}

TEST_F(RendezvousTest, PeersMayComeBeforeRankZero) {
  std::atomic<int> num_waiting{0};
  together(3, [&](int rank) {
    if (rank == 0) {
      EXPECT_TRUE(eventually([&] { return num_waiting == 2; }));
      std::this_thread::sleep_for(milliseconds(20));
    } else {
      ++num_waiting;
    }
    EXPECT_EQ(join_group({path(), rank, 3}, soon())->rank(), rank);
  });
}

TEST_F(RendezvousTest, DifferentSizesAreTheSameErrorOnEveryRank) {
  together(3, [&](int rank) {
    EXPECT_EQ(error_of<InvalidArgument>({path(), rank, rank == 2 ? 4 : 3}, soon()),
              "rendezvous '" + path() +
                  "': num_ranks: expected the same on every rank, got 3 on rank 0 and 4 on rank 2");
  });
  EXPECT_THAT(directory_.entries(), IsEmpty());
}

TEST_F(RendezvousTest, ARankThatComesTwiceIsAnErrorOnEveryRank) {
  together(4, [&](int place) {
    const int rank = place == 3 ? 1 : place;
    if (rank == 2) return;  // does not come, so that the group stays open for the double
    EXPECT_THAT(error_of<InvalidArgument>({path(), rank, 3}, soon()),
                HasSubstr("expected each rank once, got rank 1 from process"));
  });
  EXPECT_THAT(directory_.entries(), IsEmpty());
}

TEST_F(RendezvousTest, AMissingRankIsNamedOnEveryRank) {
  together(2, [&](int rank) {
    int late = -1;
    EXPECT_THAT(error_of<PeerTimeout>({path(), rank, 3}, base::Deadline(milliseconds(100)), &late),
                HasSubstr("rank 2 did not join within 100 ms"));
    EXPECT_EQ(late, 2);
  });
  EXPECT_THAT(directory_.entries(), IsEmpty());
}

TEST_F(RendezvousTest, ARankZeroThatDoesNotComeIsNamed) {
  int late = -1;
  EXPECT_THAT(error_of<PeerTimeout>({path(), 1, 2}, base::Deadline(milliseconds(50)), &late),
              HasSubstr("rank 0 did not open it within 50 ms"));
  EXPECT_EQ(late, 0);
}

TEST_F(RendezvousTest, TheSocketOfADeadRankZeroIsReplaced) {
  {
    const base::FileDescriptor dead = make_socket();
    ASSERT_EQ(listen_at(dead.get(), path(), 1), 0);
  }
  ASSERT_EQ(directory_.entries().size(), 1U);
  together(2, [&](int rank) { EXPECT_EQ(join_group({path(), rank, 2}, soon())->rank(), rank); });
  EXPECT_THAT(directory_.entries(), IsEmpty());
}

TEST_F(RendezvousTest, TheSocketOfADeadRankZeroIsRemovedByAPeerThatGivesUp) {
  {
    const base::FileDescriptor dead = make_socket();
    ASSERT_EQ(listen_at(dead.get(), path(), 1), 0);
  }
  (void)error_of<PeerTimeout>({path(), 1, 2}, base::Deadline(milliseconds(50)));
  EXPECT_THAT(directory_.entries(), IsEmpty());
}

TEST_F(RendezvousTest, ALiveListenerIsLeftAlone) {
  const base::FileDescriptor live = make_socket();
  ASSERT_EQ(listen_at(live.get(), path(), 8), 0);
  EXPECT_THAT(error_of<InvalidArgument>({path(), 0, 2}, soon()),
              HasSubstr("where another process is waiting for its ranks; start one rank 0 only"));
  EXPECT_EQ(directory_.entries().size(), 1U);
}

TEST_F(RendezvousTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(path()) << "data";
  EXPECT_THAT(error_of<InvalidArgument>({path(), 0, 2}, soon()),
              HasSubstr("which is not a socket"));
  EXPECT_EQ(directory_.entries().size(), 1U);
}

TEST_F(RendezvousTest, ALongPathIsRefusedWithItsLimit) {
  const std::string name(120 - directory_.path().size(), 'x');
  for (const int rank : {0, 1}) {
    EXPECT_THAT(error_of<InvalidArgument>({directory_.path() + "/" + name, rank, 2}, soon()),
                HasSubstr("expected a path of 1 to 107 bytes, got 121 bytes"));
  }
}

TEST_F(RendezvousTest, ADirectoryThatOthersMayWriteToIsRefused) {
  ASSERT_EQ(::chmod(directory_.path().c_str(), 01777), 0);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(error_of<InvalidArgument>({path(), rank, 2}, soon()),
                HasSubstr("with mode 1777; use a directory below $XDG_RUNTIME_DIR"));
  }
  EXPECT_THAT(error_of<InvalidArgument>({"/nowhere/at/all", 0, 2}, soon()),
              HasSubstr("No such file or directory"));
}

TEST_F(RendezvousTest, AnotherUsersProcessIsRefusedAndDoesNotCount) {
  std::thread stranger([&] {
    EXPECT_THAT(error_of<InvalidArgument>({path(), 1, 2}, soon()),
                HasSubstr("at the other end, got one of user " + std::to_string(::geteuid())));
  });
  RendezvousConfig host(path(), 0, 2);
  host.expected_uid = ::geteuid() + 1;
  int late = -1;
  (void)error_of<PeerTimeout>(host, base::Deadline(milliseconds(300)), &late);
  EXPECT_EQ(late, 1);
  stranger.join();
}

TEST_F(RendezvousTest, ARankZeroOfAnotherUserIsRefused) {
  const base::FileDescriptor live = make_socket();
  ASSERT_EQ(listen_at(live.get(), path(), 8), 0);
  RendezvousConfig peer(path(), 1, 2);
  peer.expected_uid = ::geteuid() + 1;
  EXPECT_THAT(error_of<InvalidArgument>(peer, soon()),
              HasSubstr("expected a process of user " + std::to_string(::geteuid() + 1)));
}

TEST_F(RendezvousTest, ALookAtTheSocketIsNotARank) {
  std::thread host([&] { EXPECT_EQ(join_group({path(), 0, 2}, soon())->num_ranks(), 2); });
  const auto look = [&] {
    const base::FileDescriptor probe = make_socket();
    return connect_to(probe.get(), path()) == 0;
  };
  EXPECT_TRUE(eventually(look));
  EXPECT_EQ(join_group({path(), 1, 2}, soon())->rank(), 1);
  host.join();
}

}  // namespace
}  // namespace fanfold::comm
