// SPDX-License-Identifier: Apache-2.0
#include "plan/workspace.h"

#include <algorithm>

#include "base/byte_math.h"
#include "base/format.h"
#include "fanfold/all_to_all.h"
#include "fanfold/error.h"

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

 private:
  std::int64_t position_ = 0;
};

/// Payload regions of any set whose rows add up to `row_bytes`: each region may lose up to one
/// alignment step, and each row of each payload carries the guard.
std::int64_t payload_area_bytes(std::int64_t num_rows, std::int64_t row_bytes,
                                std::int64_t guard) noexcept {
  const std::int64_t per_row = row_bytes + guard * AllToAll::kMaxPayloads;
  return num_rows * per_row + kRegionAlignment * AllToAll::kMaxPayloads;
}

/// Bounds all that the walk adds up from above, in floating point, where no product wraps.
void check_size(const Workspace& w) {
  const double rows =
      static_cast<double>(w.max_tokens_per_rank) * w.num_ranks * std::max(1, w.max_local_experts);
  const double payload_row = static_cast<double>(w.dispatch_row_bytes) +
                             static_cast<double>(w.row_guard_bytes) * AllToAll::kMaxPayloads;
  const double combine_row =
      static_cast<double>(w.combine_row_bytes) * static_cast<double>(w.rows_per_token);
  const double per_row = 16.0 * w.top_k + 16.0 + 3.0 * payload_row + 4.0 * combine_row;
  if (w.max_in_flight * rows * per_row < 0x1p62) return;
  throw InvalidArgument(base::str("workspace: expected less than 2^62 bytes, got ", w.max_in_flight,
                                  " rounds of ", w.max_tokens_per_rank, " tokens on each of ",
                                  w.num_ranks, " ranks with rows of ", w.dispatch_row_bytes,
                                  " and ", w.combine_row_bytes, " bytes"));
}

void walk_slot(const AllToAllConfig& config, Workspace& w) {
  Cursor slot;
  const std::int64_t rows = w.num_ranks * w.max_tokens_per_rank;
  w.source_token_offset = slot.take(rows * 4);
  w.topk_ids_offset = slot.take(rows * w.top_k * 4);
  w.topk_weights_offset = slot.take(rows * w.top_k * 4);
  // Gathered rows lie in private memory, where all payloads of all tokens are kept anyway.
  w.payload_bytes = config.layout == Layout::kGathered
                        ? 0
                        : payload_area_bytes(rows, w.dispatch_row_bytes, w.row_guard_bytes);
  w.payload_offset = slot.take(w.payload_bytes);
  w.combine_bytes = rows * w.rows_per_token * w.combine_row_bytes;
  w.combine_offset = slot.take(w.combine_bytes);
  w.slot_stride = slot.position();
}

void walk_flags(Workspace& w) {
  Cursor flags;
  const std::int64_t lines = w.num_ranks * base::kCacheLine;
  w.dispatch_flags_offset = flags.take(lines);
  w.combine_flags_offset = flags.take(lines);
  w.ack_flags_offset = flags.take(lines);
  w.flags_stride = flags.position();
}

void walk_local_slot(const AllToAllConfig& config, Workspace& w) {
  Cursor slot;
  const bool by_expert = config.layout == Layout::kExpertMajor;
  const bool broadcast = config.strategy == Strategy::kBroadcast;
  const std::int64_t tokens = w.num_ranks * w.max_tokens_per_rank;
  const std::int64_t rows = by_expert ? w.max_local_experts * tokens : tokens;
  w.local_counts_offset = slot.take(4 * num_counts(w.num_ranks, w.max_local_experts));
  w.local_source_rank_offset = slot.take(rows * 4);
  w.local_source_token_offset = slot.take(rows * 4);
  w.local_weights_offset = slot.take(by_expert ? rows * 4 : 0);
  w.local_ids_offset = slot.take(broadcast ? tokens * w.top_k * 4 : 0);
  w.local_gate_offset = slot.take(broadcast ? tokens * w.top_k * 4 : 0);
  const std::int64_t kept_rows = std::max(by_expert ? rows : 0, broadcast ? tokens : 0);
  w.local_payload_bytes =
      kept_rows == 0 ? 0 : payload_area_bytes(kept_rows, w.dispatch_row_bytes, w.row_guard_bytes);
  // Broadcast needs the gathered rows and, for expert_major, the expanded ones.
  if (by_expert && broadcast) {
    w.local_payload_bytes += payload_area_bytes(tokens, w.dispatch_row_bytes, w.row_guard_bytes);
  }
  w.local_payload_offset = slot.take(w.local_payload_bytes);
  const bool local_results = by_expert || config.layout == Layout::kGathered;
  w.local_combine_bytes = local_results ? rows * w.combine_row_bytes : 0;
  w.local_combine_offset = slot.take(w.local_combine_bytes);
  w.local_slot_stride = slot.position();
}

}  // namespace

std::int64_t num_counts(int num_ranks, int max_local_experts) noexcept {
  return 2 * std::int64_t{num_ranks} + 2 * std::int64_t{max_local_experts} + 2;
}

std::int64_t payload_region_bytes(std::int64_t num_rows, std::int64_t row_stride) noexcept {
  return base::align_up(num_rows * row_stride, kRegionAlignment);
}

Workspace walk_workspace(const AllToAllConfig& config, int num_ranks, int max_local_experts,
                         std::int64_t control_bytes) {
  Workspace w;
  w.num_ranks = num_ranks;
  w.num_experts = config.num_experts;
  w.max_local_experts = max_local_experts;
  w.top_k = config.top_k;
  w.max_tokens_per_rank = config.max_tokens_per_rank;
  w.max_in_flight = config.max_in_flight;
  w.dispatch_row_bytes = config.dispatch_row_bytes.value_or(0);
  w.combine_row_bytes = config.combine_row_bytes.value_or(0);
  w.row_guard_bytes = config.test_knobs.row_guard_bytes;
  w.rows_per_token = config.weighting == Weighting::kOrigin
                         ? std::max(1, std::min(config.top_k, max_local_experts))
                         : 1;
  check_size(w);
  walk_flags(w);
  walk_slot(config, w);
  walk_local_slot(config, w);

  Cursor local;
  const std::int64_t slots = w.slot_stride * w.max_in_flight;
  if (config.strategy == Strategy::kBroadcast) {
    w.slot_offset = local.take(slots);
    w.symmetric_bytes = base::align_up(control_bytes, kRegionAlignment);
  } else {
    Cursor window;
    w.control_offset = window.take(control_bytes);
    w.flags_offset = window.take(w.flags_stride * w.max_in_flight);
    w.slot_offset = window.take(slots);
    w.symmetric_bytes = window.position();
  }
  w.local_slot_offset = local.take(w.local_slot_stride * w.max_in_flight);
  if (config.strategy == Strategy::kBroadcast) {
    w.local_scratch_offset = local.take(w.combine_bytes);
    // Without ids every token comes home from every rank.
    const std::int64_t ranks_per_token =
        config.layout == Layout::kGathered ? num_ranks : std::min(num_ranks, config.top_k);
    const std::int64_t per_token = ranks_per_token * w.rows_per_token;
    w.local_mine_offset = local.take(w.max_tokens_per_rank * per_token * w.combine_row_bytes);
  }
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
      {"source_token_offset", source_token_offset},
      {"topk_ids_offset", topk_ids_offset},
      {"topk_weights_offset", topk_weights_offset},
      {"payload_offset", payload_offset},
      {"payload_bytes", payload_bytes},
      {"combine_offset", combine_offset},
      {"combine_bytes", combine_bytes},
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
