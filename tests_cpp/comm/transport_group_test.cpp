// SPDX-License-Identifier: Apache-2.0

// Ranks over a transport of messages: its faults, and what no other kind of group has.

#include "comm/transport_group.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/channel.h"
#include "comm/group_exchange.h"
#include "comm/remote_windows.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/loopback_transport.h"
#include "support/random_bits.h"
#include "support/sanitizer.h"

namespace fanfold::comm {
namespace {

using fanfold::testing::eventually;
using fanfold::testing::expect_error;
using fanfold::testing::LoopbackNetwork;
using fanfold::testing::spawn_on;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

base::Deadline soon() { return base::Deadline(seconds(20)); }

LoopbackNetwork::Options delayed(int max_us) {
  LoopbackNetwork::Options options;
  options.max_delay = microseconds(max_us);
  return options;
}

/// Calls `body(group)` on every rank of a new network.
template <class Body>
void spawn_groups(LoopbackNetwork& network, int num_ranks, const Body& body,
                  std::int64_t max_message_bytes = TransportGroup::max_message_bytes()) {
  spawn_on(network, num_ranks, [&](int, std::shared_ptr<Transport> transport) {
    const auto hub = std::make_shared<MessageHub>(std::move(transport), max_message_bytes);
    TransportGroup group(hub);
    body(group);
  });
  EXPECT_EQ(network.num_breaches(), 0);
}

template <class Body>
void spawn_communicators(LoopbackNetwork& network, int num_ranks, const Body& body) {
  spawn_on(network, num_ranks, [&](int, std::shared_ptr<Transport> transport) {
    Communicator comm =
        Communicator::from_transport(std::move(transport), TransportUse::kAlways, seconds(20));
    body(comm);
  });
  EXPECT_EQ(network.num_breaches(), 0);
}

std::int64_t sum_of_ranks(Communicator& comm,
                          std::optional<std::chrono::nanoseconds> timeout = {}) {
  std::vector<std::int64_t> value{comm.rank() + 1};
  const TensorView view(static_cast<void*>(value.data()), DType::kInt64, {1});
  comm.all_reduce(view, view, timeout);
  return value[0];
}

Parcel bytes_parcel(std::string bytes) {
  Parcel parcel;
  parcel.bytes = std::move(bytes);
  return parcel;
}

// --- Exchanges -----------------------------------------------------------------------------------

TEST(TransportGroupTest, EveryRankGetsTheBytesOfAllInPiecesOfAnyNumber) {
  LoopbackNetwork network(3, delayed(30));
  const auto text = [](int rank) {
    return std::string(static_cast<std::size_t>(rank) * 1000, static_cast<char>('a' + rank));
  };
  const auto body = [&](TransportGroup& group) {
    for (int i = 0; i < 3; ++i) {
      const auto all =
          group.exchange("showing", bytes_parcel(text(group.rank())), std::nullopt, soon());
      ASSERT_EQ(all.size(), 3U);
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(all[static_cast<std::size_t>(rank)].peer, rank);
        EXPECT_EQ(all[static_cast<std::size_t>(rank)].bytes, text(rank));
      }
    }
  };
  spawn_groups(network, 3, body, 100);
}

TEST(TransportGroupTest, AFailureOfOneRankIsThrownOnAllAndTheGroupGoesOn) {
  LoopbackNetwork network(3, delayed(30));
  spawn_groups(network, 3, [](TransportGroup& group) {
    std::optional<Failure> failure;
    if (group.rank() == 1) failure = Failure{Failure::Kind::kCudaFailure, 801, "rank 1: no memory"};
    for (int i = 0; i < 5; ++i) {
      EXPECT_THROW((void)group.exchange("showing", {}, failure, soon()), CudaFailure);
      EXPECT_EQ(group.exchange("showing", {}, std::nullopt, soon()).size(), 3U);
    }
  });
}

TEST(TransportGroupTest, DifferentCallsAndDescriptorsAreErrorsOnEveryRank) {
  LoopbackNetwork network(2);
  spawn_groups(network, 2, [](TransportGroup& group) {
    expect_error<InvalidArgument>({"'showing' on rank 0", "'telling' on rank 1"}, [&] {
      (void)group.exchange(group.rank() == 0 ? "showing" : "telling", {}, std::nullopt, soon());
    });
    expect_error<Unsupported>({"showing", "share a machine's memory", "rank 1", "'loopback'"}, [&] {
      Parcel parcel = group.rank() == 1 ? parcel_with("text") : Parcel{};
      (void)group.exchange("showing", std::move(parcel), std::nullopt, soon());
    });
    expect_error<InvalidArgument>(
        {"share_windows of 4096 bytes", "share_windows of 8192 bytes"},
        [&] { (void)group.share_windows(4096 * (1 + group.rank()), soon()); });
    EXPECT_EQ(group.exchange("showing", {}, std::nullopt, soon()).size(), 2U);
  });
}

TEST(TransportGroupTest, ALateRankIsNamedAndLearnsThatItIsLate) {
  LoopbackNetwork network(3);
  std::atomic<int> num_late{0};
  spawn_groups(network, 3, [&](TransportGroup& group) {
    if (group.rank() == 2) {
      ASSERT_TRUE(eventually([&] { return num_late == 2; }));
      expect_error<PeerAborted>({"showing", "gave up waiting"},
                                [&] { (void)group.exchange("showing", {}, std::nullopt, soon()); });
    } else {
      expect_error<PeerTimeout>({"showing: rank 2 did not arrive within 30 ms"}, [&] {
        (void)group.exchange("showing", {}, std::nullopt, base::Deadline(milliseconds(30)));
      });
      ++num_late;
    }
    EXPECT_EQ(group.exchange("showing", {}, std::nullopt, soon()).size(), 3U);
  });
}

TEST(TransportGroupTest, ARankThatLeavesOrIsLostEndsTheWaitAtOnce) {
  LoopbackNetwork network(3);
  spawn_groups(network, 3, [&](TransportGroup& group) {
    if (group.rank() == 0) return;  // destroyed
    expect_error<PeerLost>({"showing: rank 0 is gone: it left the group"},
                           [&] { (void)group.exchange("showing", {}, std::nullopt, soon()); });
    if (group.rank() == 1) network.lose(2, "the cable was pulled");
    EXPECT_TRUE(eventually([&] { return !group.lost_reason(3 - group.rank()).empty(); }));
    // Rank 1 may have taken rank 2's last words before it was lost.
    EXPECT_THAT(group.lost_reason(3 - group.rank()), HasSubstr("the cable was pulled"));
    EXPECT_EQ(group.lost_reason(group.rank()), "");
  });
}

// --- Windows and groups
// ----------------------------------------------------------------------------

TEST(TransportGroupTest, WindowsAreCopiesThatStoresReachInOrder) {
  LoopbackNetwork network(2, delayed(20));
  spawn_groups(network, 2, [](TransportGroup& group) {
    EXPECT_FALSE(group.shares_memory());
    EXPECT_FALSE(group.may_spin());
    const Windows windows = group.reserve_windows(std::int64_t{1} << 30, soon());  // untouched
    ASSERT_EQ(windows.size(), 2U);
    EXPECT_EQ(windows[0]->bytes(), std::int64_t{1} << 30);
    const auto remote = group.remote_windows(windows);
    const int peer = 1 - group.rank();
    const auto word = [&](int owner) {
      return reinterpret_cast<std::atomic<std::uint64_t>*>(
          windows[static_cast<std::size_t>(owner)]->data() + 64);
    };
    std::vector<std::byte> text(1000);
    for (std::uint64_t step = 1; step <= 200; ++step) {
      std::fill(text.begin(), text.end(), static_cast<std::byte>(step));
      Stores stores;
      stores.bytes(4096, text.data(), 1000);
      stores.set64(64, step);
      stores.raise32(128, static_cast<std::uint32_t>(1000 - step));
      remote->send(peer, group.rank(), stores);
      while (word(peer)->load(std::memory_order_acquire) < step) remote->progress(1'000'000);
      const std::byte* const theirs = windows[static_cast<std::size_t>(peer)]->data();
      // The peer goes on only when it has this rank's word: both are at the same step, or it is one
      // ahead.
      EXPECT_GE(static_cast<std::uint64_t>(theirs[4096]), step % 256);
      EXPECT_EQ(theirs[4096], theirs[5095]);
      EXPECT_EQ(reinterpret_cast<const std::atomic<std::uint32_t>*>(theirs + 128)->load(), 999U);
      // Before this rank's next word the peer stays: what was read is not overwritten early.
    }
  });
}

TEST(TransportGroupTest, StoresThatDoNotFitAreRefused) {
  LoopbackNetwork network(2);
  std::atomic<bool> is_ready{false};
  spawn_groups(network, 2, [&](TransportGroup& group) {
    const Windows windows = group.share_windows(4096, soon());
    const auto remote = group.remote_windows(windows);
    if (group.rank() == 1) is_ready = true;
    ASSERT_TRUE(eventually([&] { return is_ready.load(); }));
    std::vector<std::byte> bytes(64);
    for (const std::int64_t offset : {4090, 5000, -8}) {
      Stores stores;
      stores.bytes(offset, bytes.data(), 64);
      if (group.rank() == 0) remote->send(1, 0, stores);
    }
    Stores odd;
    odd.set64(12, 1);
    if (group.rank() == 0) remote->send(1, 0, odd);
    if (group.rank() == 0) remote->send(1, 7, Stores{});
    for (int i = 0; i < 5 && group.rank() == 1; ++i) {
      expect_error<InvalidState>({"loopback", "does not fit the 4096 bytes"},
                                 [&] { remote->progress(1'000'000'000); });
    }
    (void)group.exchange("end", {}, std::nullopt, soon());
  });
}

TEST(TransportGroupTest, MessagesForWindowsAndGroupsThatAreGoneAreDropped) {
  LoopbackNetwork network(2, delayed(50));
  spawn_groups(network, 2, [&](TransportGroup& group) {
    for (int i = 0; i < 30; ++i) {
      Windows windows = group.share_windows(4096, soon());
      std::shared_ptr<RemoteWindows> remote = group.remote_windows(windows);
      auto child = group.split({0, 1}, soon());
      Windows inner = child->share_windows(4096, soon());
      const auto inner_remote = child->remote_windows(inner);
      Stores stores;
      stores.set64(0, 7);
      if (group.rank() == i % 2) {  // the other has freed them by the time
        remote->send(1 - group.rank(), 0, stores);
        inner_remote->send(1 - group.rank(), 0, stores);
      }
      windows.clear();
      remote.reset();
      child.reset();
    }
    (void)group.exchange("end", {}, std::nullopt, soon());
  });
}

TEST(TransportGroupTest, SplitOrdersTheMembersAndGivesEachGroupItsOwnMessages) {
  LoopbackNetwork network(5, delayed(50));
  spawn_groups(network, 5, [](TransportGroup& group) {
    group.set_hosts({0, 1, 1, 2, 2});
    const std::vector<std::vector<int>> members_of = {{2, 0}, {3, 1}, {2, 0}, {3, 1}, {}};
    for (int i = 0; i < 10; ++i) {
      const auto& members = members_of[static_cast<std::size_t>(group.rank())];
      std::unique_ptr<Group> child = group.split(members, soon());
      ASSERT_EQ(child != nullptr, group.rank() != 4);
      if (child == nullptr) continue;
      EXPECT_EQ(child->rank(), members[0] == group.rank() ? 0 : 1);
      EXPECT_THAT(child->hosts(), ElementsAre(0, 1));
      const auto all = child->exchange("inner", bytes_parcel(std::to_string(group.rank())),
                                       std::nullopt, soon());
      EXPECT_EQ(all[0].bytes, std::to_string(members[0]));
      EXPECT_EQ(all[1].bytes, std::to_string(members[1]));
    }
    expect_error<InvalidArgument>({"split: members"},
                                  [&] { (void)group.split({(group.rank() + 1) % 5}, soon()); });
    expect_error<InvalidArgument>({"split: members: rank 0 gave [0, 1]"}, [&] {
      (void)group.split(group.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{}, soon());
    });
    EXPECT_EQ(group.exchange("end", {}, std::nullopt, soon()).size(), 5U);
  });
}

// --- Faults under collectives
// ----------------------------------------------------------------------

TEST(TransportFaultTest, AFrozenRankIsNamedAndComesBackWithTheReset) {
  LoopbackNetwork network(3, delayed(50));
  std::atomic<int> num_timeouts{0};
  const int num_rounds = fanfold::testing::kIsSanitizer ? 3 : 10;
  spawn_communicators(network, 3, [&](Communicator& comm) {
    for (int round = 0; round < num_rounds; ++round) {
      const int victim = round % 3;
      try {
        comm.barrier(milliseconds(30));
        if (comm.rank() == victim) network.freeze(victim);
        for (;;) EXPECT_EQ(sum_of_ranks(comm, milliseconds(30)), 6);
      } catch (const PeerTimeout& error) {
        EXPECT_NE(error.rank(), comm.rank());  // the victim, or one that waits for it
      } catch (const PeerAborted& error) {     // a peer has begun its reset
        EXPECT_THAT(error.what(), HasSubstr("called reset"));
      }
      if (++num_timeouts == 3 * (round + 1)) network.thaw(victim);
      comm.reset();
      for (int i = 0; i < 5; ++i) EXPECT_EQ(sum_of_ranks(comm), 6);
    }
    comm.close();
  });
}

TEST(TransportFaultTest, ALostRankIsNamedWithTheTransportsWords) {
  LoopbackNetwork network(3);
  spawn_communicators(network, 3, [&](Communicator& comm) {
    EXPECT_EQ(sum_of_ranks(comm), 6);
    if (comm.rank() == 2) {
      network.lose(2, "the cable was pulled");
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 2; ++i) {
      const auto until_it_fails = [&] {
        for (;;) comm.barrier();
      };
      expect_error<PeerLost>({"barrier", "rank 2 is gone: the cable was pulled"}, until_it_fails);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
    comm.close();
  });
}

TEST(TransportFaultTest, ACutLinkIsFoundOnBothSides) {
  LoopbackNetwork network(3);
  std::atomic<int> num_ready{0};
  spawn_communicators(network, 3, [&](Communicator& comm) {
    comm.barrier();
    ++num_ready;
    ASSERT_TRUE(eventually([&] { return num_ready == 3; }));
    if (comm.rank() == 0) network.cut(0, 1, "the link is down");
    const auto until_it_fails = [&] {
      for (;;) comm.barrier();
    };
    // Rank 2 reaches both; it hears that they have left, or waits for them in vain.
    EXPECT_THROW(until_it_fails(), PeerLost);
  });
}

TEST(TransportFaultTest, AFailedSendIsThrownWhereItHappensAndAbortsTheOthers) {
  for (int after = 0; after < 4; ++after) {
    LoopbackNetwork network(3, delayed(50));
    spawn_communicators(network, 3, [&](Communicator& comm) {
      comm.barrier();
      if (comm.rank() == 1) network.fail_send(1, after);
      const auto until_it_fails = [&] {
        for (;;) (void)sum_of_ranks(comm);
      };
      if (comm.rank() == 1) {
        expect_error<SystemFailure>({"the wire broke"}, until_it_fails);
      } else {
        expect_error<PeerAborted>({"rank 1 aborted", "the wire broke"}, until_it_fails);
      }
      comm.reset();
      EXPECT_EQ(sum_of_ranks(comm), 6);
      comm.close();
    });
  }
}

/// The abort of one rank and the resets of the others race; everybody names the one that began.
TEST(TransportFaultTest, AnAbortIsNamedBeforeTheResetsThatAnswerIt) {
  const int num_rounds = fanfold::testing::kIsSanitizer ? 10 : 60;
  LoopbackNetwork network(4, delayed(200));
  spawn_communicators(network, 4, [&](Communicator& comm) {
    for (int round = 0; round < num_rounds; ++round) {
      const int culprit = round % 4;
      if (comm.rank() == culprit) comm.abort("round " + std::to_string(round));
      try {
        for (;;) comm.barrier();
      } catch (const PeerAborted& error) {
        EXPECT_EQ(error.rank(), culprit) << "on rank " << comm.rank() << ": " << error.what();
        EXPECT_EQ(error.reason(), "round " + std::to_string(round));
      }
      comm.reset();
    }
    EXPECT_EQ(sum_of_ranks(comm), 10);
    comm.close();
  });
}

TEST(TransportFaultTest, RanksGiveUpAtAnyMomentAndAResetBringsThemBack) {
  const int num_rounds = fanfold::testing::kIsSanitizer ? 8 : 40;
  LoopbackNetwork network(3, delayed(100));
  spawn_communicators(network, 3, [&](Communicator& comm) {
    fanfold::testing::RandomBits random(
        fanfold::testing::mix(7, static_cast<std::uint64_t>(comm.rank())));
    std::vector<std::int64_t> big(100'000, comm.rank() + 1);  // several steps
    const TensorView view(static_cast<void*>(big.data()), DType::kInt64, {100'000});
    for (int round = 0; round < num_rounds; ++round) {
      try {
        for (std::int64_t calls = random.below(4); calls > 0; --calls) comm.barrier();
        comm.all_reduce(view, view, microseconds(random.below(3000)));
      } catch (const Error& error) {  // late, a peer is in its reset, or their numbers differ
        EXPECT_THAT(error.what(), ::testing::AnyOf(HasSubstr("did not arrive"),
                                                   HasSubstr("called reset"), HasSubstr("call:")));
      }
      comm.reset();
      for (int i = 0; i < 3; ++i) ASSERT_EQ(sum_of_ranks(comm), 6);
    }
    comm.close();
  });
}

// --- Threads
// ---------------------------------------------------------------------------------------

TEST(TransportThreadsTest, ManyObjectsOfOneGroupMoveEachOthersMessages) {
  constexpr int kObjects = 4;
  const int num_rounds = fanfold::testing::kIsSanitizer ? 30 : 150;
  LoopbackNetwork network(3, delayed(30));
  spawn_communicators(network, 3, [&](Communicator& comm) {
    std::vector<Communicator> objects;
    for (int i = 0; i < kObjects; ++i) objects.push_back(*comm.split(0, comm.rank()));
    std::vector<std::thread> threads;
    for (Communicator& object : objects) {
      threads.emplace_back([&] {
        try {
          for (int i = 0; i < num_rounds; ++i) EXPECT_EQ(sum_of_ranks(object), 6);
          object.close();
        } catch (const Error& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    for (int i = 0; i < num_rounds; ++i) EXPECT_EQ(sum_of_ranks(comm), 6);
    for (std::thread& thread : threads) thread.join();
    comm.close();
  });
}

TEST(TransportThreadsTest, ABoundTransportIsForOneThreadButAnyMayAbort) {
  LoopbackNetwork::Options options;
  options.is_thread_bound = true;
  LoopbackNetwork network(2, options);
  std::atomic<bool> is_aborted{false};
  spawn_communicators(network, 2, [&](Communicator& comm) {
    comm.barrier();
    std::thread other([&] {
      expect_error<InvalidState>({"barrier", "thread that made the communicator", "'loopback'"},
                                 [&] { comm.barrier(); });
      EXPECT_THROW(comm.close(), InvalidState);
    });
    other.join();
    comm.barrier();  // it has sent nothing
    if (comm.rank() == 0) {
      std::thread watchdog([&] {
        std::this_thread::sleep_for(milliseconds(10));
        comm.abort("watchdog");
      });
      expect_error<PeerAborted>({"rank 0 aborted: watchdog"}, [&] { comm.barrier(); });
      watchdog.join();
      is_aborted = true;
    } else {
      ASSERT_TRUE(eventually([&] { return is_aborted.load(); }));
      expect_error<PeerAborted>({"rank 0 aborted: watchdog"}, [&] { comm.barrier(); });
    }
    comm.reset();
    EXPECT_EQ(sum_of_ranks(comm), 3);
    comm.close();
  });
}

/// Only that thread may close it, and does: with its next call, or when it ends.
TEST(TransportThreadsTest, ABoundTransportIsClosedByItsThreadWhenItsRankEndsElsewhere) {
  for (const bool calls_again : {true, false}) {
    LoopbackNetwork::Options options;
    options.is_thread_bound = true;
    options.tells_losses = false;
    LoopbackNetwork network(2, options);
    LoopbackNetwork other(1, options);
    spawn_communicators(network, 2, [&](Communicator& comm) {
      comm.barrier();
      if (comm.rank() == 0) {
        std::thread([moved = std::move(comm)]() mutable {
          const Communicator end = std::move(moved);
        }).join();
        EXPECT_FALSE(network.is_closed(0));
        if (!calls_again) return;
        (void)Communicator::from_transport(other.transport(0), TransportUse::kAlways, seconds(5));
        EXPECT_TRUE(network.is_closed(0));
        return;
      }
      expect_error<PeerLost>({"rank 0 is gone: it closed its end"}, [&] { comm.barrier(); });
    });
    EXPECT_TRUE(network.is_closed(0));
  }
}

// --- Ends
// ------------------------------------------------------------------------------------------

TEST(TransportEndTest, TheLastGroupClosesTheTransport) {
  LoopbackNetwork network(2);
  spawn_communicators(network, 2, [&](Communicator& comm) {
    const int rank = comm.rank();
    Communicator child = *comm.split(0, rank);
    comm.close();
    EXPECT_FALSE(network.is_closed(rank));
    child.barrier();
    child.close();
    EXPECT_TRUE(network.is_closed(rank));
  });
}

/// Whether the transport can tell of losses or not: what the ranks say when they go is enough.
TEST(TransportEndTest, RanksThatEndInAnyOrderNeverHang) {
  for (const bool tells : {true, false}) {
    for (std::uint64_t seed = 0; seed < (fanfold::testing::kIsSanitizer ? 6U : 25U); ++seed) {
      LoopbackNetwork::Options options = delayed(200);
      options.tells_losses = tells;
      LoopbackNetwork network(4, options);
      spawn_communicators(network, 4, [&](Communicator& comm) {
        fanfold::testing::RandomBits random(
            fanfold::testing::mix(seed, static_cast<std::uint64_t>(comm.rank()), 0xe2dULL));
        std::optional<Communicator> child = comm.split(comm.rank() % 2, 0);
        const auto start = std::chrono::steady_clock::now();
        try {
          for (std::int64_t calls = random.below(6); calls > 0; --calls) comm.barrier();
          if (random.below(2) == 0) child->close(milliseconds(20));
          if (random.below(2) == 0) child.reset();
          if (random.below(2) == 0) comm.close();
        } catch (const PeerLost& error) {
          EXPECT_THAT(error.what(), ::testing::AnyOf(HasSubstr("it closed its end"),
                                                     HasSubstr("it left the group"),
                                                     HasSubstr("its connection ended")));
        } catch (const PeerTimeout& error) {
          EXPECT_THAT(error.what(), HasSubstr("close"));  // its peer waits for this rank elsewhere
        }
        EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
      });
    }
  }
}

TEST(TransportEndTest, AForkedChildIsRefusedAndDisturbsNobody) {
  if (fanfold::testing::kIsThreadSanitizer) GTEST_SKIP() << "fork with threads";
  LoopbackNetwork network(1);
  Communicator comm =
      Communicator::from_transport(network.transport(0), TransportUse::kAlways, seconds(5));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int result = 1;
    try {
      comm.barrier();
    } catch (const InvalidState&) {
      result = 0;
    }
    {
      const Communicator end = std::move(comm);
    }
    if (network.is_closed(0)) result = 2;
    ::_exit(result);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  comm.barrier();
  comm.close();
}

/// What nobody reads does not travel.
TEST(TransportEndTest, OnlyBytesInUseAreSent) {
  constexpr std::int64_t kRows = 100'000;
  LoopbackNetwork network(3);
  spawn_communicators(network, 3, [&](Communicator& comm) {
    const std::int64_t before = network.num_bytes_sent(comm.rank());
    std::vector<std::byte> tensor(kRows);
    const TensorView view(static_cast<void*>(tensor.data()), DType::kUInt8, {kRows});
    comm.broadcast(view, 1);
    const std::int64_t sent = network.num_bytes_sent(comm.rank()) - before;
    EXPECT_GE(sent, comm.rank() == 1 ? 2 * kRows : 0);
    EXPECT_LT(sent, (comm.rank() == 1 ? 2 * kRows : 0) + 1000);
    comm.barrier();
    const std::int64_t middle = network.num_bytes_sent(comm.rank());
    std::vector<std::int64_t> out{0, 0, 0};
    std::vector<std::int64_t> in{0, 0, 0};
    if (comm.rank() == 0) out[2] = kRows;
    if (comm.rank() == 2) in[0] = kRows;
    const auto rows = [&](std::int64_t n) {
      return TensorView(static_cast<void*>(tensor.data()), DType::kUInt8, {n});
    };
    comm.all_to_all_v(rows(comm.rank() == 0 ? kRows : 0), rows(comm.rank() == 2 ? kRows : 0), out,
                      in);
    EXPECT_LT(network.num_bytes_sent(comm.rank()) - middle, (comm.rank() == 0 ? kRows : 0) + 1000);
    comm.close();
  });
}

}  // namespace
}  // namespace fanfold::comm
