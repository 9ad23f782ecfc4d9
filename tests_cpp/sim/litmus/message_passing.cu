// SPDX-License-Identifier: Apache-2.0

#include "gpu/device/launch.h"
#include "kernels.h"
#include "launch_on.h"

namespace fanfold::gpu::litmus {

namespace {

constexpr int kPayload = 42;

__device__ void announce_by(const Words& w) {
  switch (w.mode) {
    case kFences:
      fence_acq_rel_sys();
      st_relaxed_sys(w.flag, 1);
      break;
    case kRelaxed:
      st_relaxed_sys(w.flag, 1);
      break;
    case kGpuFence:
      fence_acq_rel_gpu();
      st_relaxed_sys(w.flag, 1);
      break;
    case kGpuRelease:
    case kGpuScopeBoth:
      st_release_gpu(w.flag, 1);
      break;
    case kAtomics:
      atom_add_acq_rel_sys(w.flag, 1U);
      break;
    case kCompareExchange:
      atom_cas_acq_rel_sys(w.flag, 0U, 1U);
      break;
    case kPlainStore:
      *w.flag = 1;
      break;
    case kWide:
      st_release_sys(reinterpret_cast<std::uint64_t*>(w.flag), 1);
      break;
    default:
      st_release_sys(w.flag, 1);
  }
}

__device__ bool has_come(const Words& w) {
  switch (w.mode) {
    case kFences:
    case kRelaxed:
    case kGpuFence:
    case kReleaseRelaxed:
      return ld_relaxed_sys(w.flag) == 1;
    case kAtomics:
      return atom_add_acq_rel_sys(w.flag, 0U) == 1;
    case kCompareExchange:
      return atom_cas_acq_rel_sys(w.flag, 1U, 2U) == 1;
    case kWide:
      return ld_acquire_sys(reinterpret_cast<const std::uint64_t*>(w.flag)) == 1;
    case kGpuScopeBoth:
    case kGpuAcquire:
      return ld_acquire_gpu(w.flag) == 1;
    default:
      return ld_acquire_sys(w.flag) == 1;
  }
}

__global__ void message_passing_kernel(const __grid_constant__ Words w, int who) {
  if (who == 0) {
    *w.data = kPayload;  // the payload
    announce_by(w);
  } else {
    while (!has_come(w)) {
    }
    if (w.mode == kFences || w.mode == kGpuFence) {
      fence_acq_rel_sys();
    }
    *w.out = *w.data;  // the payload's reader
  }
}

__global__ void many_writers_kernel(const __grid_constant__ Words w, int who) {
  const unsigned thread = threadIdx.x;
  if (who == 0) {
    w.data[thread] = static_cast<int>(thread);
    if (w.mode == kBlockBarrier) {
      __syncthreads();
    } else if (w.mode == kWarpBarrier) {
      __syncwarp();  // carries the writes of one warp only
    } else if (w.mode == kNamedBarrier) {
      barrier_sync(1, blockDim.x);
    }
    if (thread == 0) {
      st_release_sys(w.flag, 1);
    }
  } else {
    if (thread == 0) {
      while (ld_acquire_sys(w.flag) != 1) {
      }
    }
    __syncthreads();
    w.out[thread] = w.data[blockDim.x - 1 - thread];
  }
}

__global__ void last_block_reads_kernel(const __grid_constant__ Words w) {
  w.data[blockIdx.x] = 1;
  std::uint32_t before = 0;
  if (w.mode == kAcqRelCounter) {
    before = atom_add_acq_rel_gpu(w.flag, 1U);
  } else if (w.mode == kRelaxedCounter) {
    before = atom_add_relaxed_gpu(w.flag, 1U);
  } else {
    fence_acq_rel_gpu();
    before = atom_add_relaxed_gpu(w.flag, 1U);
    fence_acq_rel_gpu();
  }
  if (before == gridDim.x - 1) {
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) {
      sum += w.data[i];
    }
    *w.out = sum;
  }
}

__global__ void chain_kernel(const __grid_constant__ Words w, int who) {
  if (who == 0) {
    *w.data = kPayload;
    st_release_sys(w.flag, 1);
  } else if (who == 1) {
    if (w.mode == 0) {
      while (ld_acquire_sys(w.flag) != 1) {
      }
    } else {
      while (ld_relaxed_sys(w.flag) != 1) {
      }
    }
    st_release_sys(w.flag + 1, 1);
  } else {
    while (ld_acquire_sys(w.flag + 1) != 1) {
    }
    *w.out = *w.data;
  }
}

__global__ void long_poll_kernel(const __grid_constant__ Words w, int who) {
  if (who == 0) {
    st_release_sys(w.flag, 1);
    for (int i = 0; i < 600; ++i) {  // gives the reader time to see the first release very often
      ld_relaxed_sys(w.flag + 8 + (i & 1));
    }
    *w.data = kPayload;
    st_release_sys(w.flag, 2);
  } else {
    while (ld_relaxed_sys(w.flag) != 2) {
      ld_relaxed_sys(w.flag + 16);
    }
    fence_acq_rel_sys();
    *w.out = *w.data;
  }
}

__global__ void two_flags_kernel(const __grid_constant__ Words w, int who) {
  if (who == 0) {
    st_relaxed_sys(w.flag, 1);
    st_relaxed_sys(w.flag + 1, 1);
    return;
  }
  std::uint32_t second = 0;
  for (int i = 0; i < 100 && second != 1; ++i) {
    second = ld_relaxed_sys(w.flag + 1);
  }
  if (second == 1 && ld_relaxed_sys(w.flag) == 0) {
    *w.out = 99;
  }
}

__global__ void put_kernel(const __grid_constant__ Words w) { w.data[threadIdx.x] = 1; }

__global__ void get_kernel(const __grid_constant__ Words w) {
  w.out[threadIdx.x] = w.data[threadIdx.x];
}

__global__ void announce_kernel(const __grid_constant__ Words w) {
  if (w.mode == 1) {
    w.data[100] = 5;
  }
  st_relaxed_sys(w.flag, 1);
}

__global__ void consume_kernel(const __grid_constant__ Words w) {
  while (ld_acquire_sys(w.flag) != 1) {
  }
  w.out[0] = w.data[0];
  if (w.mode == 1) {
    w.out[1] = w.data[100];
  }
}

}  // namespace

cudaError_t message_passing(const Words& words, int who, cudaStream_t stream) {
  return launch("message_passing", message_passing_kernel, on(stream, 1), words, who);
}

cudaError_t many_writers(const Words& words, int who, cudaStream_t stream) {
  return launch("many_writers", many_writers_kernel, on(stream, 64), words, who);
}

cudaError_t last_block_reads(const Words& words, int num_blocks, cudaStream_t stream) {
  return launch("last_block_reads", last_block_reads_kernel, on(stream, 1, num_blocks), words);
}

cudaError_t chain(const Words& words, int who, cudaStream_t stream) {
  return launch("chain", chain_kernel, on(stream, 1), words, who);
}

cudaError_t long_poll(const Words& words, int who, cudaStream_t stream) {
  return launch("long_poll", long_poll_kernel, on(stream, 1), words, who);
}

cudaError_t two_flags(const Words& words, int who, cudaStream_t stream) {
  return launch("two_flags", two_flags_kernel, on(stream, 1), words, who);
}

cudaError_t put(const Words& words, cudaStream_t stream) {
  return launch("put", put_kernel, on(stream, 32), words);
}

cudaError_t get(const Words& words, cudaStream_t stream) {
  return launch("get", get_kernel, on(stream, 32), words);
}

cudaError_t announce(const Words& words, cudaStream_t stream) {
  return launch("announce", announce_kernel, on(stream, 1), words);
}

cudaError_t consume(const Words& words, cudaStream_t stream) {
  return launch("consume", consume_kernel, on(stream, 1), words);
}

}  // namespace fanfold::gpu::litmus
