// SPDX-License-Identifier: Apache-2.0
#pragma once

// CUDA's device language for a plain C++ compiler: kernels include this instead of cuda_runtime.h
// when they are compiled for the simulated device. Only what kernels may use is here; the toolkit's
// own headers give the vector types and the 16-bit and 8-bit floats.

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cudasim/operations.h"

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): CUDA's names
#undef __global__
#undef __device__
#undef __host__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __align__(n) alignas(n)

#define threadIdx (::cudasim::current_thread->thread_idx)
#define blockIdx (::cudasim::current_thread->block_idx)
#define blockDim (::cudasim::current_thread->block_dim)
#define gridDim (::cudasim::current_thread->grid_dim)
static constexpr int warpSize = 32;

#include "cudasim/device_atomics.h"
#include "cudasim/device_math.h"
#include "cudasim/device_warp.h"

#define CUDASIM_LOC ::cudasim::Loc loc = CUDASIM_HERE

inline void __syncthreads(CUDASIM_LOC) { ::cudasim::op_barrier(loc); }
inline int __syncthreads_count(int predicate, CUDASIM_LOC) {
  return static_cast<int>(::cudasim::op_barrier_count(predicate != 0, loc));
}
inline int __syncthreads_or(int predicate, CUDASIM_LOC) {
  return ::cudasim::op_barrier_count(predicate != 0, loc) != 0;
}
inline int __syncthreads_and(int predicate, CUDASIM_LOC) {
  return ::cudasim::op_barrier_count(predicate == 0, loc) == 0;
}

inline void __threadfence_block(CUDASIM_LOC) {
  ::cudasim::op_fence(::cudasim::Order::kAcqRel, ::cudasim::Scope::kCta, loc);
}
inline void __threadfence(CUDASIM_LOC) {
  ::cudasim::op_fence(::cudasim::Order::kAcqRel, ::cudasim::Scope::kGpu, loc);
}
inline void __threadfence_system(CUDASIM_LOC) {
  ::cudasim::op_fence(::cudasim::Order::kAcqRel, ::cudasim::Scope::kSys, loc);
}

/// Programmatic dependent launch.
inline void cudaTriggerProgrammaticLaunchCompletion(CUDASIM_LOC) {
  ::cudasim::op_launch_dependents(loc);
}
inline void cudaGridDependencySynchronize(CUDASIM_LOC) { ::cudasim::op_wait_dependencies(loc); }

[[noreturn]] inline void __trap(CUDASIM_LOC) { ::cudasim::op_trap("__trap", loc); }
inline void __nanosleep(unsigned ns, CUDASIM_LOC) { ::cudasim::op_nanosleep(ns, loc); }
inline long long clock64() {
  return static_cast<long long>(::cudasim::op_globaltimer()) * 2;  // 2 GHz
}

// Cache hints mean nothing here.
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}

namespace cudasim {

/// PTX bar.sync and bar.arrive with a thread count, a multiple of 32; ids 0 to 15.
inline void barrier_sync(unsigned id, unsigned num_threads, CUDASIM_LOC) {
  op_named_barrier(id, num_threads, true, loc);
}
inline void barrier_arrive(unsigned id, unsigned num_threads, CUDASIM_LOC) {
  op_named_barrier(id, num_threads, false, loc);
}

/// Enqueues `kernel` with its parameters, which are copied now.
template <class... P, class... A>
cudaError_t launch_kernel(const KernelLaunch& launch, void (*kernel)(P...), A&&... arguments) {
  KernelLaunch with_function = launch;
  with_function.function = reinterpret_cast<const void*>(kernel);
  std::tuple<std::decay_t<P>...> copied(std::forward<A>(arguments)...);
  return enqueue_kernel(with_function,
                        [kernel, copied = std::move(copied)] { std::apply(kernel, copied); });
}

}  // namespace cudasim

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
