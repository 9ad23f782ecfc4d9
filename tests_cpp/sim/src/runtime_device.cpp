// SPDX-License-Identifier: Apache-2.0
// Runtime API: devices, functions, versions and errors.

#include <cstdio>
#include <cstring>

#include "capture.h"
#include "driver_device.h"
#include "runtime.h"

namespace cudasim {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

int attribute_value(cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      return config().resident_blocks;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return static_cast<int>(kMaxBlockThreads);
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 0x7fffffff;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrWarpSize:
      return static_cast<int>(kWarpThreads);
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return static_cast<int>(kDefaultSharedBytes);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(kMaxSharedBytes);
    case cudaDevAttrMaxBlocksPerMultiprocessor:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      return 1;
    case cudaDevAttrPciBusId:
      return config().driver.first_device + device;
    default:
      return 0;
  }
}

}  // namespace

cudaError_t with_last_error(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

Device& this_device() { return *engine.devices.at(static_cast<std::size_t>(current_device())); }

}  // namespace cudasim

using namespace cudasim;

extern "C" {

cudaError_t cudaSetDevice(int device) {
  CUDASIM_API("cudaSetDevice")
  if (!is_device(device)) return with_last_error(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  CUDASIM_API("cudaGetDevice")
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  CUDASIM_API("cudaGetDeviceCount")
  *count = num_devices();
  return *count == 0 ? with_last_error(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  CUDASIM_API("cudaDeviceGetAttribute")
  if (!is_device(device)) return with_last_error(cudaErrorInvalidDevice);
  *value = attribute_value(attribute, device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  CUDASIM_API("cudaGetDeviceProperties")
  if (!is_device(device)) return with_last_error(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "Simulated device %d", device);
  properties->major = 9;
  properties->warpSize = static_cast<int>(kWarpThreads);
  properties->multiProcessorCount = config().resident_blocks;
  properties->maxThreadsPerBlock = static_cast<int>(kMaxBlockThreads);
  properties->sharedMemPerBlock = kDefaultSharedBytes;
  properties->sharedMemPerBlockOptin = kMaxSharedBytes;
  properties->unifiedAddressing = 1;
  properties->canMapHostMemory = 1;
  properties->totalGlobalMem = config().driver.memory_bytes;
  properties->pciBusID = attribute_value(cudaDevAttrPciBusId, device);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  CUDASIM_API("cudaDeviceCanAccessPeer")
  if (!is_device(device) || !is_device(peer)) return with_last_error(cudaErrorInvalidDevice);
  *can = device != peer && config().driver.peer_access;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  CUDASIM_DEVICE_API("cudaDeviceEnablePeerAccess")
  if (flags != 0) return with_last_error(cudaErrorInvalidValue);
  if (!is_device(peer) || peer == current_device() || !config().driver.peer_access) {
    return with_last_error(cudaErrorInvalidDevice);
  }
  const std::uint64_t bit = std::uint64_t{1} << peer;
  if ((this_device().peers & bit) != 0) return with_last_error(cudaErrorPeerAccessAlreadyEnabled);
  this_device().peers |= bit;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  CUDASIM_UNCAPTURED_API("cudaDeviceSynchronize")
  if (const cudaError_t e = refuse_legacy_use(this_device().legacy)) return with_last_error(e);
  return with_last_error(synchronize_device(current_device()));
}

cudaError_t cudaDriverGetVersion(int* version) {
  CUDASIM_API("cudaDriverGetVersion")
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  CUDASIM_API("cudaRuntimeGetVersion")
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// --- Functions ------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  CUDASIM_API("cudaFuncGetAttributes")
  if (function == nullptr) return with_last_error(cudaErrorInvalidDeviceFunction);
  std::memset(attributes, 0, sizeof *attributes);
  const auto limit = engine.shared_limits.find(function);
  attributes->maxThreadsPerBlock = static_cast<int>(kMaxBlockThreads);
  attributes->numRegs = 32;
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes =
      static_cast<int>(limit == engine.shared_limits.end() ? kDefaultSharedBytes : limit->second);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  CUDASIM_API("cudaFuncSetAttribute")
  if (function == nullptr) return with_last_error(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<std::size_t>(value) > kMaxSharedBytes) {
    return with_last_error(cudaErrorInvalidValue);
  }
  engine.shared_limits[function] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

// As many multiprocessors as blocks fit, and one block on each.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void* function,
                                                          int block_size,
                                                          std::size_t dynamic_bytes) {
  CUDASIM_API("cudaOccupancyMaxActiveBlocksPerMultiprocessor")
  if (function == nullptr) return with_last_error(cudaErrorInvalidDeviceFunction);
  if (block_size <= 0) return with_last_error(cudaErrorInvalidValue);
  const bool fits =
      block_size <= static_cast<int>(kMaxBlockThreads) && dynamic_bytes <= kMaxSharedBytes;
  *num_blocks = fits ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* num_blocks, const void* function, int block_size, std::size_t dynamic_bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(num_blocks, function, block_size,
                                                       dynamic_bytes);
}

// --- Errors ---------------------------------------------------------------------------------

cudaError_t cudaPeekAtLastError() {
  const Lock lock;
  const cudaError_t sticky = this_device().sticky;
  return sticky == cudaSuccess ? last_error : sticky;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

}  // extern "C"
