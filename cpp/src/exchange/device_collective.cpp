// SPDX-License-Identifier: Apache-2.0
#include "exchange/device_collective.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "base/format.h"
#include "comm/communicator_impl.h"
#include "exchange/access_unit.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

using base::str;
using comm::DeviceCollectives;

/// After all ranks have begun to reset, what has not ended by then never does.
constexpr std::chrono::seconds kDrainTime(2);

/// What `enqueue` enqueues becomes one launch.
template <class Enqueue>
void as_group(DeviceCollectives& collectives, Enqueue&& enqueue) {
  collectives.begin_group();
  try {
    enqueue();
  } catch (...) {
    collectives.cancel_group();
    throw;
  }
  collectives.end_group();
}

}  // namespace

DeviceCollective::DeviceCollective(Setup setup, base::Deadline deadline)
    : DeviceExchange(std::move(setup), deadline), collectives_(setup_.collectives) {
  pending_.resize(slots_.size() * kNumPending);
  on_all_ranks([this] {
    for (Pending& each : pending_) each.event = device().make_event();
  });
}

DeviceCollective::~DeviceCollective() {
  if (local_ == nullptr || is_forked_child()) return;
  try {
    drain(base::Deadline(config().timeout));
  } catch (const std::exception&) {
    keep_memory();
  }
}

// --- What collectives carry ---------------------------------------------------------------------

std::vector<DeviceCollective::Region> DeviceCollective::dispatch_regions(const Slot& slot) const {
  const std::int64_t m = slot.round_max_tokens;
  const std::int64_t index_bytes = m * workspace_.top_k * 4;
  std::vector<Region> regions;
  if (routing_of(slot) == nullptr) {
    if (!gathers()) regions.push_back({slot.store.source_token_offset, m * 4});
    regions.push_back({slot.store.topk_ids_offset, index_bytes});
    if (slot.has_weights) regions.push_back({slot.store.topk_weights_offset, index_bytes});
  }
  for (const PayloadSpec& spec : slot.payloads) {
    regions.push_back({spec.region_offset, m * spec.stride_bytes});
  }
  return regions;
}

void DeviceCollective::swap_blocks(const std::byte* from, std::byte* to, std::int64_t block_bytes,
                                   void* stream) {
  std::vector<DeviceCollectives::Span> blocks(static_cast<std::size_t>(num_ranks()));
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const bool is_own = rank == static_cast<std::size_t>(rank_);
    blocks[rank] = {static_cast<std::int64_t>(rank) * block_bytes, is_own ? 0 : block_bytes};
  }
  collectives_->all_to_all_v(from, blocks, to, blocks, stream);
}

void DeviceCollective::gather_blocks(std::byte* blocks, std::int64_t block_bytes, void* stream) {
  if (!is_broadcast()) {
    collectives_->all_gather(blocks + rank_ * block_bytes, blocks, block_bytes, stream);
    return;
  }
  for (int root = 0; root < num_ranks(); ++root) {
    collectives_->broadcast(blocks + root * block_bytes, block_bytes, root, stream);
  }
}

void DeviceCollective::carry_flags(const Slot& slot, const exec::DeviceFlags& flags) {
  constexpr std::int64_t kLineBytes = std::int64_t{exec::kFlagWords} * 8;
  std::byte* const lines = local_.get() + flags.offset;
  as_group(*collectives_, [&] {
    if (gathers()) return gather_blocks(lines, kLineBytes, slot.call_stream);
    swap_blocks(staged(lines), lines, kLineBytes, slot.call_stream);
  });
}

void DeviceCollective::carry_rows(const Slot& slot) {
  const std::vector<Region> regions = dispatch_regions(slot);
  as_group(*collectives_, [&] {
    for (const Region& region : regions) {
      std::byte* const home = slot_base(slot) + region.offset;
      if (gathers()) {
        gather_blocks(staged(home), region.block_bytes, slot.call_stream);
      } else {
        swap_blocks(staged(home), home, region.block_bytes, slot.call_stream);
      }
    }
  });
}

void DeviceCollective::carry_results(const Slot& slot) {
  std::byte* const home = slot_base(slot) + slot.store.combine_offset;
  const std::int64_t block_bytes =
      slot.round_max_tokens * workspace_.rows_per_token * combine_row_bytes(slot.hidden);
  if (!is_broadcast()) {
    swap_blocks(home, staged(home), block_bytes, slot.call_stream);
    return;
  }
  // Room for the results of one rank; of each this rank keeps its own tokens' block.
  std::byte* const scratch = local_at<std::byte>(slot, workspace_.device.scratch_offset);
  for (int root = 0; root < num_ranks(); ++root) {
    std::byte* const shown = root == rank_ ? home : scratch;
    collectives_->broadcast(shown, num_ranks() * block_bytes, root, slot.call_stream);
    if (root == rank_) continue;
    device().copy(staged(home) + root * block_bytes, scratch + rank_ * block_bytes, block_bytes,
                  slot.call_stream);
  }
}

// --- Phases -------------------------------------------------------------------------------------

void DeviceCollective::plan_tokens(Slot& slot, const DispatchCall& call) {
  if (num_ranks() > 1) collectives_->check_stream(call.inputs->stream.value_or(nullptr));
  DeviceExchange::plan_tokens(slot, call);
}

void DeviceCollective::use_stream(Slot& slot, const std::optional<void*>& stream,
                                  const char* call) {
  if (num_ranks() > 1) collectives_->check_stream(stream.value_or(slot.stream));
  DeviceExchange::use_stream(slot, stream, call);
}

void DeviceCollective::dispatch_send(Slot& slot, const DispatchCall& call) {
  send_rows(slot, call, /*waits=*/false);
  const exec::DeviceFlags flags = flags_of(slot, exec::DevicePhase::kDispatch, slot.sent);
  if (num_ranks() > 1) carry_flags(slot, flags);
  signal(slot, flags, /*announces=*/false, /*waits=*/true);
  if (num_ranks() > 1) carry_rows(slot);
  slot.has_waited = true;
  expect_end(slot, /*is_dispatch=*/true, call.deadline);
}

void DeviceCollective::dispatch_recv(Slot& slot, base::Deadline deadline) {
  if (gathers()) compact_rows(slot);
  DeviceExchange::dispatch_recv(slot, deadline);
}

void DeviceCollective::compact_rows(Slot& slot) {
  exec::DeviceCompactParams params{};
  params.round = round_of(slot, exec::DevicePhase::kDispatch);
  params.token_counts = token_counts(slot);
  params.topk_ids = stored_at<std::int32_t>(slot, slot.store.topk_ids_offset);
  params.topk_weights = stored_at<float>(slot, slot.store.topk_weights_offset);
  params.source_tokens = stored_at<std::int32_t>(slot, slot.store.source_token_offset);
  params.staged_ids = reinterpret_cast<const std::int32_t*>(
      staged(reinterpret_cast<const std::byte*>(params.topk_ids)));
  if (slot.has_weights) {
    params.staged_weights = reinterpret_cast<const float*>(
        staged(reinterpret_cast<const std::byte*>(params.topk_weights)));
  }
  if (const DeviceRouting* const routing = routing_of(slot)) {
    params.routed_counts = routing->rank_counts;
    params.routed_tokens = routing->source_tokens;
  }
  params.rank_counts = counts(slot);
  params.num_rows = total_rows(slot);
  params.num_payloads = static_cast<std::int32_t>(slot.payloads.size());
  for (std::size_t i = 0; i < slot.payloads.size(); ++i) {
    const PayloadSpec& spec = slot.payloads[i];
    std::byte* const home = stored_at<std::byte>(slot, spec.region_offset);
    params.payloads[i] = {staged(home), home, spec.row_bytes, spec.stride_bytes,
                          unit_of({address(home), address(staged(home)), word(spec.row_bytes),
                                   word(spec.stride_bytes)})};
  }
  params.tiles = tiles_of(slot);
  device().compact_rows(params, slot.call_stream);
}

void DeviceCollective::combine_send(Slot& slot, const CombineCall& call) {
  send_results(slot, call, /*waits=*/false);
  const exec::DeviceFlags flags = combine_flags(slot, call.inputs->release, slot.hidden);
  if (num_ranks() > 1) carry_flags(slot, flags);
  signal(slot, flags, /*announces=*/false, /*waits=*/true);
  if (num_ranks() > 1) carry_results(slot);
  slot.has_waited = true;
  expect_end(slot, /*is_dispatch=*/false, call.deadline);
}

// --- What the host sees of them -----------------------------------------------------------------

void DeviceCollective::expect_end(const Slot& slot, bool is_dispatch, base::Deadline deadline) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (slot.is_captured()) {
    has_graphs_ = true;
    return;
  }
  Pending& pending =
      pending_[static_cast<std::size_t>(slot.index) * kNumPending + (is_dispatch ? 0 : 1)];
  device().record_event(pending.event.get(), slot.call_stream);
  pending.is_set = true;
  pending.phase = is_dispatch ? "dispatch" : "combine";
  pending.round = slot.round;
  pending.end_ns = deadline.at_ns();
  pending.timeout_ns = deadline.timeout_ns();
}

const DeviceCollective::Pending* DeviceCollective::oldest_pending() const {
  const Pending* oldest = nullptr;
  for (Pending& each : pending_) {
    if (each.is_set && device().has_passed(each.event.get())) each.is_set = false;
    if (each.is_set && (oldest == nullptr || each.end_ns < oldest->end_ns)) oldest = &each;
  }
  return oldest;
}

void DeviceCollective::throw_late(const Pending& pending) const {
  // A collective does not tell whom it waits for.
  const int peer = num_ranks() == 2 ? 1 - rank_ : -1;
  const std::string who = peer < 0 ? "a rank" : str("rank ", peer);
  throw PeerTimeout(str(what(), ": ", pending.phase, " of round ", pending.round, ": ", who,
                        " did not arrive within ", base::format_duration(pending.timeout_ns),
                        "; it is late or frozen; call reset() on every rank"),
                    peer);
}

/// Throws why what is under way will not end.
void DeviceCollective::throw_if_stuck() const {
  // Peers that have left may have done their part.
  constexpr std::int64_t kGraceNs = 400'000'000;
  const Pending* const pending = oldest_pending();
  if (pending == nullptr) {
    lost_since_ = 0;
    return;
  }
  const comm::WaitFor target{rank_, pending->phase, pending->round};
  control().throw_if_aborted(target);
  try {
    control().throw_if_lost(target);
    collectives_->check();
    lost_since_ = 0;
  } catch (const PeerLost&) {
    if (lost_since_ == 0) lost_since_ = base::now_ns();
    if (base::now_ns() - lost_since_ > kGraceNs) throw;
  }
  if (base::now_ns() >= pending->end_ns) throw_late(*pending);
}

void DeviceCollective::give_up(std::exception_ptr failure) const noexcept {
  if (failure_ == nullptr) {
    failure_ = std::move(failure);
    is_told_by_kernels_ = DeviceExchange::kernels_have_failed();
  }
  collectives_->abort();
}

void DeviceCollective::look() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ != nullptr) return;
  try {
    throw_if_stuck();
  } catch (...) {
    give_up(std::current_exception());
  }
}

void DeviceCollective::rethrow_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

bool DeviceCollective::kernels_have_failed() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_ != nullptr || DeviceExchange::kernels_have_failed();
}

void DeviceCollective::throw_if_kernels_failed() {
  look();
  bool are_kernels_first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    are_kernels_first = is_told_by_kernels_;
  }
  if (!are_kernels_first) rethrow_failure();
  DeviceExchange::throw_if_kernels_failed();
}

std::function<void()> DeviceCollective::loss_watch() const {
  return [this, limit = base::Deadline(config().timeout)] {
    look();
    if (!limit.passed()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!has_graphs_ || failure_ != nullptr) return;
    give_up(std::make_exception_ptr(PeerTimeout(
        str(what(), ": a graph: it did not end within ", base::format_duration(limit.timeout_ns()),
            "; a rank is late or frozen; call reset() on every rank"),
        -1)));
  };
}

void DeviceCollective::give_up_at(base::Deadline deadline) const noexcept {
  if (!deadline.passed()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ != nullptr) return;
  try {
    throw InvalidState(str(what(), ": its collectives were aborted, since they did not end within ",
                           base::format_duration(deadline.timeout_ns()),
                           "; call reset() on every rank"));
  } catch (...) {
    give_up(std::current_exception());
  }
}

void DeviceCollective::await_carried_until(base::Deadline deadline) const {
  constexpr std::chrono::microseconds kPause(100);
  std::optional<base::Deadline> end;  // of what was aborted
  for (;;) {
    look();
    give_up_at(deadline);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (oldest_pending() == nullptr) return;
      if (failure_ != nullptr && !end) end.emplace(kDrainTime);
      if (end && end->passed()) std::rethrow_exception(failure_);
    }
    std::this_thread::sleep_for(kPause);
  }
}

void DeviceCollective::await_carried() const {
  await_carried_until(base::Deadline(std::chrono::nanoseconds::max()));
}

void DeviceCollective::drain(base::Deadline deadline) const {
  await_carried_until(deadline);
  device().wait_idle([&] {
    look();
    give_up_at(deadline);
  });
}

void DeviceCollective::check() const {
  DeviceExchange::check();
  look();
  rethrow_failure();
}

void DeviceCollective::abort(const std::string& reason) noexcept {
  DeviceExchange::abort(reason);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ != nullptr) return;
    try {
      // Else nothing waits.
      if (!has_graphs_ && oldest_pending() == nullptr) return;
      control().throw_if_aborted({rank_, "abort", -1});
    } catch (...) {
      give_up(std::current_exception());
    }
  }
}

std::uint64_t DeviceCollective::reset(std::uint64_t max_epoch, base::Deadline deadline) {
  constexpr const char* kCall = "reset of an AllToAll";
  control().begin_reset();  // ends what peers' hosts wait for
  Communicator::Impl& communicator = *setup_.communicator;
  const Communicator::Impl::Call call(communicator, "reset");
  // When all ranks are here, nobody enqueues a part of what is under way any more.
  communicator.channel().all_gather_values({0}, deadline, kCall);
  const std::chrono::nanoseconds left(deadline.remaining_ns());
  drain(base::Deadline(std::min<std::chrono::nanoseconds>(left, kDrainTime)));
  bool is_aborted = false;
  try {
    rethrow_failure();
    collectives_->check();
  } catch (const std::exception&) {
    is_aborted = true;
  }
  const auto aborted =
      communicator.channel().all_gather_values({is_aborted ? 1 : 0}, deadline, kCall);
  if (std::find(aborted.begin(), aborted.end(), 1) != aborted.end()) {
    collectives_->abort();  // on the ranks where they still run
    collectives_->reset(deadline);
  }
  const std::uint64_t epoch = DeviceExchange::reset(max_epoch, deadline);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Pending& each : pending_) each.is_set = false;
  failure_ = nullptr;
  is_told_by_kernels_ = false;
  lost_since_ = 0;
  has_graphs_ = false;
  return epoch;
}

void DeviceCollective::close(base::Deadline deadline) {
  try {
    drain(deadline);
  } catch (const std::exception&) {
    keep_memory();
    leave();
    throw;
  }
  DeviceExchange::close(deadline);
}

std::shared_ptr<Exchange> make_collective_on_device(Setup setup, base::Deadline deadline) {
  return std::make_shared<DeviceCollective>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
