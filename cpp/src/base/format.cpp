// SPDX-License-Identifier: Apache-2.0
#include "base/format.h"

namespace fanfold::base {

std::string format_duration(std::int64_t ns) {
  if (ns >= 1'000'000'000) return str(static_cast<double>(ns / 1'000'000) / 1e3, " s");
  if (ns >= 1'000'000) return str(static_cast<double>(ns / 1'000) / 1e3, " ms");
  return str(static_cast<double>(ns) / 1e3, " us");
}

}  // namespace fanfold::base
