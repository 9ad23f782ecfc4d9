// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ids in the formats of others, where an unsigned type may have no sentinel.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fanfold/routing_rows.h"

namespace fanfold::capture {

/// The ids of `rows` as `dtype`, which may have no room for a sentinel.
/// @throws InvalidArgument  it does not hold every id; or there is a sentinel: names the first.
std::vector<std::byte> foreign_ids(const RoutingRows& rows, DType dtype);

/// Rows of ids in `dtype`, dense. Where that has no room for a sentinel: as the narrowest signed
/// type.
/// @throws InvalidArgument  a length other than num_tokens rows, or ids out of range.
RoutingRows rows_of_foreign_ids(const std::byte* data, std::size_t size, DType dtype,
                                std::int64_t num_tokens, int num_layers, int num_experts, int top_k,
                                std::int64_t first_position);

}  // namespace fanfold::capture
