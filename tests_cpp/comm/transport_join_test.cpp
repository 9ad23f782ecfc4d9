// SPDX-License-Identifier: Apache-2.0

// Communicators that are made with a transport: which kind it becomes, and what fails on all ranks.

#include <cstdlib>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/host_identity.h"
#include "fanfold/allocator.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"
#include "support/loopback_transport.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::LoopbackNetwork;
using testing::spawn_on;

/// A rank that says it is somewhere else, while it introduces itself: the library reads the
/// variable on this rank's thread, when it makes the communicator.
class HostNames {
 public:
  ~HostNames() { ::unsetenv("FANFOLD_HOST_ID"); }
  static void set(const char* name) { ::setenv("FANFOLD_HOST_ID", name, 1); }
};

/// A transport whose ranks introduce themselves one after the other, each under its own name.
class NamedTransport final : public testing::ForwardingTransport {
 public:
  NamedTransport(std::shared_ptr<Transport> inner, std::vector<std::string> names,
                 std::shared_ptr<std::mutex> mutex)
      : ForwardingTransport(std::move(inner)), names_(std::move(names)), mutex_(std::move(mutex)) {}
  void start(std::int64_t max_message_bytes) override {
    lock_ = std::unique_lock<std::mutex>(*mutex_);
    HostNames::set(names_[static_cast<std::size_t>(rank())].c_str());
    ForwardingTransport::start(max_message_bytes);
  }
  void send(int peer, const std::vector<Part>& parts) override {
    if (lock_.owns_lock()) lock_.unlock();  // it has read its name
    ForwardingTransport::send(peer, parts);
  }

 private:
  std::vector<std::string> names_;
  std::shared_ptr<std::mutex> mutex_;
  std::unique_lock<std::mutex> lock_;
};

/// Makes a communicator of ranks that call their hosts `names`.
void spawn_on_hosts(const std::vector<std::string>& names, TransportUse use,
                    const std::function<void(Communicator&)>& body) {
  const HostNames reset;
  const auto num_ranks = static_cast<int>(names.size());
  LoopbackNetwork network(num_ranks);
  const auto mutex = std::make_shared<std::mutex>();
  spawn_on(network, num_ranks, [&](int, std::shared_ptr<Transport> inner) {
    const auto transport = std::make_shared<NamedTransport>(std::move(inner), names, mutex);
    Communicator comm = Communicator::from_transport(transport, use, seconds(20));
    body(comm);
  });
  EXPECT_EQ(network.num_breaches(), 0);
}

TEST(TransportJoinTest, RanksOfOneHostMeetInItsMemoryAndCloseTheTransport) {
  for (const TransportUse use : {TransportUse::kAuto, TransportUse::kSharedMemory}) {
    LoopbackNetwork network(3);
    spawn_on(network, 3, [&](int rank, std::shared_ptr<Transport> transport) {
      Communicator comm = Communicator::from_transport(std::move(transport), use, seconds(20));
      EXPECT_EQ(comm.kind(), "processes");
      EXPECT_TRUE(comm.shares_memory());
      EXPECT_THAT(comm.hosts(), ElementsAre(0, 0, 0));
      EXPECT_TRUE(network.is_closed(rank));
      comm.barrier();
      comm.close();
    });
    EXPECT_EQ(network.num_breaches(), 0);
  }
}

TEST(TransportJoinTest, RanksOfSeveralHostsKeepTheTransport) {
  spawn_on_hosts({"b", "a", "b", "c"}, TransportUse::kAuto, [](Communicator& comm) {
    EXPECT_EQ(comm.kind(), "loopback");
    EXPECT_FALSE(comm.shares_memory());
    EXPECT_THAT(comm.hosts(), ElementsAre(0, 1, 0, 2));
    Communicator child = *comm.split(comm.rank() / 2, -comm.rank());
    EXPECT_EQ(child.kind(), "loopback");
    EXPECT_THAT(child.hosts(), ElementsAre(0, 1));
    child.close();
    comm.close();
  });
}

TEST(TransportJoinTest, SharedMemoryAcrossHostsIsUnsupportedOnEveryRank) {
  const HostNames reset;
  LoopbackNetwork network(2);
  const auto mutex = std::make_shared<std::mutex>();
  spawn_on(network, 2, [&](int rank, std::shared_ptr<Transport> inner) {
    const auto transport = std::make_shared<NamedTransport>(
        std::move(inner), std::vector<std::string>{"left", "right"}, mutex);
    expect_error<Unsupported>(
        {"shared_memory", "rank 0 on host 'FANFOLD_HOST_ID left'",
         "rank 1 on host 'FANFOLD_HOST_ID right'", "boot id and network namespace"},
        [&] {
          (void)Communicator::from_transport(transport, TransportUse::kSharedMemory, seconds(20));
        });
    EXPECT_TRUE(network.is_closed(rank));
  });
}

TEST(TransportJoinTest, TheTransportIsUsedOnOneHostIfSoAsked) {
  testing::spawn_loopback_ranks(2, [](Communicator& comm) {
    EXPECT_EQ(comm.kind(), "loopback");
    EXPECT_FALSE(comm.shares_memory());
    EXPECT_THAT(comm.hosts(), ElementsAre(0, 0));
    comm.close();
  });
}

TEST(TransportJoinTest, DifferentUsesAreAnErrorOnEveryRank) {
  LoopbackNetwork network(2);
  spawn_on(network, 2, [](int rank, std::shared_ptr<Transport> transport) {
    const TransportUse use = rank == 0 ? TransportUse::kAlways : TransportUse::kAuto;
    expect_error<InvalidArgument>({"use", "always on rank 0", "auto on rank 1"}, [&] {
      (void)Communicator::from_transport(std::move(transport), use, seconds(20));
    });
  });
}

TEST(TransportJoinTest, ARankThatDoesNotComeIsNamed) {
  LoopbackNetwork network(3);
  spawn_on(network, 3, [](int rank, std::shared_ptr<Transport> transport) {
    if (rank == 1) return;
    expect_error<PeerTimeout>({"from_transport", "rank 1 did not arrive within 50 ms"}, [&] {
      (void)Communicator::from_transport(std::move(transport), TransportUse::kAuto,
                                         milliseconds(50));
    });
  });
}

/// Rank 1 cannot name its host.
TEST(TransportJoinTest, WhatOneRankMeetsFailsOnAll) {
  const HostNames reset;
  LoopbackNetwork network(2);
  const auto mutex = std::make_shared<std::mutex>();
  spawn_on(network, 2, [&](int, std::shared_ptr<Transport> inner) {
    const auto transport = std::make_shared<NamedTransport>(
        std::move(inner), std::vector<std::string>{"left", "two\nlines"}, mutex);
    expect_error<InvalidArgument>({"FANFOLD_HOST_ID: expected one line"}, [&] {
      (void)Communicator::from_transport(transport, TransportUse::kAlways, seconds(20));
    });
  });
}

/// Brings rank 1 another path than rank 0 gave.
class MisleadingTransport final : public testing::ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  std::optional<Message> receive(std::chrono::nanoseconds max_wait) override {
    std::optional<Message> message = ForwardingTransport::receive(max_wait);
    if (!message.has_value() || rank() == 0) return message;
    const std::string name = "/rendezvous";
    const auto* text = reinterpret_cast<const char*>(message->bytes.data());
    const std::size_t at = std::string(text, message->bytes.size()).find(name);
    if (at != std::string::npos) message->bytes[at + 1] = std::byte{'X'};
    return message;
  }
};

TEST(TransportJoinTest, RanksThatCannotMeetOnTheirHostAllSaySo) {
  LoopbackNetwork network(2);
  spawn_on(network, 2, [&](int rank, std::shared_ptr<Transport> inner) {
    const auto transport = std::make_shared<MisleadingTransport>(std::move(inner));
    expect_error<PeerTimeout>({"from_transport: all ranks are on one host, but could not meet",
                               "use 'always' does without its memory"},
                              [&] {
                                (void)Communicator::from_transport(
                                    transport, TransportUse::kSharedMemory, milliseconds(300));
                              });
    EXPECT_TRUE(network.is_closed(rank));
  });
  EXPECT_EQ(network.num_breaches(), 0);
}

TEST(TransportJoinTest, RanksThatCannotMeetOnTheirHostKeepTheTransportAndTellWhy) {
  LoopbackNetwork network(2);
  spawn_on(network, 2, [&](int, std::shared_ptr<Transport> inner) {
    const auto transport = std::make_shared<MisleadingTransport>(std::move(inner));
    Communicator comm = Communicator::from_transport(transport, TransportUse::kAuto, seconds(2));
    EXPECT_EQ(comm.kind(), "loopback");
    EXPECT_FALSE(comm.shares_memory());
    EXPECT_THAT(comm.hosts(), ElementsAre(0, 0));
    Communicator child = *comm.split(0, 0);
    expect_error<Unsupported>({"all 2 ranks are on one host, but could not meet in its memory",
                               "did not", "a 'loopback' transport connects them"},
                              [&] { (void)Allocator(child); });
    child.close();
    comm.close(seconds(5));
  });
  EXPECT_EQ(network.num_breaches(), 0);
}

/// A transport that claims too many ranks, or to be none of them.
TEST(TransportJoinTest, OddTransportsAreRefused) {
  expect_error<InvalidArgument>({"transport: expected one, got null"},
                                [] { (void)Communicator::from_transport(nullptr); });
  LoopbackNetwork network(1);
  expect_error<InvalidArgument>({"rank: expected 0 to 0, got 3"},
                                [&] { (void)Communicator::from_transport(network.transport(3)); });
  expect_error<InvalidArgument>({"timeout: expected 0 or more"}, [&] {
    (void)Communicator::from_transport(network.transport(0), TransportUse::kAuto, milliseconds(-1));
  });
}

TEST(TransportJoinTest, AMessageOfAnotherUserIsRefused) {
  LoopbackNetwork network(2);
  network.inject(1, 0, std::vector<std::byte>(100, std::byte{1}));
  expect_error<InvalidState>({"loopback", "rank 1", "none of this version of Fanfold's"}, [&] {
    (void)Communicator::from_transport(network.transport(0), TransportUse::kAlways, seconds(5));
  });
}

TEST(HostIdentityTest, AHostHasOneNameUnlessTheVariableSaysOtherwise) {
  const HostNames reset;
  const std::string own = comm::host_identity();
  EXPECT_EQ(comm::host_identity(), own);
  EXPECT_THAT(own, HasSubstr("boot "));
  EXPECT_THAT(own, HasSubstr(" net "));
  HostNames::set("rack 7");
  EXPECT_EQ(comm::host_identity(), "FANFOLD_HOST_ID rack 7");
  HostNames::set("");
  EXPECT_EQ(comm::host_identity(), own);
  HostNames::set(std::string(201, 'x').c_str());
  expect_error<InvalidArgument>(
      {"FANFOLD_HOST_ID: expected one line of at most 200 bytes, got 201"},
      [] { (void)comm::host_identity(); });
  EXPECT_THAT(comm::number_hosts({"x", "y", "x", "z"}), ElementsAre(0, 1, 0, 2));
}

}  // namespace
}  // namespace fanfold
