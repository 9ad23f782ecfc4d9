// SPDX-License-Identifier: Apache-2.0
#pragma once

// Headers of .npy files, version 1.0.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fanfold/dtype.h"

namespace fanfold::capture {

struct NpyHeader {
  DType dtype = DType::kInt16;
  std::array<std::int64_t, 3> shape{};
  std::size_t bytes = 0;  // of the header; the array follows
};

/// Everything before the array.
std::string npy_header(DType dtype, const std::array<std::int64_t, 3>& shape);

/// Reads what stands before the array of a file.
/// @throws InvalidArgument  see decode_npy.
NpyHeader read_npy_header(std::string_view file);

}  // namespace fanfold::capture
