// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory that must not be given back, since somebody may use it still.

#include <memory>

namespace fanfold::base {

/// Never lets go of `memory`.
void keep_forever(std::shared_ptr<const void> memory);

}  // namespace fanfold::base
