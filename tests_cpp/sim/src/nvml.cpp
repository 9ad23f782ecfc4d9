// SPDX-License-Identifier: Apache-2.0

// The part of NVML that tells which fabric a device belongs to. NVML's header is no part of the
// CUDA toolkit's runtime packages, so its types are declared here, as its manual gives them.

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "cudasim/control.h"
#include "driver_device.h"

namespace cudasim {

// NOLINTBEGIN(readability-identifier-naming): NVML's names
extern "C" {

using nvmlReturn_t = int;
struct nvmlDevice_st {
  int device;
};
using nvmlDevice_t = nvmlDevice_st*;

struct nvmlGpuFabricInfoV_t {
  unsigned version;
  unsigned char clusterUuid[16];
  nvmlReturn_t status;
  unsigned cliqueId;
  unsigned char state;
  unsigned healthMask;
};

nvmlReturn_t nvmlInit_v2();
nvmlReturn_t nvmlShutdown();
const char* nvmlErrorString(nvmlReturn_t result);
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, nvmlDevice_t* device);
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t* info);

}  // extern "C"
// NOLINTEND(readability-identifier-naming)

static_assert(sizeof(nvmlGpuFabricInfoV_t) == 36, "the layout of NVML's version 2");

namespace {

constexpr nvmlReturn_t kSuccess = 0;
constexpr nvmlReturn_t kUninitialized = 1;
constexpr nvmlReturn_t kInvalidArgument = 2;
constexpr nvmlReturn_t kNotFound = 6;
constexpr nvmlReturn_t kDriverNotLoaded = 9;
constexpr nvmlReturn_t kVersionMismatch = 25;

constexpr unsigned kFabricInfoVersion = sizeof(nvmlGpuFabricInfoV_t) | 2U << 24U;
constexpr unsigned char kStateCompleted = 3;

// Handles of devices. Guarded by the engine's lock, as all state here.
std::array<nvmlDevice_st, 64> devices = {};
int initializations = 0;

struct ResultText {
  nvmlReturn_t result;
  const char* text;
};

constexpr std::array kResults = {
    ResultText{kSuccess, "Success"},
    ResultText{kUninitialized, "Uninitialized"},
    ResultText{kInvalidArgument, "Invalid Argument"},
    ResultText{3, "Not Supported"},
    ResultText{4, "Insufficient Permissions"},
    ResultText{kNotFound, "Not Found"},
    ResultText{kDriverNotLoaded, "Driver Not Loaded"},
    ResultText{10, "Timeout"},
    ResultText{12, "NVML Shared Library Not Found"},
    ResultText{13, "Function Not Found"},
    ResultText{15, "GPU is lost"},
    ResultText{17, "The operating system has blocked the request."},
    ResultText{kVersionMismatch, "Argument version mismatch"},
    ResultText{999, "Unknown Error"},
};

template <typename Body>
nvmlReturn_t nvml_call(const char* name, const Body& body) {
  const Lock lock;
  if (const int error = injected_fault(name); error != 0) {
    return error;
  }
  return initializations > 0 ? body() : kUninitialized;
}

// "0000:01:00.0" or "00000000:01:00.0", the forms of the driver and of NVML. -1: no bus id of ours.
int device_at(const char* bus_id) {
  std::array<unsigned long, 3> parts = {};  // domain, bus, slot
  const char* at = bus_id;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    char* end = nullptr;
    parts[i] = std::strtoul(at, &end, 16);
    if (end == at || *end != (i < 2 ? ':' : '.')) {
      return -1;
    }
    at = end + 1;
  }
  const auto number = static_cast<int>(parts[0] << 8U | parts[1]) - 1;
  const int device = number - machine_number(0);
  return parts[2] == 0 && is_device(device) ? device : -1;
}

}  // namespace

extern "C" {

nvmlReturn_t nvmlInit_v2() {
  const Lock lock;
  if (const int error = injected_fault("nvmlInit_v2"); error != 0) {
    return error;
  }
  if (!config().driver.nvml_present) {
    return kDriverNotLoaded;
  }
  ++initializations;
  return kSuccess;
}

nvmlReturn_t nvmlShutdown() {
  return nvml_call("nvmlShutdown", [] {
    --initializations;
    return kSuccess;
  });
}

const char* nvmlErrorString(nvmlReturn_t result) {
  for (const ResultText& known : kResults) {
    if (known.result == result) {
      return known.text;
    }
  }
  return "Unknown Error";
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, nvmlDevice_t* device) {
  return nvml_call("nvmlDeviceGetHandleByPciBusId_v2", [&] {
    if (bus_id == nullptr || device == nullptr) {
      return kInvalidArgument;
    }
    const int found = device_at(bus_id);
    if (found < 0 || static_cast<std::size_t>(found) >= devices.size()) {
      return kNotFound;
    }
    nvmlDevice_st& handle = devices[static_cast<std::size_t>(found)];
    handle.device = found;
    *device = &handle;
    return kSuccess;
  });
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t* info) {
  return nvml_call("nvmlDeviceGetGpuFabricInfoV", [&] {
    if (device == nullptr || info == nullptr || !is_device(device->device)) {
      return kInvalidArgument;
    }
    if (info->version != kFabricInfoVersion) {
      return kVersionMismatch;
    }
    const DriverConfig& driver = config().driver;
    *info = {};
    info->version = kFabricInfoVersion;
    info->state = static_cast<unsigned char>(driver.fabric_state);
    if (info->state == kStateCompleted) {  // the rest says nothing before
      info->status = driver.fabric_status;
      info->cliqueId = clique_of(device->device);
      std::memcpy(info->clusterUuid, driver.cluster_uuid.data(), driver.cluster_uuid.size());
    }
    return kSuccess;
  });
}

}  // extern "C"

}  // namespace cudasim
