// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tests whose ranks are the processes of an MPI job. Each process runs the same tests in the same
// order; whatever a test does with MPI, all of them do.

#include <mpi.h>

#include <chrono>
#include <functional>

#include "fanfold/communicator.h"
#include "fanfold/mpi.h"
#include "gtest/gtest.h"

namespace fanfold::testing {

inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

inline int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// Calls `body` with a communicator that sends everything through MPI, one rank per process of the
/// job; `num_ranks` must be their number. Closes it.
inline void run_mpi_rank(int num_ranks, const std::function<void(Communicator&)>& body) {
  ASSERT_EQ(num_ranks, world_size());
  Communicator communicator =
      from_mpi(MPI_COMM_WORLD, TransportUse::kAlways, std::chrono::seconds(10));
  ASSERT_EQ(communicator.kind(), "mpi");
  body(communicator);
  communicator.close();
}

/// The ranks begin each test together.
class MpiTest : public ::testing::Test {
 protected:
  void SetUp() override { MPI_Barrier(MPI_COMM_WORLD); }
};

}  // namespace fanfold::testing
