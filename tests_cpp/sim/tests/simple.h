// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small kernels that many tests launch. Each function enqueues one grid.

#include <cuda_runtime_api.h>

#include <cstddef>

namespace cudasim {

/// data[i] = value, a thread for each.
cudaError_t put(cudaStream_t stream, int* data, int count, int value);
/// out[i] = in[i].
cudaError_t get(cudaStream_t stream, int* out, const int* in, int count);
/// data[i] += 1.
cudaError_t increment(cudaStream_t stream, int* data, int count);
/// Adds 1 to `counter` by an atomic of each of `blocks` x `threads` threads.
cudaError_t count_threads(cudaStream_t stream, int* counter, int blocks, int threads);
/// Waits until the word is `value`, with acquire loads of system scope; then out = data, if given.
cudaError_t wait_for_word(cudaStream_t stream, const unsigned* word, unsigned value,
                          int* out = nullptr, const int* data = nullptr);
/// Stores to the word, with a release of system scope, after data = value, if given.
cudaError_t signal_word(cudaStream_t stream, unsigned* word, unsigned word_value,
                        int* data = nullptr, int value = 0);
/// Traps.
cudaError_t fail(cudaStream_t stream);
/// Uses so much dynamic shared memory.
cudaError_t use_shared(cudaStream_t stream, std::size_t bytes);
const void* use_shared_function();

}  // namespace cudasim
