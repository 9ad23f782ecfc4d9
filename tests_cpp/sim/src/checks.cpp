// SPDX-License-Identifier: Apache-2.0
#include "checks.h"

#include <algorithm>
#include <cstring>

#include "state.h"

namespace cudasim {
namespace {

std::string place(const Physical& physical, std::size_t offset) {
  const Region* const region = physical.region_at(offset);
  const std::string name = region == nullptr ? physical.what : region->name;
  const std::size_t in_name = region == nullptr ? offset : offset - region->offset;
  std::string text = name + "+" + std::to_string(in_name);
  if (physical.kind == MemoryKind::kHost) return text;
  return text + " of rank " + std::to_string(physical.device);
}

std::string by_whom(const Accessor& accessor, PositionId position) {
  const std::string who = engine.slots.describe(accessor.slot, accessor.clock);
  return position == kNoPosition ? who : who + " at " + describe_position(position);
}

const char* verb(bool is_write) { return is_write ? "write" : "read"; }

/// Are two accesses that overlap completely, both strong, each in the other's scope?
bool morally_strong(const AccessRecord& a, const AccessRecord& b) {
  if (a.mask != b.mask || a.strength == Strength::kWeak || b.strength == Strength::kWeak) {
    return false;
  }
  const Strength weaker = std::min(a.strength, b.strength);
  if (weaker == Strength::kSys) return true;
  if (a.device != b.device) return false;
  return weaker == Strength::kGpu || engine.slots.same_block(a.slot, a.clock, b.slot, b.clock);
}

void report_race(const AccessRecord& now, const AccessRecord& before, const Accessor& accessor,
                 const Physical& physical, std::size_t offset) {
  const std::uint64_t key = (std::uint64_t{before.position} << 32) | now.position;
  report_once("race", key, [&] {
    const Accessor other{accessor.base, before.slot, before.clock, before.device};
    return std::string(verb(now.is_write)) + " of " + place(physical, offset) + " by " +
           by_whom(accessor, now.position) + " is unordered with the " + verb(before.is_write) +
           " by " + by_whom(other, before.position);
  });
}

/// Need `old` no longer be kept once `now` is? Whatever conflicts with `old` from here on and is
/// not ordered after it conflicts with `now` as well.
bool replaces(const AccessRecord& now, const AccessRecord& old, bool is_ordered) {
  if ((old.mask & ~now.mask) != 0 || now.strength > old.strength) return false;
  return now.is_write || (!old.is_write && is_ordered);
}

/// Where to keep a record if all places are taken: rather forget a read.
AccessRecord* victim(Cell& cell) {
  AccessRecord* chosen = &cell.records[engine.random() & 3];
  for (AccessRecord& record : cell.records) {
    if (record.is_write) continue;
    chosen = &record;
    if ((engine.random() & 1) != 0) break;
  }
  return chosen;
}

void check_order(const Accessor& accessor, const AccessRecord& now, Physical& physical,
                 std::size_t cell_index) {
  Cell& cell = physical.cells[cell_index];
  AccessRecord* place_for_it = nullptr;
  for (AccessRecord& old : cell.records) {
    if (old.clock != 0 && (old.mask & now.mask) != 0) {
      const bool is_ordered =
          old.slot == now.slot || old.clock <= value_of(accessor.base, old.slot);
      if (!is_ordered && (now.is_write || old.is_write) && !morally_strong(now, old)) {
        const auto first = static_cast<std::size_t>(__builtin_ctz(old.mask & now.mask));
        report_race(now, old, accessor, physical, cell_index * kCellBytes + first);
      }
      if (replaces(now, old, is_ordered)) old.clock = 0;
    }
    if (old.clock == 0 && place_for_it == nullptr) place_for_it = &old;
  }
  if (place_for_it == nullptr) place_for_it = victim(cell);
  *place_for_it = now;
}

/// Records the access in each cell it touches.
void record(const Accessor& accessor, const Access& access, Physical& physical, std::size_t begin,
            bool check_written) {
  const std::size_t end = begin + access.bytes;
  for (std::size_t cell = begin / kCellBytes; cell * kCellBytes < end; ++cell) {
    const std::size_t low = std::max(begin, cell * kCellBytes);
    const std::size_t high = std::min(end, (cell + 1) * kCellBytes);
    const unsigned bytes = (1u << (high - low)) - 1u;
    const auto mask = static_cast<std::uint8_t>(bytes << (low - cell * kCellBytes));
    std::uint8_t& written = physical.written[cell];
    if (access.is_write) {
      written |= mask;
    } else if (check_written && (written & mask) != mask) {
      report_once("uninit", access.position, [&] {
        return "read of memory never written: " + place(physical, low) + " by " +
               by_whom(accessor, access.position);
      });
    }
    if (!engine.config.race) continue;
    check_order(accessor,
                {accessor.slot, accessor.clock, access.position, mask, access.is_write,
                 access.strength, static_cast<std::uint8_t>(accessor.device)},
                physical, cell);
  }
}

void check_region(const Accessor& accessor, const Access& access, const Physical& physical,
                  std::size_t offset) {
  const Region* const region = physical.region_at(offset);
  if (region == nullptr || offset + access.bytes > region->offset + region->bytes) {
    report_once("oob", access.position, [&] {
      return describe(access, physical, offset) + " is outside every named part, by " +
             by_whom(accessor, access.position);
    });
    return;
  }
  const std::uint64_t allowed = access.is_write ? region->writers : region->readers;
  if (((allowed >> accessor.device) & 1) != 0) return;
  report_once("owner", access.position, [&] {
    return std::string(verb(access.is_write)) + " not allowed here: " + place(physical, offset) +
           " by " + by_whom(accessor, access.position);
  });
}

}  // namespace

std::string describe(const Access& access, const Physical& physical, std::size_t offset) {
  return std::string(verb(access.is_write)) + " of " + std::to_string(access.bytes) + " bytes at " +
         place(physical, offset);
}

bool check_access(const Accessor& accessor, const Mapping& mapping, const Access& access) {
  Physical& physical = *mapping.physical;
  const std::size_t offset = mapping.offset_of(access.address);
  if (offset + access.bytes > physical.bytes) {
    report_once("oob", access.position, [&] {
      return describe(access, physical, offset) + " goes past the end of its " +
             std::to_string(physical.bytes) + " bytes, by " + by_whom(accessor, access.position);
    });
    return false;
  }
  if (!physical.regions.empty()) check_region(accessor, access, physical, offset);
  record(accessor, access, physical, offset, engine.config.init && !physical.is_all_written);
  return true;
}

void check_copy(const Accessor& accessor, const Mapping& mapping, const Access& access) {
  record(accessor, access, *mapping.physical, mapping.offset_of(access.address), false);
}

void Physical::forget(std::size_t used) {
  const std::size_t num_cells = (std::min(used, bytes) + kCellBytes - 1) / kCellBytes;
  std::memset(cells.get(), 0, num_cells * sizeof(Cell));
  std::memset(written.get(), 0, num_cells);
  strong.clear();
}

const Region* Physical::region_at(std::size_t offset) const {
  const auto after =
      std::upper_bound(regions.begin(), regions.end(), offset,
                       [](std::size_t o, const Region& region) { return o < region.offset; });
  if (after == regions.begin()) return nullptr;
  const Region& region = *std::prev(after);
  return offset < region.offset + region.bytes ? &region : nullptr;
}

void Physical::add_region(Region region) {
  const auto at = std::lower_bound(regions.begin(), regions.end(), region.offset,
                                   [](const Region& r, std::size_t o) { return r.offset < o; });
  if (at != regions.end() && at->offset == region.offset) {
    *at = std::move(region);
  } else {
    regions.insert(at, std::move(region));
  }
}

}  // namespace cudasim
