// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace cudasim {

/// What a kernel does that others may depend on by programmatic launch.
struct PrimaryParams {
  int* data;             // written before the others may start
  int* late;             // written after
  const unsigned* word;  // waited for in between, unless null
  bool triggers;
};
cudaError_t primary(cudaStream_t stream, const PrimaryParams& params, int blocks);

struct DependentParams {
  const int* early;  // read before the wait, unless null
  int* out;          // 2 values
  const int* data;   // read after the wait, with `late`, unless null
  const int* late;
  unsigned* word;  // set before the wait, unless null
  bool waits;
};
cudaError_t dependent(cudaStream_t stream, const DependentParams& params);

}  // namespace cudasim
