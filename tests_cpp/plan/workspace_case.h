// SPDX-License-Identifier: Apache-2.0
#pragma once

// A grid of configurations, and which regions each needs: told from the meaning of the regions,
// without the walk.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "plan/workspace.h"

namespace fanfold::plan {

constexpr std::int64_t kFlagBytes = 64;
constexpr std::int64_t kControlBytes = 1000;  // any number will do

/// A part of a rank's memory.
struct Region {
  std::string name;
  std::int64_t begin;
  std::int64_t bytes;
};

/// A configuration and what a rank holds for it.
struct WorkspaceCase {
  AllToAllConfig config;
  int num_ranks = 1;
  int max_local_experts = 1;
  std::int64_t dispatch_row_bytes = 8;
  std::int64_t combine_row_bytes = 8;

  bool is_window() const {
    return config.strategy == Strategy::kOneSided || config.strategy == Strategy::kLowLatency;
  }
  bool has_blocks() const { return config.strategy == Strategy::kHighThroughput; }
  bool is_private() const { return !is_window() && !has_blocks(); }
  bool is_gathering() const {
    return config.strategy == Strategy::kBroadcast || config.strategy == Strategy::kGatherScatter;
  }
  bool by_expert() const { return is_per_expert(config.layout); }
  bool is_gathered() const { return config.layout == Layout::kGathered; }
  /// Whether the rows of layout flat lie as they arrive, without a copy.
  bool is_flat_in_place() const {
    return config.layout == Layout::kFlat &&
           (is_gathering() || has_blocks() || config.strategy == Strategy::kTwoSided);
  }
  bool stores_by_expert() const {
    return config.strategy == Strategy::kHighThroughput && config.layout == Layout::kFlatByExpert &&
           !config.max_recv_rows;
  }
  /// Whether rows are copied to their experts' on arrival.
  bool expands() const { return by_expert() && !stores_by_expert(); }
  bool copies_to_flat() const { return config.layout == Layout::kFlat && !is_flat_in_place(); }
  std::int64_t tokens() const { return num_ranks * config.max_tokens_per_rank; }
  /// Rows of the layout at most.
  std::int64_t rows() const {
    switch (config.layout) {
      case Layout::kExpertMajor:
        return max_local_experts * tokens();
      case Layout::kFlat:
        return config.max_recv_rows.value_or(tokens());
      case Layout::kFlatByExpert:
        // Every token has each of its experts here, and each group lacks one row to be full.
        return config.max_recv_rows.value_or(
            tokens() * std::min<std::int64_t>(config.top_k, max_local_experts) +
            max_local_experts * (config.expert_alignment - 1));
      default:
        return tokens();
    }
  }
  /// Rows of a slot's store.
  std::int64_t stored_rows() const {
    if (!has_blocks()) return is_flat_in_place() ? std::max(rows(), tokens()) : tokens();
    return config.layout == Layout::kFlat ? config.max_recv_rows.value_or(0) : 0;
  }
  std::int64_t rows_per_token() const {
    if (config.weighting != Weighting::kOrigin) return 1;
    return std::max(1, std::min(config.top_k, max_local_experts));
  }
  /// Bytes of one result on its way home.
  std::int64_t wire_row_bytes() const {
    if (config.combine_wire == Wire::kNone) return combine_row_bytes;
    const std::int64_t hidden = combine_row_bytes / 2;  // bfloat16
    const std::int64_t scale = config.wire_scale == WireScale::kFloat32 ? 4 : 1;
    const auto whole_words = [](std::int64_t bytes) { return (bytes + 3) / 4 * 4; };
    return whole_words(whole_words(hidden) + (hidden + 127) / 128 * scale);
  }
  Workspace walk() const {
    AllToAllConfig resolved = config;
    resolved.dispatch_row_bytes = dispatch_row_bytes;
    resolved.combine_row_bytes = combine_row_bytes;
    return walk_workspace(resolved, num_ranks, max_local_experts, kControlBytes);
  }
  std::string describe() const {
    std::string text = std::string(name_of(config.strategy)) + " " + name_of(config.layout) + " " +
                       name_of(config.weighting) + ", " + std::to_string(num_ranks) + " ranks, M " +
                       std::to_string(config.max_tokens_per_rank) + ", K " +
                       std::to_string(config.top_k) + ", L " + std::to_string(max_local_experts) +
                       ", F " + std::to_string(config.max_in_flight) + ", rows of " +
                       std::to_string(dispatch_row_bytes) + " and " +
                       std::to_string(combine_row_bytes) + " bytes, guard " +
                       std::to_string(config.test_knobs.row_guard_bytes) + ", alignment " +
                       std::to_string(config.expert_alignment);
    if (config.max_recv_rows) text += ", at most " + std::to_string(*config.max_recv_rows);
    if (config.combine_wire != Wire::kNone) text += ", wires";
    if (config.device == DeviceType::kGpu) text += ", on a GPU";
    return text;
  }
};

/// What peers write into a slot, and what they read from it.
inline void add_slot(const WorkspaceCase& c, const Workspace& w, int slot,
                     std::vector<Region>& out) {
  const std::int64_t base = w.slot_offset + slot * w.slot_stride;
  const std::int64_t rows = c.stored_rows();
  const std::int64_t index_bytes = rows * c.config.top_k * 4;
  out.push_back({"source_token", base + w.store.source_token_offset, rows * 4});
  out.push_back({"topk_ids", base + w.store.topk_ids_offset, index_bytes});
  out.push_back({"topk_weights", base + w.store.topk_weights_offset, index_bytes});
  out.push_back({"payload", base + w.store.payload_offset, w.store.payload_bytes});
  out.push_back(
      {"combine", base + w.store.combine_offset, rows * c.rows_per_token() * c.wire_row_bytes()});
}

inline std::vector<Region> window_regions(const WorkspaceCase& c, const Workspace& w) {
  std::vector<Region> regions;
  regions.push_back({"control", w.control_offset, kControlBytes});
  for (int slot = 0; slot < c.config.max_in_flight && c.is_gathered(); ++slot) {
    const std::int64_t base = w.block_offset + slot * w.block_stride;
    regions.push_back({"gathered", base, w.block_combine_offset});
    regions.push_back({"results", base + w.block_combine_offset, c.tokens() * c.combine_row_bytes});
  }
  if (c.is_private()) return regions;
  for (int slot = 0; slot < c.config.max_in_flight; ++slot) {
    const std::int64_t base = w.flags_offset + slot * w.flags_stride;
    for (const std::int64_t offset : {w.dispatch_flags_offset, w.combine_flags_offset,
                                      w.ack_flags_offset, w.count_flags_offset}) {
      regions.push_back({"flags", base + offset, c.num_ranks * kFlagBytes});
    }
    if (c.is_window()) add_slot(c, w, slot, regions);
  }
  if (c.has_blocks()) {
    regions.push_back({"counts", w.counts_offset,
                       c.config.max_in_flight * std::int64_t{4} * c.num_ranks *
                           (c.num_ranks + (c.stores_by_expert() ? c.config.num_experts : 0))});
  }
  return regions;
}

inline void add_local_slot(const WorkspaceCase& c, const Workspace& w, int slot,
                           std::vector<Region>& out) {
  const std::int64_t base = w.local_slot_offset + slot * w.local_slot_stride;
  const auto add = [&](const char* name, std::int64_t offset, std::int64_t bytes) {
    out.push_back({name, base + offset, bytes});
  };
  // Rank [R], expert [L], offsets [L+1], rows [1].
  const std::int64_t num_counts = c.num_ranks + 2 * c.max_local_experts + 2;
  add("counts", w.local_counts_offset, num_counts * 4);
  add("source_rank", w.local_source_rank_offset, c.rows() * 4);
  add("source_token", w.local_source_token_offset, c.rows() * 4);
  add("local payload", w.local_payload_offset, w.local_payload_bytes);
  if (c.by_expert()) add("weights", w.local_weights_offset, c.rows() * 4);
  if (c.expands() || c.copies_to_flat()) {
    add("local combine", w.local_combine_offset, c.rows() * c.combine_row_bytes);
  }
  if (c.is_gathering() || c.copies_to_flat()) {
    const std::int64_t rows = c.is_gathering() ? c.tokens() : c.rows();
    add("ids", w.local_ids_offset, rows * c.config.top_k * 4);
    add("gate", w.local_gate_offset, rows * c.config.top_k * 4);
  }
  if (c.config.dispatch_wire != Wire::kNone) {
    // Room for a row of FP8 of that many bytes; a float32 scale for each 128 of them.
    const std::int64_t tokens = c.config.max_tokens_per_rank;
    add("packed rows", w.local_wire_offset, tokens * c.dispatch_row_bytes);
    add("scales", w.local_wire_scales_offset, tokens * ((c.dispatch_row_bytes + 127) / 128) * 4);
  }
  if (c.config.device != DeviceType::kGpu) return;
  const DeviceRegions& d = w.device;
  const std::int64_t sent = c.config.max_tokens_per_rank;
  const std::int64_t top_k = c.config.top_k;
  const bool is_origin = c.config.weighting == Weighting::kOrigin;
  add("sent ids", d.sent_ids_offset, sent * top_k * 4);
  add("sent weights", d.sent_weights_offset, is_origin ? sent * top_k * 4 : 0);
  add("targets", d.targets_offset, sent * std::min<std::int64_t>(top_k, c.num_ranks) * 8);
  add("rows per rank", d.rows_per_rank_offset, c.num_ranks * 4);
  const std::int64_t pairs = c.tokens() * std::min<std::int64_t>(top_k, c.max_local_experts);
  add("pairs", d.pairs_offset, c.by_expert() ? pairs * 12 : 0);
  // Tiles of up to 32 rows, and as many as blocks; a word for each rank or expert.
  const std::int64_t tiles = 1024 + (c.tokens() + 31) / 32;
  add("tiles", d.tiles_offset, tiles * std::max(c.num_ranks, c.max_local_experts) * 8);
}

inline std::vector<Region> private_regions(const WorkspaceCase& c, const Workspace& w) {
  std::vector<Region> regions;
  for (int slot = 0; slot < c.config.max_in_flight; ++slot) {
    if (c.is_private()) add_slot(c, w, slot, regions);
    add_local_slot(c, w, slot, regions);
  }
  if (c.config.device == DeviceType::kGpu) {
    const DeviceRegions& d = w.device;
    const std::int64_t experts = c.config.num_experts;
    regions.push_back({"slots", d.slots_offset, c.config.max_in_flight * 128});
    regions.push_back({"control words", d.control_offset, 128});
    regions.push_back({"windows", d.windows_offset, c.num_ranks * 8});
    regions.push_back({"rank_of", d.rank_of_offset, experts * 4});
    regions.push_back({"local_of", d.local_of_offset, experts * 4});
    regions.push_back({"copy_begin", d.copy_begin_offset, (experts + 1) * 4});
    regions.push_back({"copies", d.copies_offset, experts * 4});
    regions.push_back({"is_active", d.is_active_offset, c.num_ranks * 4});
  }
  if (!c.is_private()) return regions;
  regions.push_back({"scratch", w.local_scratch_offset, w.local_scratch_bytes});
  const std::int64_t row_bytes = c.rows_per_token() * c.wire_row_bytes();
  // Equal splits bring a row of every token from every rank, whether it went there or not. Gathered
  // rows are read where they are, unless the transport adds them.
  const bool from_all = c.config.strategy == Strategy::kBatched;
  std::int64_t homecoming = from_all ? c.num_ranks : std::min(c.num_ranks, c.config.top_k);
  if (c.is_gathered()) homecoming = c.config.deterministic ? 0 : 1;
  regions.push_back(
      {"mine", w.local_mine_offset, c.config.max_tokens_per_rank * homecoming * row_bytes});
  return regions;
}

constexpr Strategy kStrategies[] = {
    Strategy::kBroadcast, Strategy::kGatherScatter,  Strategy::kBatched,   Strategy::kOneSided,
    Strategy::kTwoSided,  Strategy::kHighThroughput, Strategy::kLowLatency};

/// Whether the strategy gives the layout: the table of strategies, told once more.
inline bool gives(Strategy strategy, Layout layout) {
  if (layout == Layout::kGathered) {
    return strategy == Strategy::kBroadcast || strategy == Strategy::kGatherScatter;
  }
  if (strategy != Strategy::kHighThroughput) return true;
  return layout == Layout::kFlat || layout == Layout::kFlatByExpert;
}

/// Calls `visit` for the configurations that only some strategies or layouts have.
inline void for_each_limit(WorkspaceCase& c, const std::function<void()>& visit) {
  const auto checked = [&] {
    if (::testing::Test::HasFailure()) return;
    SCOPED_TRACE(c.describe());
    visit();
  };
  checked();
  if (c.config.layout == Layout::kFlat || c.config.layout == Layout::kFlatByExpert) {
    for (const std::int64_t limit : {std::int64_t{1}, c.tokens() + 3}) {
      c.config.max_recv_rows = limit;
      checked();
    }
    c.config.max_recv_rows.reset();
  }
  if (c.config.layout == Layout::kFlatByExpert) {
    c.config.expert_alignment = 16;
    checked();
    c.config.expert_alignment = 1;
  }
  if (c.config.strategy == Strategy::kLowLatency) {
    c.config.dispatch_wire = Wire::kFp8E4M3;
    if (c.by_expert()) c.config.combine_wire = Wire::kFp8E4M3;
    for (const WireScale scale : {WireScale::kFloat32, WireScale::kUe8m0}) {
      c.config.wire_scale = scale;
      checked();
    }
    c.config.wire_scale = WireScale::kFloat32;
    c.config.dispatch_wire = c.config.combine_wire = Wire::kNone;
  }
}

/// Whether a GPU has it.
inline bool runs_on_gpu(const WorkspaceCase& c) {
  return c.is_window() &&
         (c.config.layout == Layout::kRankMajor || c.config.layout == Layout::kExpertMajor);
}

/// Calls `visit` for every pairing of strategy, layout and weighting that exists.
inline void for_each_layout(WorkspaceCase& c, const std::function<void()>& visit) {
  for (const Strategy strategy : kStrategies) {
    c.config.strategy = strategy;
    for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor,
                                Layout::kFlat, Layout::kFlatByExpert}) {
      if (!gives(strategy, layout)) continue;
      c.config.layout = layout;
      for (const Weighting weighting :
           {Weighting::kApplied, Weighting::kCarried, Weighting::kOrigin}) {
        if (!is_per_expert(layout) && weighting != Weighting::kApplied) continue;
        c.config.weighting = weighting;
        for_each_limit(c, visit);
        if (runs_on_gpu(c)) {
          c.config.device = DeviceType::kGpu;
          for_each_limit(c, visit);
          c.config.device = DeviceType::kCpu;
        }
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

/// Calls `visit` for a grid of configurations, up to the first failure.
inline void for_each_case(const std::function<void(const WorkspaceCase&)>& visit) {
  WorkspaceCase c;
  c.config.num_experts = 1;
  for (const int num_ranks : {1, 2, 7}) {
    for (const std::int64_t max_tokens : {1, 5}) {
      for (const int top_k : {1, 3}) {
        for (const int max_local : {1, 2, 40}) {
          for (const std::int64_t row_bytes : {1, 37, 256}) {
            for (const std::int64_t guard : {0, 48}) {
              c.num_ranks = num_ranks;
              c.max_local_experts = max_local;
              c.config.top_k = top_k;
              c.config.max_tokens_per_rank = max_tokens;
              c.dispatch_row_bytes = row_bytes;
              c.combine_row_bytes = 4 * row_bytes + 4;
              c.config.test_knobs.row_guard_bytes = guard;
              c.config.max_in_flight = 1 + top_k;
              for_each_layout(c, [&] { visit(c); });
              if (::testing::Test::HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

}  // namespace fanfold::plan
