// SPDX-License-Identifier: Apache-2.0
#include "base/keep_forever.h"

#include <mutex>
#include <utility>
#include <vector>

namespace fanfold::base {

void keep_forever(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  // Never destroyed, and reachable, so that no checker takes it for a leak.
  static auto& kept = *new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace fanfold::base
