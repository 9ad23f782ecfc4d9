// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shadow memory: what was written, by whom it was last accessed, and what its strong locations
// published. One shadow per physical memory, so that all its mappings are one memory to the checks.

#include <array>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clocks.h"
#include "device_memory.h"
#include "positions.h"

namespace cudasim {

/// How strong an access is; the order matters.
enum class Strength : std::uint8_t { kWeak, kCta, kGpu, kSys };
inline Strength strength_of(Scope scope) {
  return static_cast<Strength>(static_cast<int>(scope) + 1);
}

/// One access to an aligned piece of 8 bytes. A clock of 0 is an empty record.
struct AccessRecord {
  SlotId slot;
  ClockValue clock;
  PositionId position;
  std::uint8_t mask;  // bytes
  bool is_write;
  Strength strength;
  std::uint8_t device;
};
struct Cell {
  AccessRecord records[4];
};
constexpr std::size_t kCellBytes = 8;

/// A named part of an allocation (annotate()).
struct Region {
  std::size_t offset;
  std::size_t bytes;
  std::string name;
  std::uint64_t writers;
  std::uint64_t readers;
};

/// What is known of the strong accesses to one location.
struct StrongLocation {
  std::vector<Release> releases;  // what an observer of the present value learns
  struct Older {
    std::uint64_t value;
    std::vector<Release> releases;
    SlotId next_slot;  // who replaced the value
    ClockValue next_clock;
  };
  std::deque<Older> history;                     // newest last
  std::size_t num_forgotten = 0;                 // values before history's first
  std::unordered_map<SlotId, std::size_t> seen;  // by a thread: number of values before it
  std::uint64_t last_value = 0;                  // that a kernel left, in host memory
  bool has_last_value = false;
};

/// Zeroed lazily by the system, so that the shadow of untouched memory costs nothing.
template <class T>
class ZeroedArray {
 public:
  explicit ZeroedArray(std::size_t count)
      : data_(static_cast<T*>(std::calloc(count, sizeof(T))), &std::free) {}
  T& operator[](std::size_t i) { return data_.get()[i]; }
  const T& operator[](std::size_t i) const { return data_.get()[i]; }
  T* get() { return data_.get(); }

 private:
  std::unique_ptr<T, void (*)(void*)> data_;
};

struct Physical {
  Physical(std::size_t size, int of_device, MemoryKind of_kind, const char* name)
      : bytes(size),
        device(of_device),
        kind(of_kind),
        what(name),
        cells((size + kCellBytes - 1) / kCellBytes),
        written((size + kCellBytes - 1) / kCellBytes) {}

  std::size_t bytes;
  int device;
  MemoryKind kind;
  const char* what;
  int references = 1;
  bool is_all_written = false;  // others write it unseen
  ZeroedArray<Cell> cells;
  ZeroedArray<std::uint8_t> written;  // a bit for each byte
  std::vector<Region> regions;        // by offset
  std::unordered_map<std::size_t, StrongLocation> strong;

  /// Forgets accesses, writes and strong locations of the first `used` bytes.
  void forget(std::size_t used);
  const Region* region_at(std::size_t offset) const;
  void add_region(Region region);
};

struct Mapping {
  std::uintptr_t address;
  std::size_t bytes;
  Physical* physical;
  std::size_t offset;     // in the physical memory
  std::uint64_t devices;  // that may access it
  bool is_allocation = false;

  std::size_t offset_of(std::uintptr_t a) const { return a - address + offset; }
};

// All addresses of devices lie in one reserved range, so that one compare rejects all others.
constexpr std::uintptr_t kNoArena = std::uintptr_t{1} << 63;  // no user address is beyond
extern std::uintptr_t arena_begin;
constexpr std::size_t kArenaBytes = std::size_t{64} << 30;
inline bool is_in_arena(std::uintptr_t address) { return address - arena_begin < kArenaBytes; }
inline bool is_in_arena(const void* address) {
  return is_in_arena(reinterpret_cast<std::uintptr_t>(address));
}
Mapping* find_mapping(std::uintptr_t address);

/// Addresses of devices are numbers first: space is reserved before memory is there.
inline void* to_pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}
inline Mapping* find_mapping(const void* address) {
  return find_mapping(reinterpret_cast<std::uintptr_t>(address));
}

/// Reserved and readable memory of a block, known to the address space; never freed.
Mapping* create_shared_memory(std::size_t bytes);

}  // namespace cudasim
