// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cudasim {

/// How a thread waits for a word that nobody sets.
enum class Wait {
  kLoad,
  kTwoWords,     // looks at two in turn
  kSleep,        // with nanosleep in between
  kCompareSwap,  // a lock that is never free
  kBarrierLoop,  // one thread looks, the block meets
  kVoteLoop,     // a warp votes on what its lanes see
};
/// Waits until `timeout_ns` of the timer have passed (0: for ever); then sets `out` to 1.
cudaError_t wait_in_vain(cudaStream_t stream, unsigned* words, int* out, Wait how,
                         std::uint64_t timeout_ns, int threads = 32);
/// Looks at the clock only, for so long.
cudaError_t watch_clock(cudaStream_t stream, std::uint64_t* elapsed_ns, std::uint64_t duration_ns);
/// Reads the same word so many times, and sets `out`.
cudaError_t read_repeatedly(cudaStream_t stream, const unsigned* word, int times, int* out);
/// A spin lock around a plain counter, taken once by each thread.
cudaError_t locked_increment(cudaStream_t stream, unsigned* lock, int* counter, int blocks);
/// Adds 1 by a plain load and store, a thread in each block.
cudaError_t lossy_increment(cudaStream_t stream, int* counter, int blocks);

}  // namespace cudasim
