// SPDX-License-Identifier: Apache-2.0

// A rank dies. A job of its own, since MPI does not get over it.

#include <chrono>
#include <csignal>
#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "fanfold/error.h"
#include "mpi/mpi_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kDead = 1;

/// Returns when every rank that lives has called it: MPI still carries their messages.
void meet_the_living() {
  std::vector<MPI_Request> requests;
  char sent = 0;
  std::vector<char> received(static_cast<std::size_t>(testing::world_size()));
  for (int rank = 0; rank < testing::world_size(); ++rank) {
    if (rank == kDead || rank == testing::world_rank()) continue;
    MPI_Request* const both = &*requests.insert(requests.end(), 2, MPI_REQUEST_NULL);
    MPI_Isend(&sent, 1, MPI_CHAR, rank, 0, MPI_COMM_WORLD, &both[0]);
    MPI_Irecv(&received[static_cast<std::size_t>(rank)], 1, MPI_CHAR, rank, 0, MPI_COMM_WORLD,
              &both[1]);
  }
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
}

TEST(MpiLossTest, TheRankThatDiedIsNamedInTime) {
  Communicator over_mpi = from_mpi(MPI_COMM_WORLD, TransportUse::kAlways, seconds(10));
  Communicator shared = from_mpi(MPI_COMM_WORLD, TransportUse::kAuto, seconds(10));
  over_mpi.barrier();
  shared.barrier();
  if (testing::world_rank() == kDead) ::raise(SIGKILL);

  std::int64_t begin = base::now_ns();
  try {
    shared.barrier(seconds(10));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank(), kDead) << error.what();
  }
  EXPECT_LT(base::now_ns() - begin, 3'000'000'000) << "processes are watched";
  // MPI may know of the death or not.
  meet_the_living();
  begin = base::now_ns();
  try {
    over_mpi.barrier(milliseconds(500));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank(), kDead) << error.what();
  } catch (const PeerTimeout& error) {
    EXPECT_EQ(error.rank(), kDead) << error.what();
  }
  EXPECT_LT(base::now_ns() - begin, 2'000'000'000);

  meet_the_living();  // who closes is gone for the others
  begin = base::now_ns();
  EXPECT_THROW(over_mpi.close(milliseconds(300)), PeerError);
  EXPECT_TRUE(over_mpi.is_closed());
  EXPECT_LT(base::now_ns() - begin, 2'000'000'000);
}

}  // namespace
}  // namespace fanfold
