// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bytes and descriptors on their way from one rank to others.

#include <cstddef>
#include <string>
#include <vector>

#include "base/mapping.h"

namespace fanfold::comm {

/// Something for one rank, or for all others.
struct Parcel {
  static constexpr int kEveryone = -1;

  int peer = kEveryone;  // destination when given to `exchange`, source when it comes out
  std::string bytes;     // at most 16 KiB
  std::vector<base::FileDescriptor> fds;  // at most kMaxMessageFds

  /// Takes a descriptor out.
  /// @throws SystemFailure  it was lost on the way: this process has too many open files.
  base::FileDescriptor take_fd(std::size_t place);
};

}  // namespace fanfold::comm
