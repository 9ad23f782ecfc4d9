// SPDX-License-Identifier: Apache-2.0
#pragma once

// Simulated devices for a test, which must leave nothing behind on them.

#include <dirent.h>

#include <string>

#include "cudasim/control.h"
#include "gtest/gtest.h"

namespace fanfold::testing {

inline int num_open_descriptors() {
  int num = 0;
  DIR* const directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++num;
  ::closedir(directory);
  return num;
}

/// Configures the devices, and at its end expects that nothing was reported and nothing is left.
class SimulatedDevices {
 public:
  explicit SimulatedDevices(int num_devices, const cudasim::DriverConfig& driver = {})
      : num_descriptors_(num_open_descriptors()) {
    cudasim::Config config;
    config.devices = num_devices;
    config.host_threads = 8;  // thread ranks
    config.driver = driver;
    cudasim::clear_faults();
    cudasim::clear_reports();
    cudasim::configure(config);
    before_ = cudasim::stats();
  }
  ~SimulatedDevices() {
    cudasim::clear_faults();
    for (const cudasim::Report& report : cudasim::reports()) {
      ADD_FAILURE() << report.kind << ": " << report.text;
    }
    expect_nothing_left("at the end");
  }
  SimulatedDevices(const SimulatedDevices&) = delete;
  SimulatedDevices& operator=(const SimulatedDevices&) = delete;

  void expect_nothing_left(const std::string& when) const {
    const cudasim::Stats now = cudasim::stats();
    EXPECT_EQ(now.allocations, before_.allocations) << when;
    EXPECT_EQ(now.mappings, before_.mappings) << when;
    EXPECT_EQ(now.reservations, before_.reservations) << when;
    EXPECT_EQ(now.handles, before_.handles) << when;
    EXPECT_EQ(now.contexts, before_.contexts) << when;
    EXPECT_EQ(now.streams, before_.streams) << when;
    EXPECT_EQ(num_open_descriptors(), num_descriptors_) << when;
  }

 private:
  int num_descriptors_;
  cudasim::Stats before_;
};

}  // namespace fanfold::testing
