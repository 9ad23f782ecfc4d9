// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the litmus tests share: three simulated devices, their streams, and memory for the kernels.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cudasim/control.h"
#include "kernels.h"

namespace fanfold::gpu::litmus {

/// Kinds of all reports, sorted and each once, as in "oob race"; "" if there are none.
std::string kinds();
/// All reports, one a line, for messages.
std::string all_texts();
/// Text of the first report of that kind; "" if there is none.
std::string text_of(const std::string& kind);

/// The source lines of litmus files that a text names ("block.cu:26"), trimmed, in their order.
std::vector<std::string> named_lines(const std::string& text);

class LitmusTest : public testing::Test {
 protected:
  static constexpr int kNumDevices = 3;
  static constexpr std::size_t kPartBytes = 4096;

  void SetUp() override;
  void TearDown() override;

  /// Starts anew with this configuration, which has kNumDevices.
  void start(const cudasim::Config& config);
  /// Fresh memory on device 0; flags and results are zero, the payload was never written.
  Words words(int mode);
  /// A non-blocking stream of the device, and another one of device 0. The device becomes the
  /// current one, as a launch wants it.
  cudaStream_t stream(int device) const;
  cudaStream_t other_stream() const;
  /// Waits for all streams.
  cudaError_t sync();
  /// Sets memory to zero and waits: a memset itself is not ordered before non-blocking streams.
  static void clear(void* memory);
  /// One number of the results. Device 0 becomes the current one, as in words().
  int result(const Words& words, std::size_t index = 0);

  /// Runs launch(words, who) as devices 0 and 1, waits, and gives the kinds of reports.
  std::string pair(cudaError_t (*launch)(const Words&, int, cudaStream_t), int mode);
  /// Runs launch(words) on device 0, waits, and gives the kinds of reports.
  std::string single(cudaError_t (*launch)(const Words&, cudaStream_t), int mode);

  cudasim::Config config_;

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<void*> memory_;
};

/// Tests of faults that only the compiler's callbacks show: a build with a real sanitizer has none.
template <typename Base>
class WithAccessChecks : public Base {
 protected:
  void SetUp() override {
    Base::SetUp();
    if (LITMUS_CHECKS_ACCESSES == 0) {
      GTEST_SKIP()
          << "under a real sanitizer kernels show no accesses; builds without one run this";
    }
  }
};

}  // namespace fanfold::gpu::litmus
