// SPDX-License-Identifier: Apache-2.0
#pragma once

// What this copy of the library was built with.

#include "fanfold/export.h"

namespace fanfold {

/// Facts fixed when the library was configured. The strings live as long as the program.
struct BuildInfo {
  const char* version;             ///< "major.minor.patch"
  const char* build_type;          ///< CMake's build type, such as "Release"
  const char* compiler;            ///< name and version of the C++ compiler
  const char* cuda;                ///< version of nvcc, or "" without the GPU backend
  const char* cuda_architectures;  ///< CMake's list, such as "80-real;90-real", or ""
};

/// Returns the facts of this build. Never throws; safe from any thread.
FANFOLD_EXPORT const BuildInfo& build_info() noexcept;

}  // namespace fanfold
