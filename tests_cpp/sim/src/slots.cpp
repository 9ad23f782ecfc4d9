// SPDX-License-Identifier: Apache-2.0
#include "slots.h"

#include <algorithm>
#include <utility>

#include "engine.h"

namespace cudasim {

SlotRange* Slots::take(std::uint32_t count, const ClockPointer& start, LaunchName name) {
  SlotRange* best = nullptr;
  for (const auto& range : ranges_) {
    // A launch that is not ordered after the last use would look as if it were.
    const bool is_ordered = !config().race || value_of(start, range->first_) >= range->end_;
    if (range->in_use_ || range->count_ < count || !is_ordered) continue;
    if (best == nullptr || range->count_ < best->count_) best = range.get();
  }
  if (best == nullptr) {
    ranges_.push_back(std::make_unique<SlotRange>());
    best = ranges_.back().get();
    best->first_ = next_;
    best->count_ = count;
    next_ += count;
  }
  best->in_use_ = true;
  best->uses_.push_back({best->end_ + 1, std::move(name)});
  return best;
}

void Slots::give_back(SlotRange* range, ClockValue last) {
  range->in_use_ = false;
  range->end_ = std::max(last, range->start()) + 1;
}

std::string Slots::describe(SlotId slot, ClockValue clock) const {
  if (slot == kHostSlot) return "the host";
  const SlotRange* range = range_of(slot);
  const SlotRange::Use* use = range == nullptr ? nullptr : use_of(*range, clock);
  if (use == nullptr) return "an unknown thread";
  const std::string rank = "rank " + std::to_string(use->name.device);
  if (use->name.kernel.empty()) return std::string(use->name.action) + " on " + rank;
  const std::uint32_t index = slot - range->first_;
  return rank + " kernel " + use->name.kernel + " block " +
         std::to_string(index / use->name.threads_per_block) + " thread " +
         std::to_string(index % use->name.threads_per_block);
}

bool Slots::same_block(SlotId slot_a, ClockValue clock_a, SlotId slot_b, ClockValue clock_b) const {
  const SlotRange* range = range_of(slot_a);
  if (range == nullptr || range != range_of(slot_b)) return false;
  const SlotRange::Use* use = use_of(*range, clock_a);
  if (use == nullptr || use != use_of(*range, clock_b)) return false;
  return (slot_a - range->first_) / use->name.threads_per_block ==
         (slot_b - range->first_) / use->name.threads_per_block;
}

const SlotRange* Slots::range_of(SlotId slot) const {
  const auto after = std::upper_bound(
      ranges_.begin(), ranges_.end(), slot,
      [](SlotId s, const std::unique_ptr<SlotRange>& range) { return s < range->first_; });
  return after == ranges_.begin() ? nullptr : std::prev(after)->get();
}

const SlotRange::Use* Slots::use_of(const SlotRange& range, ClockValue clock) {
  const auto after =
      std::upper_bound(range.uses_.begin(), range.uses_.end(), clock,
                       [](ClockValue c, const SlotRange::Use& use) { return c < use.start; });
  return after == range.uses_.begin() ? nullptr : &*std::prev(after);
}

}  // namespace cudasim
