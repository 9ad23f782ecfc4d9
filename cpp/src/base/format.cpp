// SPDX-License-Identifier: Apache-2.0
#include "base/format.h"

namespace fanfold::base {

std::string format_duration(std::int64_t ns) {
  const auto exact = static_cast<double>(ns);
  if (ns >= 1'000'000'000) return str(exact / 1e9, " s");
  if (ns >= 1'000'000) return str(exact / 1e6, " ms");
  return str(exact / 1e3, " us");
}

}  // namespace fanfold::base
