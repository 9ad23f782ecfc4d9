// SPDX-License-Identifier: Apache-2.0
#include "clocks.h"

#include <algorithm>
#include <memory>

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

namespace {

/// The threads of a kernel, one after the other, join the same two clocks.
struct LastJoin {
  std::weak_ptr<const VectorClock> a;
  std::weak_ptr<const VectorClock> b;
  std::weak_ptr<const VectorClock> both;
};

}  // namespace

ClockPointer joined(const ClockPointer& a, const ClockPointer& b) {
  static LastJoin last;  // guarded by the engine's mutex, as all clocks
  if (b == nullptr || a == b) return a;
  if (a == nullptr) return b;
  if (a == last.a.lock() && b == last.b.lock()) {
    if (ClockPointer both = last.both.lock()) return both;
  }
  auto both = std::make_shared<VectorClock>(*a);
  both->join(*b);
  last = {a, b, both};
  return both;
}

ClockPointer raised(const ClockPointer& clock, SlotId slot, ClockValue value) {
  auto copy =
      clock == nullptr ? std::make_shared<VectorClock>() : std::make_shared<VectorClock>(*clock);
  copy->raise(slot, value);
  return copy;
}

}  // namespace cudasim
