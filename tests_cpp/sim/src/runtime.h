// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shared by the files that implement the runtime API.

#include "state.h"

namespace cudasim {

/// Remembers an error for cudaGetLastError, and returns it.
cudaError_t with_last_error(cudaError_t error);

/// The stream of a handle (null: the legacy stream of the current device); null if there is none.
Stream* find_stream(cudaStream_t handle);
Device& this_device();

/// Enqueues on the stream of the handle, or captures. Fails as CUDA does on a failed device.
cudaError_t submit(cudaStream_t handle, Operation operation);
/// Waits until the stream is idle, and orders the host after it.
cudaError_t synchronize(Stream& stream);

/// Can the devices copy from or to it without the host's help?
bool is_pageable(const void* address);

}  // namespace cudasim

// First line of an API function: holds the engine's lock, and returns an injected fault.
#define CUDASIM_API(name)                                                \
  const cudasim::Lock cudasim_lock;                                      \
  if (const int injected = cudasim::injected_fault(name)) {              \
    return cudasim::with_last_error(static_cast<cudaError_t>(injected)); \
  }

// The same for functions that a failed device refuses.
#define CUDASIM_DEVICE_API(name)                                    \
  CUDASIM_API(name)                                                 \
  if (cudasim::this_device().sticky != cudaSuccess) {               \
    return cudasim::with_last_error(cudasim::this_device().sticky); \
  }

// The same for functions that must not be called while work is captured.
#define CUDASIM_UNCAPTURED_API(name)                                    \
  CUDASIM_DEVICE_API(name)                                              \
  if (const int refused = cudasim::unsafe_during_capture()) {           \
    return cudasim::with_last_error(static_cast<cudaError_t>(refused)); \
  }
