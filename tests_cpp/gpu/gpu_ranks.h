// SPDX-License-Identifier: Apache-2.0
#pragma once

// Thread ranks with simulated devices.

#include <functional>
#include <memory>

#include "cudasim/control.h"
#include "fanfold/all_to_all.h"
#include "gpu/test_gpu.h"
#include "gtest/gtest.h"
#include "support/spawn_ranks.h"

namespace fanfold::testing {

inline cudasim::Config devices_for(int num_ranks, int num_gpus) {
  cudasim::Config config;
  config.devices = num_gpus;
  config.host_threads = num_ranks;
  // One block of each rank may wait for peers, and somebody must get on. Few, since they are slow.
  config.resident_blocks = 1 + (num_ranks + num_gpus - 1) / num_gpus;
  return config;
}

/// Configures the devices; at its end nothing may have been reported.
class GpuRanks {
 public:
  explicit GpuRanks(const cudasim::Config& config) {
    cudasim::clear_faults();
    cudasim::clear_reports();
    cudasim::configure(config);
    gpu_ = std::make_unique<TestGpu>();
  }
  GpuRanks(int num_ranks, int num_gpus) : GpuRanks(devices_for(num_ranks, num_gpus)) {}
  ~GpuRanks() {
    gpu_.reset();
    for (const cudasim::Report& report : cudasim::reports()) {
      ADD_FAILURE() << report.kind << ": " << report.text;
    }
    cudasim::clear_reports();
  }
  GpuRanks(const GpuRanks&) = delete;
  GpuRanks& operator=(const GpuRanks&) = delete;

 private:
  std::unique_ptr<TestGpu> gpu_;
};

}  // namespace fanfold::testing
