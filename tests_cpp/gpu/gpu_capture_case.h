// SPDX-License-Identifier: Apache-2.0
#pragma once

// What tests of captures on a GPU share. gpu_capture_devices.cpp gives each test its device.

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "capture/capture_case.h"
#include "gtest/gtest.h"
#include "support/test_device.h"

namespace fanfold::testing {

inline RoutingCaptureConfig on_gpu(RoutingCaptureConfig config) {
  config.device = DeviceType::kGpu;
  return config;
}

/// Ids on the device, which a test may change.
class DeviceIds {
 public:
  DeviceIds(const Ids& ids, std::int64_t columns, void* stream)
      : memory_(test_device()->allocate(0, 4 * static_cast<std::int64_t>(ids.size()))),
        view_(ids_view(ids, columns)),
        stream_(stream) {
    view_.data = memory_.get();
    view_.device = DeviceType::kGpu;
    set(ids);
  }
  void set(const Ids& ids) {
    test_device()->upload(0, memory_.get(), ids.data(), 4 * static_cast<std::int64_t>(ids.size()),
                          stream_);
  }
  const TensorView& view() const { return view_; }

 private:
  std::shared_ptr<std::byte> memory_;
  TensorView view_;
  void* stream_;
};

class GpuCaptureTest : public ::testing::Test {
 protected:
  DeviceIds device_ids(const Ids& ids, std::int64_t columns = 2) const {
    return {ids, columns, stream_.get()};
  }
  RecordOptions options(bool overwrite = false) const {
    RecordOptions made;
    made.stream = stream_.get();
    made.overwrite = overwrite;
    return made;
  }
  void* stream() const { return stream_.get(); }
  void synchronize() const { test_device()->synchronize(0, stream_.get()); }

 private:
  std::shared_ptr<void> stream_ = test_device()->make_stream(0);
};

}  // namespace fanfold::testing
