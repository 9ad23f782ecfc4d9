// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a loop waits for somebody who cannot wake it.

#include <chrono>
#include <thread>

namespace fanfold::gpu {

/// First yields, then sleeps ever longer.
class Pauses {
 public:
  void next() {
    ++num_pauses_;
    if (num_pauses_ < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(are_long() ? std::chrono::microseconds(500)
                                             : std::chrono::microseconds(20));
    }
  }
  /// Long enough that a look at something else costs nothing.
  bool are_long() const noexcept { return num_pauses_ > kShortPauses; }

 private:
  static constexpr int kYields = 50;
  static constexpr int kShortPauses = 200;
  int num_pauses_ = 0;
};

}  // namespace fanfold::gpu
