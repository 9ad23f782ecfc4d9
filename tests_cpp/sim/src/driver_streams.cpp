// SPDX-License-Identifier: Apache-2.0

// Driver API: streams and what is enqueued on them. The runtime's functions do the work.

#include <cuda_runtime_api.h>

#include "driver_device.h"

namespace cudasim {
namespace {

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

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return cudasim::runtime_call("cuStreamIsCapturing", [&] {
    cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &found);
    if (error == cudaSuccess) *status = static_cast<CUstreamCaptureStatus>(found);
    return error;
  });
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

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return cudasim::runtime_call("cuMemcpyDtoDAsync", [&] {
    return cudaMemcpyAsync(cudasim::address_of(to), cudasim::address_of(from), bytes,
                           cudaMemcpyDeviceToDevice, stream);
  });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream) {
  return cudasim::runtime_call("cuMemsetD8Async", [&] {
    return cudaMemsetAsync(cudasim::address_of(to), value, bytes, stream);
  });
}

}  // extern "C"
