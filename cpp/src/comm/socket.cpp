// SPDX-License-Identifier: Apache-2.0
#include "comm/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <limits>
#include <new>
#include <utility>

#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr int kSoPeerPidfd = 77;  // asm-generic/socket.h, kernel 6.5

int poll_one(int fd, short events, std::int64_t max_ns) noexcept {
  pollfd entry{fd, events, 0};
  const timespec limit{max_ns / 1'000'000'000, max_ns % 1'000'000'000};
  return ::ppoll(&entry, 1, &limit, nullptr);
}

void sleep_ns(std::int64_t ns) noexcept {
  const timespec length{0, ns};
  ::nanosleep(&length, nullptr);
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    throw InvalidArgument(base::str("rendezvous: expected a path of 1 to ",
                                    sizeof address.sun_path - 1, " bytes, got ", path.size(),
                                    " bytes: '", path, "'; use a shorter directory"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

base::FileDescriptor open_pidfd(pid_t pid) {
  base::FileDescriptor fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (fd.is_open()) return fd;
  if (errno == ENOSYS || errno == EPERM || errno == EINVAL) {
    throw Unsupported(base::str("processes: expected a kernel with pidfd_open (Linux 5.3), which ",
                                "tells when a rank ends, got: ", std::strerror(errno)));
  }
  throw_system_failure("pidfd_open", errno);
}

}  // namespace

void throw_system_failure(const std::string& what, int code) {
  if (code == ENOMEM || code == ENOBUFS) throw std::bad_alloc();
  throw SystemFailure(base::str(what, ": ", std::strerror(code)), code);
}

IoStatus send_message(int socket, const std::string& bytes, const std::vector<int>& fds,
                      base::Deadline deadline) {
  iovec piece{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr head{};
  head.msg_iov = &piece;
  head.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  if (!fds.empty()) {
    head.msg_control = control.data();
    head.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&head);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket, &head, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return IoStatus::kDone;
    const int code = errno;
    if (code == EPIPE || code == ECONNRESET || code == ENOTCONN) return IoStatus::kClosed;
    if (code == EINTR) continue;
    // ETOOMANYREFS: too many descriptors of this user are in flight; the receivers take them out.
    const bool is_full = code == EAGAIN || code == ETOOMANYREFS || code == ENOBUFS;
    if (!is_full) throw_system_failure("sendmsg", code);
    if (deadline.passed()) return IoStatus::kLate;
    if (code == EAGAIN) {
      poll_one(socket, POLLOUT, std::min<std::int64_t>(deadline.remaining_ns(), 20'000'000));
    } else {
      sleep_ns(1'000'000);
    }
  }
}

IoStatus receive_message(int socket, Message* message) {
  std::string bytes(kMaxMessageBytes, '\0');
  std::vector<char> control(CMSG_SPACE(kMaxMessageFds * sizeof(int)));
  iovec piece{bytes.data(), bytes.size()};
  msghdr head{};
  head.msg_iov = &piece;
  head.msg_iovlen = 1;
  head.msg_control = control.data();
  head.msg_controllen = control.size();
  ssize_t size = 0;
  bool was_reset = false;  // reported once, before the messages that the peer sent earlier
  for (;;) {
    size = ::recvmsg(socket, &head, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size >= 0) break;
    if (errno == EAGAIN) return was_reset ? IoStatus::kClosed : IoStatus::kLate;
    if (errno == ECONNRESET && !was_reset) {
      was_reset = true;
    } else if (errno == ECONNRESET || errno == ENOTCONN) {
      return IoStatus::kClosed;
    } else if (errno != EINTR) {
      throw_system_failure("recvmsg", errno);
    }
  }
  message->fds.clear();
  for (cmsghdr* part = CMSG_FIRSTHDR(&head); part != nullptr; part = CMSG_NXTHDR(&head, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t num = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    std::vector<int> numbers(num);
    std::memcpy(numbers.data(), CMSG_DATA(part), num * sizeof(int));
    for (const int number : numbers) message->fds.emplace_back(number);
  }
  if (size == 0) return IoStatus::kClosed;  // nobody sends an empty message
  message->lost_fds = (head.msg_flags & MSG_CTRUNC) != 0;
  bytes.resize(static_cast<std::size_t>(size));
  message->bytes = std::move(bytes);
  return IoStatus::kDone;
}

IoStatus peek_message(int socket, void* head, std::size_t bytes) {
  const ssize_t size = ::recv(socket, head, bytes, MSG_PEEK | MSG_DONTWAIT);
  if (size == static_cast<ssize_t>(bytes)) return IoStatus::kDone;
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return IoStatus::kLate;
  // A reset is reported once, before the messages that the peer sent earlier.
  if (size < 0 && errno == ECONNRESET) return peek_message(socket, head, bytes);
  return IoStatus::kClosed;
}

void wait_readable(int socket, std::int64_t max_ns) { poll_one(socket, POLLIN, max_ns); }

base::FileDescriptor make_socket() {
  base::FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) throw_system_failure("socket", errno);
  return fd;
}

void make_socket_pair(base::FileDescriptor* first, base::FileDescriptor* second) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    throw_system_failure("socketpair", errno);
  }
  *first = base::FileDescriptor(ends[0]);
  *second = base::FileDescriptor(ends[1]);
}

int connect_to(int socket, const std::string& path) {
  const sockaddr_un address = address_of(path);
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address);
  return ::connect(socket, generic, sizeof address) == 0 ? 0 : errno;
}

int listen_at(int socket, const std::string& path, int backlog) {
  const sockaddr_un address = address_of(path);
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address);
  if (::bind(socket, generic, sizeof address) != 0) return errno;
  return ::listen(socket, backlog) == 0 ? 0 : errno;
}

base::FileDescriptor accept_from(int listener) {
  base::FileDescriptor fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool is_none = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
  if (!fd.is_open() && !is_none) throw_system_failure("rendezvous: accept", errno);
  return fd;
}

PeerCredentials peer_credentials(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    throw_system_failure("getsockopt(SO_PEERCRED)", errno);
  }
  return {credentials.pid, credentials.uid};
}

base::FileDescriptor peer_pidfd(int socket) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (::getsockopt(socket, SOL_SOCKET, kSoPeerPidfd, &fd, &size) == 0) {
    (void)::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return base::FileDescriptor(fd);
  }
  // An older kernel. The peer waits for our answer, so its number cannot have been given anew
  // unless it died; then the socket tells.
  return open_pidfd(peer_credentials(socket).pid);
}

base::FileDescriptor own_pidfd() { return open_pidfd(::getpid()); }

bool has_ended(int pidfd) noexcept { return poll_one(pidfd, POLLIN, 0) > 0; }

base::FileDescriptor duplicate(int fd) {
  base::FileDescriptor copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.is_open()) throw_system_failure("fcntl(F_DUPFD_CLOEXEC)", errno);
  return copy;
}

}  // namespace fanfold::comm
