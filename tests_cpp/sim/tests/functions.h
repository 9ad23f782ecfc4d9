// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace cudasim {

constexpr int kNumWarpResults = 16;
/// Results of each warp function for each of 32 lanes: [function][lane].
cudaError_t warp_functions(cudaStream_t stream, int* results);

constexpr int kNumAtomicResults = 20;
/// Old and new values of each atomic function, applied by one thread.
cudaError_t atomic_functions(cudaStream_t stream, long long* results);

constexpr int kNumMathResults = 20;
cudaError_t math_functions(cudaStream_t stream, long long* results);

}  // namespace cudasim
