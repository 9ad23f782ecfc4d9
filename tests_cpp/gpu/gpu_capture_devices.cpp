// SPDX-License-Identifier: Apache-2.0

// Gives every test of this program a simulated device, of which nothing may be reported.

#include <memory>

#include "gpu/gpu_ranks.h"
#include "gtest/gtest.h"

namespace fanfold::testing {
namespace {

constexpr int kBlocks = 3;  // that run at a time: a record of many rows has several

class DeviceOfEachTest final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& /*test*/) override {
    cudasim::Config config;
    config.devices = 2;
    config.host_threads = 4;
    config.resident_blocks = kBlocks;
    config.shuffle_blocks = true;
    config.preempt = 0.02;
    config.stale = 0.2;
    gpu_ = std::make_unique<GpuRanks>(config);
  }
  void OnTestEnd(const ::testing::TestInfo& /*test*/) override { gpu_.reset(); }

  std::unique_ptr<GpuRanks> gpu_;
};

// NOLINTNEXTLINE(bugprone-throwing-static-initialization): without memory there is no test
[[maybe_unused]] const bool kIsInstalled = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new DeviceOfEachTest);
  return true;
}();

}  // namespace
}  // namespace fanfold::testing
