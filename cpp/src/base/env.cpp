// SPDX-License-Identifier: Apache-2.0
#include "base/env.h"

#include <cstdlib>

namespace fanfold::base {

std::optional<std::string> env_variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): read, never written
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

}  // namespace fanfold::base
