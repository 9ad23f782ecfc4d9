// SPDX-License-Identifier: Apache-2.0
#include "plan/shared_workspace.h"

#include <cstdint>
#include <string>
#include <vector>

#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold::plan {
namespace {

using testing::expect_error;

constexpr int kNumRanks = 3;
constexpr std::int64_t kControlBytes = 640;

AllToAllConfig config_of(Strategy strategy, std::int64_t hidden, std::int64_t max_tokens,
                         int top_k = 3) {
  AllToAllConfig config;
  config.num_experts = 9;
  config.top_k = top_k;
  config.max_tokens_per_rank = max_tokens;
  config.hidden = hidden;
  config.dtype = DType::kFloat32;
  config.combine_dtype = DType::kFloat32;
  config.dispatch_row_bytes = hidden * 4;
  config.combine_row_bytes = hidden * 4;
  config.max_in_flight = 2;
  config.strategy = strategy;
  return config;
}

Workspace walk(const AllToAllConfig& config) {
  return walk_workspace(config, kNumRanks, /*max_local_experts=*/3, kControlBytes);
}

constexpr Strategy kAll[] = {
    Strategy::kBroadcast, Strategy::kGatherScatter, Strategy::kBatched,       Strategy::kOneSided,
    Strategy::kTwoSided,  Strategy::kLowLatency,    Strategy::kHighThroughput};

/// Rows that arrive end before `split`, those that go home begin there, and the slot ends with
/// them.
void expect_apart(const Workspace& w, std::int64_t split) {
  EXPECT_LE(w.store.payload_offset + w.store.payload_bytes, split);
  EXPECT_GE(w.store.combine_offset, split);
  EXPECT_LE(w.store.combine_offset + w.store.combine_bytes, w.slot_stride);
}

TEST(SharedWorkspaceTest, AnEqualConfigurationFitsAndLiesWhereItsOwnerLies) {
  for (const Strategy strategy : kAll) {
    SCOPED_TRACE(name_of(strategy));
    const AllToAllConfig config = config_of(strategy, 16, 8);
    const Workspace owner = walk(config);
    const Workspace shared = share_workspace(config, owner, owner, "AllToAll 'a'");
    EXPECT_EQ(shared.metainfo().entries(), owner.metainfo().entries());
  }
}

TEST(SharedWorkspaceTest, SmallerOnesKeepTheSlotsAndTheirTwoHalves) {
  for (const Strategy strategy : kAll) {
    SCOPED_TRACE(name_of(strategy));
    const Workspace owner = walk(config_of(strategy, 64, 9));
    for (const std::int64_t hidden : {1, 7, 64}) {
      for (const std::int64_t max_tokens : {1, 5, 9}) {
        for (const int top_k : {1, 3}) {
          const AllToAllConfig config = config_of(strategy, hidden, max_tokens, top_k);
          const Workspace w = share_workspace(config, walk(config), owner, "AllToAll 'a'");
          EXPECT_EQ(w.slot_offset, owner.slot_offset);
          EXPECT_EQ(w.slot_stride, owner.slot_stride);
          EXPECT_EQ(w.flags_offset, owner.flags_offset);
          EXPECT_EQ(w.flags_stride, owner.flags_stride);
          EXPECT_EQ(w.local_slot_offset, owner.local_slot_offset);
          EXPECT_EQ(w.local_slot_stride, owner.local_slot_stride);
          EXPECT_EQ(w.total_bytes(), owner.total_bytes());
          EXPECT_EQ(w.max_tokens_per_rank, max_tokens);
          if (store_kind(strategy) == StoreKind::kWindow) {
            expect_apart(w, owner.store.combine_offset);
          } else if (store_kind(strategy) == StoreKind::kPrivate) {
            EXPECT_LE(w.store.bytes, w.slot_stride);
          }
        }
      }
    }
  }
}

TEST(SharedWorkspaceTest, RowsThatArriveNeverReachTheOwnersResults) {
  // More bytes arrive, fewer go home: all of it would fit in the slot, but not in the halves.
  AllToAllConfig config = config_of(Strategy::kOneSided, 64, 8);
  const Workspace owner = walk(config);
  config.dispatch_row_bytes = 300;
  config.combine_row_bytes = 100;
  const Workspace own = walk(config);
  ASSERT_LE(own.store.bytes, owner.slot_stride);
  const std::string needed = std::to_string(own.store.payload_offset + own.store.payload_bytes);
  const std::string available = std::to_string(owner.store.combine_offset);
  expect_error<InvalidArgument>(
      {"workspace_of", "rows that arrive", "needed " + needed, "AllToAll 'a' has " + available},
      [&] { share_workspace(config, own, owner, "AllToAll 'a'"); });
}

TEST(SharedWorkspaceTest, WhatDoesNotFitIsNamedWithBytesNeededAndAvailable) {
  for (const Strategy strategy : kAll) {
    SCOPED_TRACE(name_of(strategy));
    const Workspace owner = walk(config_of(strategy, 16, 8));
    AllToAllConfig more_results = config_of(strategy, 16, 8);
    more_results.combine_row_bytes = 4096;
    AllToAllConfig more_experts = config_of(strategy, 16, 8);
    more_experts.max_local_experts = 200;
    std::vector<AllToAllConfig> larger = {more_experts};
    if (store_kind(strategy) != StoreKind::kBlocks) {
      larger.push_back(config_of(strategy, 64, 8));
      larger.push_back(config_of(strategy, 16, 80));
      larger.push_back(more_results);
    }
    for (const AllToAllConfig& config : larger) {
      expect_error<InvalidArgument>({"workspace_of", "needed", "bytes", "AllToAll 'a' has"}, [&] {
        share_workspace(config, walk(config), owner, "AllToAll 'a'");
      });
    }
  }
}

TEST(SharedWorkspaceTest, CountsOfMoreExpertsAreNamedAndCountOnlyWhereTheyAreSent) {
  AllToAllConfig large = config_of(Strategy::kHighThroughput, 64, 9);
  large.layout = Layout::kFlatByExpert;
  const Workspace owner = walk(large);
  AllToAllConfig more = config_of(Strategy::kHighThroughput, 3, 2);
  more.num_experts = 99;
  more.layout = Layout::kFlatByExpert;
  // Per slot and source a count for each of 3 ranks and 9 or 99 experts.
  expect_error<InvalidArgument>(
      {"counts of a slot: needed 1224 bytes", "AllToAll 'a' has 144", "num_experts"},
      [&] { share_workspace(more, walk(more), owner, "AllToAll 'a'"); });
  more.layout = Layout::kFlat;
  EXPECT_EQ(share_workspace(more, walk(more), owner, "a").counts_stride, owner.counts_stride);
}

TEST(SharedWorkspaceTest, WhoSharesCanBeSharedInTurn) {
  for (const Strategy strategy : kAll) {
    SCOPED_TRACE(name_of(strategy));
    const AllToAllConfig large = config_of(strategy, 64, 9);
    const AllToAllConfig small = config_of(strategy, 3, 2);
    const Workspace owner = walk(large);
    const Workspace shared = share_workspace(small, walk(small), owner, "a");
    const Workspace again = share_workspace(large, walk(large), shared, "b");
    EXPECT_EQ(again.metainfo().entries(), owner.metainfo().entries());
  }
}

}  // namespace
}  // namespace fanfold::plan
