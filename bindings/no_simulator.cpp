// SPDX-License-Identifier: Apache-2.0
#include "simulator.h"

namespace fanfold::python {

bool is_simulated() noexcept { return false; }

std::optional<int> simulated_device_of(const void* /*address*/) noexcept { return std::nullopt; }

void bind_simulator(nanobind::module_& /*m*/) {}

}  // namespace fanfold::python
