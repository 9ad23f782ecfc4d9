// SPDX-License-Identifier: Apache-2.0
#pragma once

// CUDA's integer and float intrinsics that kernels use. Included by device.h.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cudasim/operations.h"

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): CUDA's names

inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
inline unsigned __brev(unsigned value) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((value >> bit) & 1u) << (31 - bit);
  return reversed;
}

inline unsigned __float_as_uint(float value) {
  return ::cudasim::from_bits<unsigned>(::cudasim::to_bits(value));
}
inline int __float_as_int(float value) {
  return ::cudasim::from_bits<int>(::cudasim::to_bits(value));
}
inline float __uint_as_float(unsigned value) { return ::cudasim::from_bits<float>(value); }
inline float __int_as_float(int value) {
  return ::cudasim::from_bits<float>(::cudasim::to_bits(value));
}
inline long long __double_as_longlong(double value) {
  return ::cudasim::from_bits<long long>(::cudasim::to_bits(value));
}
inline double __longlong_as_double(long long value) {
  return ::cudasim::from_bits<double>(::cudasim::to_bits(value));
}

// Rounded once each: kernels are compiled with -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline int __float2int_rz(float value) { return static_cast<int>(value); }

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
