// SPDX-License-Identifier: Apache-2.0
// Stands in for narrow_ids_avx2.cpp where the build leaves it out.
#include "capture/narrow_table.h"

namespace fanfold::capture {

const NarrowTable* avx2_narrow_table() noexcept { return nullptr; }

}  // namespace fanfold::capture
