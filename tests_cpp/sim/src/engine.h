// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the API functions of the simulator need of its engine. One lock guards everything: an API
// function holds it from its first line to its last, and everything below expects it to be held.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

#include "cudasim/control.h"

namespace cudasim {

/// The one engine lock. Not recursive.
struct Lock {
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

const Config& config();
Stats& counters();

int num_devices();
/// The current device of the calling host thread, shared by the runtime and the driver API.
int current_device();
void set_current_device(int device);

/// Adds a report, or counts it again.
void report(const std::string& kind, const std::string& text);

/// Error code that the call is to return, 0 for none. Counts the call; called once in each API
/// function. Also refuses calls from inside a host function, which CUDA does not allow.
int injected_fault(const char* call);

/// The error that a kernel of the device left behind, which every later call returns.
cudaError_t sticky_error(int device);

/// 0, or the error of a call that is not allowed while this thread (or, in global mode, any thread)
/// captures; the captures it would disturb are invalidated. Runtime and driver codes are equal.
int unsafe_during_capture();

/// Blocking copy, checked, ordered as cudaMemcpy on the null stream of the current device.
cudaError_t copy_now(void* dst, const void* src, std::size_t bytes);

/// Runs the devices until `done()`; the calling host thread learns nothing of clocks by it.
cudaError_t run_until(const std::function<bool()>& done);

/// Waits until all work of the device is done, and orders the host after it.
cudaError_t synchronize_device(int device);

}  // namespace cudasim
