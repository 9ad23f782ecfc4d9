// SPDX-License-Identifier: Apache-2.0

// Driver API: primary contexts. A host thread's current context and the runtime's current device
// are one thing, as in CUDA 12 and later: whichever interface sets it, both see it.

#include <map>
#include <vector>

#include "driver_device.h"
#include "runtime.h"

// The driver's own type, which cuda.h leaves open: the primary context of one device.
struct CUctx_st {
  int device = 0;
  int references = 0;
};

namespace cudasim {

namespace {

// One per device, never removed, so that a stale handle is recognised. Guarded by the engine's
// lock.
std::map<int, CUctx_st>& contexts() {
  static auto* all = new std::map<int, CUctx_st>;
  return *all;
}

// What this host thread has pushed or set, newest last. Without a context: none was current.
struct Entry {
  CUcontext context = nullptr;
  int device = 0;  // the runtime's current device then
};
thread_local std::vector<Entry> entries;

CUcontext context_of(int device) {
  CUctx_st& context = contexts()[device];
  context.device = device;
  return &context;
}

CUcontext current_context() {
  const int device = current_device();
  const CUcontext own = context_of(device);
  if (entries.empty()) {
    return own->references > 0 ? own : nullptr;
  }
  // The runtime may have chosen another device since.
  return entries.back().device == device ? entries.back().context : own;
}

CUresult check_context(CUcontext context) {
  for (const auto& [device, known] : contexts()) {
    if (&known == context) {
      return known.references > 0 ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
  }
  return CUDA_ERROR_INVALID_CONTEXT;
}

}  // namespace

extern "C" {

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return driver_call("cuDevicePrimaryCtxRetain", [&] {
    if (context == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(device)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    *context = context_of(device);
    ++(*context)->references;
    ++counters().contexts;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return driver_call("cuDevicePrimaryCtxRelease", [&] {
    if (!is_device(device)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    const CUcontext context = context_of(device);
    if (context->references == 0) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    --context->references;
    --counters().contexts;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return driver_call("cuCtxPushCurrent", [&] {
    if (const CUresult error = check_context(context); error != CUDA_SUCCESS) {
      return error;
    }
    // What the pop brings back: the runtime may have chosen another device since the last call.
    const Entry below = {current_context(), current_device()};
    if (entries.empty()) {
      entries.push_back(below);
    } else {
      entries.back() = below;
    }
    entries.push_back({context, context->device});
    set_current_device(context->device);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  return driver_call("cuCtxPopCurrent", [&] {
    const CUcontext current = current_context();
    if (entries.empty() || current == nullptr) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context != nullptr) {
      *context = current;
    }
    entries.pop_back();
    if (!entries.empty()) {
      set_current_device(entries.back().device);
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return driver_call("cuCtxGetCurrent", [&] {
    if (context == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *context = current_context();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return driver_call("cuCtxSetCurrent", [&] {
    if (context != nullptr) {
      if (const CUresult error = check_context(context); error != CUDA_SUCCESS) {
        return error;
      }
      set_current_device(context->device);
    }
    if (!entries.empty()) {
      entries.pop_back();
    }
    entries.push_back({context, current_device()});
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return driver_call("cuCtxGetDevice", [&] {
    if (device == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const CUcontext current = current_context();
    if (current == nullptr) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    *device = current->device;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return driver_call("cuStreamGetCtx", [&] {
    if (context == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const Stream* const stream = find_stream(handle);
    if (stream == nullptr) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    *context = context_of(stream->device->id);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize() {
  return driver_call("cuCtxSynchronize", [] {
    if (const int error = unsafe_during_capture(); error != 0) {
      return static_cast<CUresult>(error);
    }
    return static_cast<CUresult>(synchronize_device(current_device()));
  });
}

}  // extern "C"

}  // namespace cudasim
