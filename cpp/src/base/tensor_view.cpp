// SPDX-License-Identifier: Apache-2.0
#include "fanfold/tensor_view.h"

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold {

TensorView::TensorView(void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_)
    : data(data_), dtype(dtype_), ndim(static_cast<int>(shape_.size())) {
  if (shape_.size() > static_cast<std::size_t>(kMaxDims)) {
    throw InvalidArgument(
        base::str("tensor: expected at most ", kMaxDims, " dimensions, got ", shape_.size()));
  }
  std::size_t i = 0;
  for (const std::int64_t extent : shape_) shape[i++] = extent;
  std::int64_t stride = 1;
  while (i-- > 0) {
    strides[i] = stride;
    stride *= shape[i];
  }
}

TensorView::TensorView(const void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_)
    : TensorView(const_cast<void*>(data_), dtype_, shape_) {}

std::int64_t TensorView::num_elements() const noexcept {
  std::int64_t count = ndim > 0 ? 1 : 0;
  for (int i = 0; i < ndim; ++i) count *= shape[static_cast<std::size_t>(i)];
  return count;
}

std::int64_t TensorView::row_bytes() const noexcept {
  std::int64_t count = size_of(dtype);
  for (int i = 1; i < ndim; ++i) count *= shape[static_cast<std::size_t>(i)];
  return count;
}

std::int64_t TensorView::row_stride_bytes() const noexcept {
  return ndim == 0 ? 0 : strides[0] * size_of(dtype);
}

bool TensorView::rows_are_contiguous() const noexcept {
  if (num_elements() == 0) return true;  // whatever strides its maker gave it
  std::int64_t expected = 1;
  for (int i = ndim - 1; i > 0; --i) {
    const auto dim = static_cast<std::size_t>(i);
    if (shape[dim] != 1 && strides[dim] != expected) return false;
    expected *= shape[dim];
  }
  return true;
}

bool TensorView::is_contiguous() const noexcept {
  return rows_are_contiguous() &&
         (ndim == 0 || shape[0] <= 1 || num_elements() == 0 || row_stride_bytes() == row_bytes());
}

std::string TensorView::describe() const {
  std::string text = base::str(name_of(dtype), " [");
  for (int i = 0; i < ndim; ++i) {
    text += base::str(i == 0 ? "" : ", ", shape[static_cast<std::size_t>(i)]);
  }
  text += "] on ";
  return text + (device == DeviceType::kCpu ? "cpu" : base::str("cuda:", device_index));
}

}  // namespace fanfold
