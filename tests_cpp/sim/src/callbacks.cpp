// SPDX-License-Identifier: Apache-2.0
// Kernels are compiled with -fsanitize=thread, but not linked with its runtime: these are the
// functions that the compiler calls for every memory access.

#include <cstring>

#include "access.h"
#include "state.h"

namespace cudasim {
namespace {

inline bool concerns_us(const void* address) {
  return is_in_arena(address) && current_thread != nullptr && is_on_fiber();
}

void access_at(const void* address, std::size_t bytes, bool is_write, const void* code) {
  access_memory(reinterpret_cast<std::uintptr_t>(address), bytes, is_write, Strength::kWeak,
                position_of_code(code));
}

/// The hardware faults where an address is not a multiple of what is accessed.
void check_alignment(const void* address, std::size_t bytes, const void* code) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes == 0) return;
  const PositionId position = position_of_code(code);
  report_once("align", position, [&] {
    return "access of " + std::to_string(bytes) + " bytes at a misaligned address by " +
           describe(*self()) + " at " + describe_position(position);
  });
  stop_thread(cudaErrorMisalignedAddress);
}

}  // namespace
}  // namespace cudasim

#define CUDASIM_ACCESS(address, bytes, is_write)                               \
  if (cudasim::concerns_us(address)) {                                         \
    cudasim::access_at(address, bytes, is_write, __builtin_return_address(0)); \
  }
#define CUDASIM_ALIGNED_ACCESS(address, bytes, is_write)                       \
  if (cudasim::concerns_us(address)) {                                         \
    cudasim::check_alignment(address, bytes, __builtin_return_address(0));     \
    cudasim::access_at(address, bytes, is_write, __builtin_return_address(0)); \
  }

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): the compiler's names
#define CUDASIM_CALLBACKS(n)                                                    \
  void __tsan_read##n(void* p) { CUDASIM_ALIGNED_ACCESS(p, n, false) }          \
  void __tsan_write##n(void* p) { CUDASIM_ALIGNED_ACCESS(p, n, true) }          \
  void __tsan_volatile_read##n(void* p) { CUDASIM_ALIGNED_ACCESS(p, n, false) } \
  void __tsan_volatile_write##n(void* p) { CUDASIM_ALIGNED_ACCESS(p, n, true) } \
  void __tsan_unaligned_read##n(void* p) { CUDASIM_ACCESS(p, n, false) }        \
  void __tsan_unaligned_write##n(void* p) { CUDASIM_ACCESS(p, n, true) }        \
  void __tsan_read_write##n(void* p) {                                          \
    CUDASIM_ALIGNED_ACCESS(p, n, false)                                         \
    CUDASIM_ACCESS(p, n, true)                                                  \
  }

extern "C" {
CUDASIM_CALLBACKS(1)
CUDASIM_CALLBACKS(2)
CUDASIM_CALLBACKS(4)
CUDASIM_CALLBACKS(8)
CUDASIM_CALLBACKS(16)

void __tsan_read_range(void* p, std::size_t bytes) { CUDASIM_ACCESS(p, bytes, false) }
void __tsan_write_range(void* p, std::size_t bytes) { CUDASIM_ACCESS(p, bytes, true) }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

void* __tsan_memcpy(void* dst, const void* src, std::size_t bytes) {
  CUDASIM_ACCESS(src, bytes, false)
  CUDASIM_ACCESS(dst, bytes, true)
  return std::memcpy(dst, src, bytes);
}
void* __tsan_memmove(void* dst, const void* src, std::size_t bytes) {
  CUDASIM_ACCESS(src, bytes, false)
  CUDASIM_ACCESS(dst, bytes, true)
  return std::memmove(dst, src, bytes);
}
void* __tsan_memset(void* dst, int value, std::size_t bytes) {
  CUDASIM_ACCESS(dst, bytes, true)
  return std::memset(dst, value, bytes);
}
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
