// SPDX-License-Identifier: Apache-2.0
#pragma once

// Seeded routings. All ranks' tokens follow from the seed, so each rank makes them for itself.

#include <cstdint>
#include <vector>

#include "support/oracle.h"

namespace fanfold::testing {

enum class RoutingKind : std::uint8_t {
  kUniform,     // every rank T = m, k distinct experts, all equally likely
  kSkewed,      // few experts take most tokens; uneven T
  kAllToOne,    // every id is the same expert
  kAllNone,     // every id is negative
  kSomeNone,    // about a third of the ids are negative, among them -2 and the lowest int16
  kDuplicates,  // two or three distinct experts per token, repeated
  kZeroTokens,  // T = 0 on every rank
  kOneToken,    // one token on one rank
  kUneven,      // T from 0 to m; rank 0 is full, the last rank empty (with two ranks or more)
  kOneExpertPerToken,  // one id, all others -1: most ranks get nothing of a token
};

/// All of them, for tests that must hold for each.
const std::vector<RoutingKind>& all_routings();
const char* name_of(RoutingKind kind);

struct RoutingSpec {
  RoutingKind kind = RoutingKind::kUniform;
  int num_ranks = 1;
  int num_experts = 1;
  int top_k = 1;
  std::int64_t round_max_tokens = 1;
  std::uint64_t seed = 1;
};

/// [R] tokens with weights in (-2, 2).
std::vector<RankTokens> make_tokens(const RoutingSpec& spec);

}  // namespace fanfold::testing
