// SPDX-License-Identifier: Apache-2.0
#pragma once

// What all functions of the driver API share.

#include <cuda.h>

#include <cstdint>

#include "engine.h"

namespace cudasim {

/// Whether cuInit was called. The simulated runtime does not call it for its users.
bool is_driver_initialized();

/// Whether `device` is one of this process.
bool is_device(int device);

/// The device's number on the machine, which several processes may share.
int machine_number(int device);

/// The clique of the fabric that the device belongs to.
std::uint32_t clique_of(int device);

/// One call of the driver API: takes the engine's lock, counts the call, lets a fault be injected.
template <typename Body>
CUresult driver_call(const char* name, const Body& body) {
  const Lock lock;
  if (const int error = injected_fault(name); error != 0) {
    return static_cast<CUresult>(error);
  }
  if (!is_driver_initialized()) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  return body();
}

/// What `driver_call` checks, then `call` of the runtime without the engine's lock held. The
/// runtime's error codes are the driver's.
template <typename Call>
CUresult runtime_call(const char* name, const Call& call) {
  const CUresult refused = driver_call(name, [] { return CUDA_SUCCESS; });
  return refused != CUDA_SUCCESS ? refused : static_cast<CUresult>(call());
}

}  // namespace cudasim
