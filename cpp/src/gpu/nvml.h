// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which NVLink domain a device belongs to, as NVML tells it.

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace fanfold::gpu {

/// Devices can reach each other through fabric handles within one clique of one cluster.
struct NvlinkDomain {
  std::array<std::uint8_t, 16> cluster{};
  std::uint32_t clique = 0;

  bool operator==(const NvlinkDomain& other) const noexcept {
    return cluster == other.cluster && clique == other.clique;
  }
  /// "clique 1 of cluster 0a1b2c…".
  std::string describe() const;
};

/// What is known of a device's place in a fabric.
struct FabricState {
  std::optional<NvlinkDomain> domain;
  /// Why the device is known to be in none; empty where NVML cannot tell.
  std::string objection;
};

/// Asks NVML, where it is installed. The device is named by its PCI bus id, as NVML counts devices
/// that CUDA_VISIBLE_DEVICES hides.
FabricState fabric_state(const std::string& pci_bus_id);

}  // namespace fanfold::gpu
