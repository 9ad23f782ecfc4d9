// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loops over ids that have one source per instruction set. The one for AVX2 includes this and
// no more: an inline function that it shared with others could be linked from there.

#include <cstdint>

namespace fanfold::capture {

/// Stores ids, which must be below `num_experts` or negative, in the types of `to_bytes` 1, 2 or 4:
/// a negative one as all bits set. Contiguous ids of 2, 4 or 8 bytes. Returns whether all were
/// right; if not, what was written means nothing.
///
/// All tables give the same bytes.
using NarrowIds = bool (*)(const void* ids, std::int64_t num_ids, std::int32_t num_experts,
                           void* to);

/// By bytes of an id given (2, 4, 8) and stored (1, 2, 4).
struct NarrowTable {
  NarrowIds from_2[3];
  NarrowIds from_4[3];
  NarrowIds from_8[3];
};

const NarrowTable& portable_narrow_table() noexcept;
/// Null where the build lacks it.
const NarrowTable* avx2_narrow_table() noexcept;
/// The better one that this processor has.
const NarrowTable& narrow_table() noexcept;

}  // namespace fanfold::capture
