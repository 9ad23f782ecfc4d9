// SPDX-License-Identifier: Apache-2.0
#pragma once

// The inner loops that have one source per instruction set: row copies, row sums, FP8 rows.
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
  /// Copies `bytes` bytes through the cache and meanwhile fetches as many at `next`, where the copy
  /// after this one will go (or `dst`: nowhere else), for writing; any alignment, no overlap.
  void (*copy_fetching)(std::byte* dst, const std::byte* src, std::int64_t bytes,
                        const std::byte* next);

  /// out[h] = round_out(acc), acc = +0.0f, then for i ascending acc += w[i] * row[i][h], the
  /// product rounded to float32 before it is added. `weights` null: acc += row[i][h]. `row_dtype`,
  /// `out_dtype` are float32, float16 or bfloat16. Rows and out need only the alignment of their
  /// element. `num_rows` may be 0 (writes zeros). `out` may not overlap a row, except that it may
  /// be exactly row 0 when both types are equal.
  void (*sum_rows)(void* out, DType out_dtype, const void* const* rows, const float* weights,
                   std::int64_t num_rows, DType row_dtype, std::int64_t hidden);

  /// Packs one row to FP8 E4M3 with one scale per 128 elements (the last block may be shorter).
  ///
  /// Scale: `fp8_scale` of the block's largest finite magnitude (base/fp8.h), a float32, or for
  /// `power_of_two` one byte, the exponent biased by 127. Element: row / scale, divided in float32,
  /// then rounded to E4M3; infinities and NaN become NaN and touch no other element. `row_dtype` as
  /// in sum_rows. Any alignment of `packed`; `scales` is 4-byte aligned for float32.
  ///
  /// |row - packed * scale| <= max(scale * 2^-10, |row| * 2^-4), but for the roundings to float32:
  /// half a step of E4M3, below its normal numbers and among them.
  void (*pack_fp8)(std::byte* packed, std::byte* scales, bool power_of_two, const void* row,
                   DType row_dtype, std::int64_t hidden);
  /// Packs the float32 sums of rows as sum_rows adds them, unrounded.
  void (*sum_pack_fp8)(std::byte* packed, std::byte* scales, bool power_of_two,
                       const void* const* rows, const float* weights, std::int64_t num_rows,
                       DType row_dtype, std::int64_t hidden);
  /// sum_rows of packed rows, whose elements count as float(packed) * scale of their block, rounded
  /// to float32. The scales of a row are `scales_offset` bytes behind its first element.
  void (*sum_unpack_fp8)(void* out, DType out_dtype, const void* const* packed_rows,
                         std::int64_t scales_offset, bool power_of_two, const float* weights,
                         std::int64_t num_rows, std::int64_t hidden);
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
