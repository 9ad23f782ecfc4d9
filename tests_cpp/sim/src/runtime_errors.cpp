// SPDX-License-Identifier: Apache-2.0
// Runtime API: names of errors.

#include <cuda_runtime_api.h>

#include <map>

namespace {

struct Texts {
  const char* name;
  const char* description;
};

const std::map<cudaError_t, Texts>& errors() {
  static const auto* all = new std::map<cudaError_t, Texts>{
      {cudaSuccess, {"cudaSuccess", "no error"}},
      {cudaErrorInvalidValue, {"cudaErrorInvalidValue", "invalid argument"}},
      {cudaErrorMemoryAllocation, {"cudaErrorMemoryAllocation", "out of memory"}},
      {cudaErrorInitializationError, {"cudaErrorInitializationError", "initialization error"}},
      {cudaErrorInvalidConfiguration,
       {"cudaErrorInvalidConfiguration", "invalid configuration argument"}},
      {cudaErrorInvalidPitchValue, {"cudaErrorInvalidPitchValue", "invalid pitch argument"}},
      {cudaErrorInvalidMemcpyDirection,
       {"cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"}},
      {cudaErrorInvalidDeviceFunction,
       {"cudaErrorInvalidDeviceFunction", "invalid device function"}},
      {cudaErrorNoDevice, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
      {cudaErrorInvalidDevice, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
      {cudaErrorPeerAccessUnsupported,
       {"cudaErrorPeerAccessUnsupported",
        "peer access is not supported between these two devices"}},
      {cudaErrorPeerAccessAlreadyEnabled,
       {"cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"}},
      {cudaErrorPeerAccessNotEnabled,
       {"cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"}},
      {cudaErrorHostMemoryAlreadyRegistered,
       {"cudaErrorHostMemoryAlreadyRegistered",
        "part or all of the requested memory range is already mapped"}},
      {cudaErrorHostMemoryNotRegistered,
       {"cudaErrorHostMemoryNotRegistered",
        "pointer does not correspond to a registered memory region"}},
      {cudaErrorInvalidResourceHandle,
       {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
      {cudaErrorIllegalState,
       {"cudaErrorIllegalState", "the operation cannot be performed in the present state"}},
      {cudaErrorNotReady, {"cudaErrorNotReady", "device not ready"}},
      {cudaErrorIllegalAddress,
       {"cudaErrorIllegalAddress", "an illegal memory access was encountered"}},
      {cudaErrorLaunchOutOfResources,
       {"cudaErrorLaunchOutOfResources", "too many resources requested for launch"}},
      {cudaErrorLaunchTimeout,
       {"cudaErrorLaunchTimeout", "the launch timed out and was terminated"}},
      {cudaErrorMisalignedAddress, {"cudaErrorMisalignedAddress", "misaligned address"}},
      {cudaErrorLaunchFailure, {"cudaErrorLaunchFailure", "unspecified launch failure"}},
      {cudaErrorNotPermitted, {"cudaErrorNotPermitted", "operation not permitted"}},
      {cudaErrorNotSupported, {"cudaErrorNotSupported", "operation not supported"}},
      {cudaErrorSystemNotReady, {"cudaErrorSystemNotReady", "system not yet initialized"}},
      {cudaErrorStreamCaptureUnsupported,
       {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
      {cudaErrorStreamCaptureInvalidated,
       {"cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture"}},
      {cudaErrorStreamCaptureMerge,
       {"cudaErrorStreamCaptureMerge",
        "operation would result in a merge of separate capture sequences"}},
      {cudaErrorStreamCaptureUnmatched,
       {"cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"}},
      {cudaErrorStreamCaptureUnjoined,
       {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
      {cudaErrorStreamCaptureIsolation,
       {"cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work in another stream"}},
      {cudaErrorStreamCaptureImplicit,
       {"cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream"}},
      {cudaErrorCapturedEvent,
       {"cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream"}},
      {cudaErrorStreamCaptureWrongThread,
       {"cudaErrorStreamCaptureWrongThread",
        "attempt to terminate a thread-local capture sequence from another thread"}},
      {cudaErrorUnknown, {"cudaErrorUnknown", "unknown error"}},
  };
  return *all;
}

const Texts& texts_of(cudaError_t error) {
  static constexpr Texts kUnknown = {"unrecognized error code", "unrecognized error code"};
  const auto found = errors().find(error);
  return found == errors().end() ? kUnknown : found->second;
}

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t error) { return texts_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return texts_of(error).description; }

}  // extern "C"
