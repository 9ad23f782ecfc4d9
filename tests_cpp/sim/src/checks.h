// SPDX-License-Identifier: Apache-2.0
#pragma once

// The checks of one access: bounds, ownership, written before read, ordered after what it conflicts
// with.

#include "shadow.h"

namespace cudasim {

/// Who makes the access, and what it knows.
struct Accessor {
  const ClockPointer& base;
  SlotId slot;
  ClockValue clock;
  int device;
};

struct Access {
  std::uintptr_t address;
  std::size_t bytes;
  bool is_write;
  Strength strength;
  PositionId position;
};

/// Reports what is wrong with an access that begins in `mapping`, and records it. Returns false,
/// and records nothing, if it goes past the end of the memory.
bool check_access(const Accessor& accessor, const Mapping& mapping, const Access& access);

/// The same for the part of a copy that lies in one mapping. Copies may span named parts and
/// unwritten bytes: whole work areas are cleared and read back.
void check_copy(const Accessor& accessor, const Mapping& mapping, const Access& access);

/// "write of 4 bytes at count+8 of rank 2".
std::string describe(const Access& access, const Physical& physical, std::size_t offset);

}  // namespace cudasim
