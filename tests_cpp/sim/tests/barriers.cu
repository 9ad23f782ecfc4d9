// SPDX-License-Identifier: Apache-2.0
#include "barriers.h"

#include "cudasim/device.h"

namespace cudasim {
namespace {

constexpr int kHalf = 64;

__global__ void barrier_kernel(int* data, int* out, BarrierUse use) {
  const int me = static_cast<int>(threadIdx.x) % kHalf;
  const bool produces = static_cast<int>(threadIdx.x) < kHalf;
  switch (use) {
    case BarrierUse::kProducersArrive:
      if (produces) {
        data[me] = me;
        barrier_arrive(1, 128);
      } else {
        barrier_sync(1, 128);
        out[me] = data[kHalf - 1 - me];
      }
      break;
    case BarrierUse::kProducersDoNotArrive:
      if (!produces) barrier_sync(1, 128);
      break;
    case BarrierUse::kNobodyWaits:
      if (produces) barrier_arrive(2, 128);
      break;
    case BarrierUse::kCountsDiffer:
      if (produces) {
        barrier_arrive(3, 128);
      } else {
        barrier_sync(3, 96);
      }
      break;
    case BarrierUse::kOddCount:
      barrier_sync(1, 100);
      break;
    case BarrierUse::kNoSuchBarrier:
      barrier_sync(16, 128);
      break;
    case BarrierUse::kArriveTwice:
      if (threadIdx.x == 0) barrier_arrive(1, 64);
      if (threadIdx.x == 0) barrier_arrive(1, 64);
      break;
    case BarrierUse::kArriveAndRace:
      if (produces) {
        barrier_arrive(1, 128);
        out[me] = data[me];
      } else {
        data[me] = me;
        barrier_sync(1, 128);
      }
      break;
    case BarrierUse::kWholeBlock:
      data[threadIdx.x] = me;
      barrier_sync(0, 128);
      out[threadIdx.x] = data[127 - threadIdx.x];
      break;
    case BarrierUse::kTwoHalves: {
      int* const half = data + (produces ? 0 : kHalf);
      half[me] = me;
      barrier_sync(produces ? 4 : 5, kHalf);
      out[threadIdx.x] = half[kHalf - 1 - me];
      break;
    }
  }
}

__global__ void predicate_kernel(int* results, int num_true) {
  const int predicate = static_cast<int>(threadIdx.x) < num_true;
  const int count = __syncthreads_count(predicate);
  const int any = __syncthreads_or(predicate);
  const int all = __syncthreads_and(predicate);
  if (threadIdx.x == 95) {
    results[0] = count;
    results[1] = any;
    results[2] = all;
  }
}

__global__ void divergent_kernel() {
  if (threadIdx.x < 32) {  // NOLINT(bugprone-branch-clone): two calls are the point
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void leaving_kernel() {
  if (threadIdx.x < 32) return;
  __syncthreads();
}

}  // namespace

cudaError_t use_barriers(cudaStream_t stream, int* data, int* out, BarrierUse use) {
  return launch_kernel({"barriers", 1, 128, 0, stream, false, nullptr}, barrier_kernel, data, out,
                       use);
}

cudaError_t count_predicates(cudaStream_t stream, int* results, int num_true) {
  return launch_kernel({"predicates", 1, 96, 0, stream, false, nullptr}, predicate_kernel, results,
                       num_true);
}

cudaError_t divergent_barrier(cudaStream_t stream) {
  return launch_kernel({"divergent", 1, 64, 0, stream, false, nullptr}, divergent_kernel);
}

cudaError_t leave_before_barrier(cudaStream_t stream) {
  return launch_kernel({"leaving", 1, 64, 0, stream, false, nullptr}, leaving_kernel);
}

}  // namespace cudasim
