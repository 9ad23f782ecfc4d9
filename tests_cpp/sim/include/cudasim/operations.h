// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a simulated kernel asks of the engine. device.h wraps these in CUDA's names; a project's own
// PTX wrappers call them directly.

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

namespace cudasim {

enum class Order : std::uint8_t { kRelaxed, kAcquire, kRelease, kAcqRel };
enum class Scope : std::uint8_t { kCta, kGpu, kSys };
enum class Rmw : std::uint8_t {
  kAdd,
  kExchange,
  kCompareExchange,
  kMax,
  kMin,
  kOr,
  kAnd,
  kXor,
  kIncrement,
  kDecrement,
  kAddFloat,
};
enum class WarpOp : std::uint8_t {
  kSync,
  kShuffle,
  kBallot,
  kMatchAny,
  kMatchAll,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceMinSigned,
  kReduceMaxSigned,
  kReduceAnd,
  kReduceOr,
  kReduceXor,
};

/// Source position of an operation, taken by a default argument where it is called. A function,
/// since a braced initialiser as the default would give the position of the callee.
struct Loc {
  const char* file;
  int line;
  static constexpr Loc here(const char* f = __builtin_FILE(), int n = __builtin_LINE()) {
    return {f, n};
  }
};
#define CUDASIM_HERE ::cudasim::Loc::here()

/// The CUDA thread that runs.
struct ThreadContext {
  uint3 thread_idx{};
  uint3 block_idx{};
  dim3 block_dim{};
  dim3 grid_dim{};
  unsigned lane = 0;  // of the warp
};
extern ThreadContext* current_thread;

// Strong operations, of 4 or 8 bytes.
std::uint64_t op_load(const void* address, unsigned bytes, Order order, Scope scope, Loc loc);
void op_store(void* address, std::uint64_t value, unsigned bytes, Order order, Scope scope,
              Loc loc);
struct RmwArguments {
  std::uint64_t value;
  std::uint64_t expected;  // kCompareExchange only
  bool is_signed;
};
/// Returns the value before.
std::uint64_t op_rmw(void* address, const RmwArguments& arguments, unsigned bytes, Rmw kind,
                     Order order, Scope scope, Loc loc);
/// Any order but kRelaxed is a fence.acq_rel.
void op_fence(Order order, Scope scope, Loc loc);

/// One aligned vector access of 8 or 16 bytes between a register and memory.
void op_vector(void* reg, void* memory, unsigned bytes, bool is_write, Loc loc);

/// All threads of the block.
void op_barrier(Loc loc);
/// The same; returns how many threads gave a predicate that is not zero.
unsigned op_barrier_count(bool predicate, Loc loc);
/// Named barrier of `num_threads` threads; `waits` false is bar.arrive.
void op_named_barrier(unsigned id, unsigned num_threads, bool waits, Loc loc);

/// A function of the warp's lanes in `mask`; `source` is the lane that kShuffle reads.
std::uint64_t op_warp(WarpOp op, unsigned mask, std::uint64_t value, int source, Loc loc);
/// The lanes that have not left the kernel.
unsigned op_active_mask();

[[noreturn]] void op_trap(const char* what, Loc loc);
std::uint64_t op_globaltimer();
void op_nanosleep(unsigned ns, Loc loc);

/// Programmatic dependent launch: lets dependents start, and waits for what this kernel depends on.
void op_launch_dependents(Loc loc);
void op_wait_dependencies(Loc loc);

/// The block's storage for a shared variable; `key` is an address that is unique to the variable.
void* op_static_shared(const void* key, std::size_t bytes, std::size_t alignment);
void* op_dynamic_shared();

struct KernelLaunch {
  const char* name = "kernel";
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  std::size_t dynamic_shared_bytes = 0;
  cudaStream_t stream = nullptr;
  /// May start when the kernel before it in the stream lets its dependents start.
  bool programmatic_dependent = false;
  /// What cudaFuncSetAttribute was called with; null: no limit below the device's is checked.
  const void* function = nullptr;
};
/// Enqueues a grid, each thread of which calls `body`.
cudaError_t enqueue_kernel(const KernelLaunch& launch, std::function<void()> body);

template <class T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(std::uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T rmw(T* address, T value, T expected, Rmw kind, Order order, Scope scope, Loc loc) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if (std::is_floating_point_v<T> && kind == Rmw::kAdd) kind = Rmw::kAddFloat;
  return from_bits<T>(op_rmw(address, {to_bits(value), to_bits(expected), std::is_signed_v<T>},
                             sizeof(T), kind, order, scope, loc));
}

}  // namespace cudasim
