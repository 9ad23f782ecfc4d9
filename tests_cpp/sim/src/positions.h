// SPDX-License-Identifier: Apache-2.0
#pragma once

// Source positions in 32 bits: shadow memory keeps one with every access.

#include <cstdint>
#include <string>

#include "cudasim/operations.h"

namespace cudasim {

using PositionId = std::uint32_t;

/// No code: copies of a stream.
constexpr PositionId kNoPosition = 0;

/// The id of a return address, of the operation before it.
PositionId position_of_code(const void* return_address);
PositionId position_of(Loc loc);

/// "file.cu:12"; reads debug information where only the code address is known.
std::string describe_position(PositionId id);
std::string describe(Loc loc);

}  // namespace cudasim
