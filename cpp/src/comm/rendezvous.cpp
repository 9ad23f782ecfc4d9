// SPDX-License-Identifier: Apache-2.0
#include "comm/rendezvous.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <optional>
#include <utility>
#include <vector>

#include "base/format.h"
#include "comm/failure.h"
#include "comm/listener.h"
#include "comm/private_directory.h"
#include "comm/process_group.h"
#include "comm/rank_index.h"
#include "comm/socket.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr std::uint32_t kMagic = 0x66616e30;  // "fan0"
constexpr std::uint32_t kVersion = 1;         // of the messages between the processes of a group
// How long a rank 0 that refuses a group stays to tell the ranks that are yet to come.
constexpr std::chrono::seconds kLinger{1};

/// What a rank says first.
struct Hello {
  std::uint32_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int64_t pid;
};

std::string other_user(const std::string& path, uid_t expected, uid_t got) {
  return base::str("rendezvous '", path, "': expected a process of user ", expected,
                   " at the other end, got one of user ", got);
}

/// Rank 0 while its peers come.
class Host {
 public:
  Host(const RendezvousConfig& config, base::Deadline deadline)
      : config_(config),
        deadline_(deadline),
        listener_(config.path, config.num_ranks + 8, deadline),
        links_(index(config.num_ranks)),
        pidfds_(index(config.num_ranks)),
        pids_(index(config.num_ranks)) {}

  /// @throws InvalidArgument, PeerTimeout
  void wait_for_all();
  std::vector<base::FileDescriptor> take_links() { return std::move(links_); }
  std::vector<base::FileDescriptor> take_pidfds() { return std::move(pidfds_); }

 private:
  int first_missing() const;
  void wait_for_event(std::int64_t max_ns) const;
  void accept_new();
  void read_hellos();
  void drop_dead();
  std::optional<Failure> check(const Hello& hello) const;
  void refuse_all(const Failure& failure);

  const RendezvousConfig& config_;
  base::Deadline deadline_;
  Listener listener_;
  std::vector<base::FileDescriptor> waiting_;  // connected, hello not yet read
  std::vector<base::FileDescriptor> links_;    // by rank
  std::vector<base::FileDescriptor> pidfds_;   // by rank
  std::vector<std::int64_t> pids_;             // by rank
  std::optional<Failure> failure_;
  int num_refused_ = 0;
};

int Host::first_missing() const {
  for (int rank = 1; rank < config_.num_ranks; ++rank) {
    if (!links_[index(rank)].is_open()) return rank;
  }
  return -1;
}

void Host::wait_for_event(std::int64_t max_ns) const {
  std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
  for (const auto& socket : waiting_) entries.push_back({socket.get(), POLLIN, 0});
  const timespec limit{max_ns / 1'000'000'000, max_ns % 1'000'000'000};
  (void)::ppoll(entries.data(), entries.size(), &limit, nullptr);
}

void Host::accept_new() {
  for (;;) {
    base::FileDescriptor socket = accept_from(listener_.get());
    if (!socket.is_open()) return;
    const uid_t uid = peer_credentials(socket.get()).uid;
    if (uid == config_.expected_uid) {
      waiting_.push_back(std::move(socket));
    } else {
      Star::refuse(socket.get(), {Failure::Kind::kInvalidArgument, 0,
                                  other_user(config_.path, config_.expected_uid, uid)});
    }
  }
}

/// Why the group cannot be made with the rank that said `hello`.
std::optional<Failure> Host::check(const Hello& hello) const {
  const auto invalid = [&](const std::string& text) {
    return Failure{Failure::Kind::kInvalidArgument, 0,
                   base::str("rendezvous '", config_.path, "': ", text)};
  };
  if (hello.magic != kMagic || hello.version != kVersion) {
    return invalid(base::str("expected the same version of the library on every rank, got ",
                             kVersion, " on rank 0 and ", hello.version, " on rank ", hello.rank));
  }
  if (hello.num_ranks != config_.num_ranks) {
    return invalid(base::str("num_ranks: expected the same on every rank, got ", config_.num_ranks,
                             " on rank 0 and ", hello.num_ranks, " on rank ", hello.rank));
  }
  if (hello.rank < 1 || hello.rank >= config_.num_ranks) {
    return invalid(base::str("rank: expected 1 to ", config_.num_ranks - 1, " of a process other ",
                             "than rank 0, got ", hello.rank));
  }
  if (links_[index(hello.rank)].is_open()) {
    return invalid(base::str("rank: expected each rank once, got rank ", hello.rank,
                             " from process ", pids_[index(hello.rank)], " and from process ",
                             hello.pid));
  }
  return std::nullopt;
}

void Host::read_hellos() {
  std::vector<base::FileDescriptor> still_waiting;
  for (base::FileDescriptor& socket : waiting_) {
    Message message;
    const IoStatus status = receive_message(socket.get(), &message);
    if (status == IoStatus::kLate) {
      still_waiting.push_back(std::move(socket));
      continue;
    }
    Hello hello{};
    // Closed: somebody only looked whether we live.
    if (status != IoStatus::kDone || message.bytes.size() != sizeof hello) continue;
    std::memcpy(&hello, message.bytes.data(), sizeof hello);
    drop_dead();  // of whom this rank may take the place
    if (!failure_.has_value()) failure_ = check(hello);
    if (failure_.has_value()) {
      Star::refuse(socket.get(), *failure_);
      ++num_refused_;
      continue;
    }
    try {
      pidfds_[index(hello.rank)] = peer_pidfd(socket.get());
    } catch (...) {
      failure_ = Failure::current(0);
    }
    pids_[index(hello.rank)] = hello.pid;
    links_[index(hello.rank)] = std::move(socket);
  }
  waiting_ = std::move(still_waiting);
}

/// A rank that ended before the group was complete may be started again.
void Host::drop_dead() {
  for (int rank = 1; rank < config_.num_ranks; ++rank) {
    if (!links_[index(rank)].is_open()) continue;
    pollfd entry{links_[index(rank)].get(), POLLRDHUP, 0};
    const bool is_closed = ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLHUP | POLLRDHUP)) != 0;
    if (is_closed || has_ended(pidfds_[index(rank)].get())) links_[index(rank)].reset();
  }
}

/// Tells those who have come, and for a while those who come.
void Host::refuse_all(const Failure& failure) {
  for (const auto& link : links_) {
    if (!link.is_open()) continue;
    Star::refuse(link.get(), failure);
    ++num_refused_;
  }
  const base::Deadline end(std::min<std::chrono::nanoseconds>(
      kLinger, std::chrono::nanoseconds(deadline_.remaining_ns())));
  while (num_refused_ < config_.num_ranks - 1 && !end.passed()) {
    wait_for_event(end.remaining_ns());
    accept_new();
    read_hellos();
  }
}

void Host::wait_for_all() {
  for (;;) {
    accept_new();
    read_hellos();
    drop_dead();
    const int missing = first_missing();
    if (!failure_.has_value() && missing < 0) return;
    if (!failure_.has_value() && deadline_.passed()) {
      failure_ =
          Failure{Failure::Kind::kPeerTimeout, missing,
                  base::str("rendezvous '", config_.path, "': rank ", missing,
                            " did not join within ", base::format_duration(deadline_.timeout_ns()),
                            "; start every rank with the same path")};
    }
    if (failure_.has_value()) {
      const Failure failure = *failure_;
      refuse_all(failure);
      failure.raise();
    }
    wait_for_event(std::min<std::int64_t>(deadline_.remaining_ns(), 50'000'000));
  }
}

/// Connects to rank 0, which may not be there yet.
base::FileDescriptor reach_host(const RendezvousConfig& config, base::Deadline deadline) {
  std::int64_t pause_ns = 500'000;
  for (;;) {
    base::FileDescriptor socket = make_socket();
    const int code = connect_to(socket.get(), config.path);
    if (code == 0) return socket;
    // EAGAIN: its queue of connections is full. The others: it is not there yet, or not any more.
    if (code != ENOENT && code != ECONNREFUSED && code != EAGAIN && code != EINTR) {
      throw_system_failure(base::str("rendezvous: connect to ", config.path), code);
    }
    if (deadline.passed()) {
      if (code == ECONNREFUSED) (void)remove_dead_socket(config.path);
      throw PeerTimeout(base::str("rendezvous '", config.path, "': rank 0 did not open it within ",
                                  base::format_duration(deadline.timeout_ns()),
                                  "; start every rank with the same path"),
                        0);
    }
    const timespec pause{0, std::min(pause_ns, deadline.remaining_ns())};
    ::nanosleep(&pause, nullptr);
    pause_ns = std::min<std::int64_t>(2 * pause_ns, 20'000'000);
  }
}

std::unique_ptr<Group> join_as_peer(const RendezvousConfig& config, base::Deadline deadline) {
  base::FileDescriptor socket = reach_host(config, deadline);
  const uid_t uid = peer_credentials(socket.get()).uid;
  if (uid != config.expected_uid) {
    throw InvalidArgument(other_user(config.path, config.expected_uid, uid));
  }
  const Hello hello{kMagic, kVersion, config.rank, config.num_ranks, ::getpid()};
  std::string bytes(sizeof hello, '\0');
  std::memcpy(bytes.data(), &hello, sizeof hello);
  (void)send_message(socket.get(), bytes, {}, deadline);  // a failure shows when the answer is read
  try {
    return ProcessGroup::join(config.rank, config.num_ranks, std::move(socket), deadline);
  } catch (...) {
    (void)remove_dead_socket(config.path);
    throw;
  }
}

std::unique_ptr<Group> join_as_host(const RendezvousConfig& config, base::Deadline deadline) {
  std::vector<base::FileDescriptor> links;
  std::vector<base::FileDescriptor> pidfds;
  {
    Host host(config, deadline);
    host.wait_for_all();
    links = host.take_links();
    pidfds = host.take_pidfds();
  }
  return ProcessGroup::host(std::move(links), std::move(pidfds), deadline);
}

}  // namespace

RendezvousConfig::RendezvousConfig(std::string path_, int rank_, int num_ranks_)
    : path(std::move(path_)), rank(rank_), num_ranks(num_ranks_), expected_uid(::geteuid()) {}

std::unique_ptr<Group> join_group(const RendezvousConfig& config, base::Deadline deadline) {
  (void)open_private_directory(directory_of(config.path));
  return config.rank == 0 ? join_as_host(config, deadline) : join_as_peer(config, deadline);
}

}  // namespace fanfold::comm
