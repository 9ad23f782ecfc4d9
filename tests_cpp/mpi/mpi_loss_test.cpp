// SPDX-License-Identifier: Apache-2.0

// A rank dies. A job of its own, since MPI does not get over it.

#include <chrono>
#include <csignal>

#include "base/clock.h"
#include "fanfold/error.h"
#include "mpi/mpi_ranks.h"

namespace fanfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kDead = 1;

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

  begin = base::now_ns();
  EXPECT_THROW(over_mpi.close(milliseconds(300)), PeerError);
  EXPECT_TRUE(over_mpi.is_closed());
  EXPECT_LT(base::now_ns() - begin, 2'000'000'000);
}

}  // namespace
}  // namespace fanfold
