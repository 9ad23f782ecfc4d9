// SPDX-License-Identifier: Apache-2.0
#include "plan/workspace.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fanfold/all_to_all.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/workspace_case.h"
#include "support/expect_error.h"
#include "support/random_bits.h"

namespace fanfold::plan {
namespace {

constexpr std::uint64_t kSeed = 20240303;
constexpr std::int64_t kAlignment = 128;

std::int64_t aligned(std::int64_t bytes) { return (bytes + 127) / 128 * 128; }

/// In [0, total), aligned, apart from each other; `total` is where the last one ends.
void expect_apart(std::vector<Region> regions, std::int64_t total) {
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
  });
  std::int64_t end = 0;
  std::string before = "the start";
  for (const Region& region : regions) {
    EXPECT_EQ(region.begin % kAlignment, 0) << region.name;
    EXPECT_GE(region.bytes, 0) << region.name;
    EXPECT_GE(region.begin, end) << region.name << " overlaps " << before;
    end = region.begin + region.bytes;
    before = region.name;
  }
  EXPECT_EQ(total, aligned(end)) << "the last region is " << before;
}

/// Payload sets of `row_bytes` in all: one row, equal parts, single bytes, random parts.
std::vector<std::vector<std::int64_t>> payload_sets(std::int64_t row_bytes,
                                                    testing::RandomBits& random) {
  std::vector<std::vector<std::int64_t>> sets = {{row_bytes}};
  const std::int64_t most = std::min<std::int64_t>(row_bytes, AllToAll::kMaxPayloads);
  sets.emplace_back(static_cast<std::size_t>(most), row_bytes / most);
  sets.emplace_back(static_cast<std::size_t>(most), 1);
  sets.back().back() = row_bytes - (most - 1);
  std::vector<std::int64_t> parts;
  for (std::int64_t left = row_bytes; left > 0 && std::int64_t(parts.size()) < most;) {
    parts.push_back(1 + random.below(left));
    left -= parts.back();
  }
  sets.push_back(parts);
  return sets;
}

/// Bytes up to the end of the last payload's rows, regions one after another from `begin`.
std::int64_t end_of_payloads(const std::vector<std::int64_t>& set, std::int64_t guard,
                             std::int64_t num_rows, std::int64_t begin) {
  std::int64_t end = begin;
  for (const std::int64_t row_bytes : set) {
    EXPECT_EQ(begin % kAlignment, 0);
    EXPECT_GE(begin, end) << "payloads overlap";
    end = begin + num_rows * (row_bytes + guard);
    begin += payload_region_bytes(num_rows, row_bytes + guard);
  }
  return std::max(end, begin);
}

void expect_payloads_fit(const WorkspaceCase& c, const Workspace& w, testing::RandomBits& random) {
  const std::int64_t guard = c.config.test_knobs.row_guard_bytes;
  for (const auto& set : payload_sets(c.dispatch_row_bytes, random)) {
    if (!c.is_gathered()) {
      EXPECT_LE(end_of_payloads(set, guard, c.stored_rows(), 0), w.store.payload_bytes);
    }
    if (c.expands() || c.copies_to_flat()) {
      EXPECT_LE(end_of_payloads(set, guard, c.rows(), 0), w.local_payload_bytes);
    }
    if (c.is_gathered()) {
      EXPECT_LE(end_of_payloads(set, guard, c.tokens(), 0), w.block_combine_offset);
    }
  }
}

TEST(WorkspaceTest, RegionsAreAlignedAndApartAndEndWhereTheSizesSay) {
  for_each_case([](const WorkspaceCase& c) {
    const Workspace w = c.walk();
    expect_apart(window_regions(c, w), w.symmetric_bytes);
    expect_apart(private_regions(c, w), w.local_bytes);
    EXPECT_EQ(w.block_bytes, c.has_blocks() ? c.config.max_in_flight * w.store.bytes : 0);
    EXPECT_EQ(w.total_bytes(), w.symmetric_bytes + w.block_bytes + w.local_bytes);
  });
}

TEST(WorkspaceTest, EveryPayloadSetOfTheConfiguredBytesFits) {
  testing::RandomBits random(kSeed);
  for_each_case([&random](const WorkspaceCase& c) { expect_payloads_fit(c, c.walk(), random); });
}

TEST(WorkspaceTest, FlagsAndControlLieBeforeAllRows) {
  // A window that is used again is made fit by zeroing its head.
  for_each_case([](const WorkspaceCase& c) {
    if (c.is_private()) return;
    const Workspace w = c.walk();
    EXPECT_GE(w.flags_offset, w.control_offset + kControlBytes);
    EXPECT_GE(w.slot_offset, w.flags_offset + c.config.max_in_flight * w.flags_stride);
  });
}

TEST(WorkspaceTest, WhatKeepsRowsPrivatelyHasNoSymmetricMemoryButItsChannels) {
  for_each_case([](const WorkspaceCase& c) {
    if (!c.is_private() || c.is_gathered()) return;
    EXPECT_EQ(c.walk().symmetric_bytes, aligned(kControlBytes));
  });
}

TEST(WorkspaceTest, TheWalkRecordsWhatItWasMadeFrom) {
  for_each_case([](const WorkspaceCase& c) {
    const Workspace w = c.walk();
    EXPECT_EQ(w.num_ranks, c.num_ranks);
    EXPECT_EQ(w.num_experts, c.config.num_experts);
    EXPECT_EQ(w.max_local_experts, c.max_local_experts);
    EXPECT_EQ(w.top_k, c.config.top_k);
    EXPECT_EQ(w.max_tokens_per_rank, c.config.max_tokens_per_rank);
    EXPECT_EQ(w.max_in_flight, c.config.max_in_flight);
    EXPECT_EQ(w.dispatch_row_bytes, c.dispatch_row_bytes);
    EXPECT_EQ(w.combine_row_bytes, c.combine_row_bytes);
    EXPECT_EQ(w.row_guard_bytes, c.config.test_knobs.row_guard_bytes);
    EXPECT_EQ(w.rows_per_token, c.rows_per_token());
    EXPECT_EQ(w.wire_row_bytes, c.wire_row_bytes());
    EXPECT_EQ(w.max_layout_rows, c.rows());
    EXPECT_EQ(w.store.num_rows, c.stored_rows());
  });
}

TEST(WorkspaceTest, RoomForPlacementsToComeIsKept) {
  WorkspaceCase asked;
  asked.num_ranks = 2;
  asked.config.top_k = 2;
  asked.config.max_tokens_per_rank = 5;
  asked.config.num_experts = 9;
  for_each_layout(asked, [&] {
    WorkspaceCase larger = asked;
    larger.max_local_experts = 7;
    const Workspace wanted = larger.walk();
    asked.config.max_local_experts = 7;
    const Workspace got = asked.walk();
    EXPECT_EQ(got.metainfo().entries(), wanted.metainfo().entries());
    asked.config.max_local_experts = 1;  // fewer than there are change nothing
    EXPECT_EQ(larger.walk().metainfo().entries(), wanted.metainfo().entries());
    asked.config.max_local_experts = 0;
  });
}

/// The store of as many rows as a round brought.
void expect_store(const WorkspaceCase& c, std::int64_t num_rows, std::int64_t min_combine_offset) {
  AllToAllConfig resolved = c.config;
  resolved.dispatch_row_bytes = c.dispatch_row_bytes;
  resolved.combine_row_bytes = c.combine_row_bytes;
  const std::int64_t num_places = 3 * num_rows + 5;  // of rows that lie by expert
  const Store store = walk_store(resolved, c.walk(), num_rows, num_places, min_combine_offset);
  EXPECT_EQ(store.num_rows, num_rows);
  EXPECT_EQ(store.num_places, c.stores_by_expert() ? num_places : num_rows);
  EXPECT_GE(store.combine_offset, min_combine_offset);
  const std::int64_t index_bytes = num_rows * c.config.top_k * 4;
  std::vector<Region> regions = {
      {"source_token", store.source_token_offset, num_rows * 4},
      {"topk_ids", store.topk_ids_offset, index_bytes},
      {"topk_weights", store.topk_weights_offset, index_bytes},
      {"payload", store.payload_offset, store.payload_bytes},
      {"combine", store.combine_offset,
       c.stores_by_expert() ? num_places * c.combine_row_bytes
                            : num_rows * c.rows_per_token() * c.wire_row_bytes()}};
  if (c.stores_by_expert() && c.config.weighting != Weighting::kOrigin) {
    regions.push_back({"partial", store.partial_offset, num_rows * c.combine_row_bytes});
  }
  expect_apart(regions, store.bytes);
  testing::RandomBits random(kSeed);
  for (const auto& set : payload_sets(c.dispatch_row_bytes, random)) {
    if (c.is_gathered() || store.num_places == 0) continue;
    EXPECT_LE(end_of_payloads(set, c.config.test_knobs.row_guard_bytes, store.num_places, 0),
              store.payload_bytes);
  }
}

TEST(WorkspaceTest, AStoreOfAnyNumberOfRowsHasItsRegionsApart) {
  WorkspaceCase c;
  c.num_ranks = 3;
  c.max_local_experts = 4;
  c.config.top_k = 3;
  c.config.max_tokens_per_rank = 5;
  c.dispatch_row_bytes = 37;
  c.combine_row_bytes = 76;
  c.config.test_knobs.row_guard_bytes = 16;
  for_each_layout(c, [&] {
    for (const std::int64_t num_rows : {0, 1, 2, 77, 1000}) {
      // Behind which the results of the round before may still be read.
      for (const std::int64_t offset : {0, 100, 1 << 20}) expect_store(c, num_rows, offset);
    }
  });
}

TEST(WorkspaceTest, GuardsLieBehindEveryRowOfEveryPayload) {
  WorkspaceCase c;
  c.num_ranks = 3;
  c.config.max_tokens_per_rank = 5;
  c.dispatch_row_bytes = 100;
  c.combine_row_bytes = 100;
  c.config.top_k = 1;
  for_each_layout(c, [&] {
    c.config.test_knobs.row_guard_bytes = 0;
    const Workspace dense = c.walk();
    c.config.test_knobs.row_guard_bytes = 32;
    const Workspace guarded = c.walk();
    const std::int64_t per_row = 32 * AllToAll::kMaxPayloads;
    if (!c.is_gathered()) {
      EXPECT_GE(guarded.store.payload_bytes, dense.store.payload_bytes + c.stored_rows() * per_row);
    }
    if (c.expands() || c.copies_to_flat()) {
      EXPECT_GE(guarded.local_payload_bytes, dense.local_payload_bytes + c.rows() * per_row);
    }
    if (c.is_gathered()) {
      EXPECT_GE(guarded.block_combine_offset, dense.block_combine_offset + c.tokens() * per_row);
    }
    EXPECT_EQ(guarded.store.combine_bytes, dense.store.combine_bytes) << "results have no guards";
  });
}

TEST(WorkspaceTest, OffsetsPastThirtyTwoBitsAreExact) {
  WorkspaceCase c;
  c.num_ranks = 8;
  c.max_local_experts = 5;
  c.config.top_k = 8;
  c.config.max_in_flight = 3;
  testing::RandomBits random(kSeed);
  for (const std::int64_t max_tokens : {1LL << 16, (1LL << 24) + 1, 1LL << 30}) {
    for (const std::int64_t row_bytes : {std::int64_t{4099}, (std::int64_t{1} << 17) + 1}) {
      c.config.max_tokens_per_rank = max_tokens;
      c.dispatch_row_bytes = row_bytes;
      c.combine_row_bytes = 2 * row_bytes + 2;
      for_each_layout(c, [&] {
        const Workspace w = c.walk();
        ASSERT_GT(c.tokens() * row_bytes, std::int64_t{1} << 31);
        if (!c.has_blocks()) {
          EXPECT_GT(w.slot_stride, std::int64_t{1} << 32);
        }
        expect_apart(window_regions(c, w), w.symmetric_bytes);
        expect_apart(private_regions(c, w), w.local_bytes);
        expect_payloads_fit(c, w, random);
      });
    }
  }
}

TEST(WorkspaceTest, SizesThatSixtyFourBitsCannotTellAreRefused) {
  WorkspaceCase c;
  c.num_ranks = 2;
  c.config.top_k = 1;
  c.config.max_tokens_per_rank = std::int64_t{1} << 30;
  // 2^31 rows of 2^33 bytes are 2^64 bytes: an offset would wrap to where it began.
  c.combine_row_bytes = std::int64_t{1} << 33;
  for_each_layout(c, [&] {
    EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { c.walk(); }),
              "workspace: expected less than 2^62 bytes, got 1 rounds of 1073741824 tokens on each "
              "of 2 ranks with rows of 8 and 8589934592 bytes");
  });
  std::swap(c.dispatch_row_bytes, c.combine_row_bytes);
  for_each_layout(c, [&] { testing::expect_error<InvalidArgument>({"2^62"}, [&] { c.walk(); }); });
}

TEST(WorkspaceTest, ARankWithoutExpertsStillHasAWorkspace) {
  WorkspaceCase c;
  c.num_ranks = 2;
  c.max_local_experts = 0;
  c.config.top_k = 2;
  c.config.max_tokens_per_rank = 3;
  for_each_layout(c, [&] {
    const Workspace w = c.walk();
    EXPECT_EQ(w.rows_per_token, 1);
    expect_apart(window_regions(c, w), w.symmetric_bytes);
    expect_apart(private_regions(c, w), w.local_bytes);
  });
}

TEST(WorkspaceTest, PayloadRegionsAreRowsRoundedUpToTheAlignment) {
  EXPECT_EQ(payload_region_bytes(0, 16), 0);
  EXPECT_EQ(payload_region_bytes(1, 1), 128);
  EXPECT_EQ(payload_region_bytes(2, 64), 128);
  EXPECT_EQ(payload_region_bytes(3, 43), 256);
  EXPECT_EQ(payload_region_bytes(std::int64_t{1} << 20, (std::int64_t{1} << 20) + 1),
            (std::int64_t{1} << 40) + (std::int64_t{1} << 20));
}

TEST(WorkspaceTest, CountsHoldRanksExpertsOffsetsAndTheirTotal) {
  for (const int num_ranks : {1, 3, 1024}) {
    for (const int max_local : {0, 1, 1 << 24}) {
      EXPECT_GE(num_counts(num_ranks, max_local), num_ranks + 2 * std::int64_t{max_local} + 2);
    }
  }
}

// --- Metainfo ---------------------------------------------------------------------------------

TEST(WorkspaceMetainfoTest, HoldsTheDocumentedNamesWithTheOffsetsOfTheWalk) {
  for_each_case([](const WorkspaceCase& c) {
    const Workspace w = c.walk();
    const std::vector<Metainfo::Entry> expected = {
        {"num_ranks", c.num_ranks},
        {"num_experts", c.config.num_experts},
        {"max_local_experts", c.max_local_experts},
        {"top_k", c.config.top_k},
        {"max_tokens_per_rank", c.config.max_tokens_per_rank},
        {"max_in_flight", c.config.max_in_flight},
        {"dispatch_row_bytes", c.dispatch_row_bytes},
        {"combine_row_bytes", c.combine_row_bytes},
        {"row_guard_bytes", c.config.test_knobs.row_guard_bytes},
        {"control_offset", w.control_offset},
        {"flags_offset", w.flags_offset},
        {"flags_stride", w.flags_stride},
        {"slot_offset", w.slot_offset},
        {"slot_stride", w.slot_stride},
        {"dispatch_flags_offset", w.dispatch_flags_offset},
        {"combine_flags_offset", w.combine_flags_offset},
        {"ack_flags_offset", w.ack_flags_offset},
        {"count_flags_offset", w.count_flags_offset},
        {"source_token_offset", w.store.source_token_offset},
        {"topk_ids_offset", w.store.topk_ids_offset},
        {"topk_weights_offset", w.store.topk_weights_offset},
        {"payload_offset", w.store.payload_offset},
        {"payload_bytes", w.store.payload_bytes},
        {"combine_offset", w.store.combine_offset},
        {"combine_bytes", w.store.combine_bytes},
        {"local_slot_offset", w.local_slot_offset},
        {"local_slot_stride", w.local_slot_stride},
        {"local_payload_offset", w.local_payload_offset},
        {"local_payload_bytes", w.local_payload_bytes},
        {"local_combine_offset", w.local_combine_offset},
        {"local_combine_bytes", w.local_combine_bytes},
        {"symmetric_bytes", w.symmetric_bytes},
        {"local_bytes", w.local_bytes},
        {"workspace_bytes", w.symmetric_bytes + w.block_bytes + w.local_bytes},
    };
    EXPECT_THAT(w.metainfo().entries(), ::testing::UnorderedElementsAreArray(expected));
  });
}

}  // namespace
}  // namespace fanfold::plan
