// SPDX-License-Identifier: Apache-2.0
#include "api/all_to_all_impl.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "api/config.h"
#include "api/received_state.h"
#include "base/byte_math.h"
#include "base/format.h"
#include "comm/communicator_impl.h"
#include "cpu/backend.h"
#include "fanfold/error.h"
#include "gpu/backend.h"

namespace fanfold {

using base::str;
using exchange::Slot;
using exchange::SlotState;

namespace {

std::uint64_t digest_of(const std::string& text) noexcept {
  std::uint64_t digest = base::kDigestSeed;
  for (const char c : text) digest = base::mix_digest(digest, static_cast<unsigned char>(c));
  return digest;
}

Communicator::Bytes to_bytes(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::string to_text(const Communicator::Bytes& bytes, std::size_t first = 0) {
  return {reinterpret_cast<const char*>(bytes.data()) + first, bytes.size() - first};
}

/// A configuration that can use the workspace of `owner`: what it leaves open is as there.
AllToAllConfig config_beside(AllToAllConfig config, const exchange::Exchange& owner) {
  if (config.strategy == Strategy::kAuto) config.strategy = owner.config().strategy;
  config.test_knobs.first_epoch = owner.config().test_knobs.first_epoch;
  return config;
}

void check_beside(const AllToAllConfig& config, const exchange::Exchange& owner) {
  const AllToAllConfig& other = owner.config();
  const auto fail = [&](const char* field, const auto& expected, const auto& got) {
    throw InvalidArgument(str("workspace_of: ", field, ": expected ", expected, " (that of ",
                              owner.what(), "), got ", got));
  };
  if (config.strategy != other.strategy) {
    fail("strategy", name_of(other.strategy), name_of(config.strategy));
  }
  if (config.max_in_flight != other.max_in_flight) {
    fail("max_in_flight", other.max_in_flight, config.max_in_flight);
  }
  if (config.strategy == Strategy::kTwoSided && config.channel_bytes != other.channel_bytes) {
    fail("channel_bytes", other.channel_bytes, config.channel_bytes);
  }
}

/// What strategies over collectives need where rows lie on a GPU.
void check_collectives(const exchange::Setup& setup) {
  const AllToAllConfig& config = setup.config;
  if (config.device == DeviceType::kCpu ||
      plan::store_kind(config.strategy) == plan::StoreKind::kWindow) {
    return;
  }
  if (setup.collectives == nullptr) {
    throw Unsupported(str("strategy: ", name_of(config.strategy),
                          " on device 'cuda' needs a communicator with collectives on GPUs "
                          "(Communicator::from_nccl), got one without"));
  }
  const int device = setup.collectives->device();
  if (device == config.device_index) return;
  throw InvalidArgument(str("device_index: expected ", device,
                            " (that of the communicator's collectives), got ",
                            config.device_index));
}

void check_allocator(const AllToAllConfig& config, const Allocator* allocator) {
  if (allocator == nullptr) return;
  const AllocatorMemory memory = allocator->memory();
  const std::string got = memory.device == DeviceType::kCpu
                              ? std::string("the host's")
                              : str("memory of cuda:", memory.device_index);
  if (config.device == DeviceType::kCpu) {
    if (memory.device == DeviceType::kCpu) return;
    throw InvalidArgument(str("allocator: expected host memory for device 'cpu', got ", got));
  }
  if (memory.device == DeviceType::kGpu && memory.device_index == config.device_index) return;
  throw InvalidArgument(str("allocator: expected memory of cuda:", config.device_index,
                            " (device_index), got ", got));
}

}  // namespace

AllToAll::Impl::Impl(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator,
                     const Impl* owner) {
  const int num_ranks = communicator.num_ranks();
  exchange::Setup setup;
  setup.what = config.name.empty() ? "AllToAll" : str("AllToAll '", config.name, "'");
  std::optional<Call> guard;
  if (owner != nullptr) {
    guard.emplace(*owner);
    owner->require_not_failed();
    if (owner->exchange_->communicator() != communicator.impl()) {
      throw InvalidArgument(
          "workspace_of: expected an AllToAll of the same communicator, got one of another");
    }
    if (allocator != nullptr) {
      throw InvalidArgument("allocator: expected none beside workspace_of, got one");
    }
    if (owner->session_->num_made() == UINT16_MAX) {
      throw InvalidState("workspace_of: 65535 AllToAlls have used this workspace; make a new one");
    }
    setup.workspace_of = owner->exchange_;
    setup.member = owner->session_->num_made();
  }
  check_allocator(config, allocator);
  if (owner != nullptr && config.device == DeviceType::kGpu) {
    throw Unsupported("workspace_of: expected none on device 'cuda', got one");
  }
  const comm::Group& group = communicator.impl()->group();
  api::ResolvedConfig resolved =
      api::resolve(owner == nullptr ? config : config_beside(config, *owner->exchange_), num_ranks,
                   group.shares_memory() ? "" : group.why_no_memory());
  if (owner != nullptr) check_beside(resolved.config, *owner->exchange_);
  const base::Deadline limit(config.timeout);
  setup.map = plan::build_expert_map(config.placement, config.num_experts, num_ranks);
  const std::string encoded = api::flatten(api::encode(resolved.config));
  setup.config_digest = digest_of(encoded);
  const std::string workspace = owner == nullptr ? "its own"
                                                 : str("AllToAll ", owner->exchange_->identity(),
                                                       ", as member ", setup.member);

  // Rank 0's birth names this creation on every rank.
  const std::int64_t birth = base::now_ns();
  Communicator::Bytes bytes(sizeof birth);
  std::memcpy(bytes.data(), &birth, sizeof birth);
  const Communicator::Bytes text = to_bytes(encoded + api::flatten({{"workspace", workspace}}));
  bytes.insert(bytes.end(), text.begin(), text.end());
  std::vector<std::string> by_rank;
  for (const Communicator::Bytes& other :
       communicator.all_gather_bytes(bytes, std::chrono::nanoseconds(limit.remaining_ns()))) {
    if (by_rank.empty()) std::memcpy(&setup.identity, other.data(), sizeof setup.identity);
    by_rank.push_back(to_text(other, sizeof birth));
  }
  api::compare_encoded(by_rank, setup.what);

  setup.config = std::move(resolved.config);
  setup.communicator = communicator.impl();
  setup.handle = &communicator;
  std::optional<Allocator> own_allocator;
  setup.collectives = communicator.impl()->device_collectives();
  check_collectives(setup);
  if (setup.config.device == DeviceType::kGpu && allocator == nullptr &&
      plan::store_kind(setup.config.strategy) == plan::StoreKind::kWindow) {
    GpuMemoryConfig gpu;
    gpu.device = setup.config.device_index;
    allocator =
        &own_allocator.emplace(communicator, gpu, std::chrono::nanoseconds(limit.remaining_ns()));
    setup.owns_allocator = true;
  }
  setup.allocator = allocator;
  setup.backend = &cpu::make_backend;
  setup.device_backend = &gpu::make_backend;
  setup.deadline = limit;
  choice_ = std::move(resolved.choice);
  if (owner != nullptr && config.strategy == Strategy::kAuto) {
    choice_ = str(name_of(setup.config.strategy), ": that of the workspace it shares");
  }
  exchange_ = exchange::make_exchange(std::move(setup), limit);
  exchange_->end_setup();
  metainfo_ = exchange_->workspace().metainfo();
  session_ = owner != nullptr
                 ? owner->session_
                 : std::make_shared<api::Session>(this->config().test_knobs.first_epoch,
                                                  this->config().max_in_flight);
  // Unique in this process: no two live objects share an address, no two births an instant.
  id_ = base::mix_digest(static_cast<std::uint64_t>(base::now_ns()),
                         reinterpret_cast<std::uintptr_t>(this));
  session_->add(exchange_);
}

AllToAll::Impl::~Impl() {
  if (is_closed() || exchange_->is_forked_child()) return;
  // A round that can never end here must not keep others waiting. First, while the last of them
  // cannot yet give the memory back.
  const Slot* slot = open_slot();
  if (slot != nullptr && session_->members().size() > 1) {
    const std::string reason =
        str(what(), " was destroyed while round ", slot->round, " was ", name_of(slot->state));
    session_->fail(std::make_exception_ptr(PeerAborted(reason, exchange_->rank(), reason)));
    exchange_->abort(reason);
  }
  if (session_->remove(exchange_)) {
    exchange_->leave();
    return;
  }
  end_open_rounds();  // what was received goes now
  exchange_->detach();
}

void AllToAll::Impl::end_open_rounds() noexcept {
  for (Slot& slot : exchange_->slots()) {
    if (slot.is_open()) slot.state = SlotState::kFree;
  }
}

void AllToAll::Impl::require_usable() const {
  if (exchange_->is_forked_child()) {
    throw InvalidState(str(what(), ": not usable in a forked child; create it after the fork"));
  }
  if (is_closed()) throw InvalidState(str(what(), ": is closed"));
}

void AllToAll::Impl::require_not_failed() const {
  require_usable();
  exchange_->require_memory();
  exchange_->communicator()->group().check_thread(what().c_str());
  if (!session_->has_failed()) {
    run([this] { exchange_->throw_if_kernels_failed(); });
    return;
  }
  try {
    std::rethrow_exception(session_->failure());
  } catch (const PeerLost&) {
    throw;  // the group is broken: no reset can help
  } catch (const std::exception& error) {
    throw InvalidState(
        str(what(), ": has failed (", error.what(), "); call reset() on every rank"));
  }
}

void AllToAll::Impl::require_two_phase(const char* call) const {
  if (exchange_->capabilities().two_phase) return;
  throw Unsupported(str(what(), ": strategy ", name_of(config().strategy),
                        " has no two phases; got ", call, ", use dispatch and combine"));
}

void AllToAll::Impl::require_no_open_round(const char* call) const {
  const api::Session::OpenRound open = session_->open_round();
  if (open.slot == nullptr) return;
  throw InvalidState(str(open.member->what(), ": ", call, " while round ", open.slot->round, " is ",
                         exchange::name_of(open.slot->state), "; end it first"));
}

Slot& AllToAll::Impl::slot_of(const Round& round, const char* call) const {
  if (round.owner != id_) {
    throw InvalidState(str(what(), ": ", call, " got a handle of another AllToAll (round ",
                           round.number, " there)"));
  }
  std::vector<Slot>& slots = exchange_->slots();
  Slot& slot = slots[static_cast<std::size_t>(round.number) % slots.size()];
  if (slot.round != round.number || slot.generation != round.generation) {
    const std::string now = slot.round < 0 ? "no round is open there since reset()"
                                           : str("its slot now holds round ", slot.round,
                                                 " (generation ", slot.generation, ")");
    throw InvalidState(str(call, ": ", round.describe(what()), " has ended; ", now));
  }
  return slot;
}

Slot& AllToAll::Impl::slot_of(const Round& round, SlotState expected, const char* call) const {
  Slot& slot = slot_of(round, call);
  if (slot.state != expected) {
    throw InvalidState(str(call, ": ", round.describe(what()), " must be ",
                           exchange::name_of(expected), ", is ", exchange::name_of(slot.state)));
  }
  return slot;
}

const Slot* AllToAll::Impl::open_slot() const noexcept {
  const std::vector<Slot>& slots = exchange_->slots();
  const auto open =
      std::find_if(slots.begin(), slots.end(), [](const Slot& slot) { return slot.is_open(); });
  return open == slots.end() ? nullptr : &*open;
}

Round AllToAll::Impl::dispatch_send(const exchange::DispatchCall& call) {
  Slot& slot = session_->next_slot(exchange_);
  run([&] { session_->settle_next_slot(call.deadline); });
  session_->prepare(*exchange_, [&] { exchange_->prepare_dispatch(slot, call); });
  slot.num_tokens_per_rank = call.inputs->num_tokens_per_rank;
  slot.round = session_->next_round();
  slot.epoch = session_->next_epoch();
  slot.generation = exchange_->generation();
  session_->use_next_slot(exchange_);
  run([&] { exchange_->dispatch_send(slot, call); });
  session_->count_round();
  num_dropped_ += slot.routing ? 0 : slot.own_plan.num_dropped;
  slot.state = SlotState::kSent;
  Round round;
  round.owner = id_;
  round.number = slot.round;
  round.generation = slot.generation;
  return round;
}

Received AllToAll::Impl::dispatch_recv(const Round& round, base::Deadline limit) {
  Slot& slot = slot_of(round, SlotState::kSent, "dispatch_recv");
  run([&] {
    exchange_->dispatch_recv(slot, limit);
    if (!exchange_->is_on_gpu()) exchange_->check_token_counts(slot);
  });
  slot.state = SlotState::kReceived;
  return Received(std::make_shared<Received::State>(session_, exchange_, slot.index, round));
}

void AllToAll::Impl::combine_send(Slot& slot, const exchange::CombineCall& call) {
  const TensorView& y = call.inputs->y;
  slot.keeps_open = !call.inputs->release;
  slot.hidden = y.shape[static_cast<std::size_t>(y.ndim - 1)];
  run([&] { exchange_->combine_send(slot, call); });
  slot.state = SlotState::kCombineSent;
}

void AllToAll::Impl::combine_recv(Slot& slot, const exchange::CombineCall& call) {
  run([&] { exchange_->combine_recv(slot, call); });
  ++slot.num_combines;
  slot.state = slot.keeps_open ? SlotState::kReceived : SlotState::kFree;
}

void AllToAll::Impl::set_active(const std::vector<bool>& active) {
  if (!exchange_->capabilities().rank_mask) {
    throw Unsupported(
        str(what(), ": strategy ", name_of(config().strategy), " cannot leave ranks out"));
  }
  if (active.size() != static_cast<std::size_t>(exchange_->num_ranks())) {
    throw InvalidArgument(
        str("mask: expected ", exchange_->num_ranks(), " entries, got ", active.size()));
  }
  if (!active[static_cast<std::size_t>(exchange_->rank())]) {
    throw InvalidArgument(
        str("mask: expected this rank (", exchange_->rank(), ") to be active, got it masked out"));
  }
  require_no_open_round("set_active_mask");
  exchange_->check_no_capture("set_active_mask");
  run([&] { exchange_->finish_work(&active); });
  require_not_failed();
  for (const api::Session::Member& member : session_->members()) member->set_active(active);
  // Members that are closed may have a released round to settle.
  for (const api::Session::Member& user : session_->slot_users()) {
    if (user != nullptr) user->set_active(active);
  }
}

void AllToAll::Impl::set_placement(const Placement& placement, base::Deadline limit) {
  if (const Slot* slot = open_slot()) {
    throw InvalidState(str(what(), ": set_placement while round ", slot->round, " is ",
                           exchange::name_of(slot->state), "; end it first"));
  }
  plan::ExpertMap map =
      plan::build_expert_map(placement, config().num_experts, exchange_->num_ranks());
  const int room = exchange_->workspace().max_local_experts;
  for (std::size_t rank = 0; rank < map.experts_of.size(); ++rank) {
    const std::size_t wanted = map.experts_of[rank].size();
    if (wanted <= static_cast<std::size_t>(room)) continue;
    throw InvalidArgument(str("placement: expected at most ", room, " experts on a rank (",
                              "what the first placement needed, or max_local_experts), got ",
                              wanted, " on rank ", rank));
  }
  // Before the ranks meet: a peer's next round may wait for this rank on the device that both use.
  exchange_->check_no_capture("set_placement");
  run([this] { exchange_->finish_work(nullptr); });
  require_not_failed();
  api::Fields fields = api::encode(placement);
  fields.insert(fields.begin(), {"AllToAll whose placement is set", str(exchange_->identity())});
  // A rank that did not hear of the last one, because it timed out, is behind by one.
  std::uint32_t version = exchange_->placement_version();
  Communicator::Bytes bytes = to_bytes(api::flatten(fields));
  bytes.insert(bytes.begin(), sizeof version, std::byte{});
  std::memcpy(bytes.data(), &version, sizeof version);
  std::vector<std::string> by_rank;
  {
    Communicator::Impl& communicator = *exchange_->communicator();
    const Communicator::Impl::Call call(communicator, "set_placement");
    for (const Communicator::Bytes& other : communicator.channel().all_gather_bytes(
             bytes.data(), static_cast<std::int64_t>(bytes.size()), limit, "set_placement")) {
      std::uint32_t theirs = 0;
      std::memcpy(&theirs, other.data(), sizeof theirs);
      version = std::max(version, theirs);
      by_rank.push_back(to_text(other, sizeof theirs));
    }
  }
  api::compare_encoded(by_rank, what());
  AllToAllConfig changed = config();
  changed.placement = placement;
  exchange_->set_placement(placement, std::move(map), digest_of(api::flatten(api::encode(changed))),
                           version + 1);
}

void AllToAll::Impl::abort(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  require_usable();
  exchange_->abort(reason);
}

void AllToAll::Impl::reset(base::Deadline limit) {
  exchange_->require_memory();
  exchange_->communicator()->group().check_thread("reset");
  exchange_->check_no_capture("reset");
  // First: when this rank's wait fails, peers that came through may already send.
  session_->end_rounds();
  run([&] { session_->restart(exchange_->reset(session_->next_epoch() - 1, limit)); });
  session_->heal();
}

void AllToAll::Impl::mark_closed() noexcept {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  closed_.store(true, std::memory_order_release);
}

void AllToAll::Impl::close(base::Deadline limit) {
  exchange_->communicator()->group().check_thread("close");
  const bool has_failed = session_->has_failed();
  const Slot* slot = open_slot();
  if (slot != nullptr && !has_failed && session_->members().size() > 1) {
    throw InvalidState(str(what(), ": close while round ", slot->round, " is ",
                           exchange::name_of(slot->state),
                           "; end it first, since others go on using the workspace"));
  }
  exchange_->check_no_capture("close");
  mark_closed();
  if (session_->remove(exchange_)) {
    exchange_->give_up_open_rounds();
    session_->end_rounds();
    exchange_->close(limit);
    return;
  }
  // Of a failed session: the others' reset forgets them, too. Released ones may have to settle yet.
  end_open_rounds();
  exchange_->detach();
}

}  // namespace fanfold
