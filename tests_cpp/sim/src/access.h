// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "fiber.h"
#include "shadow.h"

namespace cudasim {

/// Checks an access of the running thread before it is made; does not return if it must not be.
/// Addresses outside the devices' memory are local to the thread and pass.
void access_memory(std::uintptr_t address, std::size_t bytes, bool is_write, Strength strength,
                   PositionId position);

/// The running thread does not go on; its device has failed.
[[noreturn]] void stop_thread(cudaError_t error);

}  // namespace cudasim
