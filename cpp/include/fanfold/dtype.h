// SPDX-License-Identifier: Apache-2.0
#pragma once

// Element types of tensors that cross the library's border.

#include <cstdint>
#include <string_view>

#include "fanfold/export.h"

namespace fanfold {

/// Type of one tensor element. Payload rows are opaque bytes to the exchange; only the types that
/// `is_summable` accepts can be combined.
enum class DType : std::uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat8E8M0,
  kFloat4E2M1x2,  ///< two FP4 values in one byte; one element is one byte
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};

/// Bytes of one element.
FANFOLD_EXPORT std::int64_t size_of(DType dtype) noexcept;

/// The name torch and NumPy use: "bfloat16", "float8_e4m3fn", …
FANFOLD_EXPORT const char* name_of(DType dtype) noexcept;

/// The type called `name`.
/// @throws InvalidArgument  no such type.
FANFOLD_EXPORT DType dtype_from_name(std::string_view name);

/// float32, float16 or bfloat16: the types that combine can add.
FANFOLD_EXPORT bool is_summable(DType dtype) noexcept;

}  // namespace fanfold
