// SPDX-License-Identifier: Apache-2.0
#include "clocks.h"

#include <algorithm>

namespace cudasim {

void VectorClock::raise(SlotId slot, ClockValue value) {
  if (slot >= values_.size()) values_.resize(std::size_t{slot} + 1, 0);
  values_[slot] = std::max(values_[slot], value);
}

void VectorClock::join(const VectorClock& other) {
  if (other.values_.size() > values_.size()) values_.resize(other.values_.size(), 0);
  for (std::size_t i = 0; i < other.values_.size(); ++i) {
    values_[i] = std::max(values_[i], other.values_[i]);
  }
}

ClockPointer joined(const ClockPointer& a, const ClockPointer& b) {
  if (b == nullptr || a == b) return a;
  if (a == nullptr) return b;
  auto both = std::make_shared<VectorClock>(*a);
  both->join(*b);
  return both;
}

ClockPointer raised(const ClockPointer& clock, SlotId slot, ClockValue value) {
  auto copy =
      clock == nullptr ? std::make_shared<VectorClock>() : std::make_shared<VectorClock>(*clock);
  copy->raise(slot, value);
  return copy;
}

}  // namespace cudasim
