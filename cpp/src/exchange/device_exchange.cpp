// SPDX-License-Identifier: Apache-2.0

// Creation, failure, and all that happens between rounds on a GPU.

#include "exchange/device_exchange.h"

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "base/format.h"
#include "base/keep_forever.h"
#include "comm/communicator_impl.h"
#include "exec/flag_line.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

using base::str;

static_assert(sizeof(exec::DeviceSlot) == plan::kDeviceSlotBytes);
static_assert(sizeof(exec::DeviceControl) <= plan::kDeviceControlBytes);
static_assert(exec::kTileRows == plan::kDeviceTileRows);
static_assert(sizeof(plan::Target) == 8 && sizeof(plan::ExpertRow) == 12);

const char* name_of(exec::DevicePhase phase) noexcept {
  switch (phase) {
    case exec::DevicePhase::kDispatch:
      return "dispatch";
    case exec::DevicePhase::kCombine:
      return "combine";
    case exec::DevicePhase::kRelease:
      return "release";
    case exec::DevicePhase::kAck:
      return "acknowledgement of a combine";
  }
  return "unknown";
}

}  // namespace

DeviceExchange::DeviceExchange(Setup setup, base::Deadline deadline) : Exchange(std::move(setup)) {
  // Flags must start as zeros; rows need not.
  const Strategy strategy = setup_.config.strategy;
  if (plan::store_kind(strategy) == plan::StoreKind::kWindow) {
    route_ = exec::DeviceRoute::kWindows;
    window_ = std::make_shared<SharedWindow>(setup_, workspace_.symmetric_bytes,
                                             workspace_.slot_offset, deadline);
    windows_ = window_->bases();
  } else {
    route_ = plan::gathers(strategy) ? exec::DeviceRoute::kGather : exec::DeviceRoute::kBlocks;
    window_ = std::make_shared<SharedWindow>(setup_, deadline);
    windows_.assign(static_cast<std::size_t>(num_ranks()),
                    local_.get() + workspace_.device.staging_offset);
    windows_[static_cast<std::size_t>(rank_)] = local_.get();
  }
  timeouts_.resize(slots_.size());
  on_all_ranks([this] {
    device_ = setup_.device_backend(setup_.config.device_index);
    const std::int64_t rows = num_ranks() * workspace_.max_tokens_per_rank;
    if (device_->max_tiles(rows) > workspace_.device.num_tiles) {
      throw Unsupported(str("device_index: expected a GPU whose grids have at most ",
                            plan::kMaxDeviceBlocks, " blocks, got one with ",
                            device_->max_tiles(0)));
    }
    report_ = device_->allocate_pinned(sizeof(exec::DeviceReport));
    const base::Mapping& mine = window_->own_control();
    own_control_ = device_->pin(mine.data(), mine.bytes());
    upload_words();
  });
  kept_ = std::make_shared<Kept>(Kept{window_->memory(), local_});
}

struct DeviceExchange::Memory {
  std::shared_ptr<SharedWindow> window;
  std::shared_ptr<const Kept> kept;
  std::shared_ptr<std::byte> local;
  exec::PinnedMemory report;
  exec::PinnedMemory own_control;
  std::vector<std::shared_ptr<const Routing::Data>> retired;
};

DeviceExchange::~DeviceExchange() {
  // The memory must outlive the work that is under way.
  if (device_ == nullptr || local_ == nullptr || is_stuck_ || is_forked_child()) return;
  control().stop_own_waits();
  try {
    device_->wait_idle([] {});
  } catch (...) {
    keep_memory();
  }
}

void DeviceExchange::keep_memory() noexcept {
  is_stuck_ = true;
  base::keep_forever(std::make_shared<Memory>(
      Memory{window_, kept_, local_, report_, own_control_, std::move(retired_)}));
}

std::byte* DeviceExchange::slot_base(const Slot& slot) const noexcept {
  return windows_[static_cast<std::size_t>(rank_)] + workspace_.slot_offset +
         slot.index * workspace_.slot_stride;
}

bool DeviceExchange::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  const std::vector<std::byte*>& windows = window_->bases();
  return Exchange::owns(data) ||
         std::any_of(windows.begin(), windows.end(), [&](const std::byte* window) {
           return at >= window && at < window + workspace_.symmetric_bytes;
         });
}

bool DeviceExchange::is_forked_child() const noexcept {
  return setup_.communicator->group().is_forked_child();
}

std::int64_t DeviceExchange::num_ids_dropped_by_kernels() const noexcept {
  if (report_.host == nullptr) return 0;
  return static_cast<std::int64_t>(__atomic_load_n(&report().num_dropped_ids, __ATOMIC_RELAXED));
}

// --- Words that kernels read --------------------------------------------------------------------

void DeviceExchange::clear_tiles() {
  const plan::DeviceRegions& d = workspace_.device;
  const std::vector<std::uint64_t> tiles(static_cast<std::size_t>(d.tile_columns * d.num_tiles));
  for (const Slot& slot : slots_) {
    device_->upload(local_at<std::byte>(slot, d.tiles_offset), tiles.data(),
                    static_cast<std::int64_t>(tiles.size() * sizeof tiles[0]));
  }
}

void DeviceExchange::upload_words() {
  // Of these regions every word must be known: what was there before could look like a count.
  const plan::DeviceRegions& d = workspace_.device;
  clear_tiles();
  upload(d.windows_offset, windows_);
  if (is_staged()) {
    const std::vector<std::byte> flags(
        static_cast<std::size_t>(workspace_.flags_stride * workspace_.max_in_flight));
    upload(workspace_.flags_offset, flags);
    upload(d.staging_offset + workspace_.flags_offset, flags);
  }
  upload_mask();
  upload_placement();
  start_generation(setup_.config.test_knobs.first_epoch, 0);
}

void DeviceExchange::upload_mask() {
  const std::vector<std::int32_t> is_active(active_.begin(), active_.end());
  upload(workspace_.device.is_active_offset, is_active);
  words_.mask_digest = mask_digest_;
}

void DeviceExchange::upload_placement() {
  const plan::DeviceRegions& d = workspace_.device;
  upload(d.rank_of_offset, setup_.map.rank_of);
  upload(d.local_of_offset, setup_.map.local_of);
  upload(d.copy_begin_offset, setup_.map.copy_begin);
  upload(d.copies_offset, setup_.map.copies);
  words_.placement_version = placement_version_;
}

void DeviceExchange::start_generation(std::uint64_t first_epoch, std::int64_t first_round) {
  first_epoch_ = first_epoch;
  first_round_ = first_round;
  std::vector<exec::DeviceSlot> slots(slots_.size());
  for (exec::DeviceSlot& slot : slots) slot.epoch = first_epoch - 1;
  upload(workspace_.device.slots_offset, slots);
  words_.generation = generation();
  words_.has_failed = 0;
  upload(workspace_.device.control_offset, std::vector{words_});
  report().failure = static_cast<std::uint32_t>(exec::DeviceFailure::kNone);
}

/// Only the words that no kernel writes.
void DeviceExchange::upload_host_words() {
  device_->upload(shared_at<std::byte>(workspace_.device.control_offset), &words_,
                  offsetof(exec::DeviceControl, has_failed));
}

void DeviceExchange::require_memory() const {
  if (window_->is_usable()) return;
  throw InvalidState(str(what(),
                         ": its memory, of kind nccl, has ended with NCCL's communicator (reset, "
                         "abort or close); close it and make it anew"));
}

void DeviceExchange::check_no_capture(const char* call) const {
  try {
    device_->check_no_capture();
  } catch (const InvalidState&) {
    throw InvalidState(str(what(), ": ", call,
                           " waits for the device, which cannot be done in a graph capture; the "
                           "capture is invalid now"));
  }
}

void DeviceExchange::finish_work(const std::vector<bool>* next_active) {
  const auto look_at = [this](const std::vector<bool>& active) {
    const std::lock_guard<std::mutex> lock(loss_mutex_);
    control().set_active(active);
  };
  if (next_active == nullptr) {
    await_carried();
    return device_->wait_idle(loss_watch());
  }
  look_at(*next_active);
  try {
    device_->wait_idle(loss_watch());
  } catch (const std::exception&) {
    look_at(active_);
    throw;
  }
}

void DeviceExchange::set_active(const std::vector<bool>& active) {
  Exchange::set_active(active);
  {
    const std::lock_guard<std::mutex> lock(loss_mutex_);
    control().set_active(active);
  }
  upload_mask();
  upload_host_words();
}

void DeviceExchange::set_placement(const Placement& placement, plan::ExpertMap map,
                                   std::uint64_t config_digest, std::uint32_t version) {
  Exchange::set_placement(placement, std::move(map), config_digest, version);
  upload_placement();
  upload_host_words();
}

// --- Failure ------------------------------------------------------------------------------------

std::int64_t DeviceExchange::round_at(std::uint32_t slot, std::uint64_t epoch) const noexcept {
  // Epochs count the rounds of a slot, whose first in this generation is the first of them that
  // falls into it.
  const auto num_slots = static_cast<std::int64_t>(slots_.size());
  const std::int64_t offset = (slot + num_slots - first_round_ % num_slots) % num_slots;
  return first_round_ + offset + exec::round_of(epoch, first_epoch_) * num_slots;
}

void DeviceExchange::throw_report(exec::DeviceFailure failure) {
  const exec::DeviceReport& told = report();
  const auto phase = static_cast<exec::DevicePhase>(told.phase);
  const comm::WaitFor target{static_cast<int>(told.peer), name_of(phase),
                             round_at(told.slot, told.epoch)};
  const std::chrono::nanoseconds timeout(static_cast<std::int64_t>(told.timeout_ns));
  switch (failure) {
    case exec::DeviceFailure::kDiffers: {
      const exec::FlagFields mine = exec::flag_fields(told.mine);
      const exec::FlagFields got = exec::flag_fields(told.got);
      if (mine.epoch != got.epoch) control().throw_if_aborted(target);  // its kernels did nothing
      const std::string difference =
          mine.epoch == got.epoch || mine.kind != got.kind
              ? exec::difference(mine, rank_, got, target.rank)
              : str("round: rank ", rank_, " has ", target.round, ", rank ", target.rank, " has ",
                    round_at(told.slot, got.epoch));
      throw InvalidArgument(str(what(), ": ", target.phase, " of round ", target.round,
                                " differs between ranks: ", difference,
                                "; call reset() on every rank"));
    }
    case exec::DeviceFailure::kAborted:
      control().throw_if_aborted(target);
      control().throw_if_lost(target);
      // Only this rank's waits were ended.
      throw PeerAborted(str(what(), ": ", target.phase, " of round ", target.round, ": this rank (",
                            rank_, ") gave up waiting for rank ", target.rank),
                        rank_, "gave up waiting");
    case exec::DeviceFailure::kStuck: {
      constexpr int kLaunchTimeout = 702;  // the driver's number for kernels that do not end
      throw CudaFailure(str(what(), ": ", target.phase, " of round ", target.round,
                            ": a block of a kernel waited for another one of the same kernel for ",
                            told.timeout_ns / 1'000'000, " ms in vain; call reset() on every rank"),
                        kLaunchTimeout);
    }
    case exec::DeviceFailure::kTimeout:
    case exec::DeviceFailure::kNone:
      break;
  }
  control().throw_late(target, timeout);
}

exec::DeviceFailure DeviceExchange::failure() const noexcept {
  if (report_.host == nullptr) return exec::DeviceFailure::kNone;
  // Acquire: the rest of the report was stored before.
  return static_cast<exec::DeviceFailure>(__atomic_load_n(&report().failure, __ATOMIC_ACQUIRE));
}

bool DeviceExchange::kernels_have_failed() const noexcept {
  return failure() != exec::DeviceFailure::kNone;
}

void DeviceExchange::throw_if_kernels_failed() {
  const exec::DeviceFailure known = failure();
  if (known != exec::DeviceFailure::kNone) throw_report(known);
}

void DeviceExchange::throw_if_kernels_gave_up() {
  std::uint32_t has_failed = 0;
  device_->download(&has_failed,
                    shared_at<std::byte>(workspace_.device.control_offset) +
                        offsetof(exec::DeviceControl, has_failed),
                    sizeof has_failed);
  if (has_failed == 0) return;
  // The kernel that found it writes the report last, on a stream that may be another.
  constexpr std::int64_t kPatienceNs = 5'000'000'000;
  for (const std::int64_t end = base::now_ns() + kPatienceNs; !kernels_have_failed();) {
    if (base::now_ns() > end) {
      throw InvalidState(str(what(),
                             ": kernels have failed without a report; call reset() on "
                             "every rank"));
    }
    std::this_thread::yield();
  }
  throw_if_kernels_failed();
}

std::function<void()> DeviceExchange::loss_watch() const {
  return [this, lost_since = std::int64_t{0}]() mutable {
    // A peer may have finished what this rank waits for, and left, while another is still at it.
    constexpr std::int64_t kGraceNs = 400'000'000;
    try {
      const std::lock_guard<std::mutex> lock(loss_mutex_);
      control().throw_if_lost({rank_, "check", -1});
    } catch (const PeerLost&) {
      const std::int64_t now = base::now_ns();
      if (lost_since == 0) lost_since = now;
      if (now - lost_since > kGraceNs) control().stop_own_waits();
    }
  };
}

void DeviceExchange::check() const {
  const comm::WaitFor nobody{rank_, "check", -1};
  control().throw_if_aborted(nobody);
  try {
    control().throw_if_lost(nobody);
  } catch (const PeerLost&) {
    control().stop_own_waits();  // for whom would the kernels wait?
    throw;
  }
}

std::uint64_t DeviceExchange::reset(std::uint64_t max_epoch, base::Deadline deadline) {
  // Work that waits for peers ends by the abort, and what it writes to them comes before their
  // resets.
  control().begin_reset();
  device_->wait_idle([] {});
  std::vector<exec::DeviceSlot> slots(slots_.size());
  device_->download(slots.data(), shared_at<std::byte>(workspace_.device.slots_offset),
                    static_cast<std::int64_t>(slots.size() * sizeof slots[0]));
  retired_.clear();
  for (const exec::DeviceSlot& slot : slots) max_epoch = std::max(max_epoch, slot.epoch);
  const std::uint64_t first = control().reset(max_epoch, deadline) + 1;
  // A kernel that failed may have left counts of an epoch to come, which after a further reset had
  // the same tag again.
  clear_tiles();
  device_->download(&words_, shared_at<std::byte>(workspace_.device.control_offset), sizeof words_);
  start_generation(first, static_cast<std::int64_t>(first - setup_.config.test_knobs.first_epoch));
  return first;
}

// --- The end ------------------------------------------------------------------------------------

void DeviceExchange::give_up_open_rounds() noexcept {
  const bool is_open =
      std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.is_open(); });
  // Kernels of rounds that have ended here may still wait, even for a rank that died.
  if (is_open || has_peer_died()) control().stop_own_waits();
}

bool DeviceExchange::has_peer_died() const noexcept {
  try {
    return control().has_peer_died();
  } catch (const std::bad_alloc&) {
    return false;  // the waits end by their time-outs
  }
}

void DeviceExchange::leave() noexcept {
  control().stop_own_waits();
  window_->leave();
}

void DeviceExchange::close(base::Deadline deadline) {
  try {
    const std::function<void()> watch = loss_watch();
    device_->wait_idle([&] {
      watch();
      if (!deadline.passed()) return;
      control().stop_own_waits();
      window_->leave();  // so that peers whose kernels run here do not wait for this rank
    });
  } catch (const std::exception&) {
    keep_memory();
    window_->leave();
    throw;
  }
  kept_.reset();  // what is left of it are the callers' views
  own_control_ = {};
  retired_.clear();
  window_->close(deadline);
  local_.reset();
}

std::shared_ptr<Exchange> make_on_device(Setup setup, base::Deadline deadline) {
  return std::make_shared<DeviceExchange>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
