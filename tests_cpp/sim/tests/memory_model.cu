// SPDX-License-Identifier: Apache-2.0
#include "memory_model.h"

#include "cudasim/device.h"

namespace cudasim {
namespace {

unsigned load(const unsigned* word, Order order, CUDASIM_LOC) {
  return static_cast<unsigned>(op_load(word, 4, order, Scope::kSys, loc));
}
void store(unsigned* word, unsigned value, Order order, CUDASIM_LOC) {
  op_store(word, value, 4, order, Scope::kSys, loc);
}
unsigned add(unsigned* word, unsigned value, Order order, CUDASIM_LOC) {
  return rmw<unsigned>(word, value, 0, Rmw::kAdd, order, Scope::kSys, loc);
}

constexpr unsigned kManyPolls = 3000;

void send(const Exchange& x, Pattern pattern) {
  unsigned* const flag = x.flags;
  *x.data = 42;
  switch (pattern) {
    case Pattern::kReleaseThenRelaxed:
      store(flag, 1, Order::kRelease);
      store(flag, 2, Order::kRelaxed);
      break;
    case Pattern::kLongPoll:
      for (unsigned i = 1; i <= kManyPolls; ++i) store(flag, i, Order::kRelease);
      break;
    case Pattern::kMixedSizes:
      op_store(flag, 0x100000001ull, 8, Order::kRelease, Scope::kSys, CUDASIM_HERE);
      break;
    case Pattern::kChainOfAdds:
      add(flag, 1, Order::kRelease);
      break;
    case Pattern::kFailedCompareIsALoad:
      __threadfence_system();
      rmw<unsigned>(flag, 7, 5, Rmw::kCompareExchange, Order::kAcqRel, Scope::kSys, CUDASIM_HERE);
      store(flag + 1, 1, Order::kRelaxed);  // only this one is published by the fence
      break;
    case Pattern::kStrongAfterPlainInit:
      *flag = 3;
      store(flag, 1, Order::kRelaxed);
      break;
    default:
      store(flag, 1, Order::kRelease);
  }
}

void receive(const Exchange& x, Pattern pattern) {
  const unsigned* const flag = x.flags;
  switch (pattern) {
    case Pattern::kReleaseThenRelaxed:
      while (load(flag, Order::kAcquire) != 2) {
      }
      break;
    case Pattern::kRelaxedThenAcquire:
      while (load(flag, Order::kRelaxed) == 0) {
      }
      load(flag, Order::kAcquire);
      break;
    case Pattern::kSmallFenceThenLarge:
      while (load(flag, Order::kRelaxed) == 0) {
      }
      __threadfence_block();
      __threadfence_system();
      break;
    case Pattern::kLongPoll:
      while (load(flag, Order::kRelaxed) != kManyPolls) load(flag + 2, Order::kRelaxed);
      __threadfence_system();
      break;
    case Pattern::kChainOfAdds:
      while (load(flag, Order::kAcquire) != 2) {
      }
      break;
    case Pattern::kStrongAfterPlainInit:
      while (load(flag, Order::kRelaxed) != 1) {
      }
      return;
    case Pattern::kFailedCompareIsALoad:
      while (load(flag + 1, Order::kRelaxed) == 0) {
      }
      load(flag, Order::kAcquire);
      break;
    default:
      while (load(flag, Order::kAcquire) == 0) {
      }
  }
  *x.out = *x.data;
}

/// A third thread that hands the value on, or releases to another flag.
void assist(const Exchange& x, Pattern pattern) {
  if (pattern == Pattern::kChainOfAdds) {
    while (load(x.flags, Order::kRelaxed) == 0) {
    }
    add(x.flags, 1, Order::kRelaxed);
  } else {
    for (unsigned i = 1; i <= kManyPolls; ++i) store(x.flags + 2, i, Order::kRelease);
  }
}

__global__ void exchange_kernel(const __grid_constant__ Exchange x, Pattern pattern, int role) {
  if (role == 0) send(x, pattern);
  if (role == 1) receive(x, pattern);
  if (role == 2) assist(x, pattern);
}

__global__ void block_scope_kernel(unsigned* word) {
  rmw<unsigned>(word, 1, 0, Rmw::kAdd, Order::kRelaxed, Scope::kCta, CUDASIM_HERE);
}

}  // namespace

cudaError_t exchange(cudaStream_t stream, const Exchange& x, Pattern pattern, int role) {
  return launch_kernel({"exchange", 1, 1, 0, stream, false, nullptr}, exchange_kernel, x, pattern,
                       role);
}

cudaError_t block_scope(cudaStream_t stream, unsigned* word, int blocks, int threads) {
  return launch_kernel({"block_scope", dim3(static_cast<unsigned>(blocks)),
                        dim3(static_cast<unsigned>(threads)), 0, stream, false, nullptr},
                       block_scope_kernel, word);
}

}  // namespace cudasim
