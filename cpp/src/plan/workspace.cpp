// SPDX-License-Identifier: Apache-2.0
#include "plan/workspace.h"

#include <algorithm>

#include "base/byte_math.h"
#include "base/format.h"
#include "fanfold/all_to_all.h"
#include "fanfold/error.h"
#include "plan/wire.h"

namespace fanfold::plan {
namespace {

constexpr std::int64_t kRegionAlignment = 128;

/// Hands out consecutive regions.
class Cursor {
 public:
  std::int64_t take(std::int64_t bytes) noexcept {
    const std::int64_t offset = position_;
    position_ = base::align_up(position_ + bytes, kRegionAlignment);
    return offset;
  }
  std::int64_t position() const noexcept { return position_; }
  /// Leaves a gap up to `offset`, if that lies ahead.
  void skip_to(std::int64_t offset) noexcept {
    position_ = std::max(position_, base::align_up(offset, kRegionAlignment));
  }

 private:
  std::int64_t position_ = 0;
};

/// Payload regions of any set whose rows add up to `row_bytes`: each region may lose up to one
/// alignment step, and each row of each payload carries the guard.
std::int64_t payload_area_bytes(std::int64_t num_rows, std::int64_t row_bytes,
                                std::int64_t guard) noexcept {
  constexpr std::int64_t kMaxRegions = AllToAll::kMaxPayloads + 1;  // the scales of a wire, too
  const std::int64_t per_row = row_bytes + guard * kMaxRegions;
  return num_rows * per_row + kRegionAlignment * kMaxRegions;
}

/// Bounds all that the walk adds up from above, in floating point, where no product wraps.
void check_size(const Workspace& w) {
  const double tokens = static_cast<double>(w.max_tokens_per_rank) * w.num_ranks;
  const double rows =
      tokens * std::max(1, w.max_local_experts) + static_cast<double>(w.max_layout_rows);
  const double payload_row = static_cast<double>(w.dispatch_row_bytes) +
                             static_cast<double>(w.row_guard_bytes) * AllToAll::kMaxPayloads;
  const double combine_row = static_cast<double>(w.combine_row_bytes + w.wire_row_bytes) *
                             static_cast<double>(w.rows_per_token);
  const double per_row = 24.0 * w.top_k + 24.0 + 4.0 * payload_row + 4.0 * combine_row;
  if (w.max_in_flight * rows * per_row < 0x1p62) return;
  throw InvalidArgument(base::str("workspace: expected less than 2^62 bytes, got ", w.max_in_flight,
                                  " rounds of ", w.max_tokens_per_rank, " tokens on each of ",
                                  w.num_ranks, " ranks with rows of ", w.dispatch_row_bytes,
                                  " and ", w.combine_row_bytes, " bytes"));
}

void walk_flags(Workspace& w) {
  Cursor flags;
  const std::int64_t lines = w.num_ranks * base::kCacheLine;
  w.dispatch_flags_offset = flags.take(lines);
  w.combine_flags_offset = flags.take(lines);
  w.ack_flags_offset = flags.take(lines);
  w.count_flags_offset = flags.take(lines);
  w.flags_stride = flags.position();
}

/// What the kernels of one slot keep for each other.
void walk_device_slot(const AllToAllConfig& config, Workspace& w, Cursor& slot) {
  DeviceRegions& d = w.device;
  const std::int64_t tokens = w.max_tokens_per_rank;
  const std::int64_t received = w.num_ranks * tokens;
  const bool by_expert = is_per_expert(config.layout);
  constexpr std::int64_t kTargetBytes = 8;
  constexpr std::int64_t kPairBytes = 12;
  d.sent_ids_offset = slot.take(tokens * w.top_k * 4);
  const bool keeps_weights = config.weighting == Weighting::kOrigin;
  d.sent_weights_offset = slot.take(keeps_weights ? tokens * w.top_k * 4 : 0);
  d.targets_offset = slot.take(tokens * max_targets(w.top_k, w.num_ranks) * kTargetBytes);
  d.rows_per_rank_offset = slot.take(std::int64_t{w.num_ranks} * 4);
  const std::int64_t pairs = received * max_pairs(w.top_k, w.max_local_experts);
  d.pairs_offset = slot.take(by_expert ? pairs * kPairBytes : 0);
  d.tile_columns = std::max(w.num_ranks, w.max_local_experts);
  d.num_tiles = kMaxDeviceBlocks + (received + kDeviceTileRows - 1) / kDeviceTileRows;
  d.tiles_offset = slot.take(d.tile_columns * d.num_tiles * 8);
  const bool shows_all = config.strategy == Strategy::kBroadcast;
  d.scratch_offset = slot.take(shows_all ? received * w.rows_per_token * w.wire_row_bytes : 0);
}

/// What the kernels of all slots share.
void walk_device_tables(Workspace& w, Cursor& local) {
  DeviceRegions& d = w.device;
  d.slots_offset = local.take(w.max_in_flight * kDeviceSlotBytes);
  d.control_offset = local.take(kDeviceControlBytes);
  d.windows_offset = local.take(std::int64_t{w.num_ranks} * 8);
  // Room for any placement: as many copies as experts.
  const std::int64_t experts = w.num_experts;
  d.rank_of_offset = local.take(experts * 4);
  d.local_of_offset = local.take(experts * 4);
  d.copy_begin_offset = local.take((experts + 1) * 4);
  d.copies_offset = local.take(experts * 4);
  d.is_active_offset = local.take(std::int64_t{w.num_ranks} * 4);
}

void walk_local_slot(const AllToAllConfig& config, Workspace& w) {
  Cursor slot;
  const bool by_expert = is_per_expert(config.layout);
  // On a GPU every token's indices lie among the staged rows.
  const bool gathered = gathers(config.strategy) && config.device == DeviceType::kCpu;
  const bool flat_copy = config.layout == Layout::kFlat && !stores_flat(config);
  const std::int64_t tokens = w.num_ranks * w.max_tokens_per_rank;
  const std::int64_t rows = w.max_layout_rows;
  w.local_counts_offset = slot.take(4 * num_counts(w.num_ranks, w.max_local_experts));
  w.local_source_rank_offset = slot.take(rows * 4);
  w.local_source_token_offset = slot.take(rows * 4);
  w.local_weights_offset = slot.take(by_expert ? rows * 4 : 0);
  const std::int64_t index_rows = gathered ? tokens : (flat_copy ? rows : 0);
  w.local_ids_offset = slot.take(index_rows * w.top_k * 4);
  w.local_gate_offset = slot.take(index_rows * w.top_k * 4);
  const auto area = [&](std::int64_t num_rows) {
    return payload_area_bytes(num_rows, w.dispatch_row_bytes, w.row_guard_bytes);
  };
  const bool expands = by_expert && !stores_by_expert(config);
  w.local_payload_bytes = expands || flat_copy ? area(rows) : 0;
  w.local_payload_offset = slot.take(w.local_payload_bytes);
  // Results per expert are folded, flat ones may have to be spread.
  const bool local_results = expands || flat_copy;
  w.local_combine_bytes = local_results ? rows * w.combine_row_bytes : 0;
  w.local_combine_offset = slot.take(w.local_combine_bytes);
  const bool packs = config.dispatch_wire != Wire::kNone;
  const std::int64_t blocks = num_wire_blocks(w.dispatch_row_bytes);
  w.local_wire_offset = slot.take(packs ? w.max_tokens_per_rank * w.dispatch_row_bytes : 0);
  w.local_wire_scales_offset = slot.take(packs ? w.max_tokens_per_rank * blocks * 4 : 0);
  if (config.device == DeviceType::kGpu) walk_device_slot(config, w, slot);
  w.local_slot_stride = slot.position();
}

/// What peers write to and read from in layout gathered.
void walk_blocks(Workspace& w) {
  const std::int64_t tokens = w.num_ranks * w.max_tokens_per_rank;
  Cursor block;
  block.take(payload_area_bytes(tokens, w.dispatch_row_bytes, w.row_guard_bytes));
  w.block_combine_offset = block.take(tokens * w.combine_row_bytes);
  w.block_stride = block.position();
}

}  // namespace

namespace {

/// What the strategies over collectives send from.
std::int64_t scratch_bytes(const AllToAllConfig& config, const Workspace& w) {
  if (config.strategy == Strategy::kTwoSided) return 0;
  if (config.strategy != Strategy::kBatched) {
    // In the stated order partials go straight from where they lie.
    return config.deterministic ? 0 : w.store.combine_bytes;
  }
  const std::int64_t rows = w.num_ranks * w.max_tokens_per_rank;
  const std::int64_t index_bytes = 4 + std::int64_t{8} * w.top_k;
  const std::int64_t per_row =
      std::max({w.dispatch_row_bytes, index_bytes, w.rows_per_token * w.wire_row_bytes});
  return rows * per_row + w.num_ranks * kRegionAlignment;
}

}  // namespace

std::int64_t num_counts(int num_ranks, int max_local_experts) noexcept {
  return 2 * std::int64_t{num_ranks} + 2 * std::int64_t{max_local_experts} + 2;
}

std::int64_t payload_region_bytes(std::int64_t num_rows, std::int64_t row_stride) noexcept {
  return base::align_up(num_rows * row_stride, kRegionAlignment);
}

StoreKind store_kind(Strategy strategy) noexcept {
  switch (strategy) {
    case Strategy::kOneSided:
    case Strategy::kLowLatency:
      return StoreKind::kWindow;
    case Strategy::kHighThroughput:
      return StoreKind::kBlocks;
    default:
      return StoreKind::kPrivate;
  }
}

bool gathers(Strategy strategy) noexcept {
  return strategy == Strategy::kBroadcast || strategy == Strategy::kGatherScatter;
}

bool stores_flat(const AllToAllConfig& config) noexcept {
  switch (config.strategy) {
    case Strategy::kHighThroughput:
      return true;
    case Strategy::kBroadcast:
    case Strategy::kGatherScatter:
    case Strategy::kTwoSided:
      return config.layout == Layout::kFlat;
    default:
      return false;
  }
}

std::int64_t max_layout_rows(const AllToAllConfig& config, int num_ranks, int max_local_experts) {
  const std::int64_t tokens = num_ranks * config.max_tokens_per_rank;
  switch (config.layout) {
    case Layout::kExpertMajor:
      return max_local_experts * tokens;
    case Layout::kFlat:
      return config.max_recv_rows.value_or(tokens);
    case Layout::kFlatByExpert: {
      const std::int64_t per_token = std::min(config.top_k, max_local_experts);
      const std::int64_t padding = max_local_experts * (config.expert_alignment - 1);
      return config.max_recv_rows.value_or(tokens * per_token + padding);
    }
    default:
      return tokens;
  }
}

bool stores_by_expert(const AllToAllConfig& config) noexcept {
  return config.strategy == Strategy::kHighThroughput && config.layout == Layout::kFlatByExpert &&
         !config.max_recv_rows;
}

Store walk_store(const AllToAllConfig& config, const Workspace& w, std::int64_t num_rows,
                 std::int64_t num_places, std::int64_t min_combine_offset) {
  Cursor slot;
  Store store;
  const bool by_expert = stores_by_expert(config);
  store.num_rows = num_rows;
  store.num_places = by_expert ? num_places : num_rows;
  store.source_token_offset = slot.take(num_rows * 4);
  store.topk_ids_offset = slot.take(num_rows * w.top_k * 4);
  store.topk_weights_offset = slot.take(num_rows * w.top_k * 4);
  // Gathered rows lie in blocks.
  store.payload_bytes =
      config.layout == Layout::kGathered || store.num_places == 0
          ? 0
          : payload_area_bytes(store.num_places, w.dispatch_row_bytes, w.row_guard_bytes);
  store.payload_offset = slot.take(store.payload_bytes);
  slot.skip_to(min_combine_offset);
  store.combine_bytes =
      by_expert ? num_places * w.combine_row_bytes : num_rows * w.rows_per_token * w.wire_row_bytes;
  store.combine_offset = slot.take(store.combine_bytes);
  const bool folds = by_expert && config.weighting != Weighting::kOrigin;
  store.partial_bytes = folds ? num_rows * w.wire_row_bytes : 0;
  store.partial_offset = slot.take(store.partial_bytes);
  store.bytes = slot.position();
  return store;
}

Workspace walk_workspace(const AllToAllConfig& config, int num_ranks, int max_local_experts,
                         std::int64_t control_bytes) {
  Workspace w;
  w.num_ranks = num_ranks;
  w.num_experts = config.num_experts;
  w.max_local_experts = std::max(max_local_experts, config.max_local_experts);
  w.top_k = config.top_k;
  w.max_tokens_per_rank = config.max_tokens_per_rank;
  w.max_in_flight = config.max_in_flight;
  w.dispatch_row_bytes = config.dispatch_row_bytes.value_or(0);
  w.combine_row_bytes = config.combine_row_bytes.value_or(0);
  w.row_guard_bytes = config.test_knobs.row_guard_bytes;
  w.rows_per_token = config.weighting == Weighting::kOrigin
                         ? std::max(1, std::min(config.top_k, w.max_local_experts))
                         : 1;
  const DType combine_dtype = config.combine_dtype.value_or(config.dtype);
  w.wire_row_bytes =
      config.combine_wire == Wire::kNone
          ? w.combine_row_bytes
          : packed_row_bytes(w.combine_row_bytes / size_of(combine_dtype), config.wire_scale);
  w.max_layout_rows = max_layout_rows(config, num_ranks, w.max_local_experts);
  check_size(w);
  walk_flags(w);
  walk_local_slot(config, w);
  if (config.layout == Layout::kGathered) walk_blocks(w);

  const StoreKind kind = store_kind(config.strategy);
  const std::int64_t tokens = num_ranks * config.max_tokens_per_rank;
  const bool fixed = config.layout == Layout::kFlat && config.max_recv_rows.has_value();
  // Rows that are seen where they lie: as many as the layout has, all of them in place.
  const bool in_place = config.layout == Layout::kFlat && stores_flat(config);
  const std::int64_t stored = in_place ? std::max(tokens, w.max_layout_rows) : tokens;
  w.store = walk_store(
      config, w, kind == StoreKind::kBlocks ? (fixed ? *config.max_recv_rows : 0) : stored, 0);
  w.slot_stride = w.store.bytes;
  const std::int64_t slots = w.slot_stride * w.max_in_flight;
  Cursor local;
  const bool is_on_gpu = config.device == DeviceType::kGpu;
  if (kind == StoreKind::kPrivate) {
    if (is_on_gpu) w.flags_offset = local.take(w.flags_stride * w.max_in_flight);
    w.slot_offset = local.take(slots);
    if (is_on_gpu) w.device.staging_offset = local.take(local.position());
    w.block_offset = base::align_up(control_bytes, kRegionAlignment);
    w.symmetric_bytes = w.block_offset + w.block_stride * w.max_in_flight;
  } else {
    Cursor window;
    w.control_offset = window.take(control_bytes);
    w.flags_offset = window.take(w.flags_stride * w.max_in_flight);
    if (kind == StoreKind::kBlocks) {
      w.counts_stride = std::int64_t{4} * num_ranks *
                        (num_ranks + (stores_by_expert(config) ? w.num_experts : 0));
      w.counts_offset = window.take(w.counts_stride * w.max_in_flight);
      w.block_bytes = slots;
    }
    w.slot_offset = window.position();
    if (kind == StoreKind::kWindow) window.take(slots);
    w.symmetric_bytes = window.position();
  }
  w.local_slot_offset = local.take(w.local_slot_stride * w.max_in_flight);
  if (kind == StoreKind::kPrivate && !is_on_gpu) {
    w.local_scratch_bytes = scratch_bytes(config, w);
    w.local_scratch_offset = local.take(w.local_scratch_bytes);
    std::int64_t per_token = std::min(num_ranks, config.top_k);
    if (config.strategy == Strategy::kBatched) per_token = num_ranks;
    // Gathered rows are added where they lie, or come home as a sum.
    if (config.layout == Layout::kGathered) per_token = config.deterministic ? 0 : 1;
    w.local_mine_offset =
        local.take(w.max_tokens_per_rank * per_token * w.rows_per_token * w.wire_row_bytes);
  }
  if (is_on_gpu) walk_device_tables(w, local);
  w.local_bytes = local.position();
  return w;
}

Metainfo Workspace::metainfo() const {
  return Metainfo({
      {"num_ranks", num_ranks},
      {"num_experts", num_experts},
      {"max_local_experts", max_local_experts},
      {"top_k", top_k},
      {"max_tokens_per_rank", max_tokens_per_rank},
      {"max_in_flight", max_in_flight},
      {"dispatch_row_bytes", dispatch_row_bytes},
      {"combine_row_bytes", combine_row_bytes},
      {"row_guard_bytes", row_guard_bytes},
      {"control_offset", control_offset},
      {"slot_offset", slot_offset},
      {"slot_stride", slot_stride},
      {"flags_offset", flags_offset},
      {"flags_stride", flags_stride},
      {"dispatch_flags_offset", dispatch_flags_offset},
      {"combine_flags_offset", combine_flags_offset},
      {"ack_flags_offset", ack_flags_offset},
      {"count_flags_offset", count_flags_offset},
      {"source_token_offset", store.source_token_offset},
      {"topk_ids_offset", store.topk_ids_offset},
      {"topk_weights_offset", store.topk_weights_offset},
      {"payload_offset", store.payload_offset},
      {"payload_bytes", store.payload_bytes},
      {"combine_offset", store.combine_offset},
      {"combine_bytes", store.combine_bytes},
      {"local_slot_offset", local_slot_offset},
      {"local_slot_stride", local_slot_stride},
      {"local_payload_offset", local_payload_offset},
      {"local_payload_bytes", local_payload_bytes},
      {"local_combine_offset", local_combine_offset},
      {"local_combine_bytes", local_combine_bytes},
      {"symmetric_bytes", symmetric_bytes},
      {"local_bytes", local_bytes},
      {"workspace_bytes", total_bytes()},
  });
}

}  // namespace fanfold::plan
