// SPDX-License-Identifier: Apache-2.0
#pragma once

// Waiting for another thread or process in a test, with an end.

#include <chrono>
#include <thread>

namespace fanfold::testing {

/// Polls `condition` until it holds; false if it does not within `limit`.
template <class Condition>
bool eventually(Condition condition, std::chrono::milliseconds limit = std::chrono::seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace fanfold::testing
