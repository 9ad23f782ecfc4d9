// SPDX-License-Identifier: Apache-2.0
#pragma once

// CUDA's warp functions. Of these only __syncwarp orders memory accesses. Included by device.h.

#include "cudasim/operations.h"

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): CUDA's names

#define CUDASIM_LOC ::cudasim::Loc loc = CUDASIM_HERE

inline void __syncwarp(unsigned mask = 0xffffffffu, CUDASIM_LOC) {
  ::cudasim::op_warp(::cudasim::WarpOp::kSync, mask, 0, 0, loc);
}
inline unsigned __activemask() { return ::cudasim::op_active_mask(); }

namespace cudasim {
template <class T>
T shuffle(unsigned mask, T value, int source, Loc loc) {
  return from_bits<T>(op_warp(WarpOp::kShuffle, mask, to_bits(value), source, loc));
}
inline int this_lane() { return static_cast<int>(current_thread->lane); }
/// The first lane of the segment of `width` lanes that this lane is in.
inline int segment_of(int width) { return this_lane() & ~(width - 1); }
}  // namespace cudasim

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDASIM_LOC) {
  return ::cudasim::shuffle(mask, value, ::cudasim::segment_of(width) | (source & (width - 1)),
                            loc);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDASIM_LOC) {
  int source = ::cudasim::this_lane() ^ lane_mask;
  if (source >= ::cudasim::segment_of(width) + width) source = ::cudasim::this_lane();
  return ::cudasim::shuffle(mask, value, source, loc);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDASIM_LOC) {
  int source = ::cudasim::this_lane() + static_cast<int>(delta);
  if (source >= ::cudasim::segment_of(width) + width) source = ::cudasim::this_lane();
  return ::cudasim::shuffle(mask, value, source, loc);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDASIM_LOC) {
  int source = ::cudasim::this_lane() - static_cast<int>(delta);
  if (source < ::cudasim::segment_of(width)) source = ::cudasim::this_lane();
  return ::cudasim::shuffle(mask, value, source, loc);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDASIM_LOC) {
  return static_cast<unsigned>(
      ::cudasim::op_warp(::cudasim::WarpOp::kBallot, mask, predicate != 0, 0, loc));
}
inline int __any_sync(unsigned mask, int predicate, CUDASIM_LOC) {
  return __ballot_sync(mask, predicate, loc) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDASIM_LOC) {
  return __ballot_sync(mask, predicate == 0, loc) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CUDASIM_LOC) {
  return static_cast<unsigned>(
      ::cudasim::op_warp(::cudasim::WarpOp::kMatchAny, mask, ::cudasim::to_bits(value), 0, loc));
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, CUDASIM_LOC) {
  const auto lanes = static_cast<unsigned>(
      ::cudasim::op_warp(::cudasim::WarpOp::kMatchAll, mask, ::cudasim::to_bits(value), 0, loc));
  *predicate = lanes != 0;
  return lanes;
}

#define CUDASIM_REDUCE(name, type, op)                                                       \
  inline type name(unsigned mask, type value, CUDASIM_LOC) {                                 \
    return static_cast<type>(                                                                \
        ::cudasim::op_warp(::cudasim::WarpOp::op, mask, ::cudasim::to_bits(value), 0, loc)); \
  }
CUDASIM_REDUCE(__reduce_add_sync, unsigned, kReduceAdd)
CUDASIM_REDUCE(__reduce_add_sync, int, kReduceAdd)
CUDASIM_REDUCE(__reduce_min_sync, unsigned, kReduceMin)
CUDASIM_REDUCE(__reduce_min_sync, int, kReduceMinSigned)
CUDASIM_REDUCE(__reduce_max_sync, unsigned, kReduceMax)
CUDASIM_REDUCE(__reduce_max_sync, int, kReduceMaxSigned)
CUDASIM_REDUCE(__reduce_and_sync, unsigned, kReduceAnd)
CUDASIM_REDUCE(__reduce_or_sync, unsigned, kReduceOr)
CUDASIM_REDUCE(__reduce_xor_sync, unsigned, kReduceXor)
#undef CUDASIM_REDUCE
#undef CUDASIM_LOC

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
