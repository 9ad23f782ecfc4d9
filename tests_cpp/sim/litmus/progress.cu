// SPDX-License-Identifier: Apache-2.0

#include "gpu/device/launch.h"
#include "kernels.h"
#include "launch_on.h"

namespace fanfold::gpu::litmus {

namespace {

constexpr std::uint64_t kPatienceNs = 2'000'000'000;

__global__ void grid_barrier_kernel(const __grid_constant__ Words w) {
  atom_add_acq_rel_gpu(w.flag, 1U);
  while (ld_acquire_gpu(w.flag) < gridDim.x) {  // waits for all blocks
  }
  w.out[blockIdx.x] = 1;
}

__global__ void wait_for_ever_kernel(const __grid_constant__ Words w) {
  const std::uint64_t begin = globaltimer_ns();
  while (ld_acquire_sys(w.flag) == 0) {
    if (w.mode == 1 && globaltimer_ns() - begin > kPatienceNs) {
      w.out[0] = 1;
      return;
    }
  }
}

__global__ void first_block_kernel(const __grid_constant__ Words w) {
  if (atom_add_relaxed_gpu(w.flag, 1U) == 0) {
    w.out[0] = static_cast<int>(blockIdx.x);
  }
}

__global__ void add_one_kernel(const __grid_constant__ Words w) {
  std::uint32_t* const sum = reinterpret_cast<std::uint32_t*>(w.out);
  if (w.mode == 1) {
    atom_add_relaxed_gpu(sum, 1U);
  } else {
    *sum = *sum + 1;
  }
}

}  // namespace

cudaError_t grid_barrier(const Words& words, int num_blocks, cudaStream_t stream) {
  return launch("grid_barrier", grid_barrier_kernel, on(stream, 1, num_blocks), words);
}

cudaError_t wait_for_ever(const Words& words, cudaStream_t stream) {
  return launch("wait_for_ever", wait_for_ever_kernel, on(stream, 1), words);
}

cudaError_t first_block(const Words& words, int num_blocks, cudaStream_t stream) {
  return launch("first_block", first_block_kernel, on(stream, 1, num_blocks), words);
}

cudaError_t add_one(const Words& words, cudaStream_t stream) {
  return launch("add_one", add_one_kernel, on(stream, 1, 32), words);
}

}  // namespace fanfold::gpu::litmus
