// SPDX-License-Identifier: Apache-2.0
#include "comm/transport_join.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "comm/bootstrap.h"
#include "comm/failure.h"
#include "comm/host_identity.h"
#include "comm/private_directory.h"
#include "comm/rendezvous.h"
#include "comm/transport_group.h"
#include "fanfold/error.h"

namespace fanfold::comm {
namespace {

constexpr const char* kCall = "from_transport";

// The ranks have just met over the transport: through a path that all see they meet soon, or never.
constexpr std::chrono::nanoseconds kMaxJoining = std::chrono::seconds(5);

const char* name_of(TransportUse use) noexcept {
  switch (use) {
    case TransportUse::kAuto:
      return "auto";
    case TransportUse::kSharedMemory:
      return "shared_memory";
    case TransportUse::kAlways:
      return "always";
  }
  return "unknown";
}

/// What a rank tells the others: three lines.
struct Introduction {
  std::string use;
  std::string host;
  std::string path;  // of the rendezvous, from rank 0

  std::string encode() const { return use + "\n" + host + "\n" + path; }
  static Introduction decode(const std::string& text) {
    const std::size_t first = text.find('\n');
    const std::size_t second = first == std::string::npos ? first : text.find('\n', first + 1);
    if (second == std::string::npos) {
      throw InvalidState(base::str(kCall, ": a peer introduced itself with other bytes"));
    }
    return {text.substr(0, first), text.substr(first + 1, second - first - 1),
            text.substr(second + 1)};
  }
};

std::vector<Introduction> introduce(Group& group, TransportUse use,
                                    std::optional<TemporaryDirectory>* directory,
                                    base::Deadline deadline) {
  Introduction own{name_of(use), "", ""};
  std::optional<Failure> failure;
  try {
    own.host = host_identity();
    if (group.rank() == 0 && use != TransportUse::kAlways) {
      own.path = directory->emplace().path() + "/rendezvous";
    }
  } catch (...) {
    failure = Failure::current(group.rank());
  }
  Parcel parcel;
  parcel.bytes = own.encode();
  std::vector<Introduction> all;
  for (const Parcel& one : group.exchange(kCall, std::move(parcel), failure, deadline)) {
    all.push_back(Introduction::decode(one.bytes));
    if (all.back().use == all.front().use) continue;
    throw InvalidArgument(base::str(kCall, ": use: expected the same on every rank, got ",
                                    all.front().use, " on rank 0 and ", all.back().use, " on rank ",
                                    one.peer));
  }
  return all;
}

/// The first that is a cause rather than a consequence.
std::optional<Failure> worst_of(const std::vector<std::string>& encoded) {
  std::optional<Failure> found;
  const auto is_of_peer = [](const Failure& failure) {
    return failure.kind == Failure::Kind::kPeerTimeout ||
           failure.kind == Failure::Kind::kPeerAborted || failure.kind == Failure::Kind::kPeerLost;
  };
  for (const std::string& text : encoded) {
    if (text.empty()) continue;
    const Failure failure = Failure::decode(text);
    if (!found.has_value() || (is_of_peer(*found) && !is_of_peer(failure))) found = failure;
  }
  return found;
}

/// The group of processes of ranks on one host. If one rank fails all get null, and why.
std::unique_ptr<Group> join_processes(Group& group, const std::string& path,
                                      std::optional<Failure>* failure, base::Deadline deadline) {
  // The rest of the time is for telling each other that it has failed, and for what comes then.
  const base::Deadline joining(
      std::min(kMaxJoining, std::chrono::nanoseconds(deadline.remaining_ns() / 4 * 3)));
  std::unique_ptr<Group> joined;
  Parcel outcome;
  try {
    joined = join_group({path, group.rank(), group.num_ranks()}, joining);
  } catch (...) {
    outcome.bytes = Failure::current(group.rank()).encode();
  }
  std::vector<std::string> outcomes;
  for (Parcel& one :
       group.exchange("joining through shared memory", std::move(outcome), {}, deadline)) {
    outcomes.push_back(std::move(one.bytes));
  }
  *failure = worst_of(outcomes);
  if (failure->has_value()) joined.reset();
  return joined;
}

}  // namespace

std::unique_ptr<Group> join_over_transport(std::shared_ptr<Transport> transport, TransportUse use,
                                           base::Deadline deadline) {
  if (transport == nullptr) {
    throw InvalidArgument(base::str(kCall, ": transport: expected one, got null"));
  }
  check_num_ranks(transport->num_ranks());
  check_rank(transport->rank(), transport->num_ranks());
  const auto hub =
      std::make_shared<MessageHub>(std::move(transport), TransportGroup::max_message_bytes());
  auto group = std::make_unique<TransportGroup>(hub);
  std::optional<TemporaryDirectory> directory;
  const std::vector<Introduction> all = introduce(*group, use, &directory, deadline);
  std::vector<std::string> identities;
  identities.reserve(all.size());
  for (const Introduction& one : all) identities.push_back(one.host);
  const std::vector<int> hosts = number_hosts(identities);
  group->set_hosts(hosts);
  if (use == TransportUse::kAlways) return group;
  const auto other = std::find_if(hosts.begin(), hosts.end(), [](int host) { return host != 0; });
  if (other == hosts.end()) {
    std::optional<Failure> failure;
    std::unique_ptr<Group> joined = join_processes(*group, all.front().path, &failure, deadline);
    if (failure.has_value() && use == TransportUse::kAuto) {
      group->set_why_apart("could not meet in its memory: " + failure->message);
      return group;
    }
    group->leave();
    group->finish(deadline);
    if (failure.has_value()) {
      failure->message = base::str(kCall, ": all ranks are on one host, but could not meet there: ",
                                   failure->message, "; use 'always' does without its memory");
      failure->raise();
    }
    return joined;
  }
  if (use == TransportUse::kAuto) return group;
  const auto rank = static_cast<int>(other - hosts.begin());
  throw Unsupported(base::str(
      kCall, ": use shared_memory: expected all ranks on one host, got ",
      describe_hosts(0, identities.front(), rank, identities[static_cast<std::size_t>(rank)])));
}

}  // namespace fanfold::comm
