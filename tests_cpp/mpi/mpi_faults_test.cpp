// SPDX-License-Identifier: Apache-2.0

// MPI's calls made to fail, through its profiling interface: a function of this program that has
// the name of one of MPI comes before it.

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "mpi/mpi_ranks.h"
#include "mpi/mpi_transport.h"
#include "support/expect_error.h"

namespace {

/// Which calls fail: those that concern a rank (-1: none), or all.
struct Faults {
  int send_to = -1;
  int sent_to = -1;  // fails later, when MPI is asked whether the message has left
  int probe_of = -1;
  bool probes_of_any = false;
  bool receives = false;
  bool holds = false;  // the first receive is said to go on
};
Faults faults;

MPI_Request doomed = MPI_REQUEST_NULL;
MPI_Request held = MPI_REQUEST_NULL;

}  // namespace

extern "C" {

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  if (to == faults.send_to) return MPI_ERR_OTHER;
  const int code = PMPI_Isend(data, count, type, to, tag, comm, request);
  if (to == faults.sent_to) doomed = *request;
  return code;
}

int MPI_Testsome(int num, MPI_Request* requests, int* num_done, int* done, MPI_Status* statuses) {
  for (int i = 0; i < num && faults.sent_to >= 0; ++i) {
    if (requests[i] != doomed) continue;
    doomed = MPI_REQUEST_NULL;
    *num_done = 1;
    done[0] = i;
    statuses[0].MPI_ERROR = MPI_ERR_OTHER;
    return MPI_ERR_IN_STATUS;
  }
  return PMPI_Testsome(num, requests, num_done, done, statuses);
}

int MPI_Improbe(int source, int tag, MPI_Comm comm, int* flag, MPI_Message* message,
                MPI_Status* status) {
  if (faults.probes_of_any && source == MPI_ANY_SOURCE) return MPI_ERR_OTHER;
  if (faults.probe_of >= 0 && (source == MPI_ANY_SOURCE || source == faults.probe_of)) {
    return MPI_ERR_OTHER;
  }
  return PMPI_Improbe(source, tag, comm, flag, message, status);
}

int MPI_Imrecv(void* data, int count, MPI_Datatype type, MPI_Message* message,
               MPI_Request* request) {
  if (faults.receives) return MPI_ERR_OTHER;
  const int code = PMPI_Imrecv(data, count, type, message, request);
  if (faults.holds && held == MPI_REQUEST_NULL) held = *request;
  return code;
}

int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  if (faults.holds && *request == held) {
    *flag = 0;
    return MPI_SUCCESS;
  }
  return PMPI_Test(request, flag, status);
}
}

namespace fanfold::mpi {
namespace {

using std::chrono::milliseconds;
using testing::expect_error;
using testing::world_rank;
using testing::world_size;

constexpr std::chrono::seconds kLimit(10);

class MpiFaultsTest : public testing::MpiTest {
 protected:
  void SetUp() override {
    MpiTest::SetUp();
    transport_ = MpiTransport::create(MPI_COMM_WORLD, kLimit);
    transport_->start(1000);
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    faults = Faults();
    held = MPI_REQUEST_NULL;
    transport_->close(milliseconds(20));
    MPI_Barrier(MPI_COMM_WORLD);
  }
  void send(int peer) {
    const std::byte byte{1};
    transport_->send(peer, {{&byte, 1}});
  }
  /// Rank 1 is said to be lost, the others are not.
  void expect_loss(const std::string& call) const {
    EXPECT_EQ(transport_->lost_reason(1).rfind(call + " failed: MPI_ERR_OTHER", 0), 0U)
        << transport_->lost_reason(1);
    for (int rank = 0; rank < world_size(); ++rank) {
      EXPECT_EQ(transport_->lost_reason(rank).empty(), rank != 1) << "rank " << rank;
    }
  }

  std::shared_ptr<MpiTransport> transport_;
};

TEST_F(MpiFaultsTest, AMessageThatCannotLeaveTellsItsRank) {
  if (world_rank() == 0) {
    faults.send_to = 1;
    send(1);
    expect_loss("MPI_Isend");
    faults.send_to = 2;
    send(1);  // does nothing any more
    expect_loss("MPI_Isend");
  }
}

TEST_F(MpiFaultsTest, AMessageThatFailsOnItsWayTellsItsRank) {
  if (world_rank() == 0) {
    faults.sent_to = 1;
    send(1);
    expect_loss("MPI_Isend");
    faults = Faults();
    send(2);  // others go on
  }
  if (world_rank() == 2) {
    const std::optional<Transport::Message> message = transport_->receive(kLimit);
    ASSERT_TRUE(message.has_value());
    EXPECT_EQ(message->source, 0);
  }
}

TEST_F(MpiFaultsTest, AFailedProbeOfAllRanksFindsTheOneAtFault) {
  if (world_rank() == 0) {
    faults.probe_of = 1;
    for (int i = 0; i < 4; ++i) {
      const std::optional<Transport::Message> message = transport_->receive(kLimit);
      ASSERT_TRUE(message.has_value());
      EXPECT_GE(message->source, 2);
    }
    EXPECT_FALSE(transport_->receive(milliseconds(5)).has_value());
    expect_loss("MPI_Improbe");
  } else if (world_rank() >= 2) {
    send(0);
    send(0);
  }
}

TEST_F(MpiFaultsTest, AFailedReceiveTellsItsRank) {
  if (world_rank() == 0) {
    faults.receives = true;
    EXPECT_FALSE(transport_->receive(milliseconds(100)).has_value());
    expect_loss("MPI_Imrecv");
  } else if (world_rank() == 1) {
    send(0);
  }
}

TEST_F(MpiFaultsTest, ASlowMessageIsOvertakenByThoseOfOtherRanksOnly) {
  if (world_rank() == 0) faults.holds = true;
  MPI_Barrier(MPI_COMM_WORLD);
  if (world_rank() == 1) {
    for (const std::byte byte : {std::byte{1}, std::byte{2}, std::byte{3}}) {
      transport_->send(0, {{&byte, 1}});
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (world_rank() == 2) send(0);
  if (world_rank() == 0) {
    std::vector<int> sources;
    std::vector<int> numbers;
    for (int i = 0; i < 4; ++i) {
      const std::optional<Transport::Message> message = transport_->receive(kLimit);
      ASSERT_TRUE(message.has_value());
      sources.push_back(message->source);
      faults.holds = false;
      if (message->source == 1) numbers.push_back(std::to_integer<int>(message->bytes[0]));
    }
    EXPECT_EQ(sources, (std::vector<int>{2, 1, 1, 1}));
    EXPECT_EQ(numbers, (std::vector<int>{1, 2, 3}));
  }
}

TEST_F(MpiFaultsTest, AFailureOfNobodyInParticularIsThrown) {
  faults.probes_of_any = true;
  expect_error<SystemFailure>({"MPI_Improbe failed", "MPI_ERR_OTHER"},
                              [this] { transport_->receive(milliseconds(50)); });
  faults = Faults();
  MPI_Barrier(MPI_COMM_WORLD);
  if (world_rank() == 0) send(1);
  EXPECT_EQ(
      transport_->receive(world_rank() == 1 ? std::chrono::nanoseconds(kLimit) : milliseconds(5))
          .has_value(),
      world_rank() == 1);
}

}  // namespace
}  // namespace fanfold::mpi
