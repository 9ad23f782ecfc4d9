// SPDX-License-Identifier: Apache-2.0
#pragma once

// Vector clocks: what each thread of execution knows of every other. A slot is one thread's place
// in them.

#include <cstdint>
#include <memory>
#include <vector>

#include "cudasim/operations.h"

namespace cudasim {

using SlotId = std::uint32_t;
using ClockValue = std::uint32_t;

/// The slot of all host threads together.
constexpr SlotId kHostSlot = 0;

class VectorClock {
 public:
  ClockValue get(SlotId slot) const { return slot < values_.size() ? values_[slot] : 0; }

  /// Raises the value of one slot.
  void raise(SlotId slot, ClockValue value);
  void join(const VectorClock& other);

 private:
  std::vector<ClockValue> values_;
};

/// Shared by all threads that learnt the same, as those that met in a barrier; null knows nothing.
using ClockPointer = std::shared_ptr<const VectorClock>;

/// Both together; either may be null.
ClockPointer joined(const ClockPointer& a, const ClockPointer& b);
ClockPointer raised(const ClockPointer& clock, SlotId slot, ClockValue value);
inline ClockValue value_of(const ClockPointer& clock, SlotId slot) {
  return clock == nullptr ? 0 : clock->get(slot);
}

/// What a release publishes to those who observe it, and whom it may reach.
struct Release {
  ClockPointer base;
  SlotId slot = 0;
  ClockValue clock = 0;
  Scope scope = Scope::kCta;
  int device = 0;
  std::uint64_t block = 0;
};

}  // namespace cudasim
