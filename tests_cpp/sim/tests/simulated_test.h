// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the tests of the simulator share: devices with a stream each, a little memory, and what was
// reported.

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "cudasim/control.h"

/// For tests of checks that see ordinary accesses of kernels.
#define CUDASIM_SKIP_WITHOUT_ACCESSES() \
  if (!::cudasim::sees_accesses())      \
  GTEST_SKIP() << "under a real sanitizer kernels show no accesses; builds without one run this"

namespace cudasim {

class SimulatedTest : public ::testing::Test {
 protected:
  static constexpr int kNumDevices = 3;

  void SetUp() override;
  void TearDown() override;

  /// Starts again with this configuration (for kNumDevices devices), memory and streams kept.
  void restart(Config config = {});
  void restart_with_seed(std::uint64_t seed);

  /// Zeroed memory of device 0, and memory that nobody has written.
  template <class T>
  T* zeros(std::size_t count) {
    return static_cast<T*>(memory(count * sizeof(T), true));
  }
  template <class T>
  T* unwritten(std::size_t count) {
    return static_cast<T*>(memory(count * sizeof(T), false));
  }

  /// A stream of the device that does not wait for the legacy one; makes the device current.
  cudaStream_t stream_on(int device);
  /// A further one of device 0.
  cudaStream_t other_stream();

  template <class T>
  std::vector<T> values(const T* address, std::size_t count) {
    std::vector<T> copied(count);
    cudaMemcpy(copied.data(), address, count * sizeof(T), cudaMemcpyDeviceToHost);
    return copied;
  }
  template <class T>
  T value(const T* address) {
    return values(address, 1)[0];
  }

  static void synchronize_all();
  /// Waits for all devices; the kinds reported since the last call, sorted, each once.
  static std::string finish();
  /// The same, with the texts.
  static std::vector<Report> finish_with_reports();

 private:
  void* memory(std::size_t bytes, bool is_zeroed);

  std::vector<cudaStream_t> streams_;
  std::vector<cudaStream_t> more_streams_;
  std::vector<void*> allocations_;
};

}  // namespace cudasim
