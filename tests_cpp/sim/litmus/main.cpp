// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "peer.h"

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--peer") == 0) {
    return fanfold::gpu::litmus::run_peer(static_cast<int>(std::strtol(argv[2], nullptr, 10)));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
