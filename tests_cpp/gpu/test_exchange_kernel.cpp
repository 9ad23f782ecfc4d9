#include "gpu/device/device.cuh"
#include "gpu/device/launch.h"
#include "gpu/test_mailboxes.h"
namespace fanfold::testing {
namespace {
__device__ inline bool wait_for(const std::uint64_t* word, std::uint64_t value,
                                const std::uint64_t* stop) {
  FANFOLD_SHARED(std::uint32_t, is_there);
  if (threadIdx.x == 0) {
    is_there = 1;
    while (gpu::ld_acquire_sys(word) < value) {
      if (gpu::ld_relaxed_sys(stop) != 0) {
        is_there = 0;
        break;
      }
    }
  }
  __syncthreads();
  const bool result = is_there != 0;
  __syncthreads();
  return result;
}

__device__ inline void copy_bytes(const std::byte* from, std::byte* to, std::int64_t bytes) {
  const bool is_wide =
      ((reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to)) & 7) == 0;
  const std::int64_t words = is_wide ? bytes / 8 : 0;
  for (std::int64_t i = threadIdx.x; i < words; i += blockDim.x) {
    reinterpret_cast<std::uint64_t*>(to)[i] = reinterpret_cast<const std::uint64_t*>(from)[i];
  }
  for (std::int64_t i = words * 8 + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

__global__ void exchange_kernel(const __grid_constant__ Ops p) {
  const Boxes boxes{p.num_ranks, p.boxes};
  const std::uint64_t number = *p.count + 1;
  const std::uint64_t* const stop = boxes.stop(p.rank);
  __syncthreads();
  if (threadIdx.x == 0) *p.count = number;
  bool is_stopped = false;
  for (int peer = 0; peer < p.num_ranks && !is_stopped; ++peer) {
    if (peer == p.rank) continue;
    if (!wait_for(boxes.taken(p.rank, peer), number - 1, stop)) {
      is_stopped = true;
      break;
    }
    std::int64_t at = 0;
    for (int i = 0; i < p.num_ops; ++i) {
      const Op& op = p.ops[i];
      if (!op.is_send || op.peer != peer) continue;
      copy_bytes(op.data, boxes.box(p.rank, peer) + at, op.bytes);
      at += (op.bytes + 15) / 16 * 16;
    }
    __syncthreads();
    if (threadIdx.x == 0) gpu::st_release_sys(boxes.sent(p.rank, peer), number);
  }
  for (int peer = 0; peer < p.num_ranks && !is_stopped; ++peer) {
    if (peer == p.rank) continue;
    if (!wait_for(boxes.sent(peer, p.rank), number, stop)) {
      is_stopped = true;
      break;
    }
    std::int64_t at = 0;
    for (int i = 0; i < p.num_ops; ++i) {
      const Op& op = p.ops[i];
      if (op.is_send || op.peer != peer) continue;
      copy_bytes(boxes.box(peer, p.rank) + at, op.data, op.bytes);
      at += (op.bytes + 15) / 16 * 16;
    }
    __syncthreads();
    if (threadIdx.x == 0) gpu::st_release_sys(boxes.taken(peer, p.rank), number);
  }
}

}
cudaError_t launch_exchange(const Ops& ops, cudaStream_t stream) {
    gpu::LaunchConfig config;
    config.grid = dim3(1);
    config.block = dim3(32);
    config.stream = stream;
    return gpu::launch("exchange", exchange_kernel, config, ops);
}
}
