// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "switch.h"

#if !defined(__x86_64__)
#error "configure with -DCUDASIM_PORTABLE_SWITCH=ON on this processor"
#endif

// Saves what the ABI asks a callee to keep, and exchanges the stacks. The swapcontext of the C
// library costs two system calls instead.
asm(R"(
.text
.globl cudasim_switch_stack
.hidden cudasim_switch_stack
.type cudasim_switch_stack,@function
cudasim_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cudasim_switch_stack,.-cudasim_switch_stack
)");
extern "C" void cudasim_switch_stack(void** save, void* load);

namespace cudasim {

void prepare(Continuation& continuation, char* stack, std::size_t bytes, void (*entry)()) {
  constexpr int kNumRegisters = 6;
  auto* top = reinterpret_cast<std::uint64_t*>(stack + bytes);
  *--top = 0;  // entry's return address; also aligns the stack as after a call
  *--top = reinterpret_cast<std::uint64_t>(entry);
  for (int i = 0; i < kNumRegisters; ++i) *--top = 0;
  continuation.state = top;
}

void switch_stack(Continuation& from, Continuation& to) {
  cudasim_switch_stack(&from.state, to.state);
}

}  // namespace cudasim
