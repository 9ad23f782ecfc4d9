// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the simulated driver and the simulated NVML answer: part of Config, and read at each call.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cudasim {

/// The machine that the driver and NVML describe.
struct DriverConfig {
  /// Number, on the whole machine, of this process's device 0. It enters bus ids and UUIDs, so
  /// processes that each see one device can have different ones.
  int first_device = 0;
  /// Which kinds of shareable handles the devices have.
  bool fd_handles = true;
  bool fabric_handles = true;
  /// Whether an IMEX channel is there; without one, fabric handles are refused.
  bool imex_channel = true;
  /// Whether a device can reach the memory of another one of this process.
  bool peer_access = true;
  /// Bytes that each device has for cuMemCreate; 0 for no limit.
  std::size_t memory_bytes = 0;
  /// Whether new memory is filled with 0xCD, so that nobody relies on zeros. Costs time and memory.
  bool fill_new_memory = true;
  /// User whose fabric handles are accepted, and who marks those exported; -1 for the real one.
  std::int64_t uid = -1;

  /// Whether NVML is there and the driver loaded.
  bool nvml_present = true;
  /// The fabric that the devices belong to: a cluster, and a clique for each device (0 for those
  /// not named). Fabric handles are good within one clique of one cluster only.
  std::array<unsigned char, 16> cluster_uuid = {0xfa, 0xb1};
  std::vector<std::uint32_t> cliques;
  /// nvmlGpuFabricState_t: 0 not supported, 1 not started, 2 in progress, 3 completed.
  unsigned fabric_state = 3;
  /// nvmlReturn_t of the fabric's registration, valid in state 3.
  int fabric_status = 0;
};

}  // namespace cudasim
