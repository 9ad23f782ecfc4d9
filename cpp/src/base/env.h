// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only door to environment variables.

#include <optional>
#include <string>

namespace fanfold::base {

/// Value of `name`, or nothing when it is unset.
std::optional<std::string> env_variable(const char* name);

}  // namespace fanfold::base
