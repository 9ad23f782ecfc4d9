// SPDX-License-Identifier: Apache-2.0

// Driver API: streams and what is enqueued on them. The runtime's functions do the work.

#include <cuda_runtime_api.h>

#include "capture.h"
#include "driver_device.h"
#include "runtime.h"

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

CUresult cuStreamQuery(CUstream stream) {
  return cudasim::runtime_call("cuStreamQuery", [&] { return cudaStreamQuery(stream); });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return cudasim::runtime_call("cuStreamWaitEvent",
                               [&] { return cudaStreamWaitEvent(stream, event, flags); });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return cudasim::runtime_call("cuEventCreate",
                               [&] { return cudaEventCreateWithFlags(event, flags); });
}

CUresult cuEventDestroy(CUevent event) {
  return cudasim::runtime_call("cuEventDestroy", [&] { return cudaEventDestroy(event); });
}

CUresult cuEventQuery(CUevent event) {
  return cudasim::runtime_call("cuEventQuery", [&] { return cudaEventQuery(event); });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return cudasim::runtime_call("cuEventRecord", [&] { return cudaEventRecord(event, stream); });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return cudasim::runtime_call("cuStreamIsCapturing", [&] {
    cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &found);
    if (error == cudaSuccess) *status = static_cast<CUstreamCaptureStatus>(found);
    return error;
  });
}

// NOLINTBEGIN(readability-identifier-naming,readability-non-const-parameter): the driver's
CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   std::size_t* num_dependencies) {
  // NOLINTEND(readability-identifier-naming,readability-non-const-parameter)
  const CUresult result = cuStreamIsCapturing(handle, status);
  if (result != CUDA_SUCCESS || *status == CU_STREAM_CAPTURE_STATUS_NONE) return result;
  return cudasim::driver_call("cuStreamGetCaptureInfo", [&] {
    // Graphs under way have no handle here.
    if (graph != nullptr || dependencies != nullptr || num_dependencies != nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (id != nullptr) *id = cudasim::find_stream(handle)->capture->id;
    return CUDA_SUCCESS;
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
