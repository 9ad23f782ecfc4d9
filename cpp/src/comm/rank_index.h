// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace fanfold::comm {

/// A rank as the index of what there is one of per rank.
inline std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

}  // namespace fanfold::comm
