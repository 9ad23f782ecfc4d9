// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

namespace fanfold::comm {

/// Raises `word` to `value`, never lowers it; release.
template <class Word>
void raise_to(std::atomic<Word>& word, Word value) noexcept {
  Word seen = word.load(std::memory_order_relaxed);
  while (seen < value && !word.compare_exchange_weak(seen, value, std::memory_order_release,
                                                     std::memory_order_relaxed)) {
  }
}

}  // namespace fanfold::comm
