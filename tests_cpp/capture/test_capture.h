// SPDX-License-Identifier: Apache-2.0
#pragma once

// A RoutingCapture for test bodies that run on the CPU and on a GPU: tensors are the host's on
// either, and errors come from the call that causes them.

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fanfold/routing_capture.h"
#include "support/test_device.h"

namespace fanfold::testing {

/// On a GPU where the program has a TestDevice.
class TestCapture {
 public:
  explicit TestCapture(RoutingCaptureConfig config)
      : stream_(is_on_gpu() ? test_device()->make_stream(0) : nullptr),
        core_(placed(std::move(config))) {}

  static bool is_on_gpu() { return test_device() != nullptr; }
  RoutingCapture& core() { return core_; }
  std::optional<void*> stream() const {
    return is_on_gpu() ? std::optional<void*>(stream_.get()) : std::nullopt;
  }

  void begin_step(std::int64_t step_id) {
    upload_sinks();
    core_.begin_step(step_id, stream());
    download_sinks();
  }

  void record(int layer, const TensorView& topk_ids, const CaptureLayout& layout = {},
              RecordOptions options = {}) {
    options.stream = stream();
    std::shared_ptr<std::byte> memory;
    core_.record(layer, is_on_gpu() ? moved(topk_ids, memory) : topk_ids, layout, options);
    finish();
  }

  /// The host's copy of it.
  TensorView sink(int layer, DType dtype = DType::kInt32) {
    const TensorView view = core_.sink(layer, dtype);
    if (!is_on_gpu()) return view;
    for (const Mirror& mirror : mirrors_) {
      if (mirror.device.data == view.data) return mirror.host;
    }
    Mirror mirror;
    mirror.device = view;
    mirror.bytes = std::make_unique<std::vector<std::byte>>(
        static_cast<std::size_t>(view.num_elements() * size_of(view.dtype)));
    mirror.host = view;
    mirror.host.device = DeviceType::kCpu;
    mirror.host.data = mirror.bytes->data();
    mirrors_.push_back(std::move(mirror));
    download_sinks();
    return mirrors_.back().host;
  }

  void import_sink(int layer, std::int64_t num_rows, const CaptureLayout& layout = {},
                   RecordOptions options = {}) {
    options.stream = stream();
    upload_sinks();
    core_.import_sink(layer, num_rows, layout, options);
    download_sinks();
    finish();
  }

  RoutingSnapshot snapshot(std::int64_t num_tokens) { return core_.snapshot(num_tokens, stream()); }
  void set_logical_of_expert(std::vector<std::int32_t> logical_of_expert) {
    core_.set_logical_of_expert(std::move(logical_of_expert));
  }
  int num_in_flight() const { return core_.num_in_flight(); }

 private:
  /// A sink, and what the host writes to in its place.
  struct Mirror {
    TensorView device;
    TensorView host;
    std::unique_ptr<std::vector<std::byte>> bytes;
  };

  static RoutingCaptureConfig placed(RoutingCaptureConfig config) {
    if (is_on_gpu()) config.device = DeviceType::kGpu;
    return config;
  }

  void finish() {
    if (!is_on_gpu()) return;
    test_device()->synchronize(0, stream_.get());
    core_.check();
  }

  /// The same ids on the device, at an address that is aligned alike.
  TensorView moved(TensorView view, std::shared_ptr<std::byte>& memory) {
    if (view.device != DeviceType::kCpu) return view;
    view.device = DeviceType::kGpu;
    for (const Mirror& mirror : mirrors_) {
      const auto* const begin = static_cast<const std::byte*>(mirror.host.data);
      const auto* const at = static_cast<const std::byte*>(view.data);
      if (at < begin || at >= begin + mirror.bytes->size()) continue;
      view.data = static_cast<std::byte*>(mirror.device.data) + (at - begin);
      return view;
    }
    if (view.data == nullptr || view.num_elements() == 0) return view;
    const auto gap = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data) % 16);
    const std::int64_t bytes = (view.shape[0] - 1) * view.row_stride_bytes() +
                               ((view.shape[1] - 1) * view.strides[1] + 1) * size_of(view.dtype);
    memory = test_device()->allocate(0, bytes + gap);
    test_device()->upload(0, memory.get() + gap, view.data, bytes, stream_.get());
    view.data = memory.get() + gap;
    return view;
  }

  void upload_sinks() {
    for (const Mirror& mirror : mirrors_) {
      test_device()->upload(0, mirror.device.data, mirror.host.data,
                            static_cast<std::int64_t>(mirror.bytes->size()), stream_.get());
    }
  }
  void download_sinks() {
    for (const Mirror& mirror : mirrors_) {
      test_device()->download(0, mirror.host.data, mirror.device.data,
                              static_cast<std::int64_t>(mirror.bytes->size()), stream_.get());
    }
  }

  std::shared_ptr<void> stream_;
  RoutingCapture core_;
  std::vector<Mirror> mirrors_;
};

}  // namespace fanfold::testing
