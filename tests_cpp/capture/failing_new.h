// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replaces this program's operator new by one that fails when told to. Included by one file only.

#include <cstdlib>
#include <new>

namespace fanfold::testing {

/// Allocations of this thread until one fails; negative: none does.
inline thread_local int news_until_failure = -1;

}  // namespace fanfold::testing

void* operator new(std::size_t size) {
  int& left = fanfold::testing::news_until_failure;
  if (left == 0) {
    left = -1;
    throw std::bad_alloc();
  }
  if (left > 0) --left;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
