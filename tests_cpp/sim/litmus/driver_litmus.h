// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the tests of the driver API share.

#include <cuda.h>

#include "litmus.h"
#include "virtual_range.h"

namespace fanfold::gpu::litmus {

constexpr unsigned kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr unsigned kFabric = CU_MEM_HANDLE_TYPE_FABRIC;

/// Each test must give back what it took from the driver.
class DriverTest : public LitmusTest {
 protected:
  void SetUp() override {
    LitmusTest::SetUp();
    ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
    before_ = cudasim::stats();
  }
  void TearDown() override {
    const cudasim::Stats after = cudasim::stats();
    EXPECT_EQ(after.handles, before_.handles);
    EXPECT_EQ(after.mappings, before_.mappings);
    EXPECT_EQ(after.reservations, before_.reservations);
    EXPECT_EQ(after.contexts, before_.contexts);
    LitmusTest::TearDown();
  }

 private:
  cudasim::Stats before_;
};

}  // namespace fanfold::gpu::litmus
