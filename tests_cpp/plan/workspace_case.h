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

  bool is_broadcast() const { return config.strategy == Strategy::kBroadcast; }
  bool is_expert_major() const { return config.layout == Layout::kExpertMajor; }
  bool is_gathered() const { return config.layout == Layout::kGathered; }
  std::int64_t tokens() const { return num_ranks * config.max_tokens_per_rank; }
  /// Rows of the layout.
  std::int64_t rows() const { return is_expert_major() ? max_local_experts * tokens() : tokens(); }
  std::int64_t rows_per_token() const {
    if (config.weighting != Weighting::kOrigin) return 1;
    return std::max(1, std::min(config.top_k, max_local_experts));
  }
  Workspace walk() const {
    AllToAllConfig resolved = config;
    resolved.dispatch_row_bytes = dispatch_row_bytes;
    resolved.combine_row_bytes = combine_row_bytes;
    return walk_workspace(resolved, num_ranks, max_local_experts, kControlBytes);
  }
  std::string describe() const {
    return std::string(name_of(config.strategy)) + " " + name_of(config.layout) + " " +
           name_of(config.weighting) + ", " + std::to_string(num_ranks) + " ranks, M " +
           std::to_string(config.max_tokens_per_rank) + ", K " + std::to_string(config.top_k) +
           ", L " + std::to_string(max_local_experts) + ", F " +
           std::to_string(config.max_in_flight) + ", rows of " +
           std::to_string(dispatch_row_bytes) + " and " + std::to_string(combine_row_bytes) +
           " bytes, guard " + std::to_string(config.test_knobs.row_guard_bytes);
  }
};

/// What peers write into a slot, and what they read from it.
inline void add_slot(const WorkspaceCase& c, const Workspace& w, int slot,
                     std::vector<Region>& out) {
  const std::int64_t base = w.slot_offset + slot * w.slot_stride;
  const std::int64_t index_bytes = c.tokens() * c.config.top_k * 4;
  out.push_back({"source_token", base + w.source_token_offset, c.tokens() * 4});
  out.push_back({"topk_ids", base + w.topk_ids_offset, index_bytes});
  out.push_back({"topk_weights", base + w.topk_weights_offset, index_bytes});
  out.push_back({"payload", base + w.payload_offset, w.payload_bytes});
  out.push_back(
      {"combine", base + w.combine_offset, c.tokens() * c.rows_per_token() * c.combine_row_bytes});
}

inline std::vector<Region> window_regions(const WorkspaceCase& c, const Workspace& w) {
  std::vector<Region> regions;
  regions.push_back({"control", w.control_offset, kControlBytes});
  if (c.is_broadcast()) return regions;
  for (int slot = 0; slot < c.config.max_in_flight; ++slot) {
    const std::int64_t base = w.flags_offset + slot * w.flags_stride;
    for (const std::int64_t offset :
         {w.dispatch_flags_offset, w.combine_flags_offset, w.ack_flags_offset}) {
      regions.push_back({"flags", base + offset, c.num_ranks * kFlagBytes});
    }
    add_slot(c, w, slot, regions);
  }
  return regions;
}

inline void add_local_slot(const WorkspaceCase& c, const Workspace& w, int slot,
                           std::vector<Region>& out) {
  const std::int64_t base = w.local_slot_offset + slot * w.local_slot_stride;
  // Rank [R], expert [L], offsets [L+1], rows [1].
  const std::int64_t num_counts = c.num_ranks + 2 * c.max_local_experts + 2;
  out.push_back({"counts", base + w.local_counts_offset, num_counts * 4});
  out.push_back({"source_rank", base + w.local_source_rank_offset, c.rows() * 4});
  out.push_back({"source_token", base + w.local_source_token_offset, c.rows() * 4});
  out.push_back({"local payload", base + w.local_payload_offset, w.local_payload_bytes});
  if (c.is_expert_major()) {
    out.push_back({"weights", base + w.local_weights_offset, c.rows() * 4});
  }
  if (c.is_expert_major() || c.is_gathered()) {
    out.push_back({"local combine", base + w.local_combine_offset, c.rows() * c.combine_row_bytes});
  }
  if (c.is_broadcast()) {
    const std::int64_t index_bytes = c.tokens() * c.config.top_k * 4;
    out.push_back({"all ids", base + w.local_ids_offset, index_bytes});
    out.push_back({"all weights", base + w.local_gate_offset, index_bytes});
  }
}

inline std::vector<Region> private_regions(const WorkspaceCase& c, const Workspace& w) {
  std::vector<Region> regions;
  for (int slot = 0; slot < c.config.max_in_flight; ++slot) {
    if (c.is_broadcast()) add_slot(c, w, slot, regions);
    add_local_slot(c, w, slot, regions);
  }
  if (c.is_broadcast()) {
    const std::int64_t row_bytes = c.rows_per_token() * c.combine_row_bytes;
    // Without ids, which only gathered allows, every token comes home from every rank.
    const std::int64_t homecoming =
        c.is_gathered() ? c.num_ranks : std::min(c.num_ranks, c.config.top_k);
    regions.push_back({"scratch", w.local_scratch_offset, c.tokens() * row_bytes});
    regions.push_back(
        {"mine", w.local_mine_offset, c.config.max_tokens_per_rank * homecoming * row_bytes});
  }
  return regions;
}

/// Calls `visit` for every pairing of strategy, layout and weighting that exists.
inline void for_each_layout(WorkspaceCase& c, const std::function<void()>& visit) {
  for (const Strategy strategy : {Strategy::kOneSided, Strategy::kBroadcast}) {
    c.config.strategy = strategy;
    for (const Layout layout : {Layout::kRankMajor, Layout::kGathered, Layout::kExpertMajor}) {
      if (layout == Layout::kGathered && strategy == Strategy::kOneSided) continue;
      c.config.layout = layout;
      for (const Weighting weighting :
           {Weighting::kApplied, Weighting::kCarried, Weighting::kOrigin}) {
        if (layout != Layout::kExpertMajor && weighting != Weighting::kApplied) continue;
        c.config.weighting = weighting;
        SCOPED_TRACE(c.describe());
        visit();
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
    for (const std::int64_t max_tokens : {1, 5, 64}) {
      for (const int top_k : {1, 3}) {
        for (const int max_local : {1, 2, 40}) {
          for (const std::int64_t row_bytes : {1, 37, 256}) {
            for (const std::int64_t guard : {0, 16, 48}) {
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
