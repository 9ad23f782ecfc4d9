// SPDX-License-Identifier: Apache-2.0

// MPI_THREAD_FUNNELED: only the thread that initialised MPI may call it. A job of its own.

#include <chrono>
#include <thread>

#include "fanfold/error.h"
#include "mpi/mpi_ranks.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using std::chrono::seconds;
using testing::expect_error;

class MpiFunneledTest : public testing::MpiTest {
 protected:
  void SetUp() override {
    MpiTest::SetUp();
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    ASSERT_EQ(level, MPI_THREAD_FUNNELED);
  }
};

TEST_F(MpiFunneledTest, OtherThreadsMayNotMakeACommunicator) {
  std::thread other([] {
    expect_error<InvalidState>({"from_mpi", "the thread that initialised MPI"},
                               [] { from_mpi(MPI_COMM_WORLD); });
  });
  other.join();
}

TEST_F(MpiFunneledTest, OtherThreadsMayNotCallWhatMpiCarries) {
  Communicator comm = from_mpi(MPI_COMM_WORLD, TransportUse::kAlways, seconds(10));
  comm.barrier();
  std::thread other([&] {
    expect_error<InvalidState>({"the thread that made the communicator", "mpi"},
                               [&] { comm.barrier(); });
  });
  other.join();
  comm.barrier();
  comm.close();
}

TEST_F(MpiFunneledTest, AnyThreadMayCallWhatSharedMemoryCarries) {
  Communicator comm = from_mpi(MPI_COMM_WORLD, TransportUse::kAuto, seconds(10));
  EXPECT_EQ(comm.kind(), "processes");
  std::thread other([&] {
    comm.barrier();
    comm.close();
  });
  other.join();
}

}  // namespace
}  // namespace fanfold
