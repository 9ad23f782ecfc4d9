// SPDX-License-Identifier: Apache-2.0
#include "gpu/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/format.h"
#include "gpu/platform.h"

namespace fanfold::gpu {
namespace {

// Of nvml.h, which comes with the driver's packages only.
using Result = int;
constexpr Result kSuccess = 0;
using Device = struct NvmlDevice*;
constexpr unsigned char kStateCompleted = 3;
/// nvmlGpuFabricInfo_v2_t.
struct FabricInfo {
  unsigned int version;
  unsigned char cluster_uuid[16];
  Result status;
  unsigned int clique_id;
  unsigned char state;
  unsigned int health_mask;
};
constexpr unsigned int kFabricInfoVersion = sizeof(FabricInfo) | (2U << 24U);

/// NVML, opened and started. Absent functions leave it not ok.
class Nvml {
 public:
  Nvml() : library_(::dlopen(kNvmlLibrary, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    find("nvmlInit_v2", init_);
    find("nvmlShutdown", shutdown_);
    find("nvmlDeviceGetHandleByPciBusId_v2", device_by_bus_id_);
    find("nvmlDeviceGetGpuFabricInfoV", fabric_info_);
    is_started_ = init_ != nullptr && shutdown_ != nullptr && init_() == kSuccess;
  }
  ~Nvml() {
    if (is_started_) shutdown_();
    if (library_ != nullptr) ::dlclose(library_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// False if NVML cannot tell.
  bool fabric_info(const std::string& pci_bus_id, FabricInfo* info) const {
    Device device = nullptr;
    if (!is_started_ || device_by_bus_id_ == nullptr || fabric_info_ == nullptr) return false;
    if (device_by_bus_id_(pci_bus_id.c_str(), &device) != kSuccess) return false;
    *info = {};
    info->version = kFabricInfoVersion;
    return fabric_info_(device, info) == kSuccess;
  }

 private:
  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library_, name));
  }

  void* library_;
  Result (*init_)() = nullptr;
  Result (*shutdown_)() = nullptr;
  Result (*device_by_bus_id_)(const char*, Device*) = nullptr;
  Result (*fabric_info_)(Device, FabricInfo*) = nullptr;
  bool is_started_ = false;
};

}  // namespace

std::string NvlinkDomain::describe() const {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = base::str("clique ", clique, " of cluster ");
  for (const std::uint8_t byte : cluster) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 0xfU];
  }
  return text;
}

FabricState fabric_state(const std::string& pci_bus_id) {
  const Nvml nvml;
  FabricInfo info{};
  if (!nvml.fabric_info(pci_bus_id, &info)) return {};
  if (info.state != kStateCompleted || info.status != kSuccess) {
    return {std::nullopt,
            base::str("NVML says that device ", pci_bus_id, " has not joined a fabric (state ",
                      static_cast<int>(info.state), ", status ", info.status, ")")};
  }
  const bool is_zero = std::all_of(std::begin(info.cluster_uuid), std::end(info.cluster_uuid),
                                   [](unsigned char byte) { return byte == 0; });
  if (is_zero) {
    return {std::nullopt,
            base::str("NVML says that device ", pci_bus_id, " belongs to no NVLink cluster")};
  }
  NvlinkDomain domain;
  std::copy(std::begin(info.cluster_uuid), std::end(info.cluster_uuid), domain.cluster.begin());
  domain.clique = info.clique_id;
  return {domain, ""};
}

}  // namespace fanfold::gpu
