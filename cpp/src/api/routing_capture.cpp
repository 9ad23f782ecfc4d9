// SPDX-License-Identifier: Apache-2.0

// Where a capture lies.

#include "fanfold/routing_capture.h"

#include "capture/routing_capture_impl.h"
#include "gpu/backend.h"

namespace fanfold {

RoutingCapture::RoutingCapture(const RoutingCaptureConfig& config)
    : impl_(config.device == DeviceType::kGpu
                ? capture::make_device_capture(config, &gpu::make_backend)
                : capture::make_host_capture(config)) {}

}  // namespace fanfold
