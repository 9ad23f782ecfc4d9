// SPDX-License-Identifier: Apache-2.0
#pragma once

// The inner loops that have one source per instruction set: row copies and row sums.
//
// All instruction sets give the same bits: products and sums are rounded to float32 one by one (no
// fused multiply-add), conversions round to nearest even and keep subnormals. NaN stays NaN, its
// payload bits are unspecified.

#include <cstddef>
#include <cstdint>

#include "fanfold/dtype.h"

namespace fanfold::base {

enum class Isa : std::uint8_t { kAuto, kPortable, kAvx2, kAvx512 };

/// Function table of one instruction set.
struct Kernels {
  Isa isa;
  const char* name;  // "portable", "avx2", "avx512"

  /// Copies `bytes` bytes with stores that bypass the cache where whole lines of `dst` are covered;
  /// any alignment, no overlap. Call `store_fence` before publishing a flag: a release store alone
  /// does not order these.
  void (*copy_streaming)(std::byte* dst, const std::byte* src, std::int64_t bytes);
  /// Orders all earlier streaming stores of this thread before its later stores.
  void (*store_fence)();

  /// out[h] = round_out(acc), acc = +0.0f, then for i ascending acc += w[i] * row[i][h], the
  /// product rounded to float32 before it is added. `weights` null: acc += row[i][h]. `row_dtype`,
  /// `out_dtype` are float32, float16 or bfloat16. Rows and out need only the alignment of their
  /// element. `num_rows` may be 0 (writes zeros). `out` may not overlap a row, except that it may
  /// be exactly row 0 when both types are equal.
  void (*sum_rows)(void* out, DType out_dtype, const void* const* rows, const float* weights,
                   std::int64_t num_rows, DType row_dtype, std::int64_t hidden);
};

/// The best (`kAuto`) or the named table. The choice is made from the processor's features.
/// @throws Unsupported  this processor or build lacks `isa`.
const Kernels& kernels(Isa isa);

/// Whether `kernels(isa)` would succeed.
bool is_supported(Isa isa) noexcept;

/// "auto", "portable", "avx2", "avx512".
/// @throws InvalidArgument  another name.
Isa isa_from_name(const char* name);

// One per source file; null where the build lacks it.
const Kernels* portable_kernels() noexcept;
const Kernels* avx2_kernels() noexcept;
const Kernels* avx512_kernels() noexcept;

}  // namespace fanfold::base
