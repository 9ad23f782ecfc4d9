// SPDX-License-Identifier: Apache-2.0
// Runtime API: memory and copies.

#include <algorithm>
#include <cstring>

#include "capture.h"
#include "runtime.h"

namespace cudasim {
namespace {

/// The last range of registered host memory that begins at or before the address.
bool is_registered(std::uintptr_t address) {
  const auto after = engine.registered.upper_bound(address);
  if (after == engine.registered.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address < begin + bytes;
}

bool fits_kind(const void* dst, const void* src, cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToDevice:
      return is_device_address(dst);
    case cudaMemcpyDeviceToHost:
      return is_device_address(src);
    case cudaMemcpyDeviceToDevice:
      return is_device_address(dst) && is_device_address(src);
    default:
      return true;
  }
}

Operation copy_of(void* dst, const void* src, std::size_t bytes) {
  Operation operation;
  operation.kind = Operation::Kind::kCopy;
  operation.dst = dst;
  operation.src = src;
  operation.bytes = bytes;
  return operation;
}

Operation set_of(void* dst, int value, std::size_t bytes) {
  Operation operation;
  operation.kind = Operation::Kind::kSet;
  operation.dst = dst;
  operation.value = value;
  operation.bytes = bytes;
  return operation;
}

cudaError_t submit_and_wait(Stream& stream, Operation operation) {
  if (const cudaError_t e = refuse_if_capturing(stream)) return e;
  if (stream.device->sticky != cudaSuccess) return stream.device->sticky;
  append(stream, std::move(operation));
  return synchronize(stream);
}

/// Copies from or to memory that is not page-locked wait, as the real ones do.
cudaError_t submit_copy(cudaStream_t handle, Operation operation, cudaMemcpyKind kind) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (operation.bytes == 0 || operation.num_rows == 0) return cudaSuccess;
  if (operation.dst == nullptr || operation.src == nullptr) return cudaErrorInvalidValue;
  if (!fits_kind(operation.dst, operation.src, kind)) return cudaErrorInvalidValue;
  if (is_pageable(operation.dst) || is_pageable(operation.src)) {
    return submit_and_wait(*stream, std::move(operation));
  }
  return submit(handle, std::move(operation));
}

cudaError_t allocated_host(void** address, std::size_t bytes) {
  *address = bytes == 0 ? nullptr : allocate_host(bytes);
  return bytes > 0 && *address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

}  // namespace

bool is_pageable(const void* address) {
  if (is_in_arena(address)) return false;
  return !is_registered(reinterpret_cast<std::uintptr_t>(address));
}

cudaError_t copy_now(void* dst, const void* src, std::size_t bytes) {
  return submit_and_wait(this_device().legacy, copy_of(dst, src, bytes));
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  CUDASIM_UNCAPTURED_API("cudaMalloc")
  *address = bytes == 0 ? nullptr : allocate_device(bytes, current_device(), "cudaMalloc memory");
  if (bytes > 0 && *address == nullptr) return with_last_error(cudaErrorMemoryAllocation);
  return cudaSuccess;
}

// Waits for the device, as CUDA's does.
cudaError_t cudaFree(void* address) {
  CUDASIM_UNCAPTURED_API("cudaFree")
  if (address == nullptr) return cudaSuccess;
  const int device = device_of(address);
  if (device < 0) return with_last_error(cudaErrorInvalidValue);
  const cudaError_t earlier = synchronize_device(device);
  if (!free_device(address)) return with_last_error(cudaErrorInvalidValue);
  return with_last_error(earlier);
}

cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned) {
  CUDASIM_UNCAPTURED_API("cudaHostAlloc")
  return with_last_error(allocated_host(address, bytes));
}

cudaError_t cudaMallocHost(void** address, std::size_t bytes) {
  CUDASIM_UNCAPTURED_API("cudaMallocHost")
  return with_last_error(allocated_host(address, bytes));
}

cudaError_t cudaFreeHost(void* address) {
  CUDASIM_UNCAPTURED_API("cudaFreeHost")
  if (address == nullptr) return cudaSuccess;
  const cudaError_t earlier = synchronize_device(current_device());
  if (!free_host(address)) return with_last_error(cudaErrorInvalidValue);
  return with_last_error(earlier);
}

cudaError_t cudaHostGetDevicePointer(void** device_address, void* host_address, unsigned) {
  CUDASIM_API("cudaHostGetDevicePointer")
  if (is_pageable(host_address) || is_device_address(host_address)) {
    return with_last_error(cudaErrorInvalidValue);
  }
  *device_address = host_address;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned) {
  CUDASIM_UNCAPTURED_API("cudaHostRegister")
  if (address == nullptr || bytes == 0) return with_last_error(cudaErrorInvalidValue);
  if (!is_pageable(address)) return with_last_error(cudaErrorHostMemoryAlreadyRegistered);
  engine.registered[reinterpret_cast<std::uintptr_t>(address)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  CUDASIM_UNCAPTURED_API("cudaHostUnregister")
  const cudaError_t earlier = synchronize_device(current_device());
  if (engine.registered.erase(reinterpret_cast<std::uintptr_t>(address)) == 0) {
    return with_last_error(cudaErrorHostMemoryNotRegistered);
  }
  return with_last_error(earlier);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  CUDASIM_API("cudaPointerGetAttributes")
  std::memset(attributes, 0, sizeof *attributes);
  const Extent extent = extent_of(address);
  const bool is_device = extent.bytes > 0 && extent.kind == MemoryKind::kDevice;
  const bool is_host = !is_device && !is_pageable(address);
  auto* const pointer = const_cast<void*>(address);
  attributes->type = is_device ? cudaMemoryTypeDevice
                               : (is_host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered);
  attributes->device = is_device ? extent.device : (is_host ? current_device() : -1);
  attributes->devicePointer = is_device || is_host ? pointer : nullptr;
  attributes->hostPointer = is_device ? nullptr : pointer;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  CUDASIM_API("cudaMemcpyAsync")
  return with_last_error(submit_copy(stream, copy_of(dst, src, bytes), kind));
}

cudaError_t cudaMemcpy2DAsync(void* dst, std::size_t dst_pitch, const void* src,
                              std::size_t src_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  CUDASIM_API("cudaMemcpy2DAsync")
  if (width > dst_pitch || width > src_pitch) return with_last_error(cudaErrorInvalidPitchValue);
  Operation operation = copy_of(dst, src, width);
  operation.num_rows = height;
  operation.dst_pitch = dst_pitch;
  operation.src_pitch = src_pitch;
  return with_last_error(submit_copy(stream, std::move(operation), kind));
}

// Between devices it does not wait for the copy, as CUDA's does not.
cudaError_t cudaMemcpy(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind kind) {
  CUDASIM_UNCAPTURED_API("cudaMemcpy")
  cudaError_t error = submit_copy(nullptr, copy_of(dst, src, bytes), kind);
  if (error == cudaSuccess && !(is_device_address(dst) && is_device_address(src))) {
    error = synchronize(this_device().legacy);
  }
  return with_last_error(error);
}

cudaError_t cudaMemsetAsync(void* dst, int value, std::size_t bytes, cudaStream_t stream) {
  CUDASIM_API("cudaMemsetAsync")
  if (bytes == 0) return cudaSuccess;
  if (is_pageable(dst)) return with_last_error(cudaErrorInvalidValue);
  return with_last_error(submit(stream, set_of(dst, value, bytes)));
}

// Does not wait: CUDA's does not for device memory.
cudaError_t cudaMemset(void* dst, int value, std::size_t bytes) {
  CUDASIM_API("cudaMemset")
  if (bytes == 0) return cudaSuccess;
  if (is_pageable(dst)) return with_last_error(cudaErrorInvalidValue);
  const cudaError_t error = submit(nullptr, set_of(dst, value, bytes));
  if (error != cudaSuccess || is_device_address(dst)) return with_last_error(error);
  return with_last_error(synchronize(this_device().legacy));
}

}  // extern "C"
