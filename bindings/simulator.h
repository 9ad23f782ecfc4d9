// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a build for the simulated device has beyond others: its memory is the host's, too, so its
// tensors are the CPU's to everybody else. In other builds: no_simulator.cpp.

#include <nanobind/nanobind.h>

#include <optional>

namespace fanfold::python {

bool is_simulated() noexcept;

/// The simulated device whose memory `address` is; nothing for other memory.
std::optional<int> simulated_device_of(const void* address) noexcept;

/// fanfold._core.simulator: what tests steer the device with.
void bind_simulator(nanobind::module_& m);

}  // namespace fanfold::python
