// SPDX-License-Identifier: Apache-2.0

#include "gpu/device/launch.h"
#include "kernels.h"
#include "launch_on.h"

namespace fanfold::gpu::litmus {

namespace {

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr unsigned kDynamicWords = 8;

__global__ void warp_exchange_kernel(const __grid_constant__ Words w) {
  FANFOLD_SHARED(int[32], values);
  const unsigned lane = threadIdx.x;
  values[lane] = static_cast<int>(lane);
  if (w.mode == kSyncWarp) {
    __syncwarp();
  } else if (w.mode == kShuffleOnly) {
    __shfl_sync(kAllLanes, static_cast<int>(lane), 0);  // orders no memory
  }
  w.out[lane] = values[31 - lane];
}

__global__ void access_kernel(const __grid_constant__ Words w) {
  FANFOLD_SHARED(int[8], first);
  FANFOLD_SHARED(int[8], second);
  FANFOLD_DYN_SHARED(int, dynamic);
  first[0] = 0;
  second[0] = 0;
  dynamic[0] = 0;
  const int past = w.mode == kInside ? 7 : 8;
  switch (w.mode) {
    case kInside:
    case kSharedPastEnd:
      first[past] = 1;  // past the shared end
      break;
    case kDynamicPastEnd:
      dynamic[kDynamicWords] = 1;
      break;
    case kGlobalPastEnd:
      w.data[1024] = 1;  // past the global end
      break;
    case kMisalignedVector:
      w.out[0] = static_cast<int>(ld16(reinterpret_cast<const char*>(w.data) + 8).x);
      break;
    case kMisalignedWord:
      *reinterpret_cast<int*>(reinterpret_cast<char*>(w.data) + 2) = 1;
      break;
    default:
      w.data[1 << 22] = 1;
  }
  w.out[1] = first[0] + second[0] + dynamic[0];
}

__global__ void store_at_kernel(const __grid_constant__ Words w, int index) { w.data[index] = 1; }

__global__ void load_at_kernel(const __grid_constant__ Words w, int index) {
  w.out[0] = w.data[index];
}

// Warps 0 and 1 produce and go on; warp 2 waits for both.
__global__ void named_barrier_kernel(const __grid_constant__ Words w) {
  FANFOLD_SHARED(int[64], values);
  const unsigned count = w.mode == kOddCount ? 95 : 96;
  const unsigned thread = threadIdx.x;
  if (thread < 64) {
    values[thread] = static_cast<int>(thread);
    if (w.mode != kMissingArrive || thread < 32) {
      barrier_arrive(1, count);
    }
  } else {
    // Too small a count lets it pass when one producer has come.
    barrier_sync(1, w.mode == kWrongCount ? 64 : count);
    w.out[thread - 64] = values[thread - 64] + values[thread - 32];
  }
}

__global__ void block_barrier_kernel(const __grid_constant__ Words w) {
  const bool is_low = threadIdx.x < 32;
  if (w.mode == kTwoPlaces) {
    // NOLINTNEXTLINE(bugprone-branch-clone): two barriers, not one
    if (is_low) {
      __syncthreads();
    } else {
      __syncthreads();
    }
    return;
  }
  if (w.mode == kLeaveBefore && is_low) {
    return;
  }
  __syncthreads();
  w.out[threadIdx.x] = 1;
}

__global__ void shuffle_kernel(const __grid_constant__ Words w) {
  const int lane = static_cast<int>(threadIdx.x);
  int got = 0;
  switch (w.mode) {
    case kFullMask:
      got = __shfl_sync(kAllLanes, lane, 31 - lane);
      break;
    case kHalfMask:  // lanes outside do not take part, and are not named
      got = lane < 16 ? __shfl_sync(0xffffU, lane, 15 - lane) : 31 - lane;
      break;
    case kNotInMask:
      got = __shfl_sync(0xffffU, lane, 0);
      break;
    case kDivergent:
      if (lane < 16) {
        got = __shfl_sync(kAllLanes, lane, 0);
      }
      break;
    default:
      if (lane == 5) {
        return;
      }
      got = __shfl_sync(kAllLanes, lane, 0);
  }
  w.out[lane] = got;
}

}  // namespace

cudaError_t warp_exchange(const Words& words, cudaStream_t stream) {
  return launch("warp_exchange", warp_exchange_kernel, on(stream, 32), words);
}

cudaError_t access(const Words& words, cudaStream_t stream) {
  LaunchConfig config = on(stream, 1);
  config.dynamic_shared_bytes = kDynamicWords * sizeof(int);
  return launch("access", access_kernel, config, words);
}

cudaError_t store_at(const Words& words, int index, cudaStream_t stream) {
  return launch("store_at", store_at_kernel, on(stream, 1), words, index);
}

cudaError_t load_at(const Words& words, int index, cudaStream_t stream) {
  return launch("load_at", load_at_kernel, on(stream, 1), words, index);
}

cudaError_t named_barrier(const Words& words, cudaStream_t stream) {
  return launch("named_barrier", named_barrier_kernel, on(stream, 96), words);
}

cudaError_t block_barrier(const Words& words, cudaStream_t stream) {
  return launch("block_barrier", block_barrier_kernel, on(stream, 64), words);
}

cudaError_t shuffle(const Words& words, cudaStream_t stream) {
  return launch("shuffle", shuffle_kernel, on(stream, 32), words);
}

}  // namespace fanfold::gpu::litmus
