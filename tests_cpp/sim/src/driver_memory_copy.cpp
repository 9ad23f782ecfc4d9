// SPDX-License-Identifier: Apache-2.0

// Driver API: plain allocations, copies and fills on the legacy stream, and what an address is. As
// in CUDA, fills and copies between devices' memory do not wait.

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "driver_device.h"
#include "driver_memory.h"
#include "runtime.h"

namespace cudasim {

namespace {

// Runtime and driver number their errors alike.
CUresult driver_error(cudaError_t error) { return static_cast<CUresult>(error); }

// Copies are the current device's accesses, so mapped memory needs rights for that one.
bool is_copyable(CUdeviceptr address, std::size_t bytes) {
  VirtualMemory& memory = virtual_memory();
  if (memory.is_reserved(address)) {
    return memory.is_accessible(address, bytes, current_device());
  }
  return is_device_address(at_address(address));
}

Operation copy_of(CUdeviceptr to, const void* from, std::size_t bytes) {
  Operation operation;
  operation.kind = Operation::Kind::kCopy;
  operation.dst = at_address(to);
  operation.src = from;
  operation.bytes = bytes;
  return operation;
}

// What all of these share; the real ones are refused during capture as well.
template <typename Work>
CUresult copy_call(const char* name, std::size_t bytes, const Work& work) {
  return driver_call(name, [&] {
    if (const int error = unsafe_during_capture(); error != 0) {
      return static_cast<CUresult>(error);
    }
    return bytes == 0 ? CUDA_SUCCESS : work();
  });
}

template <typename T>
CUresult answer(void* data, T value) {
  std::memcpy(data, &value, sizeof(value));
  return CUDA_SUCCESS;
}

CUresult read_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  const Extent extent = extent_of(at_address(address));
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return answer(data,
                    extent.kind == MemoryKind::kHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return answer(data, extent.device);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return answer(data, address);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return answer(data, CUdeviceptr{extent.address});
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return answer(data, extent.bytes);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  return driver_call("cuMemAlloc", [&] {
    if (address == nullptr || bytes == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const int error = unsafe_during_capture(); error != 0) {
      return static_cast<CUresult>(error);
    }
    void* const memory = allocate_device(bytes, current_device(), "cuMemAlloc memory");
    if (memory == nullptr) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = reinterpret_cast<CUdeviceptr>(memory);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return driver_call("cuMemFree", [&] {
    if (const int error = unsafe_during_capture(); error != 0) {
      return static_cast<CUresult>(error);
    }
    if (address == 0) {
      return CUDA_SUCCESS;
    }
    const int device = device_of(at_address(address));
    if (device < 0 || virtual_memory().is_reserved(address)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const cudaError_t earlier = synchronize_device(device);  // as cudaFree does
    return free_device(at_address(address)) ? driver_error(earlier) : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, std::size_t bytes) {
  return copy_call("cuMemcpyHtoD", bytes, [&] {
    if (from == nullptr || !is_copyable(to, bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return driver_error(copy_now(at_address(to), from, bytes));
  });
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, std::size_t bytes) {
  return copy_call("cuMemcpyDtoH", bytes, [&] {
    if (to == nullptr || !is_copyable(from, bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return driver_error(copy_now(to, at_address(from), bytes));
  });
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return copy_call("cuMemcpyDtoD", bytes, [&] {
    if (!is_copyable(to, bytes) || !is_copyable(from, bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return driver_error(submit(nullptr, copy_of(to, at_address(from), bytes)));
  });
}

CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, std::size_t bytes) {
  return copy_call("cuMemsetD8", bytes, [&] {
    if (!is_copyable(address, bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Operation operation;
    operation.kind = Operation::Kind::kSet;
    operation.dst = at_address(address);
    operation.value = value;
    operation.bytes = bytes;
    return driver_error(submit(nullptr, std::move(operation)));
  });
}

CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned value, std::size_t count) {
  const std::size_t bytes = count * sizeof(value);
  return copy_call("cuMemsetD32", bytes, [&] {
    if (address % sizeof(value) != 0 || !is_copyable(address, bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const auto words = std::make_shared<std::vector<unsigned>>(count, value);
    Operation operation = copy_of(address, words->data(), bytes);
    operation.body = [words] {};  // keeps them until the copy is done
    return driver_error(submit(nullptr, std::move(operation)));
  });
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  return driver_call("cuPointerGetAttribute", [&] {
    if (data == nullptr || extent_of(at_address(address)).bytes == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return read_attribute(data, attribute, address);
  });
}

}  // extern "C"

}  // namespace cudasim
