// SPDX-License-Identifier: Apache-2.0
#pragma once

// What differs between GPUs and the simulated device.

#include "device_check/commands.h"

namespace fanfold::device_check {

/// Before anything else.
void begin(const Options& options);
/// Afterwards; whether nothing was found.
bool end();

}  // namespace fanfold::device_check
