// SPDX-License-Identifier: Apache-2.0

// Driver API: finding functions by name, and the names of errors.

#include <algorithm>
#include <array>
#include <cstring>

#include "driver_device.h"

// The interface of CUDA 11.3 to 12.2, which cuda.h declares no more.
// NOLINTNEXTLINE(readability-identifier-naming): the driver's
extern "C" CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status,
                                              cuuint64_t* id, CUgraph* graph,
                                              const CUgraphNode** dependencies,
                                              std::size_t* num_dependencies);

namespace cudasim {

namespace {

struct Entry {
  const char* name;  // as cuGetProcAddress takes it: without the version of the interface
  void* function;
  int since;  // CUDA version that the interface belongs to
};

template <typename Function>
Entry entry(const char* name, Function* function, int since) {
  return {name, reinterpret_cast<void*>(function), since};
}

const auto& entries() {
  // cuda.h renames most of these to their newest version.
  static const std::array kAll = {
      entry("cuInit", &cuInit, 2000),
      entry("cuDriverGetVersion", &cuDriverGetVersion, 2020),
      entry("cuDeviceGet", &cuDeviceGet, 2000),
      entry("cuDeviceGetCount", &cuDeviceGetCount, 2000),
      entry("cuDeviceGetName", &cuDeviceGetName, 2000),
      entry("cuDeviceGetAttribute", &cuDeviceGetAttribute, 2000),
      entry("cuDeviceGetPCIBusId", &cuDeviceGetPCIBusId, 4010),
      entry("cuDeviceGetUuid", &cuDeviceGetUuid, 11040),
      entry("cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain, 7000),
      entry("cuDevicePrimaryCtxRelease", &cuDevicePrimaryCtxRelease, 11000),
      entry("cuCtxPushCurrent", &cuCtxPushCurrent, 4000),
      entry("cuCtxPopCurrent", &cuCtxPopCurrent, 4000),
      entry("cuCtxGetCurrent", &cuCtxGetCurrent, 4000),
      entry("cuCtxSetCurrent", &cuCtxSetCurrent, 4000),
      entry("cuCtxGetDevice", &cuCtxGetDevice, 2000),
      entry("cuCtxSynchronize", &cuCtxSynchronize, 2000),
      entry("cuStreamCreate", &cuStreamCreate, 2000),
      entry("cuStreamDestroy", &cuStreamDestroy, 4000),
      entry("cuStreamSynchronize", &cuStreamSynchronize, 2000),
      entry("cuStreamGetCtx", &cuStreamGetCtx, 9020),
      entry("cuStreamIsCapturing", &cuStreamIsCapturing, 10000),
      entry("cuStreamGetCaptureInfo", &cuStreamGetCaptureInfo_v2, 11030),
      entry("cuStreamQuery", &cuStreamQuery, 2000),
      entry("cuStreamWaitEvent", &cuStreamWaitEvent, 3020),
      entry("cuEventCreate", &cuEventCreate, 2000),
      entry("cuEventDestroy", &cuEventDestroy, 4000),
      entry("cuEventQuery", &cuEventQuery, 2000),
      entry("cuEventRecord", &cuEventRecord, 2000),
      entry("cuMemGetAllocationGranularity", &cuMemGetAllocationGranularity, 10020),
      entry("cuMemCreate", &cuMemCreate, 10020),
      entry("cuMemRelease", &cuMemRelease, 10020),
      entry("cuMemExportToShareableHandle", &cuMemExportToShareableHandle, 10020),
      entry("cuMemImportFromShareableHandle", &cuMemImportFromShareableHandle, 10020),
      entry("cuMemAddressReserve", &cuMemAddressReserve, 10020),
      entry("cuMemAddressFree", &cuMemAddressFree, 10020),
      entry("cuMemMap", &cuMemMap, 10020),
      entry("cuMemUnmap", &cuMemUnmap, 10020),
      entry("cuMemSetAccess", &cuMemSetAccess, 10020),
      entry("cuMemGetAccess", &cuMemGetAccess, 10020),
      entry("cuMemAlloc", &cuMemAlloc, 3020),
      entry("cuMemFree", &cuMemFree, 3020),
      entry("cuMemHostAlloc", &cuMemHostAlloc, 2020),
      entry("cuMemFreeHost", &cuMemFreeHost, 2000),
      entry("cuMemHostRegister", &cuMemHostRegister, 6050),
      entry("cuMemHostUnregister", &cuMemHostUnregister, 4000),
      entry("cuMemHostGetDevicePointer", &cuMemHostGetDevicePointer, 3020),
      entry("cuMemcpyHtoD", &cuMemcpyHtoD, 3020),
      entry("cuMemcpyDtoH", &cuMemcpyDtoH, 3020),
      entry("cuMemcpyDtoD", &cuMemcpyDtoD, 3020),
      entry("cuMemsetD8", &cuMemsetD8, 3020),
      entry("cuMemsetD32", &cuMemsetD32, 3020),
      entry("cuMemcpyHtoDAsync", &cuMemcpyHtoDAsync, 3020),
      entry("cuMemcpyDtoHAsync", &cuMemcpyDtoHAsync, 3020),
      entry("cuMemcpyDtoDAsync", &cuMemcpyDtoDAsync, 3020),
      entry("cuMemsetD8Async", &cuMemsetD8Async, 3020),
      entry("cuPointerGetAttribute", &cuPointerGetAttribute, 4000),
      entry("cuGetErrorName", &cuGetErrorName, 6000),
      entry("cuGetErrorString", &cuGetErrorString, 6000),
      entry("cuGetProcAddress", &cuGetProcAddress, 12000),
  };
  return kAll;
}

struct ErrorText {
  CUresult error;
  const char* name;
  const char* text;
};

// Names and texts as the driver gives them, for the errors that the simulator returns or that tests
// inject.
constexpr std::array kErrors = {
    ErrorText{CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    ErrorText{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    ErrorText{CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    ErrorText{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    ErrorText{CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    ErrorText{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    ErrorText{CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    ErrorText{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    ErrorText{CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
              "OS call failed or operation not supported on this OS"},
    ErrorText{CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    ErrorText{CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
              "the operation cannot be performed in the present state"},
    ErrorText{CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    ErrorText{CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    ErrorText{CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
              "an illegal memory access was encountered"},
    ErrorText{CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT",
              "the launch timed out and was terminated"},
    ErrorText{CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED",
              "context is destroyed"},
    ErrorText{CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    ErrorText{CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    ErrorText{CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
              "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
              "part or all of the requested memory range is already mapped"},
    ErrorText{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
              "pointer does not correspond to a registered memory region"},
    ErrorText{CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    ErrorText{CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    ErrorText{CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY",
              "system not yet initialized"},
    ErrorText{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
              "operation not permitted when stream is capturing"},
    ErrorText{CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(CUresult error) {
  const auto* const found = std::find_if(kErrors.begin(), kErrors.end(),
                                         [&](const ErrorText& e) { return e.error == error; });
  return found == kErrors.end() ? nullptr : found;
}

}  // namespace

extern "C" {

// The functions below work before cuInit.

CUresult cuGetErrorName(CUresult error, const char** name) {
  const ErrorText* const found = find_error(error);
  if (name != nullptr) {
    *name = found == nullptr ? nullptr : found->name;
  }
  return name == nullptr || found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* const found = find_error(error);
  if (text != nullptr) {
    *text = found == nullptr ? nullptr : found->text;
  }
  return text == nullptr || found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t /*flags*/,
                             CUdriverProcAddressQueryResult* status) {
  const Lock lock;
  if (const int error = injected_fault("cuGetProcAddress"); error != 0) {
    return static_cast<CUresult>(error);
  }
  if (symbol == nullptr || function == nullptr || version > CUDA_VERSION) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto found = std::find_if(entries().begin(), entries().end(),
                                  [&](const Entry& e) { return std::strcmp(e.name, symbol) == 0; });
  const bool is_known = found != entries().end();
  const bool is_offered = is_known && found->since <= version;
  *function = is_offered ? found->function : nullptr;
  if (status != nullptr) {
    *status = is_offered ? CU_GET_PROC_ADDRESS_SUCCESS
              : is_known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                         : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  // cuda.h describes success with a null pointer, drivers were seen to return this error: callers
  // have to look at both, and this is the harder case.
  return is_offered ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"

}  // namespace cudasim
