// SPDX-License-Identifier: Apache-2.0
#include "comm/process_group.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/byte_math.h"
#include "base/format.h"
#include "comm/failure.h"
#include "comm/members.h"
#include "comm/rank_index.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

using Phase = Star::Phase;

/// Maps memory that a peer sent. A peer that could shrink it could make our loads fault.
std::shared_ptr<base::Mapping> map_received(Parcel& parcel, std::int64_t bytes,
                                            base::Pages pages = base::Pages::kTouched) {
  const base::FileDescriptor fd = parcel.take_fd(parcel.fds.size() - 1);
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) throw_system_failure("fstat", errno);
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (status.st_size != bytes || seals < 0 || (seals & kSeals) != kSeals) {
    throw InvalidArgument(base::str("shared memory of rank ", parcel.peer, ": expected ", bytes,
                                    " sealed bytes, got ", status.st_size, " with seals ", seals));
  }
  return std::make_shared<base::Mapping>(fd, bytes, pages);
}

std::string encode(const std::vector<int>& members) {
  return std::string(reinterpret_cast<const char*>(members.data()), members.size() * sizeof(int));
}

constexpr const char* kJoinCall = "joining the group";

}  // namespace

struct alignas(base::kCacheLine) ProcessGroup::LeftWord {
  std::atomic<std::uint32_t> left;  // release by the rank's `leave`, acquire by `lost_reason`
};

namespace {

std::int64_t page_bytes(int num_ranks) {
  return base::round_to_pages(num_ranks * base::kCacheLine);
}

}  // namespace

std::unique_ptr<ProcessGroup> ProcessGroup::host(std::vector<base::FileDescriptor> links,
                                                 std::vector<base::FileDescriptor> pidfds,
                                                 base::Deadline deadline) {
  const int num_ranks = static_cast<int>(links.size());
  Star star(0, num_ranks, std::move(links));
  std::vector<Parcel> parcels;
  std::optional<Failure> failure;
  std::shared_ptr<base::Mapping> page;
  try {
    pidfds[0] = own_pidfd();
    for (std::size_t first = 0; first < pidfds.size(); first += kMaxMessageFds) {
      Parcel& parcel = parcels.emplace_back();
      const std::size_t end = std::min(pidfds.size(), first + kMaxMessageFds);
      for (std::size_t i = first; i < end; ++i) {
        parcel.fds.push_back(duplicate(pidfds[i].get()));
      }
    }
    const std::int64_t bytes = page_bytes(num_ranks);
    base::FileDescriptor memory = base::create_shared_memory(bytes);
    page = std::make_shared<base::Mapping>(memory, bytes);
    parcels.emplace_back().fds.push_back(std::move(memory));
  } catch (...) {
    failure = Failure::current(0);
    parcels.clear();
  }
  const auto lost_reason = [&](int rank) {
    return std::string(has_ended(pidfds[index(rank)].get()) ? "its process ended" : "");
  };
  (void)star.exchange(Phase::kGather, kJoinCall, std::move(parcels), failure, lost_reason,
                      deadline);
  (void)star.exchange(Phase::kCommit, kJoinCall, {}, std::nullopt, lost_reason, deadline);
  return std::make_unique<ProcessGroup>(0, num_ranks, std::move(star), std::move(pidfds), page);
}

std::unique_ptr<ProcessGroup> ProcessGroup::join(int rank, int num_ranks, base::FileDescriptor link,
                                                 base::Deadline deadline) {
  const base::FileDescriptor host_pidfd = peer_pidfd(link.get());
  std::vector<base::FileDescriptor> links;
  links.push_back(std::move(link));
  Star star(rank, num_ranks, std::move(links));
  const auto lost_reason = [&](int) {
    return std::string(has_ended(host_pidfd.get()) ? "its process ended" : "");
  };
  std::vector<Parcel> received =
      star.exchange(Phase::kGather, kJoinCall, {}, std::nullopt, lost_reason, deadline);
  std::optional<Failure> failure;
  std::vector<base::FileDescriptor> pidfds;
  std::shared_ptr<base::Mapping> page;
  try {
    for (std::size_t first = 0; first < index(num_ranks); first += kMaxMessageFds) {
      Parcel& parcel = received.at(first / kMaxMessageFds);
      const std::size_t end = std::min(index(num_ranks), first + kMaxMessageFds);
      for (std::size_t i = first; i < end; ++i) pidfds.push_back(parcel.take_fd(i - first));
    }
    page = map_received(received.back(), page_bytes(num_ranks));
  } catch (...) {
    failure = Failure::current(rank);
  }
  (void)star.exchange(Phase::kCommit, kJoinCall, {}, failure, lost_reason, deadline);
  return std::make_unique<ProcessGroup>(rank, num_ranks, std::move(star), std::move(pidfds), page);
}

ProcessGroup::ProcessGroup(int rank, int num_ranks, Star star,
                           std::vector<base::FileDescriptor> pidfds,
                           std::shared_ptr<base::Mapping> page)
    : Group(rank, num_ranks),
      star_(std::move(star)),
      pidfds_(std::move(pidfds)),
      page_(std::move(page)) {
  static_assert(sizeof(LeftWord) == base::kCacheLine);
}

ProcessGroup::~ProcessGroup() { leave(); }

ProcessGroup::LeftWord& ProcessGroup::left_word(int rank) const noexcept {
  return reinterpret_cast<LeftWord*>(page_->data())[rank];
}

void ProcessGroup::check_usable(const char* call) const {
  if (is_forked_child()) throw InvalidState(base::str(call, ": called in a forked child"));
  if (has_left_) throw InvalidState(base::str(call, ": this rank has left the group"));
}

std::string ProcessGroup::lost_reason(int rank) const {
  if (rank == rank_) return "";
  if (left_word(rank).left.load(std::memory_order_acquire) != 0) return "it left the group";
  return has_ended(pidfds_[index(rank)].get()) ? "its process ended" : "";
}

void ProcessGroup::leave() noexcept {
  // A forked child's copies of the sockets are the parent's connections: do not end them.
  if (is_forked_child() || has_left_) return;
  has_left_ = true;
  left_word(rank_).left.store(1, std::memory_order_release);  // acquire: lost_reason
  star_.shut_down();
}

std::vector<Parcel> ProcessGroup::pass_on(Star::Phase phase, const std::string& call,
                                          std::vector<Parcel> parcels,
                                          const std::optional<Failure>& failure,
                                          base::Deadline deadline) {
  const auto reason = [this](int rank) { return lost_reason(rank); };
  return star_.exchange(phase, call, std::move(parcels), failure, reason, deadline);
}

std::vector<Parcel> ProcessGroup::exchange(const std::string& call, Parcel own,
                                           const std::optional<Failure>& failure,
                                           base::Deadline deadline) {
  check_usable(call.c_str());
  std::vector<Parcel> all(index(num_ranks_));
  all[index(rank_)].peer = rank_;
  all[index(rank_)].bytes = own.bytes;
  own.peer = Parcel::kEveryone;
  std::vector<Parcel> parcels;
  parcels.push_back(std::move(own));
  std::vector<Parcel> received =
      pass_on(Phase::kGather, call, std::move(parcels), failure, deadline);
  for (Parcel& parcel : received) all[index(parcel.peer)] = std::move(parcel);
  // A rank that was too late for the first part is missed here by all.
  (void)pass_on(Phase::kCommit, call, {}, std::nullopt, deadline);
  return all;
}

Windows ProcessGroup::share_windows(std::int64_t bytes, base::Deadline deadline) {
  return make_windows("share_windows", bytes, base::Pages::kTouched, deadline);
}

Windows ProcessGroup::reserve_windows(std::int64_t bytes, base::Deadline deadline) {
  return make_windows("reserve_windows", bytes, base::Pages::kReserved, deadline);
}

Windows ProcessGroup::make_windows(const char* name, std::int64_t bytes, base::Pages pages,
                                   base::Deadline deadline) {
  check_usable(name);
  const std::string call = base::str(name, " of ", bytes, " bytes");
  Windows windows(index(num_ranks_));
  std::int64_t size = 0;
  std::vector<Parcel> parcels;
  std::optional<Failure> failure;
  try {
    size = base::round_to_pages(bytes);
    base::FileDescriptor memory = base::create_shared_memory(size);
    windows[index(rank_)] = std::make_shared<base::Mapping>(memory, size, pages);
    parcels.emplace_back().fds.push_back(std::move(memory));
  } catch (...) {
    failure = Failure::current(rank_);
  }
  std::vector<Parcel> received =
      pass_on(Phase::kGather, call, std::move(parcels), failure, deadline);
  try {
    for (Parcel& parcel : received) {
      windows[index(parcel.peer)] = map_received(parcel, size, pages);
    }
  } catch (...) {
    failure = Failure::current(rank_);
  }
  // Nobody returns before everybody has mapped everything.
  (void)pass_on(Phase::kCommit, call, {}, failure, deadline);
  return windows;
}

std::vector<base::FileDescriptor> ProcessGroup::pidfds_of(const std::vector<int>& members) const {
  std::vector<base::FileDescriptor> pidfds;
  pidfds.reserve(members.size());
  for (const int member : members) pidfds.push_back(duplicate(pidfds_[index(member)].get()));
  return pidfds;
}

/// What the first of `members` sends to the others: a connection to it and the group's page.
std::vector<Parcel> ProcessGroup::invitations(const std::vector<int>& members,
                                              base::FileDescriptor* page,
                                              std::vector<base::FileDescriptor>* links) const {
  std::vector<Parcel> parcels;
  *page = base::create_shared_memory(page_bytes(static_cast<int>(members.size())));
  links->resize(members.size());
  for (std::size_t place = 1; place < members.size(); ++place) {
    Parcel& parcel = parcels.emplace_back();
    parcel.peer = members[place];
    parcel.bytes = encode(members);
    base::FileDescriptor& theirs = parcel.fds.emplace_back();
    make_socket_pair(&(*links)[place], &theirs);
    parcel.fds.push_back(duplicate(page->get()));
  }
  return parcels;
}

std::unique_ptr<Group> ProcessGroup::accept_invitation(const std::vector<int>& members,
                                                       std::vector<Parcel> received) {
  for (const Parcel& parcel : received) {
    if (!members.empty() && parcel.peer == members.front() && parcel.bytes == encode(members)) {
      continue;
    }
    throw InvalidArgument(base::str("split: members: rank ", parcel.peer,
                                    " gave another list with rank ", rank_, " in it than rank ",
                                    rank_, " did"));
  }
  if (members.empty()) return nullptr;
  if (received.size() != 1) {
    throw InvalidArgument(base::str("split: members: rank ", rank_, " expected rank ",
                                    members.front(), " to give the same list, which it did not"));
  }
  const auto num_ranks = static_cast<int>(members.size());
  auto page = map_received(received.front(), page_bytes(num_ranks));
  std::vector<base::FileDescriptor> links;
  links.push_back(received.front().take_fd(0));
  const int rank = position_in(members, rank_);
  return std::make_unique<ProcessGroup>(rank, num_ranks, Star(rank, num_ranks, std::move(links)),
                                        pidfds_of(members), std::move(page));
}

std::unique_ptr<Group> ProcessGroup::split(const std::vector<int>& members,
                                           base::Deadline deadline) {
  check_usable("split");
  const bool is_host = !members.empty() && members.front() == rank_;
  std::vector<Parcel> parcels;
  std::optional<Failure> failure;
  base::FileDescriptor page;
  std::vector<base::FileDescriptor> links;
  try {
    check_members(members, rank_, num_ranks_);
    if (is_host) parcels = invitations(members, &page, &links);
  } catch (...) {
    failure = Failure::current(rank_);
  }
  std::vector<Parcel> received =
      pass_on(Phase::kGather, "split", std::move(parcels), failure, deadline);
  std::unique_ptr<Group> group;
  try {
    if (is_host) {
      const auto num_ranks = static_cast<int>(members.size());
      if (!received.empty()) accept_invitation({}, std::move(received));
      group = std::make_unique<ProcessGroup>(
          0, num_ranks, Star(0, num_ranks, std::move(links)), pidfds_of(members),
          std::make_shared<base::Mapping>(page, page_bytes(num_ranks)));
    } else {
      group = accept_invitation(members, std::move(received));
    }
  } catch (...) {
    failure = Failure::current(rank_);
  }
  (void)pass_on(Phase::kCommit, "split", {}, failure, deadline);
  return group;
}

}  // namespace fanfold::comm
