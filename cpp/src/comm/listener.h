// SPDX-License-Identifier: Apache-2.0
#pragma once

// The socket at which rank 0 waits for its peers.

#include <sys/types.h>

#include <string>

#include "base/clock.h"
#include "base/mapping.h"

namespace fanfold::comm {

/// "a/b" of "a/b/c", "." of "c".
std::string directory_of(const std::string& path);

/// Removes the socket at `path` if nobody listens there; returns whether it did. Best effort.
bool remove_dead_socket(const std::string& path) noexcept;

/// A listening socket with a name, which it removes when it dies.
class Listener {
 public:
  /// Replaces the socket of a process that is gone.
  /// @throws InvalidArgument  the directory is not private, something else has that name, or a live
  ///                          process listens there.
  /// @throws SystemFailure
  Listener(const std::string& path, int backlog, base::Deadline deadline);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int get() const noexcept { return socket_.get(); }

 private:
  std::string path_;
  base::FileDescriptor socket_;
  ino_t inode_ = 0;
};

}  // namespace fanfold::comm
