// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA driver, found at run time: nothing links it, so that all of the library loads where
// there is none.

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>

#include "base/fork_guard.h"

namespace fanfold::gpu {

// All that the library calls. Where the driver has several versions of a function, cuda.h names the
// one meant.
#define FANFOLD_DRIVER_FUNCTIONS(X) \
  X(cuInit)                         \
  X(cuGetErrorName)                 \
  X(cuGetErrorString)               \
  X(cuDeviceGet)                    \
  X(cuDeviceGetCount)               \
  X(cuDeviceGetAttribute)           \
  X(cuDeviceGetPCIBusId)            \
  X(cuDevicePrimaryCtxRetain)       \
  X(cuDevicePrimaryCtxRelease)      \
  X(cuCtxPushCurrent)               \
  X(cuCtxPopCurrent)                \
  X(cuCtxSynchronize)               \
  X(cuStreamCreate)                 \
  X(cuStreamDestroy)                \
  X(cuStreamSynchronize)            \
  X(cuStreamQuery)                  \
  X(cuStreamWaitEvent)              \
  X(cuStreamGetCtx)                 \
  X(cuEventCreate)                  \
  X(cuEventDestroy)                 \
  X(cuEventQuery)                   \
  X(cuEventRecord)                  \
  X(cuMemGetAllocationGranularity)  \
  X(cuMemCreate)                    \
  X(cuMemRelease)                   \
  X(cuMemExportToShareableHandle)   \
  X(cuMemImportFromShareableHandle) \
  X(cuMemAddressReserve)            \
  X(cuMemAddressFree)               \
  X(cuMemMap)                       \
  X(cuMemUnmap)                     \
  X(cuMemSetAccess)                 \
  X(cuMemAlloc)                     \
  X(cuMemFree)                      \
  X(cuMemHostAlloc)                 \
  X(cuMemFreeHost)                  \
  X(cuMemHostRegister)              \
  X(cuMemHostUnregister)            \
  X(cuMemHostGetDevicePointer)      \
  X(cuMemcpyHtoDAsync)              \
  X(cuMemcpyDtoHAsync)              \
  X(cuMemcpyDtoDAsync)              \
  X(cuMemsetD8Async)                \
  X(cuPointerGetAttribute)

/// Pointers to the driver's functions.
struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): declares the name
#define FANFOLD_DRIVER_FIELD(name) decltype(&::name) name = nullptr;
  FANFOLD_DRIVER_FUNCTIONS(FANFOLD_DRIVER_FIELD)
#undef FANFOLD_DRIVER_FIELD
  /// As CUDA 11.3 to 12.2 has it; newer headers do not declare it.
  CUresult (*cuStreamGetCaptureInfo)(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                     CUgraph* graph, const CUgraphNode** dependencies,
                                     std::size_t* num_dependencies) = nullptr;
  std::shared_ptr<const base::ForkGuard> guard;

  /// The driver of this process, loaded and initialised on first use. Any thread.
  /// @throws Unsupported  there is none, it is too old, or it has no device; the next call tries
  ///         again.
  static const Driver& get();
  /// Whether this is a forked child of the process that loaded it: nothing may be called there.
  bool is_forked_child() const noexcept { return guard->is_child(); }

  /// @throws OutOfMemory  the device has no memory left.
  /// @throws InvalidState a stream capture is under way, which allows no such call.
  /// @throws CudaFailure  `result` is another failure; the text is `step` and the driver's words.
  void check(CUresult result, const std::string& step) const;
  /// "CUDA_ERROR_NOT_PERMITTED (operation not permitted)".
  std::string describe(CUresult result) const;
};

}  // namespace fanfold::gpu
