// SPDX-License-Identifier: Apache-2.0

// Driver API: streams and what is enqueued on them. The runtime's functions do the work.

#include <cuda_runtime_api.h>

#include "driver_device.h"

namespace cudasim {
namespace {

/// What `driver_call` checks, then `call` of the runtime without the engine's lock held. The
/// runtime's error codes are the driver's.
template <typename Call>
CUresult runtime_call(const char* name, const Call& call) {
  const CUresult refused = driver_call(name, [] { return CUDA_SUCCESS; });
  return refused != CUDA_SUCCESS ? refused : static_cast<CUresult>(call());
}

void* address_of(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace
}  // namespace cudasim

extern "C" {

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return cudasim::runtime_call("cuStreamCreate",
                               [&] { return cudaStreamCreateWithFlags(stream, flags); });
}

CUresult cuStreamDestroy(CUstream stream) {
  return cudasim::runtime_call("cuStreamDestroy", [&] { return cudaStreamDestroy(stream); });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return cudasim::runtime_call("cuStreamSynchronize",
                               [&] { return cudaStreamSynchronize(stream); });
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) {
  return cudasim::runtime_call("cuMemcpyHtoDAsync", [&] {
    return cudaMemcpyAsync(cudasim::address_of(to), from, bytes, cudaMemcpyHostToDevice, stream);
  });
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return cudasim::runtime_call("cuMemcpyDtoHAsync", [&] {
    return cudaMemcpyAsync(to, cudasim::address_of(from), bytes, cudaMemcpyDeviceToHost, stream);
  });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream) {
  return cudasim::runtime_call("cuMemsetD8Async", [&] {
    return cudaMemsetAsync(cudasim::address_of(to), value, bytes, stream);
  });
}

}  // extern "C"
