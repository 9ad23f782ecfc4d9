// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cpu/backend.h"

namespace fanfold::cpu {

void gather_rows(const exec::Context& context, const exec::GatherRowsParams& params) {
  const bool convert = params.source_dtype != params.target_dtype;
  const std::int64_t hidden = convert ? params.row_bytes / size_of(params.source_dtype) : 0;
  const auto gather = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::byte* row = params.source + params.indices[i] * params.source_stride_bytes;
      std::byte* out = params.target + i * params.target_stride_bytes;
      if (!convert) {
        std::memcpy(out, row, static_cast<std::size_t>(params.row_bytes));
        continue;
      }
      const void* rows = row;
      context.kernels->sum_rows(out, params.target_dtype, &rows, nullptr, 1, params.source_dtype,
                                hidden);
    }
  };
  exec::for_ranges(context.workers, params.num_rows, params.row_bytes, gather);
}

}  // namespace fanfold::cpu
