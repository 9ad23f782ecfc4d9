// SPDX-License-Identifier: Apache-2.0
#include <ucontext.h>

#include "switch.h"

namespace cudasim {
namespace {

/// Kept as long as the fiber, which is never freed.
ucontext_t* context_of(Continuation& continuation) {
  if (continuation.state == nullptr) continuation.state = new ucontext_t{};
  return static_cast<ucontext_t*>(continuation.state);
}

}  // namespace

void prepare(Continuation& continuation, char* stack, std::size_t bytes, void (*entry)()) {
  ucontext_t* const context = context_of(continuation);
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
}

void switch_stack(Continuation& from, Continuation& to) {
  swapcontext(context_of(from), context_of(to));
}

}  // namespace cudasim
