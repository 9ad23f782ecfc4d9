// SPDX-License-Identifier: Apache-2.0

// Strategy high_throughput: the ranks tell each other how many rows they will send, so that every
// rank knows the place of each row among all the rows of its destination, and every rank has memory
// for as many as the fullest receives. Then rows move as one_sided moves them.
//
// Before rows move, the ranks take steps together: one tells the counts, and, in a round that needs
// more memory than any before, another says whether every rank has it. In a step each rank
// publishes a flag in every peer's window and waits for theirs. Consecutive steps use different
// lines: p raises its flag of step k + 2 after it has read mine of step k + 1, which I raised after
// I had read p's of step k. A later round begins with either line free, since it begins after the
// earlier one has ended on both sides.
//
// Memory of the rows: address space for all rows that can ever come is reserved at creation, and
// takes up memory only where it has been touched. So a store grows without moving: peers need not
// map it anew, views of earlier rounds stay valid, and ranks that are masked out are not asked. The
// rows that arrive lie at the start of a slot, as dense as the round's number of rows allows; those
// that go home begin at an offset that never changes, so that rows of a later round, pushed as soon
// as their own rank has left the earlier one, never meet results that a third rank still pulls.
//
// Layout flat_by_expert: the ranks also tell each other how many tokens each expert gets from them.
// So a sender knows the place of each row among the rows of its expert, and puts it there: nothing
// is copied on arrival. Many results that lie in the combine buffer, and all of weighting origin,
// go home the same way: the owner of a token reads them where they are, and adds them as their rank
// would have done. Others are added up first: fewer rows from another core's cache are faster.

#include <algorithm>
#include <new>
#include <utility>

#include "base/format.h"
#include "comm/communicator_impl.h"
#include "comm/control.h"
#include "exchange/window_exchange.h"
#include "fanfold/error.h"

namespace fanfold::exchange {
namespace {

/// Bytes at the two ends of a slot.
struct Room {
  std::int64_t arriving = 0;
  std::int64_t leaving = 0;

  static Room of(const plan::Store& store) noexcept {
    return {base::align_up(store.payload_offset + store.payload_bytes, 128),
            base::align_up(store.bytes - store.combine_offset, 128)};
  }
  std::int64_t bytes() const noexcept { return arriving + leaving; }
  bool holds(const Room& other) const noexcept {
    return arriving >= other.arriving && leaving >= other.leaving;
  }
};

Room larger_of(const Room& a, const Room& b) noexcept {
  return {std::max(a.arriving, b.arriving), std::max(a.leaving, b.leaving)};
}

/// The slots of the exchanges of one workspace, and what all active ranks know of them.
struct Blocks {
  comm::Windows windows;            // by rank
  std::int64_t combine_offset = 0;  // from a slot's base
  std::int64_t stride = 0;          // between slots
  Room initial;                     // of each slot, at creation
  std::vector<Room> agreed;         // by slot: what every active rank has
  std::vector<Room> held;           // by slot: what this rank has
  std::uint32_t mask_digest = 0;    // of the ranks that agreed
  std::uint32_t num_steps = 0;      // taken for the next round
};

class HighThroughput final : public WindowExchange {
 public:
  HighThroughput(Setup setup, base::Deadline deadline);

  std::int64_t workspace_bytes() const override;
  void dispatch_send(Slot& slot, const DispatchCall& call) override;
  void dispatch_recv(Slot& slot, base::Deadline deadline) override;
  std::uint64_t reset(std::uint64_t max_epoch, base::Deadline deadline) override;
  void close(base::Deadline deadline) override;
  void detach() noexcept override;
  bool owns(const void* data) const noexcept override;

 private:
  std::byte* base_of(const Slot& slot, int rank) const noexcept override {
    return bases_[static_cast<std::size_t>(rank)] + slot.index * stride_;
  }
  std::int64_t first_row_on(const Slot& slot, int rank) const noexcept override;
  const std::int32_t* stored_counts(const Slot& slot) override;
  const plan::PairPlan* pairs_of(const Slot& slot) const override {
    return stores_by_expert() ? &slot.pairs() : nullptr;
  }
  void choose_way_home(const Slot& slot, exec::CombineSendParams& params) override;
  void find_results(const Slot& slot, exec::SumRowsParams& params) override;

  /// Whether the store has as many rows as the layout, however many come.
  bool is_fixed() const noexcept {
    return config().layout == Layout::kFlat && config().max_recv_rows.has_value();
  }
  std::int64_t fixed_rows() const noexcept { return config().max_recv_rows.value_or(0); }
  const std::vector<std::int32_t>& matrix(const Slot& slot) const noexcept {
    return slot.routing ? slot.routing->rows_matrix : slot.rows_matrix;
  }
  std::int64_t rows_between(const Slot& slot, int source, int destination) const noexcept {
    return matrix(slot)[static_cast<std::size_t>(std::int64_t{source} * num_ranks() + destination)];
  }
  /// Row counts of `source` for each rank, then (stores_by_expert) its pairs of each expert, in
  /// `window`'s window.
  std::int32_t* count_row(const Slot& slot, int window, int source) const noexcept {
    std::byte* counts =
        window_of(window) + workspace_.counts_offset + slot.index * workspace_.counts_stride;
    return reinterpret_cast<std::int32_t*>(counts) +
           std::int64_t{source} * (num_ranks() + (stores_by_expert() ? map().num_experts : 0));
  }
  void forget_agreed();
  std::int64_t step(const Slot& slot, exec::FlagFields mine, base::Deadline deadline);
  void check_same(const Slot& slot, const exec::FlagFields& mine, int peer,
                  const exec::FlagFields& got);
  void exchange_counts(Slot& slot, base::Deadline deadline);
  void place_store(Slot& slot, base::Deadline deadline);
  void make_room(const Slot& slot, const Room& needed, base::Deadline deadline);
  std::int64_t agree(const Slot& slot, const Room& wanted, base::Deadline deadline);
  bool touch_own(const Slot& slot, const Room& room);
  bool try_touch(const Slot& slot, int rank, const Room& room) const;
  void prune(Slot& slot) const;

  std::shared_ptr<Blocks> blocks_;
  std::vector<std::byte*> bases_;  // of slot 0, by rank
  std::int64_t stride_ = 0;
  std::vector<std::int32_t> kept_counts_;      // scratch [R]
  std::vector<exec::LayoutRows> layout_rows_;  // scratch [R]
  std::vector<std::uint32_t> ways_home_;       // by slot: of this rank's results, see way_of
};

/// What a combine flag says of the rows that it announces: 0, one for each received row; else the
/// layout's, of this type.
std::uint32_t way_of(DType dtype) noexcept { return 1 + static_cast<std::uint32_t>(dtype); }

HighThroughput::HighThroughput(Setup setup, base::Deadline deadline)
    : WindowExchange(std::move(setup), deadline) {
  const std::int64_t max_rows =
      is_fixed() ? fixed_rows() : num_ranks() * workspace_.max_tokens_per_rank;
  const plan::Store most =
      plan::walk_store(config(), workspace_, max_rows, workspace_.max_layout_rows);
  if (setup_.workspace_of != nullptr) {
    blocks_ = static_cast<const HighThroughput&>(*setup_.workspace_of).blocks_;
    const Room room{blocks_->combine_offset, blocks_->stride - blocks_->combine_offset};
    if (!room.holds(Room::of(most))) {
      throw InvalidArgument(base::str(
          "workspace_of: rows of a slot: needed room for ", Room::of(most).arriving, " and ",
          Room::of(most).leaving, " bytes, ", setup_.workspace_of->what(), " has room for ",
          room.arriving, " and ", room.leaving,
          "; give the first of them the larger sizes (hidden, top_k, max_tokens_per_rank, "
          "dispatch_row_bytes, combine_row_bytes)"));
    }
  } else {
    blocks_ = std::make_shared<Blocks>();
    blocks_->combine_offset = most.combine_offset;
    blocks_->stride = most.bytes;
    comm::Group& group = setup_.communicator->group();
    const std::int64_t bytes = std::max<std::int64_t>(1, most.bytes * workspace_.max_in_flight);
    blocks_->windows =
        is_fixed() ? group.share_windows(bytes, deadline) : group.reserve_windows(bytes, deadline);
    if (is_fixed()) blocks_->initial = Room::of(most);
    blocks_->held.assign(slots_.size(), blocks_->initial);
    forget_agreed();
  }
  stride_ = blocks_->stride;
  for (const auto& window : blocks_->windows) bases_.push_back(window->data());
  kept_counts_.resize(static_cast<std::size_t>(num_ranks()));
  layout_rows_.resize(static_cast<std::size_t>(num_ranks()));
  ways_home_.resize(slots_.size());
  keep(std::make_shared<comm::Windows>(blocks_->windows));
}

/// What was agreed holds among the ranks that agreed.
void HighThroughput::forget_agreed() {
  blocks_->agreed.assign(slots_.size(), blocks_->initial);
  blocks_->mask_digest = mask_digest_;
}

std::int64_t HighThroughput::workspace_bytes() const {
  std::int64_t bytes = workspace_.symmetric_bytes + workspace_.local_bytes;
  if (blocks_ == nullptr) return bytes;
  for (const Room& room : blocks_->held) bytes += room.bytes();
  return bytes;
}

std::int64_t HighThroughput::first_row_on(const Slot& slot, int rank) const noexcept {
  std::int64_t row = 0;
  for (int source = 0; source < rank_; ++source) row += rows_between(slot, source, rank);
  return row;
}

const std::int32_t* HighThroughput::stored_counts(const Slot& slot) {
  if (!is_fixed()) return counts(slot);
  for (std::size_t source = 0; source < kept_counts_.size(); ++source) {
    kept_counts_[source] = static_cast<std::int32_t>(kept_rows(slot, source));
  }
  return kept_counts_.data();
}

/// Where two ranks differ every rank differs from one of them, so all of them throw: those that
/// wait for rows already learn of it from this rank's dispatch flag.
void HighThroughput::check_same(const Slot& slot, const exec::FlagFields& mine, int peer,
                                const exec::FlagFields& got) {
  const std::string difference = exec::difference(mine, rank_, got, peer);
  if (difference.empty()) return;
  announce(slot, workspace_.dispatch_flags_offset, slot.sent);
  throw InvalidArgument(base::str(what(), ": dispatch of round ", slot.round,
                                  " differs between ranks: ", difference,
                                  "; call reset() on every rank"));
}

/// Takes one step with all active ranks. Returns the lowest rank whose flag carries rows, -1: none.
std::int64_t HighThroughput::step(const Slot& slot, exec::FlagFields mine,
                                  base::Deadline deadline) {
  // Above all epochs, and apart from those of acknowledgements, whose lines are used here.
  constexpr std::uint64_t kStepBit = std::uint64_t{1} << 63;
  const std::uint32_t number = blocks_->num_steps++;
  mine.epoch = slot.epoch | kStepBit | (std::uint64_t{number % (1U << 15)} << 48);
  const std::int64_t offset =
      number % 2 == 0 ? workspace_.count_flags_offset : workspace_.ack_flags_offset;
  std::int64_t first = mine.num_rows != 0 ? rank_ : -1;
  announce(slot, offset, mine);
  for (int i = 1; i < num_ranks(); ++i) {
    const int peer = (rank_ + num_ranks() - i) % num_ranks();
    if (!active_[static_cast<std::size_t>(peer)]) continue;
    const exec::FlagLine& flag = *line(slot, offset, rank_, peer);
    // Who sends rows without this step makes another call.
    const exec::FlagLine& rows = *line(slot, workspace_.dispatch_flags_offset, rank_, peer);
    const auto is_there = [&] { return exec::has_arrived(flag, mine.epoch); };
    const auto has_skipped = [&] { return exec::has_arrived(rows, slot.epoch); };
    const comm::WaitFor target{peer, "dispatch", slot.round};
    control().wait([&] { return is_there() || has_skipped(); }, target, deadline);
    hook_.step();
    if (!is_there()) {
      check_same(slot, slot.sent, peer, exec::read(rows));
      control().wait(is_there, target, deadline);
    }
    const exec::FlagFields got = exec::read(flag);
    check_same(slot, mine, peer, got);
    if (got.num_rows != 0 && (first < 0 || peer < first)) first = peer;
  }
  return first;
}

void HighThroughput::exchange_counts(Slot& slot, base::Deadline deadline) {
  const auto ranks = static_cast<std::size_t>(num_ranks());
  const auto experts = static_cast<std::size_t>(stores_by_expert() ? map().num_experts : 0);
  const std::vector<std::int32_t>& rows = slot.own_plan.rows_per_rank;
  const std::vector<std::int32_t>& pairs = slot.own_pairs.pairs_per_expert;
  const auto rows_of = [&](int source) {
    return slot.rows_matrix.begin() + std::int64_t{source} * num_ranks();
  };
  const auto pairs_of = [&](int source) {
    return slot.pairs_matrix.begin() + static_cast<std::int64_t>(experts) * source;
  };
  slot.rows_matrix.assign(ranks * ranks, 0);
  slot.pairs_matrix.assign(ranks * experts, 0);
  std::copy(rows.begin(), rows.end(), rows_of(rank_));
  std::copy_n(pairs.begin(), experts, pairs_of(rank_));
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_ || !active_[static_cast<std::size_t>(peer)]) continue;
    // The peer has read those of the round before: it has ended that round. Release: the flag.
    std::int32_t* const out = std::copy(rows.begin(), rows.end(), count_row(slot, peer, rank_));
    std::copy_n(pairs.begin(), experts, out);
    hook_.step();
  }
  (void)step(slot, slot.sent, deadline);
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_ || !active_[static_cast<std::size_t>(peer)]) continue;
    const std::int32_t* const in = count_row(slot, rank_, peer);
    std::copy_n(in, ranks, rows_of(peer));
    std::copy_n(in + ranks, experts, pairs_of(peer));
  }
}

/// False: there is no memory.
bool HighThroughput::try_touch(const Slot& slot, int rank, const Room& room) const {
  const base::Mapping& window = *blocks_->windows[static_cast<std::size_t>(rank)];
  const std::int64_t base = slot.index * stride_;
  try {
    window.touch(base, room.arriving);
    window.touch(base + blocks_->combine_offset, room.leaving);
  } catch (const std::bad_alloc&) {
    return false;
  } catch (const SystemFailure&) {
    return false;
  }
  return true;
}

bool HighThroughput::touch_own(const Slot& slot, const Room& room) {
  const std::int64_t limit = config().test_knobs.max_store_bytes;
  if (limit >= 0 && room.bytes() > limit) return false;
  if (!try_touch(slot, rank_, room)) return false;
  Room& held = blocks_->held[static_cast<std::size_t>(slot.index)];
  held = larger_of(held, room);
  return true;
}

/// Returns the lowest rank that has no memory for `wanted`, -1: all have it now.
std::int64_t HighThroughput::agree(const Slot& slot, const Room& wanted, base::Deadline deadline) {
  exec::FlagFields mine = slot.sent;
  mine.num_rows = touch_own(slot, wanted) ? 0 : 1;
  const std::int64_t refused_by = step(slot, mine, deadline);
  if (refused_by >= 0) return refused_by;
  blocks_->agreed[static_cast<std::size_t>(slot.index)] = wanted;
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_ || !active_[static_cast<std::size_t>(peer)]) continue;
    (void)try_touch(slot, peer, wanted);  // only saves faults while rows are pushed
  }
  return -1;
}

/// Every rank knows `needed`, from the same counts, and what is agreed: all of them get here, or
/// none. A later round of the same size finds its memory.
void HighThroughput::make_room(const Slot& slot, const Room& needed, base::Deadline deadline) {
  const Room& agreed = blocks_->agreed[static_cast<std::size_t>(slot.index)];
  if (agreed.holds(needed)) return;
  const Room exact = larger_of(agreed, needed);
  const auto with_reserve = [](std::int64_t old, std::int64_t target, std::int64_t most) {
    return target == old ? old : std::min(most, std::max(target, old + old / 4));
  };
  const Room wanted{with_reserve(agreed.arriving, exact.arriving, blocks_->combine_offset),
                    with_reserve(agreed.leaving, exact.leaving, stride_ - blocks_->combine_offset)};
  std::int64_t refused_by = agree(slot, wanted, deadline);
  if (refused_by >= 0 && !exact.holds(wanted)) refused_by = agree(slot, exact, deadline);
  if (refused_by < 0) return;
  throw CapacityExceeded(base::str(
      what(), ": dispatch of round ", slot.round, ": expected memory for ", slot.store.num_places,
      " rows (", needed.bytes(), " bytes) on every rank, rank ", refused_by,
      " has not got it; no row was sent and the round has not begun, on any rank"));
}

void HighThroughput::place_store(Slot& slot, base::Deadline deadline) {
  std::int64_t most = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    std::int64_t rows = 0;
    for (int source = 0; source < num_ranks(); ++source) rows += rows_between(slot, source, rank);
    most = std::max(most, rows);
  }
  std::int64_t most_places = 0;
  if (stores_by_expert()) {
    const auto& pairs = slot.routing ? slot.routing->pairs_matrix : slot.pairs_matrix;
    most_places = plan::most_places(pairs, map(), config().expert_alignment);
  }
  slot.store = plan::walk_store(config(), workspace_, is_fixed() ? fixed_rows() : most, most_places,
                                blocks_->combine_offset);
  make_room(slot, Room::of(slot.store), deadline);
  place_payloads(slot);
}

/// Leaves out the rows that would lie beyond their destination's store. What they would have
/// brought home is missing from the sums, as it is where rows are dropped on arrival.
void HighThroughput::prune(Slot& slot) const {
  plan::SendPlan& plan = slot.own_plan;
  bool is_full = false;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    std::int32_t& rows = plan.rows_per_rank[static_cast<std::size_t>(rank)];
    const std::int64_t room = std::clamp(slot.store.num_rows - first_row_on(slot, rank),
                                         std::int64_t{0}, std::int64_t{rows});
    is_full = is_full || room < rows;
    rows = static_cast<std::int32_t>(room);
  }
  if (!is_full) return;
  std::size_t kept = 0;
  std::int64_t begin = 0;
  for (std::int64_t token = 0; token < plan.num_tokens; ++token) {
    std::int64_t& end = plan.target_begin[static_cast<std::size_t>(token) + 1];
    for (std::int64_t i = begin; i < end; ++i) {
      const plan::Target target = plan.targets[static_cast<std::size_t>(i)];
      if (target.row >= plan.rows_per_rank[static_cast<std::size_t>(target.rank)]) continue;
      plan.targets[kept++] = target;
    }
    begin = end;
    end = static_cast<std::int64_t>(kept);
  }
  plan.targets.resize(kept);
}

// Along a routing nobody waits for anybody here, unless memory must grow: that the peers have left
// the slot's last round, its combine flags have said, as in one_sided; where rows go, and that
// there is room, the routing's counts say.
void HighThroughput::dispatch_send(Slot& slot, const DispatchCall& call) {
  if (blocks_->mask_digest != mask_digest_) forget_agreed();
  slot.sent = dispatch_fields(slot);
  if (!slot.routing && stores_by_expert()) {
    const TensorView& weights = call.inputs->topk_weights;
    plan::build_pairs(slot.own_plan, map(), active_, static_cast<const float*>(weights.data),
                      weights.has_value() ? weights.strides[0] : 0, slot.own_pairs);
  }
  if (!slot.routing) exchange_counts(slot, call.deadline);
  place_store(slot, call.deadline);
  blocks_->num_steps = 0;
  if (!slot.routing && is_fixed()) prune(slot);  // a routing keeps the pruned plan
  if (!slot.routing && stores_by_expert()) {
    plan::place_pairs(slot.pairs_matrix, map(), rank_, config().expert_alignment, slot.own_pairs);
  }
  push(slot, call);
}

void HighThroughput::dispatch_recv(Slot& slot, base::Deadline deadline) {
  await_rows(slot, deadline);
  // With those that were not sent for lack of room.
  for (int source = 0; source < num_ranks(); ++source) {
    counts(slot)[source] = static_cast<std::int32_t>(rows_between(slot, source, rank_));
  }
  finish_dispatch(slot);
}

/// Where results lie in the combine buffer and are too many for the caches, reading them once saves
/// writing and reading their sums.
void HighThroughput::choose_way_home(const Slot& slot, exec::CombineSendParams& params) {
  std::uint32_t& way = ways_home_[static_cast<std::size_t>(slot.index)];
  way = 0;
  if (!stores_by_expert()) return;
  constexpr std::int64_t kManyBytes = std::int64_t{4} << 20;
  params.rows = slot_base(slot) + partials_offset(slot);
  std::byte* const buffer = slot_base(slot) + slot.store.combine_offset;
  const bool is_there = params.y == buffer;
  const std::int64_t bytes = params.num_y_rows * params.hidden * size_of(params.y_dtype);
  const std::int64_t limit = config().test_knobs.min_pull_bytes;
  const bool is_pulled = is_there && bytes >= (limit >= 0 ? limit : kManyBytes);
  if (!is_pulled && !params.origin) return;
  params.layout_rows = buffer;
  params.layout_dtype = is_there ? params.y_dtype : params.combine_dtype;
  way = way_of(params.layout_dtype);
  params.fields.num_rows = way;
}

void HighThroughput::find_results(const Slot& slot, exec::SumRowsParams& params) {
  if (!stores_by_expert()) return;
  bool is_pulled = false;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    layout_rows_[index] = {};
    if (!active_[index]) continue;
    // A peer raises this flag anew only in a later combine, which waits for this one's end here.
    const std::uint32_t way =
        rank == rank_
            ? ways_home_[static_cast<std::size_t>(slot.index)]
            : exec::read(*line(slot, workspace_.combine_flags_offset, rank_, rank)).num_rows;
    if (way == 0) continue;
    is_pulled = true;
    layout_rows_[index] = {base_of(slot, rank) + slot.store.combine_offset,
                           static_cast<DType>(way - 1)};
  }
  if (!is_pulled) return;
  params.pairs = &slot.pairs();
  params.layout_rows = layout_rows_.data();
  params.carried = config().weighting == Weighting::kCarried;
}

// A rank that was left out, or whose last step failed, may know of other agreements. A dispatch
// whose steps failed has used the epoch after `max_epoch`.
std::uint64_t HighThroughput::reset(std::uint64_t max_epoch, base::Deadline deadline) {
  forget_agreed();
  blocks_->num_steps = 0;
  return WindowExchange::reset(max_epoch + 1, deadline);
}

void HighThroughput::detach() noexcept {
  blocks_.reset();
  WindowExchange::detach();
}

void HighThroughput::close(base::Deadline deadline) {
  WindowExchange::close(deadline);
  blocks_.reset();
}

bool HighThroughput::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  const std::int64_t bytes = stride_ * workspace_.max_in_flight;
  const auto inside = [&](const std::byte* base) { return at >= base && at < base + bytes; };
  return WindowExchange::owns(data) || std::any_of(bases_.begin(), bases_.end(), inside);
}

}  // namespace

std::shared_ptr<Exchange> make_high_throughput(Setup setup, base::Deadline deadline) {
  return std::make_shared<HighThroughput>(std::move(setup), deadline);
}

}  // namespace fanfold::exchange
