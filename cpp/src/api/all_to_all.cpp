// SPDX-License-Identifier: Apache-2.0
#include "fanfold/all_to_all.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>

#include "api/check.h"
#include "api/config.h"
#include "api/received_state.h"
#include "base/byte_math.h"
#include "base/format.h"
#include "comm/communicator_impl.h"
#include "comm/control.h"
#include "cpu/backend.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"

namespace fanfold {
namespace {

using base::str;
using exchange::Slot;
using exchange::SlotState;

std::uint64_t digest_of(const std::string& text) noexcept {
  std::uint64_t digest = base::kDigestSeed;
  for (const char c : text) digest = base::mix_digest(digest, static_cast<unsigned char>(c));
  return digest;
}

}  // namespace

class AllToAll::Impl {
 public:
  Impl(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator);
  ~Impl() {
    if (!closed_ && !exchange_->is_forked_child()) exchange_->leave();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // What a call may do. Each public call holds one `Call` while it runs.
  class Call {
   public:
    explicit Call(Impl& impl) : impl_(impl) {
      if (impl_.busy_.exchange(true, std::memory_order_acquire)) {
        throw InvalidState(str(impl_.what(),
                               ": another thread is inside a call on this object; "
                               "one call at a time"));
      }
    }
    ~Call() { impl_.busy_.store(false, std::memory_order_release); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Impl& impl_;
  };

  const std::string& what() const noexcept { return exchange_->what(); }
  void require_usable() const;
  void require_not_failed() const;
  /// Runs data movement; any error leaves the AllToAll failed.
  template <class Body>
  void run(Body&& body) {
    try {
      body();
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }

  /// The slot of a round that has not ended. @throws InvalidState
  Slot& slot_of(const Round& round, const char* call);
  /// … and is in the state that `call` needs.
  Slot& slot_of(const Round& round, SlotState expected, const char* call);
  Round dispatch_send(const exchange::DispatchCall& call);
  Received dispatch_recv(const Round& round, base::Deadline deadline);
  void combine_send(Slot& slot, const exchange::CombineCall& call);
  void combine_recv(Slot& slot, const exchange::CombineCall& call);
  void check_token_counts(const Slot& slot, const DispatchInputs& inputs);
  void end_rounds();
  base::Deadline deadline(const std::optional<std::chrono::nanoseconds>& timeout) const {
    return base::Deadline(timeout.value_or(config().timeout));
  }
  void require_two_phase(const char* call) const;
  const AllToAllConfig& config() const noexcept { return exchange_->config(); }

  std::shared_ptr<exchange::Exchange> exchange_;
  std::string choice_;
  Metainfo metainfo_{{}};
  std::uint64_t id_ = 0;
  std::uint64_t next_epoch_ = 1;
  std::atomic<bool> busy_{false};
  std::atomic<bool> closed_{false};
  std::exception_ptr failure_;
  std::int64_t num_dropped_ = 0;
};

AllToAll::Impl::Impl(Communicator& communicator, const AllToAllConfig& config,
                     Allocator* allocator) {
  const int num_ranks = communicator.num_ranks();
  api::ResolvedConfig resolved = api::resolve(config, num_ranks);
  const base::Deadline limit(config.timeout);
  exchange::Setup setup;
  setup.what = config.name.empty() ? "AllToAll" : str("AllToAll '", config.name, "'");
  setup.map = plan::build_expert_map(config.placement, config.num_experts, num_ranks);
  const std::string encoded = api::flatten(api::encode(resolved.config));
  setup.config_digest = digest_of(encoded);

  // Rank 0's birth names this creation on every rank.
  const std::int64_t birth = base::now_ns();
  Communicator::Bytes bytes(sizeof birth + encoded.size());
  std::memcpy(bytes.data(), &birth, sizeof birth);
  std::memcpy(bytes.data() + sizeof birth, encoded.data(), encoded.size());
  std::vector<std::string> by_rank;
  for (const Communicator::Bytes& other :
       communicator.all_gather_bytes(bytes, std::chrono::nanoseconds(limit.remaining_ns()))) {
    if (by_rank.empty()) std::memcpy(&setup.identity, other.data(), sizeof setup.identity);
    by_rank.emplace_back(reinterpret_cast<const char*>(other.data()) + sizeof birth,
                         other.size() - sizeof birth);
  }
  api::compare_encoded(by_rank, setup.what);

  setup.config = std::move(resolved.config);
  setup.communicator = communicator.impl();
  setup.handle = &communicator;
  setup.allocator = allocator;
  setup.backend = &cpu::make_backend;
  choice_ = std::move(resolved.choice);
  exchange_ = setup.config.strategy == Strategy::kBroadcast
                  ? exchange::make_broadcast(std::move(setup), limit)
                  : exchange::make_one_sided(std::move(setup), limit);
  metainfo_ = exchange_->workspace().metainfo();
  next_epoch_ = this->config().test_knobs.first_epoch;
  // Unique in this process: no two live objects share an address, no two births an instant.
  id_ = base::mix_digest(static_cast<std::uint64_t>(base::now_ns()),
                         reinterpret_cast<std::uintptr_t>(this));
}

void AllToAll::Impl::require_usable() const {
  if (exchange_->is_forked_child()) {
    throw InvalidState(str(what(), ": not usable in a forked child; create it after the fork"));
  }
  if (closed_.load(std::memory_order_acquire)) {
    throw InvalidState(str(what(), ": is closed"));
  }
}

void AllToAll::Impl::require_not_failed() const {
  require_usable();
  if (!failure_) return;
  try {
    std::rethrow_exception(failure_);
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

Slot& AllToAll::Impl::slot_of(const Round& round, const char* call) {
  if (round.owner != id_) {
    throw InvalidState(str(what(), ": ", call, " got a handle of another AllToAll (round ",
                           round.number, " there)"));
  }
  auto& slots = exchange_->slots();
  Slot& slot = slots[static_cast<std::size_t>(round.number) % slots.size()];
  if (slot.round != round.number || slot.generation != round.generation) {
    const std::string now = slot.round < 0 ? "no round is open there since reset()"
                                           : str("its slot now holds round ", slot.round,
                                                 " (generation ", slot.generation, ")");
    throw InvalidState(str(call, ": ", round.describe(what()), " has ended; ", now));
  }
  return slot;
}

Slot& AllToAll::Impl::slot_of(const Round& round, SlotState expected, const char* call) {
  Slot& slot = slot_of(round, call);
  if (slot.state != expected) {
    throw InvalidState(str(call, ": ", round.describe(what()), " must be ",
                           exchange::name_of(expected), ", is ", exchange::name_of(slot.state)));
  }
  return slot;
}

Round AllToAll::Impl::dispatch_send(const exchange::DispatchCall& call) {
  const auto number = static_cast<std::int64_t>(next_epoch_ - config().test_knobs.first_epoch);
  auto& slots = exchange_->slots();
  Slot& slot = slots[static_cast<std::size_t>(number) % slots.size()];
  if (slot.is_open()) {
    throw InvalidState(str(what(), ": dispatch of round ", number, " needs the slot of round ",
                           slot.round, ", which is ", exchange::name_of(slot.state),
                           "; combine or release it first (max_in_flight is ", slots.size(), ")"));
  }
  if (slot.state == SlotState::kReleased) {
    run([&] { exchange_->settle(slot, call.deadline); });
    slot.state = SlotState::kFree;
  }
  exchange_->prepare_dispatch(slot, call);
  num_dropped_ += slot.routing ? 0 : slot.own_plan.num_dropped;
  slot.round = number;
  slot.epoch = next_epoch_;
  slot.generation = exchange_->generation();
  run([&] { exchange_->dispatch_send(slot, call); });
  ++next_epoch_;
  slot.state = SlotState::kSent;
  Round round;
  round.owner = id_;
  round.number = number;
  round.generation = slot.generation;
  return round;
}

Received AllToAll::Impl::dispatch_recv(const Round& round, base::Deadline limit) {
  Slot& slot = slot_of(round, SlotState::kSent, "dispatch_recv");
  run([&] { exchange_->dispatch_recv(slot, limit); });
  slot.state = SlotState::kReceived;
  return Received(std::make_shared<Received::State>(exchange_, slot.index, round));
}

void AllToAll::Impl::check_token_counts(const Slot& slot, const DispatchInputs& inputs) {
  if (!inputs.num_tokens_per_rank) return;
  const auto& known = *inputs.num_tokens_per_rank;
  for (std::size_t rank = 0; rank < known.size(); ++rank) {
    if (!exchange_->active()[rank] || known[rank] == slot.token_counts[rank]) continue;
    throw InvalidArgument(str("num_tokens_per_rank: expected ", slot.token_counts[rank],
                              " tokens of rank ", rank, " in round ", slot.round, ", got ",
                              known[rank], "; call reset() on every rank"));
  }
}

void AllToAll::Impl::end_rounds() {
  for (Slot& slot : exchange_->slots()) {
    slot.state = SlotState::kFree;
    slot.round = -1;
    slot.routing.reset();
  }
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

AllToAll::AllToAll(Communicator& communicator, const AllToAllConfig& config, Allocator* allocator)
    : impl_(std::make_unique<Impl>(communicator, config, allocator)) {}

AllToAll::~AllToAll() = default;

AllToAll::AllToAll(AllToAll&&) noexcept = default;
AllToAll& AllToAll::operator=(AllToAll&&) noexcept = default;

AllToAll::Impl& AllToAll::impl() const {
  if (!impl_) throw InvalidState("AllToAll: was moved from");
  return *impl_;
}

std::int64_t AllToAll::required_bytes(int num_ranks, const AllToAllConfig& config) {
  const api::ResolvedConfig resolved = api::resolve(config, num_ranks);
  const plan::ExpertMap map =
      plan::build_expert_map(config.placement, config.num_experts, num_ranks);
  return exchange::workspace_of(resolved.config, num_ranks, map.max_local_experts).total_bytes();
}

const AllToAllConfig& AllToAll::config() const { return impl().config(); }
int AllToAll::rank() const { return impl().exchange_->rank(); }
int AllToAll::num_ranks() const { return impl().exchange_->num_ranks(); }
int AllToAll::num_local_experts() const { return impl().exchange_->num_local_experts(); }

const std::vector<std::int32_t>& AllToAll::local_experts() const {
  return impl().exchange_->map().experts_of[static_cast<std::size_t>(rank())];
}

Received AllToAll::dispatch(const DispatchInputs& inputs) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  const exchange::DispatchCall call = api::check_dispatch(*impl().exchange_, inputs);
  const Round round = impl().dispatch_send(call);
  Received received = impl().dispatch_recv(round, call.deadline);
  impl().run([&] { impl().check_token_counts(received.state()->slot_state(), inputs); });
  return received;
}

Round AllToAll::dispatch_send(const DispatchInputs& inputs) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("dispatch_send");
  const exchange::DispatchCall call = api::check_dispatch(*impl().exchange_, inputs);
  return impl().dispatch_send(call);
}

Received AllToAll::dispatch_recv(const Round& round,
                                 std::optional<std::chrono::nanoseconds> timeout) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("dispatch_recv");
  return impl().dispatch_recv(round, impl().deadline(timeout));
}

TensorView AllToAll::combine_buffer(const Round& round, std::optional<std::int64_t> hidden,
                                    std::optional<DType> dtype) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  const Slot& slot = impl().slot_of(round, SlotState::kReceived, "combine_buffer");
  const AllToAllConfig& config = impl().config();
  const DType travels = config.combine_dtype.value_or(config.dtype);
  const DType type = dtype.value_or(travels);
  const std::int64_t width = hidden.value_or(config.hidden);
  api::check_combine_row(*impl().exchange_, width, type);
  if (config.layout == Layout::kRankMajor && type != travels) {
    throw InvalidArgument(str("dtype of the combine buffer: expected ", name_of(travels),
                              " (combine_dtype; layout rank_major sends it as it is), got ",
                              name_of(type)));
  }
  return impl().exchange_->combine_view(slot, width, type);
}

std::pair<std::int64_t, std::int64_t> AllToAll::out_shape(const Round& round) const {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  const Slot& slot = impl().slot_of(round, "out_shape");
  const bool sent = slot.state == SlotState::kCombineSent;
  return {slot.plan().num_tokens, sent ? slot.hidden : impl().config().hidden};
}

void AllToAll::combine(const CombineInputs& inputs, const Round& round) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  Slot& slot = impl().slot_of(round, SlotState::kReceived, "combine");
  api::check_results(*impl().exchange_, slot, inputs);
  api::check_combine_out(*impl().exchange_, slot, inputs,
                         inputs.y.shape[static_cast<std::size_t>(inputs.y.ndim - 1)]);
  const exchange::CombineCall call{&inputs, impl().deadline(inputs.timeout)};
  impl().combine_send(slot, call);
  impl().combine_recv(slot, call);
}

void AllToAll::combine_send(const CombineInputs& inputs, const Round& round) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("combine_send");
  Slot& slot = impl().slot_of(round, SlotState::kReceived, "combine_send");
  api::check_results(*impl().exchange_, slot, inputs);
  impl().combine_send(slot, {&inputs, impl().deadline(inputs.timeout)});
}

void AllToAll::combine_recv(const CombineInputs& inputs, const Round& round) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  impl().require_two_phase("combine_recv");
  Slot& slot = impl().slot_of(round, SlotState::kCombineSent, "combine_recv");
  api::check_combine_out(*impl().exchange_, slot, inputs, slot.hidden);
  CombineInputs resolved = inputs;
  resolved.release = !slot.keeps_open;  // as combine_send said
  impl().combine_recv(slot, {&resolved, impl().deadline(inputs.timeout)});
}

void AllToAll::release(const Round& round) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  Slot& slot = impl().slot_of(round, SlotState::kReceived, "release");
  impl().run([&] { impl().exchange_->release(slot); });
  slot.state = SlotState::kReleased;
}

void AllToAll::sanitize(const TensorView& ids, const TensorView& counts,
                        std::int64_t invalid_expert_id, SanitizePolicy policy,
                        const TensorView& out) const {
  impl().require_usable();
  api::check_sanitize(ids, counts, invalid_expert_id, out);
  exchange::Exchange& exchange = *impl().exchange_;
  exchange.freeze_indices(out.data);
  exchange.backend().sanitize({ids, static_cast<const std::int32_t*>(counts.data), out,
                               invalid_expert_id, policy, &exchange.map(), exchange.rank()});
}

void AllToAll::set_active_mask(const std::vector<bool>& active) {
  const Impl::Call guard(impl());
  impl().require_not_failed();
  exchange::Exchange& exchange = *impl().exchange_;
  if (!exchange.capabilities().rank_mask) {
    throw Unsupported(str(impl().what(), ": strategy ", name_of(impl().config().strategy),
                          " cannot leave ranks out"));
  }
  if (active.size() != static_cast<std::size_t>(exchange.num_ranks())) {
    throw InvalidArgument(
        str("mask: expected ", exchange.num_ranks(), " entries, got ", active.size()));
  }
  if (!active[static_cast<std::size_t>(exchange.rank())]) {
    throw InvalidArgument(
        str("mask: expected this rank (", exchange.rank(), ") to be active, got it masked out"));
  }
  for (Slot& slot : exchange.slots()) {
    if (slot.is_open()) {
      throw InvalidState(str(impl().what(), ": set_active_mask while round ", slot.round, " is ",
                             exchange::name_of(slot.state), "; end it first"));
    }
  }
  exchange.set_active(active);
}

std::vector<bool> AllToAll::active_mask() const { return impl().exchange_->active(); }

void AllToAll::abort(const std::string& reason) {
  impl().require_usable();
  impl().exchange_->abort(reason);
}

void AllToAll::reset(std::optional<std::chrono::nanoseconds> timeout) {
  const Impl::Call guard(impl());
  impl().require_usable();
  // First: when this rank's wait fails, peers that came through may already send.
  impl().end_rounds();
  impl().run([&] {
    impl().next_epoch_ = impl().exchange_->reset(impl().next_epoch_ - 1, impl().deadline(timeout));
  });
  impl().failure_ = nullptr;
}

void AllToAll::close(std::optional<std::chrono::nanoseconds> timeout) {
  if (impl().closed_.load(std::memory_order_acquire)) return;
  const Impl::Call guard(impl());
  impl().require_usable();
  impl().closed_.store(true, std::memory_order_release);
  impl().end_rounds();
  impl().exchange_->close(impl().deadline(timeout));
}

bool AllToAll::is_closed() const noexcept {
  return impl_ == nullptr || impl_->closed_.load(std::memory_order_acquire);
}
bool AllToAll::is_failed() const noexcept { return impl_ != nullptr && impl_->failure_ != nullptr; }

void AllToAll::check() const {
  const Impl::Call guard(impl());
  impl().require_usable();
  if (impl().failure_) std::rethrow_exception(impl().failure_);
  impl().exchange_->check();
}

std::int64_t AllToAll::num_dropped_ids() const noexcept {
  return impl_ == nullptr ? 0 : impl_->num_dropped_;
}
const Metainfo& AllToAll::metainfo() const { return impl().metainfo_; }

std::int64_t AllToAll::workspace_bytes() const {
  return impl().exchange_->workspace().total_bytes();
}

Capabilities AllToAll::capabilities() const { return impl().exchange_->capabilities(); }
std::string AllToAll::choice() const { return impl().choice_; }

Feasibility AllToAll::feasible(std::int64_t round_max_tokens, std::int64_t row_bytes,
                               Layout layout) const {
  const AllToAllConfig& config = impl().config();
  if (layout != config.layout) {
    return {false,
            str("layout: this AllToAll gives ", name_of(config.layout), ", got ", name_of(layout))};
  }
  if (round_max_tokens < 0 || round_max_tokens > config.max_tokens_per_rank) {
    return {false, str("round_max_tokens: expected at most ", config.max_tokens_per_rank,
                       " (max_tokens_per_rank), got ", round_max_tokens)};
  }
  const std::int64_t room = impl().exchange_->workspace().dispatch_row_bytes;
  if (row_bytes < 1 || row_bytes > room) {
    return {false,
            str("row_bytes: expected 1 to ", room, " (dispatch_row_bytes), got ", row_bytes)};
  }
  return {true, "fits"};
}

std::shared_ptr<const void> AllToAll::memory() const { return impl().exchange_->memory(); }

}  // namespace fanfold
