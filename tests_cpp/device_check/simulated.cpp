// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "cudasim/control.h"
#include "device_check/platform.h"

namespace fanfold::device_check {

void begin(const Options& options) {
  cudasim::Config config;
  config.seed = options.seed;
  config.host_threads = options.ranks;
  cudasim::configure(config);
}

bool end() {
  const auto reports = cudasim::reports();
  for (const cudasim::Report& report : reports) {
    std::printf("%s: %s\n", report.kind.c_str(), report.text.c_str());
  }
  return reports.empty();
}

}  // namespace fanfold::device_check
