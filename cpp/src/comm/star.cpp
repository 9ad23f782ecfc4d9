// SPDX-License-Identifier: Apache-2.0
#include "comm/star.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/format.h"
#include "comm/rank_index.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr std::uint32_t kMagic = 0x66616e31;  // "fan1"
constexpr std::int64_t kPollNs = 20'000'000;  // between two looks at who is gone
// A rank waits longer than rank 0, to learn from it who is late.
constexpr std::chrono::milliseconds kAnswerGrace{300};
constexpr std::size_t kMaxFailureBytes = 8192;  // of a message's text

enum class Kind : std::uint32_t { kParcel, kEnd, kFailedEnd, kDone, kFailure };

std::vector<int> numbers_of(const std::vector<base::FileDescriptor>& fds) {
  std::vector<int> numbers;
  numbers.reserve(fds.size());
  for (const auto& fd : fds) numbers.push_back(fd.get());
  return numbers;
}

}  // namespace

/// In front of every message.
struct Star::Head {
  std::uint32_t magic;
  Kind kind;
  std::int32_t source;
  std::int32_t destination;
  std::int64_t number;

  std::string with(const std::string& bytes) const {
    std::string message(sizeof *this, '\0');
    std::memcpy(message.data(), this, sizeof *this);
    return message + bytes;
  }
  /// Splits a message; false if it is not one of ours.
  bool take_from(std::string* bytes) {
    if (bytes->size() < sizeof *this) return false;
    std::memcpy(this, bytes->data(), sizeof *this);
    bytes->erase(0, sizeof *this);
    return magic == kMagic;
  }
};

/// What the hub has of the present exchange.
struct Star::Gathered {
  struct Sent {
    int destination;
    Parcel parcel;
  };
  std::vector<std::vector<Sent>> parcels;        // by source
  std::vector<bool> ended;                       // by rank: all of its parcels are here
  std::vector<std::string> calls;                // by rank
  std::vector<std::optional<Failure>> failures;  // by rank
};

base::FileDescriptor Parcel::take_fd(std::size_t place) {
  if (place < fds.size()) return std::move(fds[place]);
  throw_system_failure("processes: a descriptor was lost; raise the limit of open files", EMFILE);
}

Star::Star(int rank, int num_ranks, std::vector<base::FileDescriptor> links)
    : rank_(rank), num_ranks_(num_ranks), links_(std::move(links)) {}

void Star::refuse(int socket, const Failure& failure) {
  Failure cut = failure;
  cut.message.resize(std::min(cut.message.size(), kMaxFailureBytes));
  const Head head{kMagic, Kind::kFailure, 0, 0, 0};
  (void)send_message(socket, head.with(cut.encode()), {}, base::Deadline(std::chrono::seconds(0)));
}

std::vector<Parcel> Star::exchange(Phase phase, const std::string& call,
                                   std::vector<Parcel> parcels,
                                   const std::optional<Failure>& failure, LostReason lost_reason,
                                   base::Deadline deadline) {
  number_ = phase == Phase::kGather ? 2 * num_calls_++ : 2 * num_calls_ - 1;
  if (rank_ == 0) return exchange_as_hub(call, std::move(parcels), failure, lost_reason, deadline);
  return exchange_as_leaf(call, parcels, failure, lost_reason, deadline);
}

std::vector<Parcel> Star::exchange_as_leaf(const std::string& call,
                                           const std::vector<Parcel>& parcels,
                                           const std::optional<Failure>& failure,
                                           LostReason lost_reason, base::Deadline deadline) {
  const int link = links_.front().get();
  IoStatus status = IoStatus::kDone;
  const auto send = [&](Kind kind, int destination, const std::string& bytes,
                        const std::vector<int>& fds) {
    const Head head{kMagic, kind, rank_, destination, number_};
    // After a failed send the answer may still tell why.
    if (status == IoStatus::kDone) status = send_message(link, head.with(bytes), fds, deadline);
  };
  if (failure.has_value()) {
    send(Kind::kFailedEnd, 0, failure->encode(), {});
  } else {
    for (const Parcel& parcel : parcels) {
      send(Kind::kParcel, parcel.peer, parcel.bytes, numbers_of(parcel.fds));
    }
    send(Kind::kEnd, 0, call, {});
  }
  const base::Deadline patience(std::min(std::chrono::nanoseconds::max() - kAnswerGrace,
                                         std::chrono::nanoseconds(deadline.remaining_ns())) +
                                kAnswerGrace);
  std::vector<Parcel> received;
  for (;;) {
    // Asked first: what rank 0 sent before it left has arrived by then.
    const std::string reason = lost_reason(0);
    Message message;
    status = receive_message(link, &message);
    if (status == IoStatus::kClosed) peer_is_gone(call, 0, "its connection ended").raise();
    if (status == IoStatus::kLate) {
      if (!reason.empty()) peer_is_gone(call, 0, reason).raise();
      if (patience.passed()) peer_is_late(call, 0, deadline).raise();
      wait_readable(link, std::min(kPollNs, patience.remaining_ns()));
      continue;
    }
    Head head{};
    if (!head.take_from(&message.bytes) || head.number < number_) continue;
    if (head.kind == Kind::kDone) return received;
    if (head.kind == Kind::kFailure) {
      const Failure told = Failure::decode(message.bytes);
      const bool was_late = told.kind == Failure::Kind::kPeerTimeout && told.code == rank_;
      (was_late ? peer_gave_up(call, 0) : told).raise();
    }
    received.push_back({head.source, std::move(message.bytes), std::move(message.fds)});
  }
}

std::vector<Parcel> Star::exchange_as_hub(const std::string& call, std::vector<Parcel> parcels,
                                          const std::optional<Failure>& failure,
                                          LostReason lost_reason, base::Deadline deadline) {
  Gathered gathered;
  gathered.parcels.resize(index(num_ranks_));
  gathered.ended.resize(index(num_ranks_));
  gathered.calls.resize(index(num_ranks_));
  gathered.failures.resize(index(num_ranks_));
  for (Parcel& parcel : parcels) {
    const int destination = parcel.peer;
    parcel.peer = 0;
    gathered.parcels[0].push_back({destination, std::move(parcel)});
  }
  gathered.ended[0] = true;
  gathered.calls[0] = call;
  gathered.failures[0] = failure;
  std::optional<Failure> problem = gather(call, &gathered, lost_reason, deadline);
  if (!problem.has_value()) problem = first_problem(call, gathered);
  if (problem.has_value()) {
    problem->message.resize(std::min(problem->message.size(), kMaxFailureBytes));
    const Head head{kMagic, Kind::kFailure, 0, 0, number_};
    for (const auto& link : links_) {
      if (!link.is_open()) continue;
      // Does not wait: a rank whose socket is full reads older answers first and then times out.
      (void)send_message(link.get(), head.with(problem->encode()), {},
                         base::Deadline(std::chrono::seconds(0)));
    }
    problem->raise();
  }
  deliver(call, &gathered, deadline);
  std::vector<Parcel> received;
  for (int source = 1; source < num_ranks_; ++source) {
    for (auto& sent : gathered.parcels[index(source)]) {
      const bool is_mine = sent.destination == 0 || sent.destination == Parcel::kEveryone;
      if (is_mine) received.push_back(std::move(sent.parcel));
    }
  }
  return received;
}

/// Reads until every rank's parcels are here.
std::optional<Failure> Star::gather(const std::string& call, Gathered* gathered,
                                    LostReason lost_reason, base::Deadline deadline) {
  for (;;) {
    std::vector<pollfd> waiting;
    int first_missing = -1;
    for (int rank = 1; rank < num_ranks_; ++rank) {
      if (gathered->ended[index(rank)]) continue;
      // Asked first: what the rank sent before it left has arrived by then.
      const std::string reason = lost_reason(rank);
      std::optional<Failure> problem = take_in(rank, call, gathered);
      if (problem.has_value()) return problem;
      if (gathered->ended[index(rank)]) continue;
      if (!reason.empty()) return peer_is_gone(call, rank, reason);
      if (first_missing < 0) first_missing = rank;
      waiting.push_back({links_[index(rank)].get(), POLLIN, 0});
    }
    if (waiting.empty()) return std::nullopt;
    if (deadline.passed()) return peer_is_late(call, first_missing, deadline);
    const timespec limit{0, std::min(kPollNs, deadline.remaining_ns())};
    (void)::ppoll(waiting.data(), waiting.size(), &limit, nullptr);
  }
}

/// Takes what has arrived from `rank` for the present exchange.
std::optional<Failure> Star::take_in(int rank, const std::string& call, Gathered* gathered) {
  const int link = links_[index(rank)].get();
  while (!gathered->ended[index(rank)]) {
    Head head{};
    IoStatus status = peek_message(link, &head, sizeof head);
    if (status == IoStatus::kLate) return std::nullopt;
    // A later exchange: the rank gave this one up. What it sent stays for then.
    if (status == IoStatus::kDone && head.number > number_) return peer_gave_up(call, rank);
    Message message;
    if (status == IoStatus::kDone) status = receive_message(link, &message);
    if (status != IoStatus::kDone || !head.take_from(&message.bytes)) {
      return peer_is_gone(call, rank, "its connection ended");
    }
    if (head.number < number_) continue;
    if (message.lost_fds) {
      return Failure{Failure::Kind::kSystemFailure, EMFILE,
                     base::str(call, ": rank 0 lost a descriptor; raise its limit of open files")};
    }
    if (head.kind == Kind::kParcel) {
      gathered->parcels[index(rank)].push_back(
          {head.destination, {rank, std::move(message.bytes), std::move(message.fds)}});
      continue;
    }
    gathered->ended[index(rank)] = true;
    if (head.kind == Kind::kFailedEnd) {
      gathered->failures[index(rank)] = Failure::decode(message.bytes);
    } else {
      gathered->calls[index(rank)] = message.bytes;
    }
  }
  return std::nullopt;
}

std::optional<Failure> Star::first_problem(const std::string& call,
                                           const Gathered& gathered) const {
  for (const auto& failure : gathered.failures) {
    if (failure.has_value()) return failure;
  }
  for (int rank = 1; rank < num_ranks_; ++rank) {
    const std::string& other = gathered.calls[index(rank)];
    if (other == call) continue;
    return calls_differ(call, rank, other);
  }
  return std::nullopt;
}

void Star::deliver(const std::string& call, Gathered* gathered, base::Deadline deadline) {
  int late_rank = -1;
  for (int rank = 1; rank < num_ranks_; ++rank) {
    const int link = links_[index(rank)].get();
    IoStatus status = IoStatus::kDone;
    for (int source = 0; source < num_ranks_; ++source) {
      for (const auto& sent : gathered->parcels[index(source)]) {
        const bool is_for_all = sent.destination == Parcel::kEveryone && source != rank;
        if (sent.destination != rank && !is_for_all) continue;
        const Head head{kMagic, Kind::kParcel, source, rank, number_};
        if (status == IoStatus::kDone) {
          status = send_message(link, head.with(sent.parcel.bytes), numbers_of(sent.parcel.fds),
                                deadline);
        }
      }
    }
    const Head done{kMagic, Kind::kDone, 0, rank, number_};
    if (status == IoStatus::kDone) status = send_message(link, done.with(""), {}, deadline);
    // A rank that died meanwhile is found by the next exchange.
    if (status == IoStatus::kLate && late_rank < 0) late_rank = rank;
  }
  if (late_rank >= 0) peer_is_late(call, late_rank, deadline).raise();
}

void Star::shut_down() noexcept {
  for (auto& link : links_) {
    if (link.is_open()) (void)::shutdown(link.get(), SHUT_RDWR);
    link.reset();
  }
}

}  // namespace fanfold::comm
