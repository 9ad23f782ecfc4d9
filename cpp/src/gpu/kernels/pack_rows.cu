// SPDX-License-Identifier: Apache-2.0

#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launcher.h"
#include "gpu/kernels/row_sums.cuh"

namespace fanfold::gpu {
namespace {

constexpr int kUnits = 4;  // vectors that a lane has on their way

/// Grid: any number of blocks. A warp takes parts of rows in turn; sixteen lanes pack a block of
/// 128. It waits for no other and publishes nothing: the end of the kernel does.
template <DType kRow>
__global__ void __launch_bounds__(kThreads, 2)
    pack_rows_kernel(const __grid_constant__ exec::DevicePackParams p) {
  grid_dependency_wait();
  const bool power_of_two = p.wire_scale == WireScale::kUe8m0;
  const std::int64_t scales_bytes = plan::num_wire_blocks(p.hidden) * plan::size_of(p.wire_scale);
  const RowFormat format = {static_cast<int>(p.hidden), 0, power_of_two};
  std::int64_t num_rows = p.num_rows;
  if (p.num_tokens_word != nullptr) {
    const std::int64_t wanted = *p.num_tokens_word;
    num_rows = max(std::int64_t{0}, min(wanted, num_rows));
  }
  const Shares shares = shares_of<kUnits>(num_rows, p.hidden);
  for (std::int64_t item = grid_warp(); item < num_rows * shares.num_parts;
       item += num_grid_warps()) {
    const std::int64_t row = item / shares.num_parts;
    const int first = static_cast<int>(item % shares.num_parts) * shares.part_columns;
    const std::byte* const from = p.rows + row * p.row_stride_bytes;
    move_columns<kRow, kUnits, false>(
        from, p.hidden % kVector == 0 && is_aligned<kRow>(from), first, first + shares.part_columns,
        format,
        packed_destination(p.packed + row * p.hidden, p.scales + row * scales_bytes, format));
  }
  grid_dependency_launch();
}

template <DType kRow>
cudaError_t launch_for(const exec::DevicePackParams& params, LaunchLimits limits,
                       cudaStream_t stream) {
  return launch_blocks<pack_rows_kernel<kRow>>(
      "pack_rows", num_blocks_for<kUnits>(params.num_rows, params.hidden, limits.max_blocks), 0,
      limits, stream, params);
}

}  // namespace

cudaError_t pack_rows(const exec::DevicePackParams& params, LaunchLimits limits,
                      cudaStream_t stream) {
  if (params.dtype == DType::kBFloat16) return launch_for<DType::kBFloat16>(params, limits, stream);
  if (params.dtype == DType::kFloat16) return launch_for<DType::kFloat16>(params, limits, stream);
  return launch_for<DType::kFloat32>(params, limits, stream);
}

}  // namespace fanfold::gpu
