// SPDX-License-Identifier: Apache-2.0
#pragma once

// CUDA's atomic functions: relaxed, and of device scope unless the name says otherwise. Included by
// device.h.

#include "cudasim/operations.h"

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): CUDA's names

#define CUDASIM_ATOMIC_OF(name, kind, scope)                                            \
  template <class T>                                                                    \
  T name(T* address, std::common_type_t<T> value, ::cudasim::Loc loc = CUDASIM_HERE) {  \
    return ::cudasim::rmw<T>(address, value, T{}, ::cudasim::Rmw::kind,                 \
                             ::cudasim::Order::kRelaxed, ::cudasim::Scope::scope, loc); \
  }
#define CUDASIM_ATOMIC(name, kind)             \
  CUDASIM_ATOMIC_OF(name, kind, kGpu)          \
  CUDASIM_ATOMIC_OF(name##_system, kind, kSys) \
  CUDASIM_ATOMIC_OF(name##_block, kind, kCta)

CUDASIM_ATOMIC(atomicAdd, kAdd)
CUDASIM_ATOMIC(atomicExch, kExchange)
CUDASIM_ATOMIC(atomicMax, kMax)
CUDASIM_ATOMIC(atomicMin, kMin)
CUDASIM_ATOMIC(atomicOr, kOr)
CUDASIM_ATOMIC(atomicAnd, kAnd)
CUDASIM_ATOMIC(atomicXor, kXor)
CUDASIM_ATOMIC(atomicInc, kIncrement)
CUDASIM_ATOMIC(atomicDec, kDecrement)

#define CUDASIM_ATOMIC_SUB(name, add)                                                  \
  template <class T>                                                                   \
  T name(T* address, std::common_type_t<T> value, ::cudasim::Loc loc = CUDASIM_HERE) { \
    return add(address, static_cast<T>(T{} - value), loc);                             \
  }
CUDASIM_ATOMIC_SUB(atomicSub, atomicAdd)
CUDASIM_ATOMIC_SUB(atomicSub_system, atomicAdd_system)
CUDASIM_ATOMIC_SUB(atomicSub_block, atomicAdd_block)

#define CUDASIM_ATOMIC_CAS(name, scope)                                                  \
  template <class T>                                                                     \
  T name(T* address, std::common_type_t<T> expected, std::common_type_t<T> value,        \
         ::cudasim::Loc loc = CUDASIM_HERE) {                                            \
    return ::cudasim::rmw<T>(address, value, expected, ::cudasim::Rmw::kCompareExchange, \
                             ::cudasim::Order::kRelaxed, ::cudasim::Scope::scope, loc);  \
  }
CUDASIM_ATOMIC_CAS(atomicCAS, kGpu)
CUDASIM_ATOMIC_CAS(atomicCAS_system, kSys)
CUDASIM_ATOMIC_CAS(atomicCAS_block, kCta)

#undef CUDASIM_ATOMIC_CAS
#undef CUDASIM_ATOMIC_SUB
#undef CUDASIM_ATOMIC
#undef CUDASIM_ATOMIC_OF

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
