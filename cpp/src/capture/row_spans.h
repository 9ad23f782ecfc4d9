// SPDX-License-Identifier: Apache-2.0
#pragma once

// From a layout to the rows that are copied.

#include <cstdint>
#include <vector>

#include "fanfold/routing_capture.h"

namespace fanfold::capture {

/// Rows [source, source + num_rows) that go to the tokens from `token` on.
struct RowSpan {
  std::int64_t source;
  std::int64_t token;
  std::int64_t num_rows;
};

/// The spans of `num_rows` rows under `layout`, which is not kSharded; no token twice.
/// @throws InvalidArgument  the layout does not fit the rows, or a token is at or past max_tokens.
std::vector<RowSpan> row_spans(const CaptureLayout& layout, std::int64_t num_rows,
                               std::int64_t max_tokens);

/// Sum of a layout's counts, which must be non-negative and one of which must be `rank`'s.
std::int64_t check_counts(const CaptureLayout& layout);

}  // namespace fanfold::capture
