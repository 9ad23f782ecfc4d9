// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "task.h"

namespace cudasim {

/// Makes the copy or memset of a task that starts, and checks its accesses.
void run_copy(Task& task);

}  // namespace cudasim
