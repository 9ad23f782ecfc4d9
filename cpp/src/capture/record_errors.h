// SPDX-License-Identifier: Apache-2.0
#pragma once

// What is said of ids that cannot be recorded, on every device alike.

#include <cstdint>

#include "capture/narrow_ids.h"

namespace fanfold::capture {

/// @throws InvalidArgument  always.
[[noreturn]] void refuse_id(int layer, const WrongId& wrong, std::int64_t num_ids,
                            bool is_physical);
/// @throws InvalidState  always.
[[noreturn]] void refuse_other_ids(int layer, std::int64_t token, std::int64_t row,
                                   std::int64_t step_id);
/// @throws InvalidArgument  always.
[[noreturn]] void refuse_partly_written(int top_k, std::int64_t row, std::int64_t column);

/// @throws InvalidArgument  always.
[[noreturn]] void refuse_count(int layer, std::int64_t rank, std::int64_t expected,
                               std::int64_t got);

}  // namespace fanfold::capture
