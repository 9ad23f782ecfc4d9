// SPDX-License-Identifier: Apache-2.0
#pragma once

// Everything a kernel needs that is not portable C++. This is the only file with inline PTX or
// __CUDA_ARCH__, and with launch.h the only one that knows whether kernels are compiled by nvcc or,
// as plain C++ with FANFOLD_SIM defined, for the simulated device.
//
// Memory order, for all of the words below (uint32_t or uint64_t, naturally aligned, in global
// memory: the device's own, a peer's, or page-locked memory of the host):
//
// - st_release_*: what this thread wrote, and what it had seen through a barrier or an acquire,
//   is visible to whoever reads this value. Partner: ld_acquire_*, or ld_relaxed_* with a fence
//   after it.
// - ld_acquire_*: partner of st_release_*, of a fence before st_relaxed_*, of atom_*_acq_rel_*.
// - *_relaxed_*: atomic, and no order at all. To say that other data is there, a store needs a
//   fence before it, and a load one after it.
// - atom_*_acq_rel_*: both at once. A chain of them is one release: the last of many adders has
//   seen what all of them wrote before they added. Partner: each other, or as above.
// - fence_acq_rel_*: as above. One fence and many relaxed stores cost less than many releases.
//
// The scope must cover both partners: _gpu for threads of one device, _sys for peers and the host.
// __syncthreads, __syncwarp and barrier_sync carry the writes of all who meet there, so that one
// thread can release for a block; a shuffle or a vote carries nothing.

#if defined(FANFOLD_SIM)
#include <cudasim/device.h>
#else
#include <cuda_runtime.h>
#endif

#include <cstdint>

#if defined(FANFOLD_SIM)

// A variable that a block's threads share. A static byte is its key; the block has the storage.
// NOLINTBEGIN(bugprone-macro-parentheses): these declare the name
#define FANFOLD_SHARED(type, name)                        \
  static const char name##_key = 0;                       \
  using name##_shared_t = type;                           \
  name##_shared_t& name = *static_cast<name##_shared_t*>( \
      ::cudasim::op_static_shared(&name##_key, sizeof(name##_shared_t), alignof(name##_shared_t)))
// The shared memory whose size the launch gives, as an array of `type`; aligned to 16 bytes.
#define FANFOLD_DYN_SHARED(type, name) \
  type* const name = static_cast<type*>(::cudasim::op_dynamic_shared())
// NOLINTEND(bugprone-macro-parentheses)
// Before a loop over arrays that have to stay in registers.
#define FANFOLD_UNROLL

// Where the caller stands, for reports. The second form is for functions without other parameters.
#define FANFOLD_LOC , ::cudasim::Loc loc = CUDASIM_HERE
#define FANFOLD_ONLY_LOC ::cudasim::Loc loc = CUDASIM_HERE

#define FANFOLD_LOAD(name, ptx, bits, reg, order, scope)                                    \
  inline std::uint##bits##_t name(const std::uint##bits##_t* address FANFOLD_LOC) {         \
    return static_cast<std::uint##bits##_t>(::cudasim::op_load(                             \
        address, sizeof(*address), ::cudasim::Order::order, ::cudasim::Scope::scope, loc)); \
  }
#define FANFOLD_STORE(name, ptx, bits, reg, order, scope)                                 \
  inline void name(std::uint##bits##_t* address, std::uint##bits##_t value FANFOLD_LOC) { \
    ::cudasim::op_store(address, value, sizeof(*address), ::cudasim::Order::order,        \
                        ::cudasim::Scope::scope, loc);                                    \
  }
#define FANFOLD_ADD(name, ptx, bits, reg, order, scope)                                          \
  inline std::uint##bits##_t name(std::uint##bits##_t* address,                                  \
                                  std::uint##bits##_t value FANFOLD_LOC) {                       \
    return ::cudasim::rmw<std::uint##bits##_t>(address, value, 0, ::cudasim::Rmw::kAdd,          \
                                               ::cudasim::Order::order, ::cudasim::Scope::scope, \
                                               loc);                                             \
  }
#define FANFOLD_CAS(name, ptx, bits, reg, order, scope)                                       \
  inline std::uint##bits##_t name(std::uint##bits##_t* address, std::uint##bits##_t expected, \
                                  std::uint##bits##_t value FANFOLD_LOC) {                    \
    return ::cudasim::rmw<std::uint##bits##_t>(                                               \
        address, value, expected, ::cudasim::Rmw::kCompareExchange, ::cudasim::Order::order,  \
        ::cudasim::Scope::scope, loc);                                                        \
  }
#define FANFOLD_FENCE(name, ptx, scope)                                           \
  inline void name(FANFOLD_ONLY_LOC) {                                            \
    ::cudasim::op_fence(::cudasim::Order::kAcqRel, ::cudasim::Scope::scope, loc); \
  }

#else

#define FANFOLD_UNROLL _Pragma("unroll")
#define FANFOLD_SHARED(type, name) \
  using name##_shared_t = type;    \
  __shared__ name##_shared_t name
#define FANFOLD_DYN_SHARED(type, name)                                    \
  extern __shared__ __align__(16) unsigned char fanfold_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(fanfold_dynamic_shared)

#define FANFOLD_LOAD(name, ptx, bits, reg, order, scope)                                    \
  __device__ __forceinline__ std::uint##bits##_t name(const std::uint##bits##_t* address) { \
    std::uint##bits##_t value;                                                              \
    asm volatile("ld." ptx ".global.u" #bits " %0, [%1];"                                   \
                 : "=" reg(value)                                                           \
                 : "l"(address)                                                             \
                 : "memory");                                                               \
    return value;                                                                           \
  }
#define FANFOLD_STORE(name, ptx, bits, reg, order, scope)                                         \
  __device__ __forceinline__ void name(std::uint##bits##_t* address, std::uint##bits##_t value) { \
    asm volatile("st." ptx ".global.u" #bits " [%0], %1;" ::"l"(address), reg(value) : "memory"); \
  }
#define FANFOLD_ADD(name, ptx, bits, reg, order, scope)                             \
  __device__ __forceinline__ std::uint##bits##_t name(std::uint##bits##_t* address, \
                                                      std::uint##bits##_t value) {  \
    std::uint##bits##_t before;                                                     \
    asm volatile("atom." ptx ".global.add.u" #bits " %0, [%1], %2;"                 \
                 : "=" reg(before)                                                  \
                 : "l"(address), reg(value)                                         \
                 : "memory");                                                       \
    return before;                                                                  \
  }
#define FANFOLD_CAS(name, ptx, bits, reg, order, scope)                                        \
  __device__ __forceinline__ std::uint##bits##_t name(                                         \
      std::uint##bits##_t* address, std::uint##bits##_t expected, std::uint##bits##_t value) { \
    std::uint##bits##_t before;                                                                \
    asm volatile("atom." ptx ".global.cas.b" #bits " %0, [%1], %2, %3;"                        \
                 : "=" reg(before)                                                             \
                 : "l"(address), reg(expected), reg(value)                                     \
                 : "memory");                                                                  \
    return before;                                                                             \
  }
#define FANFOLD_FENCE(name, ptx, scope) \
  __device__ __forceinline__ void name() { asm volatile("fence." ptx ";" ::: "memory"); }

#endif

namespace fanfold::gpu {

FANFOLD_LOAD(ld_acquire_gpu, "acquire.gpu", 32, "r", kAcquire, kGpu)
FANFOLD_LOAD(ld_acquire_gpu, "acquire.gpu", 64, "l", kAcquire, kGpu)
FANFOLD_LOAD(ld_acquire_sys, "acquire.sys", 32, "r", kAcquire, kSys)
FANFOLD_LOAD(ld_acquire_sys, "acquire.sys", 64, "l", kAcquire, kSys)
FANFOLD_LOAD(ld_relaxed_gpu, "relaxed.gpu", 32, "r", kRelaxed, kGpu)
FANFOLD_LOAD(ld_relaxed_gpu, "relaxed.gpu", 64, "l", kRelaxed, kGpu)
FANFOLD_LOAD(ld_relaxed_sys, "relaxed.sys", 32, "r", kRelaxed, kSys)
FANFOLD_LOAD(ld_relaxed_sys, "relaxed.sys", 64, "l", kRelaxed, kSys)

FANFOLD_STORE(st_release_gpu, "release.gpu", 32, "r", kRelease, kGpu)
FANFOLD_STORE(st_release_gpu, "release.gpu", 64, "l", kRelease, kGpu)
FANFOLD_STORE(st_release_sys, "release.sys", 32, "r", kRelease, kSys)
FANFOLD_STORE(st_release_sys, "release.sys", 64, "l", kRelease, kSys)
FANFOLD_STORE(st_relaxed_gpu, "relaxed.gpu", 32, "r", kRelaxed, kGpu)
FANFOLD_STORE(st_relaxed_gpu, "relaxed.gpu", 64, "l", kRelaxed, kGpu)
FANFOLD_STORE(st_relaxed_sys, "relaxed.sys", 32, "r", kRelaxed, kSys)
FANFOLD_STORE(st_relaxed_sys, "relaxed.sys", 64, "l", kRelaxed, kSys)

// These return the value before.
FANFOLD_ADD(atom_add_relaxed_gpu, "relaxed.gpu", 32, "r", kRelaxed, kGpu)
FANFOLD_ADD(atom_add_relaxed_gpu, "relaxed.gpu", 64, "l", kRelaxed, kGpu)
FANFOLD_ADD(atom_add_relaxed_sys, "relaxed.sys", 32, "r", kRelaxed, kSys)
FANFOLD_ADD(atom_add_relaxed_sys, "relaxed.sys", 64, "l", kRelaxed, kSys)
FANFOLD_ADD(atom_add_acq_rel_gpu, "acq_rel.gpu", 32, "r", kAcqRel, kGpu)
FANFOLD_ADD(atom_add_acq_rel_gpu, "acq_rel.gpu", 64, "l", kAcqRel, kGpu)
FANFOLD_ADD(atom_add_acq_rel_sys, "acq_rel.sys", 32, "r", kAcqRel, kSys)
FANFOLD_ADD(atom_add_acq_rel_sys, "acq_rel.sys", 64, "l", kAcqRel, kSys)
FANFOLD_CAS(atom_cas_acq_rel_gpu, "acq_rel.gpu", 32, "r", kAcqRel, kGpu)
FANFOLD_CAS(atom_cas_acq_rel_gpu, "acq_rel.gpu", 64, "l", kAcqRel, kGpu)
FANFOLD_CAS(atom_cas_acq_rel_sys, "acq_rel.sys", 32, "r", kAcqRel, kSys)
FANFOLD_CAS(atom_cas_acq_rel_sys, "acq_rel.sys", 64, "l", kAcqRel, kSys)

FANFOLD_FENCE(fence_acq_rel_gpu, "acq_rel.gpu", kGpu)
FANFOLD_FENCE(fence_acq_rel_sys, "acq_rel.sys", kSys)

#undef FANFOLD_LOAD
#undef FANFOLD_STORE
#undef FANFOLD_ADD
#undef FANFOLD_CAS
#undef FANFOLD_FENCE

// Rows move by 16 bytes: one access, aligned to 16 bytes, ordered by nothing but the words above.
//
// ld16_stream reads past the first-level cache, by the path for data that nobody writes: right only
// where no thread, here or on a peer, writes the bytes between the kernel's start and its end. So
// it is for inputs, never for what arrives during the kernel. st16_stream keeps rows that this
// device will not read again out of that cache; its order is st16's.

#if defined(FANFOLD_SIM)

inline uint4 ld16(const void* address FANFOLD_LOC) {
  uint4 value;
  ::cudasim::op_vector(&value, const_cast<void*>(address), sizeof(value), false, loc);
  return value;
}
inline uint4 ld16_stream(const void* address FANFOLD_LOC) { return ld16(address, loc); }
inline void st16(void* address, uint4 value FANFOLD_LOC) {
  ::cudasim::op_vector(&value, address, sizeof(value), true, loc);
}
inline void st16_stream(void* address, uint4 value FANFOLD_LOC) { st16(address, value, loc); }

/// Nanoseconds of one clock for all threads of a device; two devices' clocks may differ.
inline std::uint64_t globaltimer_ns() { return ::cudasim::op_globaltimer(); }
/// Lets the thread rest for about `ns` nanoseconds, between two looks at a flag.
inline void nanosleep(unsigned ns FANFOLD_LOC) { ::cudasim::op_nanosleep(ns, loc); }

/// Waits in barrier `id` (0 to 15; __syncthreads uses 0) until `num_threads` threads, a multiple of
/// 32, have come by barrier_sync or barrier_arrive. Who waited sees what all of them wrote before.
inline void barrier_sync(unsigned id, unsigned num_threads FANFOLD_LOC) {
  ::cudasim::op_named_barrier(id, num_threads, true, loc);
}
/// Counts as having come, and goes on without waiting or seeing anything. Partner: barrier_sync.
inline void barrier_arrive(unsigned id, unsigned num_threads FANFOLD_LOC) {
  ::cudasim::op_named_barrier(id, num_threads, false, loc);
}

/// Waits until the kernel before it in the stream has ended and its writes are visible, where this
/// one was launched as a programmatic dependent; else, and before sm_90, it has nothing to wait
/// for.
inline void grid_dependency_wait(FANFOLD_ONLY_LOC) { ::cudasim::op_wait_dependencies(loc); }
/// Lets the next kernel of the stream start, if it is a programmatic dependent, once every block
/// has called this or ended. Publishes nothing: the dependent's grid_dependency_wait does.
inline void grid_dependency_launch(FANFOLD_ONLY_LOC) { ::cudasim::op_launch_dependents(loc); }

/// The thread's place in its warp.
inline unsigned lane_id() { return ::cudasim::current_thread->lane; }

#undef FANFOLD_LOC
#undef FANFOLD_ONLY_LOC

#else

__device__ __forceinline__ uint4 ld16(const void* address) {
  return *static_cast<const uint4*>(address);
}
__device__ __forceinline__ uint4 ld16_stream(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ void st16(void* address, uint4 value) {
  *static_cast<uint4*>(address) = value;
}
__device__ __forceinline__ void st16_stream(void* address, uint4 value) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ std::uint64_t globaltimer_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
__device__ __forceinline__ void nanosleep(unsigned ns) { __nanosleep(ns); }

// The form that does not ask the lanes of a warp to come together.
__device__ __forceinline__ void barrier_sync(unsigned id, unsigned num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned id, unsigned num_threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ unsigned lane_id() {
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

#endif

}  // namespace fanfold::gpu
