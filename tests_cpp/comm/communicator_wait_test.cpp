// SPDX-License-Identifier: Apache-2.0

// Waiting for ranks that are late, that abort or that leave; closing and splitting.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/eventually.h"
#include "support/spawn_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::eventually;
using ::testing::HasSubstr;
using testing::make_ranks;
using testing::spawn_ranks;

/// What `body` throws, or a failure of the test.
template <class Error, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

TensorView floats(std::vector<float>& values) {
  return TensorView(static_cast<void*>(values.data()), DType::kFloat32,
                    {static_cast<std::int64_t>(values.size())});
}

std::string name_of_kind(const ::testing::TestParamInfo<testing::GroupKind>& info) {
  return name_of(info.param);
}

class CommunicatorWaitTest : public ::testing::TestWithParam<testing::GroupKind> {};
class CommunicatorCloseTest : public ::testing::TestWithParam<testing::GroupKind> {};
class CommunicatorSplitTest : public ::testing::TestWithParam<testing::GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, CommunicatorWaitTest, ::testing::ValuesIn(testing::kGroupKinds),
                         name_of_kind);
INSTANTIATE_TEST_SUITE_P(Kinds, CommunicatorCloseTest, ::testing::ValuesIn(testing::kGroupKinds),
                         name_of_kind);
INSTANTIATE_TEST_SUITE_P(Kinds, CommunicatorSplitTest, ::testing::ValuesIn(testing::kGroupKinds),
                         name_of_kind);

// --- Waiting ------------------------------------------------------------------------------------

TEST_P(CommunicatorWaitTest, ATimeoutNamesTheLateRankAndResetRepairs) {
  auto ranks = make_ranks(GetParam(), 3, seconds(20));
  std::atomic<int> num_timeouts{0};
  spawn_ranks(ranks, [&](Communicator& comm) {
    if (comm.rank() != 2) {
      try {
        comm.barrier(milliseconds(50));
        ADD_FAILURE() << "expected PeerTimeout";
      } catch (const PeerTimeout& error) {
        EXPECT_EQ(error.rank(), 2);
        EXPECT_STREQ(error.what(),
                     "Communicator: barrier: rank 2 did not arrive within 50 ms; it is late or "
                     "frozen; call reset() on every rank");
      }
      EXPECT_EQ(message_of<InvalidState>([&] { comm.barrier(); }),
                "Communicator: barrier: an earlier call failed; call reset() on every rank");
      ++num_timeouts;
    }
    ASSERT_TRUE(eventually([&] { return num_timeouts == 2; }));  // rank 2 only comes now
    comm.reset();
    std::vector<float> value{1.0F};
    comm.all_reduce(floats(value), floats(value));
    EXPECT_EQ(value[0], 3.0F);
    comm.close();
  });
}

TEST_P(CommunicatorWaitTest, ALateRankMeetsTheResetOfItsPeer) {
  auto ranks = make_ranks(GetParam(), 2, seconds(20));
  std::atomic<bool> has_timed_out{false};
  spawn_ranks(ranks, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      EXPECT_THROW(comm.barrier(milliseconds(20)), PeerTimeout);
      has_timed_out = true;
    } else {
      ASSERT_TRUE(eventually([&] { return has_timed_out.load(); }));
      // Rank 0 was here, so a barrier may pass; the next one cannot.
      const auto twice = [&] {
        comm.barrier();
        comm.barrier();
      };
      EXPECT_THROW(twice(), PeerAborted);
    }
    comm.reset();
    for (int i = 0; i < 5; ++i) comm.barrier();
    comm.close();
  });
}

TEST_P(CommunicatorWaitTest, AnAbortReachesAllRanksWithinMilliseconds) {
  auto ranks = make_ranks(GetParam(), 3, seconds(20));
  std::atomic<std::int64_t> aborted_at{0};
  spawn_ranks(ranks, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(30));
      aborted_at = base::now_ns();
      comm.abort("no memory");
      EXPECT_THROW(comm.barrier(), PeerAborted);
    } else {
      try {
        comm.barrier();
        ADD_FAILURE() << "expected PeerAborted";
      } catch (const PeerAborted& error) {
        EXPECT_LT(base::now_ns() - aborted_at, 5'000'000'000);
        EXPECT_EQ(error.rank(), 1);
        EXPECT_EQ(error.reason(), "no memory");
      }
    }
    EXPECT_THROW(comm.barrier(), InvalidState);
    comm.reset();
    comm.barrier();
    comm.close();
  });
}

TEST_P(CommunicatorWaitTest, AnotherThreadMayAbortAWaitingRank) {
  auto ranks = make_ranks(GetParam(), 2, seconds(20));
  std::thread watchdog([&] {
    std::this_thread::sleep_for(milliseconds(20));
    ranks[0].abort("watchdog");
  });
  EXPECT_THROW(ranks[0].barrier(), PeerAborted);
  watchdog.join();
}

TEST_P(CommunicatorWaitTest, ASecondThreadInOneCommunicatorIsRefused) {
  std::string message;
  const auto try_once = [&] {
    auto ranks = make_ranks(GetParam(), 2, seconds(20));
    std::thread waiting([&] {
      try {
        ranks[0].barrier();
      } catch (const Error& error) {
        EXPECT_STRNE(error.what(), "");  // aborted below, or this thread came second
      }
    });
    std::this_thread::sleep_for(milliseconds(20));
    try {
      ranks[0].all_gather_bytes({}, milliseconds(0));
    } catch (const InvalidState& error) {
      message = error.what();
    } catch (const PeerTimeout& error) {
      EXPECT_EQ(error.rank(), 1);  // the other thread had not begun
    }
    ranks[1].abort("end of the test");
    waiting.join();
    return !message.empty();
  };
  EXPECT_TRUE(eventually(try_once));  // the other thread must be inside its call in time
  EXPECT_THAT(message, HasSubstr("all_gather_bytes: another thread is inside a call"));
}

TEST_P(CommunicatorWaitTest, ARankWhoseObjectIsDestroyedIsLostForItsPeers) {
  auto ranks = make_ranks(GetParam(), 3, seconds(20));
  std::thread leaver([rank = std::move(ranks[2])]() mutable {
    std::this_thread::sleep_for(milliseconds(20));
    const Communicator end = std::move(rank);
  });
  std::vector<Communicator> rest;
  rest.push_back(std::move(ranks[0]));
  rest.push_back(std::move(ranks[1]));
  spawn_ranks(rest, [&](Communicator& comm) {
    const std::int64_t start = base::now_ns();
    for (int attempt = 0; attempt < 2; ++attempt) {  // and again at each later call
      try {
        comm.barrier();
        ADD_FAILURE() << "expected PeerLost";
      } catch (const PeerLost& error) {
        EXPECT_EQ(error.rank(), 2);
        EXPECT_THAT(error.what(), HasSubstr("rank 2 is gone"));
      }
    }
    EXPECT_LT(base::now_ns() - start, 5'000'000'000);
    EXPECT_THROW(comm.reset(), PeerLost);
    comm.close();
  });
  leaver.join();
}

// --- Closing ------------------------------------------------------------------------------------

TEST_P(CommunicatorCloseTest, ClosingTwiceIsHarmlessAndLaterCallsAreRefused) {
  auto ranks = make_ranks(GetParam(), 2, seconds(20));
  spawn_ranks(ranks, [&](Communicator& comm) {
    comm.close();
    comm.close();
    EXPECT_TRUE(comm.is_closed());
    EXPECT_EQ(message_of<InvalidState>([&] { comm.barrier(); }),
              "barrier: the communicator is closed");
    EXPECT_THROW(comm.reset(), InvalidState);
    EXPECT_THROW(comm.abort("x"), InvalidState);
    EXPECT_EQ(comm.num_ranks(), 2);
  });
}

TEST_P(CommunicatorCloseTest, ALateCloseIsATimeoutAndTheRankIsClosedAllTheSame) {
  auto ranks = make_ranks(GetParam(), 2, seconds(20));
  EXPECT_THROW(ranks[0].close(milliseconds(20)), PeerTimeout);
  EXPECT_TRUE(ranks[0].is_closed());
  EXPECT_THROW(ranks[1].barrier(), PeerLost);
  ranks[1].close();
}

TEST_P(CommunicatorCloseTest, RanksMayBeDestroyedInAnyOrder) {
  for (const std::vector<std::size_t>& order :
       {std::vector<std::size_t>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    auto ranks = make_ranks(GetParam(), 3);
    for (const std::size_t rank : order) const Communicator end = std::move(ranks[rank]);
  }
}

// --- Split --------------------------------------------------------------------------------------

TEST_P(CommunicatorSplitTest, EqualColorsFormAGroupOrderedByKey) {
  spawn_ranks(GetParam(), 5, [](Communicator& comm) {
    const int color = comm.rank() == 4 ? -1 : comm.rank() % 2;
    std::optional<Communicator> child = comm.split(color, -comm.rank());
    ASSERT_EQ(child.has_value(), comm.rank() != 4);
    if (child.has_value()) {
      EXPECT_EQ(child->num_ranks(), 2);
      EXPECT_EQ(child->rank(), comm.rank() < 2 ? 1 : 0);
      EXPECT_EQ(child->timeout(), comm.timeout());
      const auto all = child->all_gather_bytes({static_cast<std::byte>(comm.rank())});
      EXPECT_EQ(all[0][0], static_cast<std::byte>(color + 2));
      EXPECT_EQ(all[1][0], static_cast<std::byte>(color));
      child->close();
    }
    comm.barrier();
    comm.close();
  });
}

TEST_P(CommunicatorSplitTest, AChildOutlivesItsParent) {
  spawn_ranks(GetParam(), 2, [](Communicator& comm) {
    Communicator child = *comm.split(0, comm.rank());
    comm.close();
    child.barrier();
    child.close();
  });
}

}  // namespace
}  // namespace fanfold
