// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace cudasim {

/// Use of named barriers by one block of 128 threads: 64 produce, 64 consume.
enum class BarrierUse {
  kProducersArrive,       // consumers wait, producers go on
  kProducersDoNotArrive,  // consumers wait for ever
  kNobodyWaits,           // the barrier is left half full
  kCountsDiffer,
  kOddCount,       // not a multiple of 32
  kNoSuchBarrier,  // id 16
  kArriveTwice,    // a thread comes again before completion
  kArriveAndRace,  // an arriving thread is not ordered after the others
  kWholeBlock,     // id 0, all threads: __syncthreads
  kTwoHalves,      // each half has a barrier of its own
};
cudaError_t use_barriers(cudaStream_t stream, int* data, int* out, BarrierUse use);

/// __syncthreads_count, _or and _and of a predicate that `num_true` of 96 threads give: 3 results.
cudaError_t count_predicates(cudaStream_t stream, int* results, int num_true);

/// Half the block calls one __syncthreads and half another.
cudaError_t divergent_barrier(cudaStream_t stream);
/// Half the block leaves, the other half waits.
cudaError_t leave_before_barrier(cudaStream_t stream);

}  // namespace cudasim
