// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which token goes to which expert, and to which row of the expert's rank: for layouts whose rows
// their senders place.

#include <cstdint>
#include <vector>

#include "plan/expert_map.h"
#include "plan/send_plan.h"

namespace fanfold::plan {

/// One token for one expert: row `row` of the layout of `rank`.
struct Pair {
  std::int32_t rank;
  std::int32_t expert;  // its global id
  std::int64_t row;
  float weight;  // merged over repeats, k ascending; 1 when no weights travel
};

/// The pairs of one rank's tokens.
struct PairPlan {
  std::vector<std::int64_t> begin;  // [T+1] into pairs
  std::vector<Pair> pairs;          // per token: ranks ascending, on each by first column
  std::vector<std::int32_t> pairs_per_expert;  // [E]
  std::vector<std::int64_t> last_pair;         // scratch [E]
  std::vector<Pair> unsorted;                  // scratch, of one token
};

/// Fills `out` from the ids of `plan`, rows still unknown. Experts on inactive ranks are left out.
/// `weights` [T, K], `weights_stride` elements apart; may be null.
void build_pairs(const SendPlan& plan, const ExpertMap& map, const std::vector<bool>& active,
                 const float* weights, std::int64_t weights_stride, PairPlan& out);

/// Gives each pair its row: the rows of an expert are those of all sources, sources ascending, of
/// each in the order of its tokens; the next expert of the rank begins at a multiple of
/// `alignment`. `counts` [R, E] pairs of each source and expert. Returns the most rows that any
/// rank's layout has, padding included.
std::int64_t place_pairs(const std::vector<std::int32_t>& counts, const ExpertMap& map, int source,
                         std::int64_t alignment, PairPlan& plan);

/// Only the most rows that any rank's layout has.
std::int64_t most_places(const std::vector<std::int32_t>& counts, const ExpertMap& map,
                         std::int64_t alignment);

}  // namespace fanfold::plan
