// SPDX-License-Identifier: Apache-2.0
#include "comm/thread_group.h"

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/format.h"
#include "comm/failure.h"
#include "comm/members.h"
#include "comm/rank_index.h"
#include "comm/socket.h"
#include "fanfold/error.h"

namespace fanfold::comm {

/// What a rank brings to a collective call.
struct ThreadGroup::Offer {
  std::string call;
  std::shared_ptr<base::Mapping> window;  // share_windows, reserve_windows
  std::int64_t bytes = 0;
  std::shared_ptr<const Parcel> parcel;  // exchange
  std::vector<int> members;              // split
  std::optional<Failure> failure;
};

/// One collective call. Written under `Shared::mutex`; offers are constant once all have arrived.
struct ThreadGroup::Meeting {
  std::vector<Offer> offers;
  std::vector<bool> arrived;
  int num_arrived = 0;
  int failed_by = -1;  // the rank that gave up
  std::optional<Failure> failure;
  std::map<int, std::shared_ptr<Shared>> children;  // by the parent's rank of their rank 0
};

struct ThreadGroup::Shared {
  explicit Shared(int num_ranks) : left(static_cast<std::size_t>(num_ranks)) {}

  std::mutex mutex;  // guards `meetings`; `left` is written under it
  std::condition_variable changed;
  std::map<std::int64_t, std::shared_ptr<Meeting>> meetings;  // by call number
  std::vector<std::atomic<bool>> left;  // release by `leave`, acquire by `lost_reason`
};

std::vector<std::unique_ptr<Group>> ThreadGroup::create(int num_ranks) {
  const auto shared = std::make_shared<Shared>(num_ranks);
  std::vector<std::unique_ptr<Group>> ranks;
  ranks.reserve(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(std::make_unique<ThreadGroup>(rank, shared));
  }
  return ranks;
}

Windows ThreadGroup::make_windows(int num_ranks, std::int64_t bytes) {
  const std::int64_t size = base::round_to_pages(bytes);
  Windows windows;
  for (int rank = 0; rank < num_ranks; ++rank) {
    windows.push_back(std::make_shared<base::Mapping>(base::create_shared_memory(size), size));
  }
  return windows;
}

ThreadGroup::ThreadGroup(int rank, std::shared_ptr<Shared> shared)
    : Group(rank, static_cast<int>(shared->left.size())), shared_(std::move(shared)) {}

ThreadGroup::~ThreadGroup() { leave(); }

int ThreadGroup::missing_rank(const Meeting& meeting) const {
  int missing = -1;
  for (int rank = num_ranks_ - 1; rank >= 0; --rank) {
    if (meeting.arrived[static_cast<std::size_t>(rank)]) continue;
    // A rank that left can never come: name it rather than one that may only be late.
    if (!lost_reason(rank).empty()) return rank;
    missing = rank;
  }
  return missing;
}

/// Fails `meeting` if a missing rank has left or the deadline has passed.
void ThreadGroup::fail_meeting(Meeting& meeting, const std::string& call,
                               base::Deadline deadline) const {
  const int missing = missing_rank(meeting);
  const std::string lost = lost_reason(missing);
  if (!lost.empty()) {
    meeting.failure = Failure{Failure::Kind::kPeerLost, missing,
                              base::str(call, ": rank ", missing, " is gone: ", lost)};
  } else if (deadline.passed()) {
    meeting.failure = Failure{Failure::Kind::kPeerTimeout, missing,
                              base::str(call, ": rank ", missing, " did not arrive within ",
                                        base::format_duration(deadline.timeout_ns()),
                                        "; every rank must make this call")};
  }
  if (meeting.failure.has_value()) {
    meeting.failed_by = rank_;
    meeting.offers.clear();  // their memory is of no use any more
  }
}

std::shared_ptr<ThreadGroup::Meeting> ThreadGroup::meet(Offer offer, base::Deadline deadline) {
  const std::string call = offer.call;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  const std::int64_t number = num_calls_++;
  std::shared_ptr<Meeting>& place = shared_->meetings[number];
  if (place == nullptr) {
    place = std::make_shared<Meeting>();
    place->offers.resize(static_cast<std::size_t>(num_ranks_));
    place->arrived.resize(static_cast<std::size_t>(num_ranks_));
  }
  const std::shared_ptr<Meeting> meeting = place;
  meeting->arrived[static_cast<std::size_t>(rank_)] = true;
  if (++meeting->num_arrived == num_ranks_) shared_->meetings.erase(number);
  if (meeting->failure.has_value()) {
    const std::string reason = "gave up waiting for this rank";
    throw PeerAborted(base::str(call, ": rank ", meeting->failed_by, " ", reason),
                      meeting->failed_by, reason);
  }
  meeting->offers[static_cast<std::size_t>(rank_)] = std::move(offer);
  shared_->changed.notify_all();
  while (meeting->num_arrived < num_ranks_ && !meeting->failure.has_value()) {
    fail_meeting(*meeting, call, deadline);
    if (meeting->failure.has_value()) {
      shared_->changed.notify_all();
    } else {
      shared_->changed.wait_until(
          lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline.at_ns())));
    }
  }
  if (meeting->failure.has_value()) meeting->failure->raise();
  for (const Offer& one : meeting->offers) {
    if (one.call != meeting->offers[0].call) {
      throw InvalidArgument(base::str("collective call: rank 0 made ", meeting->offers[0].call,
                                      ", another rank made ", one.call));
    }
    if (one.failure.has_value()) one.failure->raise();
  }
  return meeting;
}

Windows ThreadGroup::share_windows(std::int64_t bytes, base::Deadline deadline) {
  return make_windows("share_windows", bytes, base::Pages::kTouched, deadline);
}

Windows ThreadGroup::reserve_windows(std::int64_t bytes, base::Deadline deadline) {
  return make_windows("reserve_windows", bytes, base::Pages::kReserved, deadline);
}

Windows ThreadGroup::make_windows(const char* call, std::int64_t bytes, base::Pages pages,
                                  base::Deadline deadline) {
  Offer offer;
  offer.call = call;
  offer.bytes = bytes;
  try {
    if (is_forked_child()) throw InvalidState(base::str(call, ": called in a forked child"));
    const std::int64_t size = base::round_to_pages(bytes);
    offer.window = std::make_shared<base::Mapping>(base::create_shared_memory(size), size, pages);
  } catch (...) {
    if (is_forked_child()) throw;
    offer.failure = Failure::current(rank_);
  }
  const std::shared_ptr<Meeting> meeting = meet(std::move(offer), deadline);
  Windows windows;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const Offer& one = meeting->offers[static_cast<std::size_t>(rank)];
    if (one.bytes != meeting->offers[0].bytes) {
      throw InvalidArgument(base::str(call, ": bytes: rank 0 gave ", meeting->offers[0].bytes,
                                      ", rank ", rank, " gave ", one.bytes));
    }
    windows.push_back(one.window);
  }
  return windows;
}

std::vector<Parcel> ThreadGroup::exchange(const std::string& call, Parcel own,
                                          const std::optional<Failure>& failure,
                                          base::Deadline deadline) {
  if (is_forked_child()) throw InvalidState(base::str(call, ": called in a forked child"));
  Offer offer;
  offer.call = call;
  offer.parcel = std::make_shared<const Parcel>(std::move(own));
  offer.failure = failure;
  const std::shared_ptr<Meeting> meeting = meet(std::move(offer), deadline);
  std::vector<Parcel> all(index(num_ranks_));
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const Parcel& theirs = *meeting->offers[index(rank)].parcel;
    Parcel& copy = all[index(rank)];
    copy.peer = rank;
    copy.bytes = theirs.bytes;
    if (rank == rank_) continue;
    try {
      for (const base::FileDescriptor& fd : theirs.fds) copy.fds.push_back(duplicate(fd.get()));
    } catch (const SystemFailure&) {
      copy.fds.clear();  // take_fd says so, as where they come through a socket
    }
  }
  return all;
}

std::unique_ptr<Group> ThreadGroup::split(const std::vector<int>& members,
                                          base::Deadline deadline) {
  if (is_forked_child()) throw InvalidState("split: called in a forked child");
  Offer offer;
  offer.call = "split";
  offer.members = members;
  try {
    check_members(members, rank_, num_ranks_);
  } catch (...) {
    offer.failure = Failure::current(rank_);
  }
  const std::shared_ptr<Meeting> meeting = meet(std::move(offer), deadline);
  std::vector<std::vector<int>> members_by_rank;
  for (const Offer& one : meeting->offers) members_by_rank.push_back(one.members);
  check_members_agree(members_by_rank);
  if (members.empty()) return nullptr;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  std::shared_ptr<Shared>& child = meeting->children[members.front()];
  if (child == nullptr) child = std::make_shared<Shared>(static_cast<int>(members.size()));
  return std::make_unique<ThreadGroup>(position_in(members, rank_), child);
}

std::string ThreadGroup::lost_reason(int rank) const {
  const bool left = shared_->left[static_cast<std::size_t>(rank)].load(std::memory_order_acquire);
  return left ? "it left the group" : "";
}

void ThreadGroup::leave() noexcept {
  // In a forked child another thread's lock is held for ever.
  if (is_forked_child()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->left[static_cast<std::size_t>(rank_)].store(true, std::memory_order_release);
  shared_->changed.notify_all();
}

}  // namespace fanfold::comm
