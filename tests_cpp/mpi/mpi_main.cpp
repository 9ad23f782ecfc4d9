// SPDX-License-Identifier: Apache-2.0

// The main of the ranks that mpi_jobs_test.cpp starts under mpirun. Arguments: `funneled`, the
// level of threads; `outside`, calls before MPI_Init and after MPI_Finalize instead of the tests.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "mpi/mpi_ranks.h"

namespace {

template <class Call>
bool is_refused(Call&& call) {
  try {
    call();
  } catch (const fanfold::InvalidState& error) {
    std::printf("%s\n", error.what());
    return true;
  } catch (const std::exception& error) {
    std::printf("expected InvalidState, got: %s\n", error.what());
  }
  return false;
}

int run_outside(int argc, char** argv) {
  using fanfold::TransportUse;
  const auto make = [] { fanfold::from_mpi(MPI_COMM_WORLD); };
  const bool before = is_refused(make);
  MPI_Init(&argc, &argv);
  auto open = std::make_unique<fanfold::Communicator>(
      fanfold::from_mpi(MPI_COMM_WORLD, TransportUse::kAlways, std::chrono::seconds(10)));
  open->barrier();
  MPI_Finalize();
  const bool between = is_refused([&] { open->barrier(std::chrono::seconds(1)); });
  const bool after = is_refused(make);
  open.reset();  // does not call MPI
  if (!before || !between || !after) return 1;
  std::printf("refused before, between and after\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto has = [&](const char* word) {
    return std::find(arguments.begin(), arguments.end(), word) != arguments.end();
  };
  if (has("outside")) return run_outside(argc, argv);
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, has("funneled") ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE,
                  &level);
  const int status = RUN_ALL_TESTS();
  MPI_Finalize();
  std::printf("left MPI in peace\n");
  return status;
}
