// SPDX-License-Identifier: Apache-2.0

// The main of the ranks that mpi_jobs_test.cpp starts under mpirun.

#include <cstring>

#include "gtest/gtest.h"
#include "mpi/mpi_ranks.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  int wanted = MPI_THREAD_MULTIPLE;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "funneled") == 0) wanted = MPI_THREAD_FUNNELED;
  }
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, wanted, &level);
  const int status = RUN_ALL_TESTS();
  MPI_Finalize();
  return status;
}
