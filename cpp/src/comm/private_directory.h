// SPDX-License-Identifier: Apache-2.0
#pragma once

// Directories in which only this user can make files.

#include <string>

#include "base/mapping.h"

namespace fanfold::comm {

/// Opens `path` if it belongs to this user and nobody else can write to it.
/// @throws InvalidArgument  it does not exist, is another user's, or others may write (as in /tmp).
base::FileDescriptor open_private_directory(const std::string& path);

/// This user's directory for sockets: $XDG_RUNTIME_DIR if that is fit for it, else
/// /tmp/fanfold-<user id>, which is made if need be.
/// @throws InvalidArgument  /tmp/fanfold-<user id> is there, but is not ours alone.
std::string runtime_directory();

/// A new directory in `runtime_directory()`, removed with this object.
class TemporaryDirectory {
 public:
  /// @throws SystemFailure, InvalidArgument
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

}  // namespace fanfold::comm
