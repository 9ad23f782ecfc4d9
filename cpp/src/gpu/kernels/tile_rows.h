// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many rows a tile has (tiles.cuh), for launches and kernels.

#include <cstdint>

#include "exec/device_params.h"

namespace fanfold::gpu {

/// Rows of a tile where a grid of `num_blocks` shares at most `num_rows` rows.
constexpr int max_tile_rows(std::int64_t num_rows, std::int64_t num_blocks) {
  const std::int64_t rows = (num_rows + num_blocks - 1) / num_blocks;
  return static_cast<int>(rows < 1 ? 1 : rows > exec::kTileRows ? exec::kTileRows : rows);
}

/// Rows of a tile where it shares `num_rows`: as many as make each block take as many tiles as any
/// other. At most what max_tile_rows says of these or of more rows.
constexpr int tile_rows(std::int64_t num_rows, std::int64_t num_blocks) {
  if (num_rows < 1) return 1;
  const std::int64_t turn_rows = num_blocks * exec::kTileRows;
  const std::int64_t num_tiles = (num_rows + turn_rows - 1) / turn_rows * num_blocks;
  return static_cast<int>((num_rows + num_tiles - 1) / num_tiles);
}

}  // namespace fanfold::gpu
