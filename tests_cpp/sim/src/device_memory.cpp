// SPDX-License-Identifier: Apache-2.0
#include "device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "engine.h"
#include "shadow.h"

namespace cudasim {

std::uintptr_t arena_begin = kNoArena;

namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

/// What a fresh allocation holds, so that nobody relies on zeros.
constexpr int kFreshByte = 0xcd;

struct AddressSpace {
  Mapping** pages = nullptr;  // one entry for each page of the arena
  std::uintptr_t top = 0;     // nothing was handed out from here on
  std::multimap<std::size_t, std::uintptr_t> holes;
  std::map<std::uintptr_t, Mapping*> mappings;
};

AddressSpace& space() {
  static AddressSpace* the_space = [] {
    auto* created = new AddressSpace;  // outlives static destructors of tests
    void* const arena = mmap(nullptr, kArenaBytes, PROT_NONE, kReserved, -1, 0);
    void* const pages = mmap(nullptr, kArenaBytes / kPageBytes * sizeof(Mapping*),
                             PROT_READ | PROT_WRITE, kReserved, -1, 0);
    if (arena == MAP_FAILED || pages == MAP_FAILED) {
      std::fputs("cudasim: no address space for the devices' memory\n", stderr);
      std::abort();
    }
    arena_begin = reinterpret_cast<std::uintptr_t>(arena);
    created->pages = static_cast<Mapping**>(pages);
    created->top = arena_begin + kPageBytes;
    return created;
  }();
  return *the_space;
}

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

void set_pages(const Mapping& mapping, Mapping* value) {
  const std::size_t first = (mapping.address - arena_begin) / kPageBytes;
  std::fill_n(space().pages + first, mapping.bytes / kPageBytes, value);
}

/// Mappings that lie in the range.
template <class F>
void for_each_mapping(std::uintptr_t address, std::size_t bytes, F&& f) {
  auto it = space().mappings.lower_bound(address);
  while (it != space().mappings.end() && it->first < address + bytes) {
    Mapping* const mapping = it->second;
    ++it;  // f may erase the mapping
    f(mapping);
  }
}

/// Ordinary memory behind new addresses, with a shadow of its own; null if there is none.
Mapping* allocate(std::size_t bytes, int device, MemoryKind kind, const char* what) {
  const std::size_t size = whole_pages(std::max<std::size_t>(bytes, 1));
  const std::uintptr_t address = reserve_addresses(size, kPageBytes);
  if (address == 0) return nullptr;
  void* const memory = mmap(to_pointer(address), size, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (memory == MAP_FAILED) {
    release_addresses(address, size);
    return nullptr;
  }
  auto* const physical = new Physical(bytes, device, kind, what);
  map_addresses(address, size, physical, 0, ~std::uint64_t{0});
  drop_reference(physical);
  Mapping* const mapping = find_mapping(address);
  mapping->is_allocation = true;
  return mapping;
}

bool free_allocation(void* address, MemoryKind kind) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const Mapping* const mapping = find_mapping(begin);
  if (mapping == nullptr || mapping->address != begin) return false;
  if (!mapping->is_allocation || mapping->physical->kind != kind) return false;
  const std::size_t bytes = mapping->bytes;
  unmap_addresses(begin, bytes);
  release_addresses(begin, bytes);
  return true;
}

}  // namespace

Mapping* find_mapping(std::uintptr_t address) {
  return is_in_arena(address) ? space().pages[(address - arena_begin) / kPageBytes] : nullptr;
}

Physical* create_physical(std::size_t bytes, int device, const char* what) {
  auto* const physical = new Physical(bytes, device, MemoryKind::kDevice, what);
  physical->is_all_written = config().multiprocess;
  return physical;
}

void add_reference(Physical* physical) { ++physical->references; }

void drop_reference(Physical* physical) {
  if (--physical->references == 0) delete physical;
}

std::uintptr_t reserve_addresses(std::size_t bytes, std::size_t alignment) {
  AddressSpace& all = space();
  const std::size_t size = whole_pages(bytes);
  const std::uintptr_t align = std::max(alignment, kPageBytes);
  const std::uintptr_t fresh = (all.top + align - 1) / align * align;
  // Old addresses are used only when there are no new ones, so that a use after free is seen. A
  // page of nothing lies between neighbours.
  if (size <= kArenaBytes && fresh + size + kPageBytes <= arena_begin + kArenaBytes) {
    all.top = fresh + size + kPageBytes;
    return fresh;
  }
  for (auto it = all.holes.lower_bound(size); it != all.holes.end() && it->first == size; ++it) {
    if (it->second % align != 0) continue;
    const std::uintptr_t address = it->second;
    all.holes.erase(it);
    return address;
  }
  return 0;
}

void release_addresses(std::uintptr_t address, std::size_t bytes) {
  const std::size_t size = whole_pages(bytes);
  if (mmap(to_pointer(address), size, PROT_NONE, kReserved | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return;  // the system has no more mappings to give: the space stays as it is, and unused
  }
  space().holes.emplace(size, address);
}

void map_addresses(std::uintptr_t address, std::size_t bytes, Physical* physical,
                   std::size_t offset, std::uint64_t devices) {
  auto* const mapping = new Mapping{address, bytes, physical, offset, devices, false};
  add_reference(physical);
  space().mappings[address] = mapping;
  set_pages(*mapping, mapping);
}

void allow_access(std::uintptr_t address, std::size_t bytes, std::uint64_t devices) {
  for_each_mapping(address, bytes, [&](Mapping* mapping) { mapping->devices = devices; });
}

void unmap_addresses(std::uintptr_t address, std::size_t bytes) {
  for_each_mapping(address, bytes, [](Mapping* mapping) {
    set_pages(*mapping, nullptr);
    space().mappings.erase(mapping->address);
    drop_reference(mapping->physical);
    delete mapping;
  });
}

bool is_device_address(const void* address) {
  const Mapping* const mapping = find_mapping(address);
  return mapping != nullptr && mapping->physical->kind == MemoryKind::kDevice;
}

int device_of(const void* address) {
  return is_device_address(address) ? find_mapping(address)->physical->device : -1;
}

void* allocate_device(std::size_t bytes, int device, const char* what) {
  const Mapping* const mapping = allocate(bytes, device, MemoryKind::kDevice, what);
  if (mapping == nullptr) return nullptr;
  auto* const memory = to_pointer(mapping->address);
  std::memset(memory, kFreshByte, mapping->bytes);
  ++counters().allocations;
  return memory;
}

void* allocate_host(std::size_t bytes) {
  const Mapping* const mapping = allocate(bytes, 0, MemoryKind::kHost, "host memory");
  if (mapping == nullptr) return nullptr;
  mapping->physical->is_all_written = true;
  ++counters().host_allocations;
  return to_pointer(mapping->address);
}

bool free_device(void* address) {
  if (!free_allocation(address, MemoryKind::kDevice)) return false;
  --counters().allocations;
  return true;
}

bool free_host(void* address) {
  if (!free_allocation(address, MemoryKind::kHost)) return false;
  --counters().host_allocations;
  return true;
}

Extent extent_of(const void* address) {
  const Mapping* const mapping = find_mapping(address);
  if (mapping == nullptr) return {};
  const Physical& physical = *mapping->physical;
  return {mapping->address, std::min(mapping->bytes, physical.bytes - mapping->offset),
          physical.device, physical.kind};
}

Mapping* create_shared_memory(std::size_t bytes) {
  return allocate(bytes, 0, MemoryKind::kShared, "shared memory");
}

}  // namespace cudasim
