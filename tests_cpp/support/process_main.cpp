// SPDX-License-Identifier: Apache-2.0

// The main of a test program that starts itself as ranks. The program defines `scenarios`.

#include "gtest/gtest.h"
#include "support/spawn_processes.h"

int main(int argc, char** argv) {
  int exit_status = 0;
  if (fanfold::testing::run_scenario(argc, argv, &exit_status)) {
    return exit_status;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
