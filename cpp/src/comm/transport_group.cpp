// SPDX-License-Identifier: Apache-2.0
#include "comm/transport_group.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/format.h"
#include "comm/channel.h"
#include "comm/members.h"
#include "comm/rank_index.h"
#include "comm/remote_windows.h"
#include "comm/transport_message.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr std::int64_t kWaitNs = 1'000'000;
constexpr std::int64_t kLookNs = 5'000'000;
constexpr std::chrono::milliseconds kMinFlush{100};

}  // namespace

/// What a rank brings to an exchange, as one text.
struct TransportGroup::Offer {
  std::string call;
  std::string bytes;
  std::optional<Failure> failure;

  std::string encode() const {
    const auto size = static_cast<std::uint32_t>(call.size());
    std::string text(1 + sizeof size, failure.has_value() ? '!' : '=');
    std::memcpy(&text[1], &size, sizeof size);
    return text + call + (failure.has_value() ? failure->encode() : bytes);
  }

  static Offer decode(const std::string& text) {
    Offer offer;
    std::uint32_t size = 0;
    const std::size_t head = 1 + sizeof size;
    if (text.size() >= head) std::memcpy(&size, &text[1], sizeof size);
    if (text.size() < head + size) throw InvalidState("exchange: a peer sent a malformed offer");
    offer.call = text.substr(head, size);
    const std::string rest = text.substr(head + size);
    if (text.front() == '!') {
      offer.failure = Failure::decode(rest);
    } else {
      offer.bytes = rest;
    }
    return offer;
  }
};

namespace {

/// Windows, and what keeps them alike.
struct HeldWindows {
  std::shared_ptr<RemoteWindows> remote;
  std::deque<base::Mapping> mappings;
};

std::vector<int> all_ranks(int num_ranks) {
  std::vector<int> ranks(index(num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Numbers in the order in which they first come.
std::vector<int> renumber(const std::vector<int>& numbers) {
  std::map<int, int> known;
  std::vector<int> result;
  result.reserve(numbers.size());
  for (const int number : numbers) {
    result.push_back(known.emplace(number, static_cast<int>(known.size())).first->second);
  }
  return result;
}

}  // namespace

/// What has come of one exchange.
struct TransportGroup::Meeting {
  struct Text {
    std::string text;
    bool is_whole = false;
  };
  explicit Meeting(std::size_t num_ranks) : offers(num_ranks), verdicts(num_ranks) {}
  std::vector<Text>& of(MessageKind kind) {
    return kind == MessageKind::kOffer ? offers : verdicts;
  }
  std::vector<Text> offers;    // by rank
  std::vector<Text> verdicts;  // by rank; empty: it goes on
};

/// Takes in the messages of the group. Any thread may be inside the transport when they come.
class TransportGroup::Mailbox final : public Inbox {
 public:
  Mailbox(const std::vector<int>& ranks, int num_transport_ranks)
      : left_(ranks.size()), rank_of_(index(num_transport_ranks), -1) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      rank_of_[index(ranks[rank])] = static_cast<int>(rank);
    }
  }

  void take(int source, const std::vector<std::byte>& bytes) override {
    const int rank = rank_of_[index(source)];
    MessageHead head;
    if (rank < 0 || !head.read(bytes)) return;
    switch (head.kind) {
      case MessageKind::kStores:
        // Made without the lock: the windows may go with the last use of them, here.
        if (const auto windows = find(head.object)) windows->apply(head, bytes);
        return;
      case MessageKind::kOffer:
      case MessageKind::kVerdict:
        return take_piece(rank, head, bytes);
      case MessageKind::kLeft:
        left_[index(rank)].store(true, std::memory_order_release);  // acquire: has_left
        return;
    }
  }

  bool has_left(int rank) const noexcept {
    return left_[index(rank)].load(std::memory_order_acquire);
  }

  void add(const std::shared_ptr<RemoteWindows>& windows) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto place = windows_.begin(); place != windows_.end();) {
      place = place->second.expired() ? windows_.erase(place) : std::next(place);
    }
    windows_[windows->id()] = windows;
  }

  std::shared_ptr<RemoteWindows> find(std::uint64_t id) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = windows_.find(id);
    return place == windows_.end() ? nullptr : place->second.lock();
  }

  /// The windows of which rank 0's lies at `data`.
  std::shared_ptr<RemoteWindows> find(const std::byte* data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : windows_) {
      std::shared_ptr<RemoteWindows> windows = entry.second.lock();
      if (windows != nullptr && windows->data(0) == data) return windows;
    }
    return nullptr;
  }

  /// Ranks other than `own` of which not all has come, and who has said that it failed.
  std::vector<int> missing(MessageKind kind, std::int64_t number, int own, int* failed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Meeting& meeting = at(number);
    std::vector<int> ranks;
    *failed = -1;
    for (int rank = 0; index(rank) < left_.size(); ++rank) {
      if (rank == own) continue;
      const Meeting::Text& verdict = meeting.verdicts[index(rank)];
      if (*failed < 0 && verdict.is_whole && !verdict.text.empty()) *failed = rank;
      if (!meeting.of(kind)[index(rank)].is_whole) ranks.push_back(rank);
    }
    return ranks;
  }

  std::string text(MessageKind kind, std::int64_t number, int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return at(number).of(kind)[index(rank)].text;
  }

  /// What comes for exchanges up to `number` is dropped from now on.
  void end(std::int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    first_open_ = number + 1;
    meetings_.erase(meetings_.begin(), meetings_.lower_bound(first_open_));
  }

 private:
  Meeting& at(std::int64_t number) {
    return meetings_.try_emplace(number, left_.size()).first->second;
  }

  void take_piece(int rank, const MessageHead& head, const std::vector<std::byte>& bytes) {
    const auto number = static_cast<std::int64_t>(head.object);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number < first_open_) return;
    Meeting::Text& text = at(number).of(head.kind)[index(rank)];
    text.text.append(reinterpret_cast<const char*>(bytes.data()) + sizeof head,
                     bytes.size() - sizeof head);
    text.is_whole = head.count == 0;
  }

  std::vector<std::atomic<bool>> left_;  // by rank
  std::vector<int> rank_of_;             // of the group, by rank of the transport; -1: not in it
  mutable std::mutex mutex_;             // guards all below
  std::map<std::int64_t, Meeting> meetings_;  // by number
  std::int64_t first_open_ = 0;
  std::map<std::uint64_t, std::weak_ptr<RemoteWindows>> windows_;  // by id
};

std::int64_t TransportGroup::max_message_bytes() noexcept {
  return Channel::max_half_bytes() + RemoteWindows::kMaxOverhead;
}

TransportGroup::TransportGroup(const std::shared_ptr<MessageHub>& hub)
    : TransportGroup(hub, 0, all_ranks(hub->num_ranks()), hub->rank()) {}

TransportGroup::TransportGroup(std::shared_ptr<MessageHub> hub, std::uint64_t id,
                               std::vector<int> ranks, int rank)
    : Group(rank, static_cast<int>(ranks.size())),
      hub_(std::move(hub)),
      id_(id),
      ranks_(std::move(ranks)),
      mailbox_(std::make_shared<Mailbox>(ranks_, hub_->num_ranks())) {
  may_spin_ = false;  // a rank that waits moves messages
  hub_->add(id_, mailbox_);
}

TransportGroup::~TransportGroup() {
  leave();
  finish(base::Deadline(kMinFlush));
}

void TransportGroup::check_usable(const char* call) const {
  if (is_forked_child()) throw InvalidState(base::str(call, ": called in a forked child"));
  if (has_left_) throw InvalidState(base::str(call, ": this rank has left the group"));
  hub_->check_thread(call);
}

std::string TransportGroup::lost_reason(int rank) const {
  if (rank == rank_) return "";
  if (mailbox_->has_left(rank)) return "it left the group";
  if (is_finished_.load(std::memory_order_acquire)) return "this rank has closed the communicator";
  const std::string reason = hub_->lost_reason(ranks_[index(rank)]);
  // What it sent last has been taken by now.
  return mailbox_->has_left(rank) ? "it left the group" : reason;
}

void TransportGroup::leave() noexcept {
  if (is_forked_child() || std::exchange(has_left_, true)) return;
  MessageHead head;
  head.kind = MessageKind::kLeft;
  head.group = id_;
  try {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (rank != rank_) hub_->post(ranks_[index(rank)], {head.part()});
    }
  } catch (...) {
    hub_->defer_current();
  }
}

void TransportGroup::finish(base::Deadline deadline) noexcept {
  if (is_forked_child() || is_finished_.exchange(true, std::memory_order_acq_rel)) return;
  const std::chrono::nanoseconds left(deadline.remaining_ns());
  hub_->remove(id_, std::max<std::chrono::nanoseconds>(left, kMinFlush));
}

std::shared_ptr<RemoteWindows> TransportGroup::remote_windows(const Windows& windows) const {
  std::shared_ptr<RemoteWindows> remote = mailbox_->find(windows.front()->data());
  if (remote == nullptr) throw InvalidState("windows: expected windows of this group, got others");
  return remote;
}

void TransportGroup::tell_all(MessageKind kind, std::int64_t number, const std::string& text) {
  MessageHead head;
  head.kind = kind;
  head.group = id_;
  head.object = static_cast<std::uint64_t>(number);
  const auto room = static_cast<std::size_t>(hub_->max_message_bytes()) - sizeof head;
  for (std::size_t begin = 0; begin == 0 || begin < text.size(); begin += room) {
    const std::size_t bytes = std::min(room, text.size() - begin);
    head.count = begin + bytes < text.size() ? 1 : 0;
    const auto* data = reinterpret_cast<const std::byte*>(text.data()) + begin;
    for (int i = 1; i < num_ranks_; ++i) {
      const int peer = ranks_[index((rank_ + i) % num_ranks_)];
      hub_->send(peer, {head.part(), {data, static_cast<std::int64_t>(bytes)}});
    }
  }
}

/// `problem` or else the error being handled, which this rank throws in any case.
void TransportGroup::tell_failure(std::int64_t number, const std::optional<Failure>& problem,
                                  base::Deadline deadline) noexcept {
  try {
    const Failure failure = problem.has_value() ? *problem : Failure::current(rank_);
    tell_all(MessageKind::kVerdict, number, failure.encode());
    flush(deadline);
  } catch (...) {
    hub_->defer_current();  // peers time out
  }
}

/// Waits until every peer has said its part; why it cannot.
std::optional<Failure> TransportGroup::await(MessageKind kind, std::int64_t number,
                                             const std::string& call, base::Deadline deadline) {
  hub_->progress(0);
  std::int64_t next_liveness = base::now_ns() + kWaitNs;
  for (;;) {
    int failed = -1;
    std::vector<int> missing = mailbox_->missing(kind, number, rank_, &failed);
    if (failed >= 0) {
      Failure told = Failure::decode(mailbox_->text(MessageKind::kVerdict, number, failed));
      const bool was_late = told.kind == Failure::Kind::kPeerTimeout && told.code == rank_;
      return was_late ? peer_gave_up(call, failed) : told;
    }
    if (missing.empty()) return std::nullopt;
    const std::int64_t now = base::now_ns();
    const bool late = now >= deadline.at_ns();
    if (late || now >= next_liveness) {
      next_liveness = now + kLookNs;
      for (const int rank : missing) {
        const std::string reason = lost_reason(rank);
        if (reason.empty()) continue;
        const std::vector<int> still = mailbox_->missing(kind, number, rank_, &failed);
        if (failed >= 0 || position_in(still, rank) < 0) break;  // the loop takes it up
        return peer_is_gone(call, rank, reason);
      }
    }
    if (late) {
      missing = mailbox_->missing(kind, number, rank_, &failed);
      if (failed < 0 && !missing.empty()) return peer_is_late(call, missing.front(), deadline);
      continue;
    }
    hub_->progress(std::min(kWaitNs, deadline.remaining_ns()));
  }
}

std::vector<std::string> TransportGroup::meet(const std::string& call, const std::string& offer,
                                              const std::optional<Failure>& failure,
                                              const Prepare& prepare, base::Deadline deadline) {
  check_usable(call.c_str());
  const std::int64_t number = num_meetings_++;
  // Whatever happens: what still comes for it is for nobody.
  struct Ending {
    Mailbox& mailbox;
    std::int64_t number;
    ~Ending() { mailbox.end(number); }
  } const ending{*mailbox_, number};
  // What this rank throws and the others cannot know of, they are told.
  bool is_known = false;
  std::optional<Failure> problem;
  try {
    const Offer own{call, offer, failure};
    tell_all(MessageKind::kOffer, number, own.encode());
    problem = await(MessageKind::kOffer, number, call, deadline);
    if (problem.has_value()) problem->raise();
    std::optional<Failure> agreed;
    std::vector<std::string> offers = read_offers(number, own, &agreed);
    is_known = agreed.has_value();
    if (agreed.has_value()) {
      flush(deadline);
      agreed->raise();
    }
    if (prepare) prepare(offers);
    tell_all(MessageKind::kVerdict, number, "");
    problem = await(MessageKind::kVerdict, number, call, deadline);
    is_known = problem.has_value();
    if (problem.has_value()) problem->raise();
    flush(deadline);
    return offers;
  } catch (...) {
    if (!is_known) tell_failure(number, problem, deadline);
    throw;
  }
}

/// By rank, and what all ranks throw because of them.
std::vector<std::string> TransportGroup::read_offers(std::int64_t number, const Offer& own,
                                                     std::optional<Failure>* agreed) {
  std::vector<std::string> offers;
  std::optional<Failure> difference;
  std::string first_call;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    Offer theirs =
        rank == rank_ ? own : Offer::decode(mailbox_->text(MessageKind::kOffer, number, rank));
    if (rank == 0) first_call = theirs.call;
    if (theirs.failure.has_value() && !agreed->has_value()) *agreed = theirs.failure;
    if (theirs.call != first_call && !difference.has_value()) {
      difference = calls_differ(first_call, rank, theirs.call);
    }
    offers.push_back(std::move(theirs.bytes));
  }
  if (!agreed->has_value()) *agreed = std::move(difference);
  return offers;
}

/// Lets what this rank has said leave, as long as somebody waits for it.
void TransportGroup::flush(base::Deadline deadline) {
  std::int64_t next_look = base::now_ns() + kLookNs;
  const auto give_up = [&] {
    const std::int64_t now = base::now_ns();
    if (now < next_look) return false;
    next_look = now + kLookNs;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (!lost_reason(rank).empty()) return true;
    }
    return false;
  };
  hub_->flush(ranks_, deadline, give_up);
}

std::vector<Parcel> TransportGroup::exchange(const std::string& call, Parcel own,
                                             const std::optional<Failure>& failure,
                                             base::Deadline deadline) {
  std::optional<Failure> problem = failure;
  if (!problem.has_value() && !own.fds.empty()) {
    problem = Failure{Failure::Kind::kUnsupported, 0,
                      base::str(call, ": expected ranks that share a machine's memory, got rank ",
                                rank_, " behind a '", kind(), "' transport")};
  }
  const std::vector<std::string> offers = meet(call, own.bytes, problem, {}, deadline);
  std::vector<Parcel> all(offers.size());
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    all[rank].peer = static_cast<int>(rank);
    all[rank].bytes = offers[rank];
  }
  return all;
}

Windows TransportGroup::reserve_windows(std::int64_t bytes, base::Deadline deadline) {
  return share_windows(bytes, deadline);
}

Windows TransportGroup::share_windows(std::int64_t bytes, base::Deadline deadline) {
  check_usable("share_windows");
  const auto held = std::make_shared<HeldWindows>();
  std::optional<Failure> failure;
  try {
    held->remote = std::make_shared<RemoteWindows>(
        hub_, id_, static_cast<std::uint64_t>(num_meetings_), ranks_, bytes);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      held->mappings.emplace_back(held->remote->data(rank), held->remote->bytes());
    }
    mailbox_->add(held->remote);
  } catch (...) {
    failure = Failure::current(rank_);
  }
  (void)meet(base::str("share_windows of ", bytes, " bytes"), "", failure, {}, deadline);
  Windows windows;
  for (base::Mapping& mapping : held->mappings) windows.emplace_back(held, &mapping);
  return windows;
}

std::unique_ptr<Group> TransportGroup::split(const std::vector<int>& members,
                                             base::Deadline deadline) {
  check_usable("split");
  std::vector<std::int64_t> own;  // the number of the group, if this rank is its first; members
  std::optional<Failure> failure;
  try {
    check_members(members, rank_, num_ranks_);
    const bool is_first = !members.empty() && members.front() == rank_;
    own.push_back(is_first ? static_cast<std::int64_t>(hub_->new_group()) : 0);
    own.insert(own.end(), members.begin(), members.end());
  } catch (...) {
    failure = Failure::current(rank_);
  }
  std::unique_ptr<TransportGroup> child;
  const auto make = [&](const std::vector<std::string>& offers) {
    std::vector<std::vector<int>> members_by_rank;
    std::vector<std::int64_t> numbers;
    for (const std::string& offer : offers) {
      std::vector<std::int64_t> values(offer.size() / sizeof(std::int64_t));
      if (values.empty()) throw InvalidState("split: a peer sent a malformed offer");
      std::memcpy(values.data(), offer.data(), values.size() * sizeof(std::int64_t));
      numbers.push_back(values.front());
      std::vector<int>& list = members_by_rank.emplace_back();
      for (std::size_t i = 1; i < values.size(); ++i) list.push_back(static_cast<int>(values[i]));
    }
    check_members_agree(members_by_rank);
    if (members.empty()) return;
    std::vector<int> ranks;
    std::vector<int> hosts;
    for (const int member : members) {
      ranks.push_back(ranks_[index(member)]);
      hosts.push_back(hosts_[index(member)]);
    }
    const auto id = static_cast<std::uint64_t>(numbers[index(members.front())]);
    child.reset(new TransportGroup(hub_, id, std::move(ranks), position_in(members, rank_)));
    child->set_hosts(renumber(hosts));
    child->set_why_apart(why_apart_);
  };
  const std::string offer(reinterpret_cast<const char*>(own.data()),
                          own.size() * sizeof(std::int64_t));
  (void)meet("split", offer, failure, make, deadline);
  return child;
}

}  // namespace fanfold::comm
