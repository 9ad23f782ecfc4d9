// SPDX-License-Identifier: Apache-2.0

// Driver API: page-locked host memory. The runtime's functions do the work.

#include <cuda_runtime_api.h>

#include "driver_device.h"

extern "C" {

CUresult cuMemHostAlloc(void** host, std::size_t bytes, unsigned flags) {
  return cudasim::runtime_call("cuMemHostAlloc", [&] { return cudaHostAlloc(host, bytes, flags); });
}

CUresult cuMemFreeHost(void* host) {
  return cudasim::runtime_call("cuMemFreeHost", [&] { return cudaFreeHost(host); });
}

CUresult cuMemHostRegister_v2(void* host, std::size_t bytes, unsigned flags) {
  return cudasim::runtime_call("cuMemHostRegister",
                               [&] { return cudaHostRegister(host, bytes, flags); });
}

CUresult cuMemHostUnregister(void* host) {
  return cudasim::runtime_call("cuMemHostUnregister", [&] { return cudaHostUnregister(host); });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host, unsigned flags) {
  return cudasim::runtime_call("cuMemHostGetDevicePointer", [&] {
    void* device = nullptr;
    const cudaError_t error = cudaHostGetDevicePointer(&device, host, flags);
    if (error == cudaSuccess) *address = reinterpret_cast<CUdeviceptr>(device);
    return error;
  });
}

}  // extern "C"
