// SPDX-License-Identifier: Apache-2.0
#pragma once

// Switching between stacks. The build takes switch_x86_64.cpp or switch_portable.cpp.

#include <cstddef>

namespace cudasim {

/// Where a suspended flow of control continues. Zero-initialised; prepare() or being left by
/// switch_stack() fills it.
struct Continuation {
  void* state = nullptr;
};

/// Makes `continuation` start `entry` on that stack. `entry` must not return.
void prepare(Continuation& continuation, char* stack, std::size_t bytes, void (*entry)());

/// Continues at `to`; the caller goes on when somebody switches to `from`.
void switch_stack(Continuation& from, Continuation& to);

}  // namespace cudasim
