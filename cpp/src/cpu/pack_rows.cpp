// SPDX-License-Identifier: Apache-2.0
#include "cpu/backend.h"
#include "plan/wire.h"

namespace fanfold::cpu {

void pack_rows(const exec::Context& context, const exec::PackRowsParams& params) {
  const std::int64_t scales_bytes =
      plan::num_wire_blocks(params.hidden) * plan::size_of(params.wire_scale);
  const auto pack = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      context.kernels->pack_fp8(params.packed + i * params.hidden, params.scales + i * scales_bytes,
                                params.wire_scale == WireScale::kUe8m0,
                                params.rows + i * params.row_stride_bytes, params.dtype,
                                params.hidden);
    }
  };
  exec::for_ranges(context.workers, params.num_rows, params.hidden * size_of(params.dtype), pack);
}

}  // namespace fanfold::cpu
