// SPDX-License-Identifier: Apache-2.0
#include "dependents.h"

#include "cudasim/device.h"

namespace cudasim {
namespace {

__global__ void primary_kernel(const __grid_constant__ PrimaryParams params) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.data = 1;
  if (params.triggers) cudaTriggerProgrammaticLaunchCompletion();
  while (params.word != nullptr &&
         op_load(params.word, 4, Order::kRelaxed, Scope::kSys, CUDASIM_HERE) == 0) {
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.late = 2;
}

__global__ void dependent_kernel(const __grid_constant__ DependentParams params) {
  if (params.early != nullptr) params.out[0] = *params.early;
  if (params.word != nullptr) {
    op_store(params.word, 1, 4, Order::kRelaxed, Scope::kSys, CUDASIM_HERE);
  }
  if (params.waits) cudaGridDependencySynchronize();
  if (params.data != nullptr) {
    params.out[0] = *params.data;
    params.out[1] = *params.late;
  }
}

}  // namespace

cudaError_t primary(cudaStream_t stream, const PrimaryParams& params, int blocks) {
  return launch_kernel(
      {"primary", dim3(static_cast<unsigned>(blocks)), 32, 0, stream, false, nullptr},
      primary_kernel, params);
}

cudaError_t dependent(cudaStream_t stream, const DependentParams& params) {
  return launch_kernel({"dependent", 1, 1, 0, stream, true, nullptr}, dependent_kernel, params);
}

}  // namespace cudasim
