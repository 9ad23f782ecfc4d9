// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which launch used which slots of the vector clocks, and when: so that a slot and a clock value
// name a kernel, a block and a thread.

#include <memory>
#include <string>
#include <vector>

#include "clocks.h"

namespace cudasim {

/// One launch (or copy) as reports name it.
struct LaunchName {
  std::string kernel;  // empty: no kernel, but `action`
  int device = 0;
  std::uint32_t threads_per_block = 1;
  const char* action = "kernel";
};

/// Slots that one launch uses at a time. Later launches that are ordered after all of it reuse
/// them.
class SlotRange {
 public:
  SlotId first() const { return first_; }
  /// Where the clocks of the launch that has the range start.
  ClockValue start() const { return uses_.back().start; }

 private:
  friend class Slots;
  struct Use {
    ClockValue start;
    LaunchName name;
  };
  SlotId first_ = 0;
  std::uint32_t count_ = 0;
  ClockValue end_ = 0;  // known, in slot first_, to those ordered after the last use
  bool in_use_ = false;
  std::vector<Use> uses_;
};

class Slots {
 public:
  /// Slots for `count` threads of a launch that starts knowing `start`.
  SlotRange* take(std::uint32_t count, const ClockPointer& start, LaunchName name);
  /// Ends the use; `last` is the largest clock value of its threads. Whoever is ordered after the
  /// launch must be given value end_of() in the range's first slot.
  void give_back(SlotRange* range, ClockValue last);
  static ClockValue end_of(const SlotRange* range) { return range->end_; }

  /// "rank 0 kernel dispatch block 1 thread 81".
  std::string describe(SlotId slot, ClockValue clock) const;
  /// Are both threads of one block of one launch?
  bool same_block(SlotId slot_a, ClockValue clock_a, SlotId slot_b, ClockValue clock_b) const;

 private:
  const SlotRange* range_of(SlotId slot) const;
  static const SlotRange::Use* use_of(const SlotRange& range, ClockValue clock);

  std::vector<std::unique_ptr<SlotRange>> ranges_;  // by first slot
  SlotId next_ = kHostSlot + 1;
};

}  // namespace cudasim
