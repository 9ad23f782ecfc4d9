// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ids as routers give them, turned into the narrow type that they are stored in.

#include <cstddef>
#include <cstdint>

#include "capture/narrow_table.h"
#include "fanfold/tensor_view.h"

namespace fanfold::capture {

/// An id that is no expert.
struct WrongId {
  std::int64_t row, column, id;
};

/// What ids are, and what becomes of them.
struct IdRule {
  std::int32_t num_experts;               // ids that `topk_ids` may hold: 0 to num_experts - 1
  const std::int32_t* logical_of_expert;  // null, or what each is replaced by
  int top_k;
  std::int64_t id_bytes;  // of one that is stored
};

/// Whether ids may be given in this type.
bool is_router_dtype(DType dtype) noexcept;

/// Stores the first top_k ids of rows [first, first + num_rows) of `topk_ids` at `to`, densely.
/// Returns whether all were right; if not, what was written means nothing.
bool store_ids(const TensorView& topk_ids, std::int64_t first, std::int64_t num_rows,
               const IdRule& rule, const NarrowTable& table, std::byte* to) noexcept;

/// The first id of these rows that is no expert; there is one.
WrongId find_wrong_id(const TensorView& topk_ids, std::int64_t first, std::int64_t num_rows,
                      const IdRule& rule) noexcept;

}  // namespace fanfold::capture
