// SPDX-License-Identifier: Apache-2.0
#pragma once

// Unix SEQPACKET sockets: messages with descriptors, and who is at the other end.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mapping.h"

namespace fanfold::comm {

constexpr std::size_t kMaxMessageBytes = std::size_t{32} << 10;
constexpr std::size_t kMaxMessageFds = 16;  // the kernel takes 253

struct Message {
  std::string bytes;
  std::vector<base::FileDescriptor> fds;
  bool lost_fds = false;  // some did not come through: this process has too many open files
};

enum class IoStatus : std::uint8_t { kDone, kLate, kClosed };

/// Sends one message, with copies of `fds`; waits for room until the deadline.
/// @throws SystemFailure
IoStatus send_message(int socket, const std::string& bytes, const std::vector<int>& fds,
                      base::Deadline deadline);
/// Takes a message that has arrived; kLate if there is none yet.
/// @throws SystemFailure
IoStatus receive_message(int socket, Message* message);
/// As `receive_message`, but only its first bytes, and the message stays.
IoStatus peek_message(int socket, void* head, std::size_t bytes);
/// Waits until `socket` has a message or is closed, for at most `max_ns`.
void wait_readable(int socket, std::int64_t max_ns);

base::FileDescriptor make_socket();
/// Two ends of one connection.
void make_socket_pair(base::FileDescriptor* first, base::FileDescriptor* second);
/// Connects to `path`; returns 0 or an errno.
/// @throws InvalidArgument  the path is too long for a socket.
int connect_to(int socket, const std::string& path);
/// Binds to `path` and listens; returns 0 or an errno.
/// @throws InvalidArgument  the path is too long for a socket.
int listen_at(int socket, const std::string& path, int backlog);
/// The next connection, not open when none waits.
/// @throws SystemFailure  such as too many open files.
base::FileDescriptor accept_from(int listener);

/// The process at the other end, as the kernel saw it when it connected or began to listen.
struct PeerCredentials {
  pid_t pid;
  uid_t uid;
};
PeerCredentials peer_credentials(int socket);
/// A pidfd of the process at the other end.
/// @throws Unsupported  a kernel without pidfds (before 5.3).
base::FileDescriptor peer_pidfd(int socket);
base::FileDescriptor own_pidfd();
/// True once the process has ended, even if nobody has waited for it.
bool has_ended(int pidfd) noexcept;
base::FileDescriptor duplicate(int fd);

[[noreturn]] void throw_system_failure(const std::string& what, int code);

}  // namespace fanfold::comm
