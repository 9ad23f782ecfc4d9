// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of the tensors and counts that callers pass to collectives.

#include <cstdint>
#include <vector>

#include "comm/channel.h"
#include "fanfold/tensor_view.h"

namespace fanfold::comm {

/// Contiguous memory of at least one dimension, of the CPU or of any GPU.
/// @throws InvalidArgument
void check_tensor(const char* name, const TensorView& view, DeviceType device = DeviceType::kCpu);

/// As `check_tensor`, with the dtype and row shape of `like` and `num_rows` rows.
/// @throws InvalidArgument
void check_rows(const char* name, const TensorView& view, const TensorView& like,
                std::int64_t num_rows, DeviceType device = DeviceType::kCpu);

/// A type that collectives can add: float32, float16, bfloat16, int32 or int64.
/// @throws InvalidArgument
void check_addable(const char* name, const TensorView& view);

/// One entry per rank, none negative. Returns their sum.
/// @throws InvalidArgument
std::int64_t check_counts(const char* name, const std::vector<std::int64_t>& counts, int num_ranks);

/// The tensors share no byte.
/// @throws InvalidArgument
void check_apart(const TensorView& send, const TensorView& recv);

/// One row of `view`, and all of it as a single row.
RowType row_type(const TensorView& view);
RowType whole_type(const TensorView& view);

}  // namespace fanfold::comm
