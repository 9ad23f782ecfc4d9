// SPDX-License-Identifier: Apache-2.0
#include "comm/tensor_checks.h"

#include <cstddef>
#include <functional>
#include <string>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

// Keeps sums over 1024 ranks, and bytes of rows up to 32 KiB, far from overflow.
constexpr std::int64_t kMaxCount = std::int64_t{1} << 48;

std::string describe(const std::vector<std::int64_t>& counts) {
  std::string text = "[";
  for (std::size_t i = 0; i < counts.size(); ++i) {
    text += base::str(i == 0 ? "" : ", ", counts[i]);
  }
  return text + "]";
}

}  // namespace

void check_tensor(const char* name, const TensorView& view, DeviceType device) {
  if (view.device != device) {
    throw InvalidArgument(base::str(name, ": expected a tensor on ",
                                    device == DeviceType::kCpu ? "cpu" : "the GPU", ", got ",
                                    view.describe()));
  }
  if (view.ndim < 1) {
    throw InvalidArgument(
        base::str(name, ": expected at least one dimension, got ", view.describe()));
  }
  if (!view.is_contiguous()) {
    throw InvalidArgument(base::str(name, ": expected a contiguous tensor, got strides of ",
                                    view.describe(), " that leave gaps"));
  }
  if (view.num_elements() > 0 && view.data == nullptr) {
    throw InvalidArgument(
        base::str(name, ": expected memory for ", view.describe(), ", got a null pointer"));
  }
}

void check_rows(const char* name, const TensorView& view, const TensorView& like,
                std::int64_t num_rows, DeviceType device) {
  bool fits = view.dtype == like.dtype && view.ndim == like.ndim && view.ndim > 0 &&
              view.shape[0] == num_rows;
  for (std::size_t i = 1; fits && i < static_cast<std::size_t>(view.ndim); ++i) {
    fits = view.shape[i] == like.shape[i];
  }
  if (!fits) {
    TensorView expected = like;
    expected.shape[0] = num_rows;
    throw InvalidArgument(
        base::str(name, ": expected ", expected.describe(), ", got ", view.describe()));
  }
  check_tensor(name, view, device);
}

void check_addable(const char* name, const TensorView& view) {
  if (is_summable(view.dtype) || view.dtype == DType::kInt32 || view.dtype == DType::kInt64) return;
  throw InvalidArgument(base::str(
      name, ": expected float32, float16, bfloat16, int32 or int64, got ", view.describe()));
}

std::int64_t check_counts(const char* name, const std::vector<std::int64_t>& counts,
                          int num_ranks) {
  bool fits = counts.size() == static_cast<std::size_t>(num_ranks);
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    fits = fits && count >= 0 && count <= kMaxCount;
    if (fits) sum += count;
  }
  if (fits) return sum;
  throw InvalidArgument(base::str(name, ": expected ", num_ranks,
                                  " numbers of rows, none negative, got ", describe(counts)));
}

void check_apart(const TensorView& send, const TensorView& recv) {
  const auto bytes = [](const TensorView& view) {
    return static_cast<std::size_t>(view.num_elements() * size_of(view.dtype));
  };
  if (bytes(send) == 0 || bytes(recv) == 0) return;
  const auto* const a = static_cast<const std::byte*>(send.data);
  const auto* const b = static_cast<const std::byte*>(recv.data);
  const std::less_equal<const std::byte*> before_or_at;
  if (before_or_at(a + bytes(send), b) || before_or_at(b + bytes(recv), a)) return;
  throw InvalidArgument("recv: expected memory apart from send, got tensors that overlap");
}

RowType row_type(const TensorView& view) {
  return {view.dtype, view.row_bytes() / size_of(view.dtype)};
}

RowType whole_type(const TensorView& view) { return {view.dtype, view.num_elements()}; }

}  // namespace fanfold::comm
