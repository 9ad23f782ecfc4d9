// SPDX-License-Identifier: Apache-2.0
#include "comm/private_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <optional>
#include <sstream>

#include "base/env.h"
#include "base/format.h"
#include "comm/socket.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr mode_t kOthersMayWrite = S_IWGRP | S_IWOTH;
// Leaves room for a name in the 107 bytes of a socket's path.
constexpr std::size_t kMaxDirectoryBytes = 60;

std::string octal(mode_t mode) {
  std::ostringstream out;
  out << std::oct << std::setw(4) << std::setfill('0') << (mode & 07777U);
  return out.str();
}

bool is_private_directory(const std::string& path) {
  try {
    return open_private_directory(path).is_open();
  } catch (const InvalidArgument&) {
    return false;
  }
}

}  // namespace

base::FileDescriptor open_private_directory(const std::string& path) {
  base::FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  const std::string expected =
      base::str("rendezvous: expected a directory of user ", ::geteuid(),
                " that nobody else may write to (mode 0700), got '", path, "'");
  if (!fd.is_open()) throw InvalidArgument(base::str(expected, ": ", std::strerror(errno)));
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) throw_system_failure("fstat", errno);
  if (status.st_uid != ::geteuid() || (status.st_mode & kOthersMayWrite) != 0) {
    throw InvalidArgument(base::str(expected, " of user ", status.st_uid, " with mode ",
                                    octal(status.st_mode),
                                    "; use a directory below $XDG_RUNTIME_DIR, or make one with "
                                    "mkdir -m 700"));
  }
  return fd;
}

std::string runtime_directory() {
  const std::optional<std::string> session = base::env_variable("XDG_RUNTIME_DIR");
  // Not always fit: it may be left over from another user's session. Every rank finds the same.
  if (session.has_value() && !session->empty() && session->size() <= kMaxDirectoryBytes &&
      is_private_directory(*session)) {
    return *session;
  }
  const std::string path = base::str("/tmp/fanfold-", ::geteuid());
  if (::mkdir(path.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    throw_system_failure(base::str("rendezvous: mkdir ", path), errno);
  }
  (void)open_private_directory(path);
  return path;
}

TemporaryDirectory::TemporaryDirectory() : path_(runtime_directory() + "/fanfold-XXXXXX") {
  if (::mkdtemp(path_.data()) == nullptr) {
    throw_system_failure(base::str("rendezvous: mkdtemp ", path_), errno);
  }
}

TemporaryDirectory::~TemporaryDirectory() { (void)::rmdir(path_.c_str()); }

}  // namespace fanfold::comm
