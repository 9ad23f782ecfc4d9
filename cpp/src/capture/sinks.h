// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory that fused kernels write ids to themselves. The minimum of its type says "not written",
// which no router gives: so a kernel that wrote nothing shows.

#include <vector>

#include "capture/row_spans.h"
#include "fanfold/tensor_view.h"

namespace fanfold::capture {

/// Fills an int16 or int32 tensor with "not written".
void clear_sink(const TensorView& sink) noexcept;

/// The parts of `spans` whose rows of `ids`, int16 or int32, were written.
/// @throws InvalidArgument  a row of which only some of the first top_k ids were.
std::vector<RowSpan> written_spans(const TensorView& ids, int top_k,
                                   const std::vector<RowSpan>& spans);

}  // namespace fanfold::capture
