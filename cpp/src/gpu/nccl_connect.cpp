// SPDX-License-Identifier: Apache-2.0
// How the ranks come to a communicator of NCCL, and how they leave it.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/format.h"
#include "comm/failure.h"
#include "comm/rank_index.h"
#include "fanfold/error.h"
#include "gpu/nccl_collectives.h"
#include "gpu/pauses.h"

namespace fanfold::gpu {
namespace {

using comm::Failure;

/// What each rank says of itself before anything is made.
struct Card {
  std::int32_t version;
  std::int32_t has_handle;
};

template <class Plain>
std::string encode(const Plain& plain) {
  return {reinterpret_cast<const char*>(&plain), sizeof plain};
}

template <class Plain>
Plain decode(const std::string& bytes, std::size_t rank) {
  Plain plain{};
  if (bytes.size() != sizeof plain) {
    throw InvalidArgument(base::str("NCCL: rank ", rank, ": expected ", sizeof plain,
                                    " bytes, got ", bytes.size(), ": another version of Fanfold?"));
  }
  std::memcpy(&plain, bytes.data(), sizeof plain);
  return plain;
}

Failure failure_here(int rank) {
  Failure failure = Failure::current(rank);
  const std::string prefix = base::str("rank ", rank, ": ");
  const bool names_rank = failure.message.find(base::str("rank ", rank)) != std::string::npos;
  if (!names_rank) failure.message = prefix + failure.message;
  return failure;
}

/// Ranks that only waited for another say less than that one.
bool is_consequence(const Failure& failure) {
  return failure.kind == Failure::Kind::kPeerTimeout || failure.kind == Failure::Kind::kPeerLost;
}

/// `part` on all ranks; each hears how it went on the others, and throws what went wrong on any.
std::vector<std::string> meet_on(comm::Group& group, const std::string& step,
                                 base::Deadline deadline,
                                 const std::function<std::string()>& part) {
  comm::Parcel own;
  try {
    own.bytes = "+" + part();
  } catch (...) {
    own.bytes = "-" + failure_here(group.rank()).encode();
  }
  const std::vector<comm::Parcel> parcels =
      group.exchange("NCCL: " + step, std::move(own), std::nullopt, deadline);
  std::optional<Failure> first;
  std::vector<std::string> all;
  for (const comm::Parcel& parcel : parcels) {
    if (parcel.bytes.empty() || parcel.bytes[0] == '+') {
      all.push_back(parcel.bytes.empty() ? std::string() : parcel.bytes.substr(1));
      continue;
    }
    Failure failure = Failure::decode(parcel.bytes.substr(1));
    if (!first || (is_consequence(*first) && !is_consequence(failure))) first = std::move(failure);
  }
  if (first) first->raise();
  return all;
}

/// Leaves the others time to hear of a failure.
base::Deadline most_of(base::Deadline deadline) {
  return base::Deadline(std::chrono::nanoseconds(deadline.remaining_ns() / 4 * 3));
}

nccl::Config config_of_own() {
  nccl::Config config;
  config.blocking = 0;
  return config;
}

NcclSearch search_of(const NcclOptions& options) {
  return {options.library, options.default_library, options.handle != nullptr};
}

void check_cards(const std::vector<std::string>& texts) {
  const Card first = decode<Card>(texts[0], 0);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const Card card = decode<Card>(texts[rank], rank);
    if (card.has_handle != first.has_handle) {
      throw InvalidArgument(base::str("handle: expected one on every rank or on none, got ",
                                      first.has_handle ? "one" : "none", " on rank 0 and ",
                                      card.has_handle ? "one" : "none", " on rank ", rank));
    }
    if (card.version != first.version) {
      throw Unsupported(base::str("NCCL: expected the same version on every rank, got ",
                                  nccl_version_text(first.version), " on rank 0 and ",
                                  nccl_version_text(card.version), " on rank ", rank));
    }
  }
}

}  // namespace

std::vector<std::string> NcclCollectives::meet(const std::string& step, base::Deadline deadline,
                                               const std::function<std::string()>& part) const {
  return meet_on(*setup_.group, step, deadline, part);
}

void NcclCollectives::connect(base::Deadline deadline) {
  const std::vector<std::string> cards = meet("check", deadline, [&] {
    if (is_adopted()) adopt();
    return encode(Card{setup_.library->version(), is_adopted() ? 1 : 0});
  });
  check_cards(cards);
  if (!is_adopted()) make_anew(deadline);
}

void NcclCollectives::adopt() {
  const auto comm = static_cast<nccl::Comm>(setup_.options.handle);
  struct Fact {
    const char* what;
    const char* name;
    nccl::Pointer<nccl::Result(nccl::Comm, int*)> get;
    int expected;
  };
  const nccl::Functions& call = functions();
  for (const Fact& fact : {Fact{"ranks", "ncclCommCount", call.ncclCommCount, num_ranks()},
                           Fact{"rank", "ncclCommUserRank", call.ncclCommUserRank, rank()},
                           Fact{"device", "ncclCommCuDevice", call.ncclCommCuDevice, device()}}) {
    int got = 0;
    const nccl::Result result = fact.get(comm, &got);
    if (result != nccl::kSuccess) {
      throw InvalidArgument(base::str("handle: expected a communicator of NCCL, got ", fact.name,
                                      ": ", setup_.library->describe(result, nullptr)));
    }
    if (got != fact.expected) {
      throw InvalidArgument(base::str("handle: expected a communicator with ", fact.what, " ",
                                      fact.expected, ", got ", got));
    }
  }
  comm_ = comm;
}

void NcclCollectives::make(const std::string& step, base::Deadline deadline,
                           const std::function<void(base::Deadline)>& part) {
  {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    reason_.clear();
  }
  try {
    (void)meet(step, deadline, [&] {
      part(most_of(deadline));
      return std::string();
    });
  } catch (const std::exception& error) {
    remember(error.what());
    (void)drop();
    throw;
  }
}

void NcclCollectives::make_anew(base::Deadline deadline) {
  const std::vector<std::string> ids = meet("unique id", deadline, [&] {
    if (rank() != 0) return std::string();
    nccl::UniqueId id{};
    const nccl::Result result = functions().ncclGetUniqueId(&id);
    if (result != nccl::kSuccess) fail("ncclGetUniqueId", result);
    return encode(id);
  });
  const auto id = decode<nccl::UniqueId>(ids[0], 0);
  make("ncclCommInitRankConfig", deadline, [&](base::Deadline most) {
    const auto making = std::make_shared<NcclMaking>();
    making->config = config_of_own();
    nccl::Result result = nccl::kSuccess;
    {
      const DeviceContext::Current current(*setup_.context);
      const std::lock_guard<std::mutex> lock(mutex_);
      result = functions().ncclCommInitRankConfig(&making->comm, num_ranks(), id, rank(),
                                                  &making->config);
      comm_ = making->made();
    }
    if (result != nccl::kSuccess && result != nccl::kInProgress) {
      fail("ncclCommInitRankConfig", result);
    }
    (void)await_made("ncclCommInitRankConfig", making, *this, most);
    settle("ncclCommInitRankConfig", most);
  });
}

void NcclCollectives::connect_survivors(NcclCollectives& parent, const std::vector<int>& lost,
                                        base::Deadline deadline) {
  std::vector<int> sorted = lost;
  std::sort(sorted.begin(), sorted.end());
  // The same ranks are lost for all, and those that are left keep their order.
  int place = parent.rank();
  for (const int gone : sorted) place -= gone < parent.rank() ? 1 : 0;
  const std::vector<std::string> opinions = meet("shrink", deadline, [&] {
    if (std::binary_search(sorted.begin(), sorted.end(), parent.rank())) {
      throw InvalidArgument(base::str("lost: expected ranks that are gone, got rank ",
                                      parent.rank(), ", which makes this call"));
    }
    if (place != rank()) {
      throw InvalidArgument(base::str("survivors: expected rank ", parent.rank(), " as rank ",
                                      place, ", in the old order, got it as rank ", rank()));
    }
    const std::lock_guard<std::mutex> lock(parent.mutex_);
    const bool is_there = parent.comm_ != nullptr && !parent.is_closed_;
    std::string opinion = is_there && setup_.library->has(NcclFeature::kShrink) ? "1" : "0";
    for (const int gone : sorted) opinion += base::str(" ", gone);
    return opinion;
  });
  bool all_can = true;
  for (std::size_t other = 0; other < opinions.size(); ++other) {
    all_can = all_can && opinions[other][0] == '1';
    if (opinions[other].substr(1) == opinions[0].substr(1)) continue;
    throw InvalidArgument(base::str("lost: expected the same ranks on every survivor, got",
                                    opinions[0].substr(1), " on rank 0 and",
                                    opinions[other].substr(1), " on rank ", other));
  }
  if (all_can) {
    make_out_of(parent, lost, deadline);
  } else {
    make_anew(deadline);
  }
  parent.remember("its communicator was shrunk");
  if (!parent.is_adopted()) (void)parent.drop();
}

nccl::Comm NcclCollectives::await_made(const char* name, const std::shared_ptr<NcclMaking>& making,
                                       NcclCollectives& source, base::Deadline deadline) {
  // From its own the new one is told at once, where it is not there yet: nothing to look at.
  const bool has_parent = &source != this;
  try {
    for (Pauses pauses;; pauses.next()) {
      const nccl::Comm made = making->made();
      const nccl::Result state = has_parent ? source.look(name) : nccl::kSuccess;
      if (made != nullptr && state != nccl::kInProgress) {
        const std::lock_guard<std::mutex> lock(mutex_);
        comm_ = made;
        return made;
      }
      if (state != nccl::kSuccess && state != nccl::kInProgress) source.fail(name, state);
      if (deadline.passed()) source.give_up(name, deadline);
    }
  } catch (...) {
    const std::lock_guard<std::mutex> lock(source.mutex_);
    source.late_.push_back(making);
    throw;
  }
}

void NcclCollectives::check_child() const {
  int rank_there = -1;
  int num_there = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) throw InvalidState("NCCL, ncclCommShrink: it has ended");
    (void)functions().ncclCommUserRank(comm_, &rank_there);
    (void)functions().ncclCommCount(comm_, &num_there);
  }
  if (rank_there == rank() && num_there == num_ranks()) return;
  throw InvalidArgument(base::str("survivors: expected this rank as rank ", rank_there, " of ",
                                  num_there, ", as NCCL counts those that are left, got rank ",
                                  rank(), " of ", num_ranks()));
}

void NcclCollectives::make_out_of(NcclCollectives& parent, std::vector<int> lost,
                                  base::Deadline deadline) {
  std::sort(lost.begin(), lost.end());  // as NCCL wants it
  make("ncclCommShrink", deadline, [&](base::Deadline most) {
    const auto making = std::make_shared<NcclMaking>();
    making->config = config_of_own();
    making->lost = lost;
    nccl::Result result = nccl::kSuccess;
    {
      const DeviceContext::Current current(*setup_.context);
      const std::lock_guard<std::mutex> lock(parent.mutex_);
      if (parent.comm_ == nullptr) throw InvalidState("NCCL, ncclCommShrink: it has ended");
      result = functions().ncclCommShrink(
          parent.comm_, making->lost.data(), static_cast<int>(lost.size()), &making->comm,
          &making->config, parent.is_adopted() ? 0 : nccl::kShrinkAbort);
    }
    if (result != nccl::kSuccess && result != nccl::kInProgress) {
      parent.fail("ncclCommShrink", result);
    }
    (void)await_made("ncclCommShrink", making, parent, most);
    settle("ncclCommShrink", most);
    check_child();
  });
}

void NcclCollectives::reset(base::Deadline deadline) {
  if (is_closed_) throw InvalidState("reset: the communicator is closed");
  group_calls_.clear();
  group_depth_ = 0;
  (void)meet("reset", deadline, [&] {
    if (is_adopted()) {
      std::string failed = reason();
      const nccl::Result state = look("reset");
      if (failed.empty() && state != nccl::kSuccess && state != nccl::kInProgress) {
        failed = setup_.library->describe(state, comm_);
      }
      if (!failed.empty()) {
        throw Unsupported(base::str(
            "reset: expected a communicator that this library made, got the caller's, which has "
            "failed (",
            failed, "); make a new one and adopt that"));
      }
    }
    return std::string();
  });
  if (is_adopted()) return;
  remember("a reset is under way");
  (void)meet("reset, end of the communicator", deadline, [&] {
    const base::Deadline half(std::chrono::nanoseconds(deadline.remaining_ns() / 2));
    if (!drop(half)) throw_not_ended("reset", half);
    return std::string();
  });
  make_anew(deadline);
}

std::unique_ptr<comm::DeviceCollectives> NcclCollectives::on_group(comm::Group& group,
                                                                   base::Deadline deadline) {
  check_usable("split");
  Setup setup = setup_;
  setup.group = &group;
  setup.options.handle = nullptr;  // the new one is ours
  auto collectives = std::make_unique<NcclCollectives>(std::move(setup));
  collectives->make_anew(deadline);
  return collectives;
}

bool NcclCollectives::finalize(base::Deadline deadline) {
  const char* const name = "ncclCommFinalize";
  // Peers that have finalized may leave; who is gone for so long has not.
  constexpr std::chrono::milliseconds kGrace(400);
  std::optional<base::Deadline> lost_until;
  nccl::Result result = nccl::kSuccess;
  {
    const DeviceContext::Current current(*setup_.context);
    const std::lock_guard<std::mutex> lock(mutex_);
    result = functions().ncclCommFinalize(comm_);
  }
  if (result != nccl::kSuccess && result != nccl::kInProgress) fail(name, result);
  for (Pauses pauses;; pauses.next()) {
    const nccl::Result state = look(name);
    if (state == nccl::kSuccess) return true;
    if (state != nccl::kInProgress) fail(name, state);
    if (pauses.are_long() && !lost_until && has_lost_peers()) lost_until.emplace(kGrace);
    if (lost_until && lost_until->passed()) return false;
    if (deadline.passed()) give_up(name, deadline);
  }
}

void NcclCollectives::close(base::Deadline deadline) {
  if (is_closed_) return;
  is_closed_ = true;
  bool has_ended = true;
  if (is_adopted() || !reason().empty()) {
    has_ended = drop(deadline);
  } else {
    try {
      if (finalize(deadline)) return destroy();
    } catch (...) {
      (void)drop();
      throw;
    }
    has_ended = drop(deadline);
  }
  if (!has_ended) throw_not_ended("close", deadline);
}

void NcclCollectives::destroy() {
  const DeviceContext::Current current(*setup_.context);
  const std::lock_guard<std::mutex> lock(mutex_);
  windows_.clear();
  ++generation_;
  (void)functions().ncclCommDestroy(std::exchange(comm_, nullptr));
}

void NcclCollectives::throw_not_ended(const char* call, base::Deadline deadline) {
  throw InvalidState(base::str(call, ": NCCL has not ended the communicator within ",
                               deadline.timeout_ns() / 1000000,
                               " ms: destroy the graphs that were captured over it"));
}

// --- What the rest of the library calls -------------------------------------------------------

std::unique_ptr<comm::DeviceCollectives> make_nccl_collectives(
    comm::Group& group, const NcclOptions& options, std::chrono::nanoseconds call_timeout,
    base::Deadline deadline) {
  NcclCollectives::Setup setup{&group, nullptr, nullptr, options, call_timeout};
  (void)meet_on(group, "library and device", deadline, [&] {
    setup.library = NcclLibrary::open(search_of(options));
    setup.context = std::make_shared<const DeviceContext>(options.device_index);
    return std::string();
  });
  auto collectives = std::make_unique<NcclCollectives>(std::move(setup));
  collectives->connect(deadline);
  return collectives;
}

std::unique_ptr<comm::DeviceCollectives> shrink_nccl_collectives(
    comm::DeviceCollectives& old, const std::vector<int>& lost, comm::Group& group,
    std::chrono::nanoseconds call_timeout, base::Deadline deadline) {
  auto& parent = static_cast<NcclCollectives&>(old);
  NcclCollectives::Setup setup = parent.setup();
  setup.group = &group;
  setup.call_timeout = call_timeout;
  setup.options.handle = nullptr;  // the new one is ours
  auto collectives = std::make_unique<NcclCollectives>(std::move(setup));
  collectives->connect_survivors(parent, lost, deadline);
  return collectives;
}

}  // namespace fanfold::gpu
