// SPDX-License-Identifier: Apache-2.0

// What a transport may do to a rank in the middle of a call, and what its peers must not suffer.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/channel.h"
#include "comm/message_hub.h"
#include "comm/transport_group.h"
#include "comm/transport_message.h"
#include "fanfold/communicator.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/loopback_transport.h"

namespace fanfold::comm {
namespace {

using fanfold::testing::eventually;
using fanfold::testing::expect_error;
using fanfold::testing::LoopbackNetwork;
using fanfold::testing::spawn_on;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

base::Deadline soon() { return base::Deadline(seconds(20)); }

/// Calls `before_send` with what is sent.
class HookedTransport final : public fanfold::testing::ForwardingTransport {
 public:
  using Hook = std::function<void(const std::vector<Part>&)>;

  HookedTransport(std::shared_ptr<Transport> inner, Hook before_send)
      : ForwardingTransport(std::move(inner)), before_send_(std::move(before_send)) {}
  void send(int peer, const std::vector<Part>& parts) override {
    before_send_(parts);
    ForwardingTransport::send(peer, parts);
  }

 private:
  Hook before_send_;
};

/// A rank that computes after a call, far from any other, keeps nobody in that call.
TEST(TransportFlushTest, WhatPeersNeedHasLeftWhenACallReturns) {
  constexpr int kRounds = 3;
  LoopbackNetwork::Options options;
  options.sends_take_calls = 7;
  LoopbackNetwork network(3, options);
  std::atomic<int> num_calls{0};
  spawn_on(network, 3, [&](int rank, std::shared_ptr<Transport> transport) {
    Communicator comm =
        Communicator::from_transport(std::move(transport), TransportUse::kAlways, seconds(3));
    int calls = 0;
    const auto compute = [&] {
      ++num_calls;
      ++calls;
      ASSERT_TRUE(eventually([&] { return num_calls >= 3 * calls; }));
      // Who comes last finds what the others have sent, and is through before its own has left.
      if (calls % 3 == rank) std::this_thread::sleep_for(milliseconds(20));
    };
    compute();
    std::vector<std::int64_t> big(100'000);  // several steps
    const TensorView view(static_cast<void*>(big.data()), DType::kInt64, {100'000});
    for (int round = 0; round < kRounds; ++round) {
      comm.barrier();
      compute();
      comm.all_reduce(view, view);
      compute();
      expect_error<InvalidArgument>({"root"}, [&] { comm.broadcast(view, rank == 0 ? 1 : 0); });
      compute();
      std::optional<Communicator> child = comm.split(0, rank);
      compute();
      comm.reset();
      compute();
      child->close();
    }
    comm.close();
  });
  EXPECT_EQ(network.num_breaches(), 0);
}

TEST(TransportFlushTest, ACallThatIsDoneWaitsForItsSendsUntilItsDeadlineOrAnAbort) {
  for (const auto timeout : {milliseconds(50), milliseconds(10'000)}) {
    LoopbackNetwork::Options options;
    options.sends_take_calls = 1;
    LoopbackNetwork network(2, options);
    std::atomic<int> num_ready{0};
    std::atomic<bool> is_late{false};
    spawn_on(network, 2, [&](int rank, std::shared_ptr<Transport> transport) {
      Communicator comm =
          Communicator::from_transport(std::move(transport), TransportUse::kAlways, seconds(20));
      comm.barrier();
      // What has not been taken yet is held back, too.
      ++num_ready;
      ASSERT_TRUE(eventually([&] { return num_ready >= 2; }));
      if (rank == 0) network.freeze(0);
      ++num_ready;
      ASSERT_TRUE(eventually([&] { return num_ready == 4; }));
      const auto start = std::chrono::steady_clock::now();
      if (rank == 0) {
        comm.barrier(timeout);
        EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(50));
        EXPECT_TRUE(eventually([&] { return is_late.load(); }));
        network.thaw(0);
      } else {
        EXPECT_THROW(comm.barrier(milliseconds(150)), PeerTimeout);
        is_late = true;
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
      comm.reset();
      comm.close();
    });
  }
}

/// In an exchange, by a send that fails at any place.
TEST(TransportMeetingTest, WhatOneRankMeetsIsToldToThoseThatWait) {
  for (int after = 0; after < 4; ++after) {
    LoopbackNetwork network(3);
    std::atomic<int> num_ready{0};
    spawn_on(network, 3, [&](int, std::shared_ptr<Transport> transport) {
      const auto hub =
          std::make_shared<MessageHub>(std::move(transport), TransportGroup::max_message_bytes());
      TransportGroup group(hub);
      (void)group.exchange("meeting", {}, std::nullopt, soon());
      if (group.rank() == 1) network.fail_send(1, after);
      ++num_ready;
      ASSERT_TRUE(eventually([&] { return num_ready == 3; }));
      const auto start = std::chrono::steady_clock::now();
      const auto meet = [&] { (void)group.exchange("showing", {}, std::nullopt, soon()); };
      if (group.rank() == 1) {
        expect_error<SystemFailure>({"the wire broke"}, meet);
      } else if (after < 3) {
        expect_error<SystemFailure>({"rank 1: loopback: send: the wire broke"}, meet);
      } else {  // one of them has been told that all is well
        try {
          meet();
        } catch (const SystemFailure& error) {
          EXPECT_THAT(error.what(), HasSubstr("rank 1: loopback: send: the wire broke"));
        }
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
      (void)group.exchange("end", {}, std::nullopt, soon());
    });
    EXPECT_EQ(network.num_breaches(), 0);
  }
}

/// While a transport sends an abort, which may take a lock of an interpreter, another thread that
/// holds that lock may abort too.
TEST(TransportLockTest, AnAbortIsSentOutsideTheLockOfAborts) {
  LoopbackNetwork network(2);
  std::atomic<bool> is_hooked{false};
  Channel* channel_of_0 = nullptr;
  std::thread other;
  std::atomic<bool> has_aborted{false};
  spawn_on(network, 2, [&](int rank, std::shared_ptr<Transport> inner) {
    const auto before_send = [&, rank](const std::vector<Transport::Part>&) {
      if (rank != 0 || !is_hooked.exchange(false)) return;
      other = std::thread([&] {
        channel_of_0->abort("another thread");
        has_aborted = true;
      });
      EXPECT_TRUE(eventually([&] { return has_aborted.load(); }));
    };
    const auto hub = std::make_shared<MessageHub>(
        std::make_shared<HookedTransport>(std::move(inner), before_send),
        TransportGroup::max_message_bytes());
    TransportGroup group(hub);
    const std::unique_ptr<Channel> channel = Channel::create(group, "test", soon());
    if (rank == 0) {
      channel_of_0 = channel.get();
      is_hooked = true;
      channel->abort("one thread");
      other.join();
    }
    expect_error<PeerAborted>({"rank 0 aborted: one thread"}, [&] { channel->barrier(soon()); });
    channel->reset(soon());
  });
}

/// Errors may take locks when they go.
TEST(TransportLockTest, ErrorsOfPostsGoOutsideTheHubsLock) {
  struct Loud final : std::runtime_error {
    explicit Loud(std::shared_ptr<void> last)
        : std::runtime_error("loud"), last_words(std::move(last)) {}
    std::shared_ptr<void> last_words;
  };
  LoopbackNetwork network(2);
  MessageHub* hub = nullptr;
  std::atomic<int> num_sent{0};
  std::atomic<int> num_gone{0};
  std::vector<std::thread> threads;
  const auto on_end = [&](void*) {
    if (++num_gone > 1) return;
    const auto is_posted = std::make_shared<std::atomic<bool>>(false);
    threads.emplace_back([&, is_posted] {
      hub->post(1, {});
      *is_posted = true;
    });
    EXPECT_TRUE(eventually([&] { return is_posted->load(); }));
  };
  const auto before_send = [&](const std::vector<Transport::Part>&) {
    if (++num_sent <= 2) throw Loud(std::shared_ptr<void>(&num_sent, on_end));
  };
  {
    MessageHub own(std::make_shared<HookedTransport>(network.transport(0), before_send), 100);
    hub = &own;
    own.post(1, {});
    own.post(1, {});
    EXPECT_EQ(num_gone, 1);  // the second
    EXPECT_THROW(own.progress(0), Loud);
    own.progress(0);
    for (std::thread& thread : threads) thread.join();
  }
}

/// Peers tell a rank that ended from one that left by what they hear first.
TEST(TransportEndTest, ARankLeavesItsChannelBeforeTheGroup) {
  LoopbackNetwork network(2);
  spawn_on(network, 2, [&](int, std::shared_ptr<Transport> inner) {
    std::vector<MessageKind> sent;
    const auto before_send = [&](const std::vector<Transport::Part>& parts) {
      std::vector<std::byte> bytes;
      for (const auto& part : parts) bytes.insert(bytes.end(), part.data, part.data + part.bytes);
      MessageHead head;
      ASSERT_TRUE(head.read(bytes));
      sent.push_back(head.kind);
    };
    Communicator comm = Communicator::from_transport(
        std::make_shared<HookedTransport>(std::move(inner), before_send), TransportUse::kAlways,
        seconds(20));
    comm.barrier();
    sent.clear();
    comm.close();
    ASSERT_GE(sent.size(), 2U);
    EXPECT_EQ(sent.front(), MessageKind::kStores);
    EXPECT_THAT(sent, ::testing::Contains(MessageKind::kLeft));
  });
}

}  // namespace
}  // namespace fanfold::comm
