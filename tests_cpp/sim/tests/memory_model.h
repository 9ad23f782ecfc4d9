// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace cudasim {

/// One thread of device `role` 0 sends, one of role 1 receives; who they are is in Exchange.
enum class Pattern {
  kReleaseThenRelaxed,    // a strong store after the thread's own release of the location
  kRelaxedThenAcquire,    // the acquire load comes after the relaxed one that saw the release
  kSmallFenceThenLarge,   // a fence of too small a scope does not use up the observation
  kLongPoll,              // thousands of relaxed polls of values that two threads release
  kMixedSizes,            // strong accesses of different sizes to one place
  kChainOfAdds,           // the release goes through others' relaxed read-modify-writes
  kFailedCompareIsALoad,  // a compare-and-swap that fails publishes nothing
  kStrongAfterPlainInit,  // a plain write is not hidden by a later strong one
};
struct Exchange {
  int* data;
  unsigned* flags;  // 4, zero
  int* out;
};
cudaError_t exchange(cudaStream_t stream, const Exchange& exchange, Pattern pattern, int role);

/// Strong accesses of block scope: by two threads of one block, or of two.
cudaError_t block_scope(cudaStream_t stream, unsigned* word, int blocks, int threads);

}  // namespace cudasim
