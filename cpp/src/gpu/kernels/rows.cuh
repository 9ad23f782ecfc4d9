// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies of rows by warps. The work is cut into segments, so that one long row occupies all warps
// of a block; what is loaded once goes to all places that want it.

#include <cstddef>
#include <cstdint>

#include "gpu/device/device.cuh"
#include "gpu/kernels/faults.cuh"

namespace fanfold::gpu {

/// Of a row, for one warp: four 16-byte loads a lane, all in flight at once.
constexpr std::int64_t kSegmentBytes = 2048;

__host__ __device__ constexpr int segments_of(std::int64_t row_bytes) {
  return static_cast<int>((row_bytes + kSegmentBytes - 1) / kSegmentBytes);
}
__device__ inline int segment_bytes(std::int64_t row_bytes, int segment) {
  return static_cast<int>(min(kSegmentBytes, row_bytes - segment * kSegmentBytes));
}

// ld16 and not ld16_stream: the kernel before may still write rows when this one starts.
__device__ inline uint4 load_unit(const uint4* from) { return ld16(from); }
__device__ inline void store_unit(uint4* to, uint4 value) { st16_stream(to, value); }
template <typename Unit>
__device__ inline Unit load_unit(const Unit* from) {
  return *from;
}
template <typename Unit>
__device__ inline void store_unit(Unit* to, Unit value) {
  *to = value;
}

template <typename Unit>
__device__ inline void copy_units(const std::byte* from, std::byte* to, int num_places, int bytes) {
  constexpr int kUnitBytes = sizeof(Unit);
  constexpr int kLoads = 4;
  constexpr int kStep = 32 * kUnitBytes;
  const int lane_begin = static_cast<int>(lane_id()) * kUnitBytes;
  for (int first = 0; first < bytes; first += kLoads * kStep) {
    const int begin = first + lane_begin;
    Unit values[kLoads] = {};
    for (int i = 0; i < kLoads; ++i) {
      const int at = begin + i * kStep;
      if (at < bytes) values[i] = load_unit(reinterpret_cast<const Unit*>(from + at));
    }
    for (int place = 0; place < num_places; ++place) {
      const auto address = __shfl_sync(0xffffffffU, reinterpret_cast<std::uintptr_t>(to), place);
      // NOLINTNEXTLINE(performance-no-int-to-ptr): shuffles take numbers only
      auto* const target = reinterpret_cast<std::byte*>(address);
      for (int i = 0; i < kLoads; ++i) {
        const int at = begin + i * kStep;
        if (at < bytes) store_unit(reinterpret_cast<Unit*>(target + at), values[i]);
      }
    }
  }
}

/// Copies `bytes` bytes to at most 32 places; lane n has the nth in `to`. All lanes of a warp call
/// it. `unit` (16, 8, 4, 2 or 1) divides all addresses and `bytes`.
__device__ inline void copy_segment(const std::byte* from, std::byte* to, int num_places, int bytes,
                                    int unit) {
  if (has(Fault::kDropsLastUnit)) bytes -= unit;
  switch (unit) {
    case 16:
      return copy_units<uint4>(from, to, num_places, bytes);
    case 8:
      return copy_units<std::uint64_t>(from, to, num_places, bytes);
    case 4:
      return copy_units<std::uint32_t>(from, to, num_places, bytes);
    case 2:
      return copy_units<std::uint16_t>(from, to, num_places, bytes);
    default:
      return copy_units<std::uint8_t>(from, to, num_places, bytes);
  }
}

}  // namespace fanfold::gpu
