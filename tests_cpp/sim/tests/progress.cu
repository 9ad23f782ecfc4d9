// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include "cudasim/device.h"

namespace cudasim {
namespace {

unsigned look(const unsigned* word, CUDASIM_LOC) {
  return static_cast<unsigned>(op_load(word, 4, Order::kAcquire, Scope::kSys, loc));
}

__device__ bool is_set(unsigned* words, Wait how, int* shared) {
  switch (how) {
    case Wait::kLoad:
      return look(words) != 0;
    case Wait::kTwoWords:
      return look(words) != 0 && look(words + 1) != 0;
    case Wait::kSleep:
      __nanosleep(100);
      return look(words) != 0;
    case Wait::kCompareSwap:
      return atomicCAS(words + 2, 1u, 2u) == 1;
    case Wait::kBarrierLoop: {
      if (threadIdx.x == 0) *shared = static_cast<int>(look(words));
      __syncthreads();
      const bool result = *shared != 0;
      __syncthreads();
      return result;
    }
    default:
      return __all_sync(~0u, look(words + threadIdx.x % 2) != 0) != 0;
  }
}

__global__ void wait_kernel(unsigned* words, int* out, Wait how, std::uint64_t timeout_ns) {
  static const char kKey = 0;
  auto* const shared = static_cast<int*>(op_static_shared(&kKey, sizeof(int), alignof(int)));
  const std::uint64_t begin_ns = op_globaltimer();
  bool is_late = false;
  while (!is_late && !is_set(words, how, shared)) {
    is_late = timeout_ns != 0 && op_globaltimer() - begin_ns > timeout_ns;
    if (how == Wait::kBarrierLoop || how == Wait::kVoteLoop) {
      is_late = __syncthreads_or(is_late) != 0;
    }
  }
  if (threadIdx.x == 0) *out = 1;
}

__global__ void clock_kernel(std::uint64_t* elapsed_ns, std::uint64_t duration_ns) {
  const std::uint64_t begin_ns = op_globaltimer();
  while (op_globaltimer() - begin_ns < duration_ns) {
  }
  *elapsed_ns = op_globaltimer() - begin_ns;
}

__global__ void read_kernel(const unsigned* word, int times, int* out) {
  for (int i = 0; i < times; ++i) look(word);
  *out = 1;
}

__global__ void lock_kernel(unsigned* lock, int* counter) {
  while (rmw<unsigned>(lock, 1, 0, Rmw::kCompareExchange, Order::kAcquire, Scope::kGpu,
                       CUDASIM_HERE) != 0) {
  }
  *counter += 1;
  op_store(lock, 0, 4, Order::kRelease, Scope::kGpu, CUDASIM_HERE);
}

__global__ void lossy_kernel(int* counter) { *counter += 1; }

}  // namespace

cudaError_t wait_in_vain(cudaStream_t stream, unsigned* words, int* out, Wait how,
                         std::uint64_t timeout_ns, int threads) {
  return launch_kernel({"wait", 1, dim3(static_cast<unsigned>(threads)), 0, stream, false, nullptr},
                       wait_kernel, words, out, how, timeout_ns);
}

cudaError_t watch_clock(cudaStream_t stream, std::uint64_t* elapsed_ns, std::uint64_t duration_ns) {
  return launch_kernel({"clock", 1, 1, 0, stream, false, nullptr}, clock_kernel, elapsed_ns,
                       duration_ns);
}

cudaError_t read_repeatedly(cudaStream_t stream, const unsigned* word, int times, int* out) {
  return launch_kernel({"read", 1, 1, 0, stream, false, nullptr}, read_kernel, word, times, out);
}

cudaError_t locked_increment(cudaStream_t stream, unsigned* lock, int* counter, int blocks) {
  return launch_kernel({"lock", dim3(static_cast<unsigned>(blocks)), 32, 0, stream, false, nullptr},
                       lock_kernel, lock, counter);
}

cudaError_t lossy_increment(cudaStream_t stream, int* counter, int blocks) {
  return launch_kernel({"lossy", dim3(static_cast<unsigned>(blocks)), 1, 0, stream, false, nullptr},
                       lossy_kernel, counter);
}

}  // namespace cudasim
