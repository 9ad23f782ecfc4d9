// SPDX-License-Identifier: Apache-2.0
#pragma once

// Building messages.

#include <cstdint>
#include <locale>
#include <sstream>
#include <string>

namespace fanfold::base {

/// Concatenates its arguments as an ostream prints them.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // texts are compared between ranks
  (out << ... << parts);
  return out.str();
}

/// "60 s", "1.5 s", "20 ms".
std::string format_duration(std::int64_t ns);

}  // namespace fanfold::base
