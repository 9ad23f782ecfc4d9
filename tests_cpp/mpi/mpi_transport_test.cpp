// SPDX-License-Identifier: Apache-2.0

// What MpiTransport promises to the groups that are built on it: whole messages, in order, whatever
// their sizes; waits that end; a close after which no message goes astray.

#include "mpi/mpi_transport.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "mpi/mpi_ranks.h"
#include "support/expect_error.h"
#include "support/random_bits.h"

namespace fanfold::mpi {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_error;
using testing::RandomBits;
using testing::world_rank;
using testing::world_size;
using Bytes = std::vector<std::byte>;
using TransportPtr = std::shared_ptr<MpiTransport>;

constexpr seconds kLimit(10);

class MpiTransportTest : public testing::MpiTest {
 protected:
  static TransportPtr open() {
    TransportPtr transport = MpiTransport::create(MPI_COMM_WORLD, kLimit);
    transport->start(1 << 24);
    return transport;
  }
};

/// The bytes of a message, which tell where it came from.
Bytes pattern(int from, int to, std::int64_t number, std::int64_t size) {
  Bytes bytes(static_cast<std::size_t>(size));
  RandomBits random(testing::mix(static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to),
                                 static_cast<std::uint64_t>(number)));
  const std::uint64_t base = random.next();
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(base >> (i % 57));
  return bytes;
}

/// Empty ones, small ones, and some that MPI does not send before the receiver asks.
std::int64_t size_of(int from, int to, std::int64_t number) {
  RandomBits random(testing::mix(static_cast<std::uint64_t>(from) + 100,
                                 static_cast<std::uint64_t>(to),
                                 static_cast<std::uint64_t>(number)));
  const std::int64_t kind = random.below(6);
  if (kind == 0) return 0;
  return random.below(kind == 1 ? 300'000 : 700);
}

void send(MpiTransport& transport, int peer, const Bytes& bytes) {
  transport.send(peer, {{bytes.data(), static_cast<std::int64_t>(bytes.size())}});
}

Transport::Message receive(MpiTransport& transport) {
  std::optional<Transport::Message> message = transport.receive(kLimit);
  if (message) return *std::move(message);
  ADD_FAILURE() << "no message came";
  return {-1, {}};
}

/// Sends `num` messages to every peer and takes as many from each, with pauses now and then.
void exchange(MpiTransport& transport, std::int64_t num, std::uint64_t seed) {
  RandomBits random(testing::mix(seed, static_cast<std::uint64_t>(transport.rank())));
  const int num_ranks = transport.num_ranks();
  std::vector<std::int64_t> sent(static_cast<std::size_t>(num_ranks), 0);
  std::vector<std::int64_t> received(static_cast<std::size_t>(num_ranks), 0);
  std::int64_t left_to_send = num * (num_ranks - 1);
  std::int64_t left_to_receive = left_to_send;
  while (left_to_send + left_to_receive > 0) {
    if (random.below(64) == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    const auto peer = static_cast<int>(random.below(num_ranks));
    const auto which = static_cast<std::size_t>(peer);
    if (left_to_send > 0 && random.below(2) == 0) {
      if (peer == transport.rank() || sent[which] == num) continue;
      const std::int64_t number = sent[which]++;
      send(transport, peer,
           pattern(transport.rank(), peer, number, size_of(transport.rank(), peer, number)));
      --left_to_send;
    } else if (left_to_receive > 0) {
      const std::optional<Transport::Message> message =
          transport.receive(left_to_send > 0 ? std::chrono::nanoseconds(0) : kLimit);
      if (!message) {
        ASSERT_GT(left_to_send, 0) << left_to_receive << " messages did not come";
        continue;
      }
      const std::int64_t number = received[static_cast<std::size_t>(message->source)]++;
      ASSERT_TRUE(message->bytes == pattern(message->source, transport.rank(), number,
                                            size_of(message->source, transport.rank(), number)))
          << "message " << number << " of rank " << message->source;
      --left_to_receive;
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);  // what comes later is not of this exchange
}

TEST_F(MpiTransportTest, MessagesOfOneRankArriveWholeAndInOrder) {
  const TransportPtr transport = open();
  EXPECT_EQ(transport->rank(), world_rank());
  EXPECT_EQ(transport->num_ranks(), world_size());
  EXPECT_EQ(transport->kind(), "mpi");
  EXPECT_FALSE(transport->is_thread_bound());
  for (std::uint64_t seed = 0; seed < 3; ++seed) exchange(*transport, 120, seed);
  transport->close(kLimit);
}

TEST_F(MpiTransportTest, PartsAreOneMessageAndTheirMemoryIsFreeAtOnce) {
  const TransportPtr transport = open();
  const int next = (transport->rank() + 1) % transport->num_ranks();
  const int before = (transport->rank() + transport->num_ranks() - 1) % transport->num_ranks();
  Bytes head = pattern(transport->rank(), next, 1, 17);
  Bytes body = pattern(transport->rank(), next, 2, 500'000);
  transport->send(next, {{head.data(), 17}, {nullptr, 0}, {body.data(), 500'000}});
  std::fill(head.begin(), head.end(), std::byte{0});
  std::fill(body.begin(), body.end(), std::byte{0});
  Bytes expected = pattern(before, transport->rank(), 1, 17);
  const Bytes rest = pattern(before, transport->rank(), 2, 500'000);
  expected.insert(expected.end(), rest.begin(), rest.end());
  const Transport::Message message = receive(*transport);
  EXPECT_EQ(message.source, before);
  EXPECT_TRUE(message.bytes == expected);
  transport->close(kLimit);
}

TEST_F(MpiTransportTest, ReceiveWaitsNoLongerThanItIsTold) {
  const TransportPtr transport = open();
  for (const milliseconds wait : {milliseconds(0), milliseconds(1), milliseconds(30)}) {
    const std::int64_t begin = base::now_ns();
    EXPECT_FALSE(transport->receive(wait).has_value());
    const std::chrono::nanoseconds took(base::now_ns() - begin);
    EXPECT_GE(took, wait);
    EXPECT_LT(took, wait + milliseconds(5000));
  }
  transport->close(kLimit);
}

TEST_F(MpiTransportTest, ALargeMessageOfABusyRankHoldsUpNobodyElse) {
  const TransportPtr transport = open();
  MPI_Barrier(MPI_COMM_WORLD);
  if (transport->rank() == 1) {
    send(*transport, 0, pattern(1, 0, 0, 8 << 20));
    std::this_thread::sleep_for(milliseconds(2000));  // within which MPI does nothing for it
  }
  if (transport->rank() == 2) {
    std::this_thread::sleep_for(milliseconds(20));
    for (int number = 0; number < 5; ++number) send(*transport, 0, pattern(2, 0, number, 100));
  }
  if (transport->rank() == 0) {
    const std::int64_t begin = base::now_ns();
    int num_small = 0;
    for (int i = 0; i < 6; ++i) {
      const Transport::Message message = receive(*transport);
      if (message.source != 2) {
        EXPECT_TRUE(message.bytes == pattern(1, 0, 0, 8 << 20));
        continue;
      }
      EXPECT_TRUE(message.bytes == pattern(2, 0, num_small++, 100));
      EXPECT_LT(base::now_ns() - begin, 1'900'000'000);
    }
    EXPECT_EQ(num_small, 5);
  }
  transport->close(kLimit);
}

TEST_F(MpiTransportTest, MessagesSentBeforeCloseArriveAndLaterOnesAreLost) {
  const TransportPtr transport = open();
  const int last = transport->num_ranks() - 1;
  if (transport->rank() == 0) {
    for (int peer = 1; peer <= last; ++peer) send(*transport, peer, pattern(0, peer, 0, 200'000));
    transport->close(kLimit);
    transport->close(kLimit);  // has no effect
  } else {
    std::this_thread::sleep_for(milliseconds(10 * transport->rank()));
    const Transport::Message message = receive(*transport);
    EXPECT_EQ(message.source, 0);
    EXPECT_TRUE(message.bytes == pattern(0, transport->rank(), 0, 200'000));
    EXPECT_FALSE(transport->receive(milliseconds(5)).has_value());
    send(*transport, 0, pattern(transport->rank(), 0, 0, 200'000));
    EXPECT_EQ(transport->lost_reason(0), "");
    transport->close(kLimit);
  }
}

TEST_F(MpiTransportTest, CloseGivesUpOnRanksThatDoNotClose) {
  TransportPtr transport = open();
  const std::int64_t begin = base::now_ns();
  if (transport->rank() == 0) {
    send(*transport, 1, pattern(0, 1, 0, 1 << 20));  // which rank 1 does not take
    transport->close(milliseconds(50));
  }
  // Nothing is on its way to the others: they need not wait for the end of the time.
  if (transport->rank() == 3) transport->close(kLimit);
  EXPECT_LT(base::now_ns() - begin, 2'000'000'000);
  MPI_Barrier(MPI_COMM_WORLD);
  transport.reset();  // without close, as after an exception
}

TEST_F(MpiTransportTest, NoMessageReachesALaterCommunicator) {
  for (std::uint64_t round = 0; round < 12; ++round) {
    TransportPtr transport = open();
    exchange(*transport, 3, round);
    RandomBits random(testing::mix(round, static_cast<std::uint64_t>(world_rank())));
    // Sent and never received.
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != world_rank()) send(*transport, peer, Bytes(random.next() % 9000));
    }
    switch (random.below(3)) {
      case 0:
        transport->close(milliseconds(30));
        break;
      case 1:
        transport->close(std::chrono::microseconds(200));
        break;
      default:
        transport.reset();
    }
    // Some go on at once, and communicate on a communicator that MPI may have numbered alike.
    if (random.below(2) == 0) std::this_thread::sleep_for(milliseconds(1));
    exchange(*open(), 3, round + 1000);
  }
}

// --- Making one -------------------------------------------------------------------------------

TEST_F(MpiTransportTest, OtherCommunicatorsThanGroupsAreRefused) {
  expect_error<InvalidArgument>({"communicator", "MPI_COMM_NULL"},
                                [] { MpiTransport::create(MPI_COMM_NULL, kLimit); });
  expect_error<InvalidArgument>({"timeout", "-1"}, [] {
    MpiTransport::create(MPI_COMM_WORLD, std::chrono::nanoseconds(-1));
  });
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm between = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank() % 2, world_rank(), &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - world_rank() % 2, 0, &between);
  expect_error<InvalidArgument>({"communicator", "intercommunicator"},
                                [&] { MpiTransport::create(between, kLimit); });
  MPI_Comm_free(&between);
  MPI_Comm_free(&half);
}

TEST_F(MpiTransportTest, ARankThatDoesNotComeIsAnErrorInTime) {
  MPI_Comm own = MPI_COMM_NULL;  // cannot be used any more afterwards
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  if (world_rank() != 2) {
    const std::int64_t begin = base::now_ns();
    try {
      MpiTransport::create(own, milliseconds(50));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const PeerTimeout& error) {
      EXPECT_EQ(error.rank(), -1);
      EXPECT_NE(std::string(error.what()).find("every rank of the communicator within 0.05 s"),
                std::string::npos)
          << error.what();
    }
    EXPECT_LT(base::now_ns() - begin, 5'000'000'000);
  }
  const TransportPtr transport = open();
  exchange(*transport, 5, 1);
  transport->close(kLimit);
}

TEST_F(MpiTransportTest, ALargerMessageThanMpiCountsIsRefused) {
  const TransportPtr transport = MpiTransport::create(MPI_COMM_WORLD, kLimit);
  expect_error<InvalidArgument>({"max_message_bytes", "2147483647", "2147483648"},
                                [&] { transport->start(std::int64_t{1} << 31); });
  transport->close(kLimit);
}

TEST_F(MpiTransportTest, MessagesOfTheCallerAreNotTouched) {
  const TransportPtr transport = open();
  const int next = (world_rank() + 1) % world_size();
  int mine = world_rank();
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Isend(&mine, 1, MPI_INT, next, 0, MPI_COMM_WORLD, &request);
  exchange(*transport, 10, 2);
  EXPECT_FALSE(transport->receive(milliseconds(5)).has_value());
  int theirs = -1;
  MPI_Status status;
  MPI_Recv(&theirs, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
  EXPECT_EQ((theirs + 1) % world_size(), world_rank());
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  transport->close(kLimit);
}

}  // namespace
}  // namespace fanfold::mpi
