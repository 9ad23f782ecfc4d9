// SPDX-License-Identifier: Apache-2.0
#include "comm/listener.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "base/format.h"
#include "comm/private_directory.h"
#include "comm/socket.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

void pause_ns(std::int64_t ns) noexcept {
  const timespec length{0, ns};
  ::nanosleep(&length, nullptr);
}

/// Held while a name is looked at and replaced, so that two processes cannot remove each other's.
base::FileDescriptor lock_directory(const std::string& path, base::Deadline deadline) {
  base::FileDescriptor directory = open_private_directory(path);
  while (::flock(directory.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      throw_system_failure(base::str("rendezvous: flock ", path), errno);
    }
    if (deadline.passed()) {
      throw InvalidState(base::str("rendezvous: expected to lock '", path, "' within ",
                                   base::format_duration(deadline.timeout_ns()),
                                   ", got a directory that another process holds locked"));
    }
    pause_ns(1'000'000);
  }
  return directory;
}

/// Whether the socket at `path` is left over from a process that is gone.
bool is_dead(const std::string& path) {
  const base::FileDescriptor probe = make_socket();
  return connect_to(probe.get(), path) == ECONNREFUSED;
}

bool is_socket(const std::string& path) noexcept {
  struct stat status{};
  return ::lstat(path.c_str(), &status) == 0 && S_ISSOCK(status.st_mode);
}

}  // namespace

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool remove_dead_socket(const std::string& path) noexcept {
  try {
    const base::Deadline end(std::chrono::milliseconds(100));
    const auto lock = lock_directory(directory_of(path), end);
    // A process that is just dying may close its connections before the socket that it listens at.
    while (is_socket(path) && !is_dead(path) && !end.passed()) pause_ns(5'000'000);
    return is_socket(path) && is_dead(path) && ::unlink(path.c_str()) == 0;
  } catch (...) {
    return false;  // tidying up only: the next rank 0 does it again
  }
}

Listener::Listener(const std::string& path, int backlog, base::Deadline deadline)
    : path_(path), socket_(make_socket()) {
  const base::FileDescriptor lock = lock_directory(directory_of(path), deadline);
  int code = listen_at(socket_.get(), path, backlog);
  if (code == EADDRINUSE) {
    if (!is_socket(path)) {
      throw InvalidArgument(
          base::str("rendezvous: expected a free name, got '", path, "', which is not a socket"));
    }
    if (!is_dead(path)) {
      throw InvalidArgument(base::str("rendezvous: expected a free name, got '", path,
                                      "', where another process is waiting for its ranks; start "
                                      "one rank 0 only, and give each job a path of its own"));
    }
    (void)::unlink(path.c_str());
    code = listen_at(socket_.get(), path, backlog);
  }
  if (code != 0) throw_system_failure(base::str("rendezvous: listen at ", path), code);
  (void)::chmod(path.c_str(), S_IRUSR | S_IWUSR);  // the directory is what protects it
  struct stat status{};
  if (::lstat(path.c_str(), &status) == 0) inode_ = status.st_ino;
}

Listener::~Listener() {
  struct stat status{};
  // Only if the name is still ours.
  if (inode_ != 0 && ::lstat(path_.c_str(), &status) == 0 && status.st_ino == inode_) {
    (void)::unlink(path_.c_str());
  }
}

}  // namespace fanfold::comm
