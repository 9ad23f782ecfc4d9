// SPDX-License-Identifier: Apache-2.0
// A user's program: prints what it was linked with, and fails when that is not the package which
// CMake found.

#include <cstdio>
#include <cstring>

#include "fanfold/build_info.h"

int main(int argc, char** argv) {
  const fanfold::BuildInfo& info = fanfold::build_info();
  const char* expected = argc > 1 ? argv[1] : "";
  std::printf("fanfold %s, %s, %s\n", info.version, info.build_type, info.compiler);
  if (std::strcmp(info.version, expected) != 0) {
    std::printf("version: expected %s, got %s\n", expected, info.version);
    return 1;
  }
  return 0;
}
