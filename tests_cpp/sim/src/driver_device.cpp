// SPDX-License-Identifier: Apache-2.0

// Driver API: initialisation and devices.

#include "driver_device.h"

#include <cstdio>
#include <cstring>
#include <string>

#include "cudasim/control.h"

namespace cudasim {

namespace {

// The version that cuda.h belongs to: what the headers offer, the driver has.
constexpr int kDriverVersion = CUDA_VERSION;
constexpr int kComputeMajor = 9;
constexpr int kComputeMinor = 0;

bool initialized = false;  // guarded by the engine's lock

int attribute_value(CUdevice_attribute attribute, int device) {
  const DriverConfig& driver = config().driver;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return kComputeMajor;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return kComputeMinor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return config().resident_blocks;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return 227 * 1024;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return driver.fd_handles ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      return driver.fabric_handles ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return machine_number(device) + 1;
    default:
      return 0;  // a feature that the simulator does not have
  }
}

}  // namespace

bool is_driver_initialized() { return initialized; }

bool is_device(int device) { return device >= 0 && device < num_devices(); }

int machine_number(int device) { return config().driver.first_device + device; }

std::uint32_t clique_of(int device) {
  const auto& cliques = config().driver.cliques;
  const auto place = static_cast<std::size_t>(device);
  return place < cliques.size() ? cliques[place] : 0;
}

extern "C" {

CUresult cuInit(unsigned flags) {
  const Lock lock;
  if (const int error = injected_fault("cuInit"); error != 0) {
    return static_cast<CUresult>(error);
  }
  if (flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (num_devices() == 0) {
    return CUDA_ERROR_NO_DEVICE;
  }
  initialized = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  const Lock lock;
  if (const int error = injected_fault("cuDriverGetVersion"); error != 0) {
    return static_cast<CUresult>(error);
  }
  if (version == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return driver_call("cuDeviceGet", [&] {
    if (device == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(ordinal)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetCount(int* count) {
  return driver_call("cuDeviceGetCount", [&] {
    if (count == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *count = num_devices();
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  return driver_call("cuDeviceGetName", [&] {
    if (name == nullptr || size <= 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(device)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    std::snprintf(name, static_cast<std::size_t>(size), "cudasim device %d",
                  machine_number(device));
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return driver_call("cuDeviceGetAttribute", [&] {
    if (value == nullptr || attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(device)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    *value = attribute_value(attribute, device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetPCIBusId(char* bus_id, int size, CUdevice device) {
  return driver_call("cuDeviceGetPCIBusId", [&] {
    constexpr int kBusIdChars = 13;  // "0000:01:00.0" and its end
    if (bus_id == nullptr || size < kBusIdChars) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(device)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    const unsigned number = static_cast<unsigned>(machine_number(device)) + 1;
    std::snprintf(bus_id, static_cast<std::size_t>(size), "%04x:%02x:00.0", number >> 8 & 0xffffU,
                  number & 0xffU);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return driver_call("cuDeviceGetUuid", [&] {
    if (uuid == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(device)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    *uuid = {};
    const int number = machine_number(device);
    std::memcpy(uuid->bytes, "cudasim", 7);
    std::memcpy(uuid->bytes + 12, &number, sizeof(number));
    return CUDA_SUCCESS;
  });
}

}  // extern "C"

}  // namespace cudasim
