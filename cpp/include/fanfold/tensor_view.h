// SPDX-License-Identifier: Apache-2.0
#pragma once

// A tensor that somebody else owns.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "fanfold/dtype.h"
#include "fanfold/export.h"

namespace fanfold {

/// Where a tensor lies.
enum class DeviceType : std::uint8_t { kCpu, kGpu };

/// Pointer, element type, shape and strides of a tensor; owns nothing.
///
/// Strides count elements. `data` may be null when the tensor holds no element.
struct FANFOLD_EXPORT TensorView {
  static constexpr int kMaxDims = 8;

  void* data = nullptr;
  DType dtype = DType::kUInt8;
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};
  DeviceType device = DeviceType::kCpu;
  int device_index = 0;  // of a GPU: its CUDA ordinal

  TensorView() = default;
  /// A contiguous (row-major) tensor.
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape);
  /// A contiguous tensor that is only read; the library never writes through an input view.
  TensorView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape);

  bool has_value() const noexcept { return ndim > 0 || data != nullptr; }
  std::int64_t num_elements() const noexcept;
  /// Bytes of one row, a row being everything past the first dimension.
  std::int64_t row_bytes() const noexcept;
  /// Distance between two rows.
  std::int64_t row_stride_bytes() const noexcept;
  /// All dimensions but the first are densely packed.
  bool rows_are_contiguous() const noexcept;
  bool is_contiguous() const noexcept;
  /// "bfloat16 [128, 2048] on cpu", for messages.
  std::string describe() const;
};

}  // namespace fanfold
