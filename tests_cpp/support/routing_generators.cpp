// SPDX-License-Identifier: Apache-2.0
#include "support/routing_generators.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "support/random_bits.h"

namespace fanfold::testing {
namespace {

std::int64_t num_tokens_of(const RoutingSpec& spec, int rank, RandomBits& random) {
  const std::int64_t most = spec.round_max_tokens;
  switch (spec.kind) {
    case RoutingKind::kZeroTokens:
      return 0;
    case RoutingKind::kOneToken:
      return rank == static_cast<int>(spec.seed % static_cast<std::uint64_t>(spec.num_ranks)) ? 1
                                                                                              : 0;
    case RoutingKind::kUneven:
      if (rank == 0) return most;
      if (rank == spec.num_ranks - 1) return 0;
      return random.below(most + 1);
    case RoutingKind::kSkewed:
    case RoutingKind::kSomeNone:
      return random.below(most + 1);
    case RoutingKind::kUniform:
    case RoutingKind::kAllToOne:
    case RoutingKind::kAllNone:
    case RoutingKind::kDuplicates:
    case RoutingKind::kOneExpertPerToken:
      return most;
  }
  return most;
}

/// top_k distinct experts while there are that many; afterwards -1.
std::vector<std::int64_t> distinct_ids(const RoutingSpec& spec, RandomBits& random) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(std::max(spec.num_experts, spec.top_k)),
                                -1);
  std::iota(ids.begin(), ids.begin() + spec.num_experts, 0);
  for (std::int64_t i = spec.num_experts - 1; i > 0; --i) {
    std::swap(ids[static_cast<std::size_t>(i)], ids[static_cast<std::size_t>(random.below(i + 1))]);
  }
  ids.resize(static_cast<std::size_t>(spec.top_k));
  return ids;
}

std::int64_t negative_id(RandomBits& random) {
  constexpr std::int64_t kChoices[] = {-1, -2, std::numeric_limits<std::int16_t>::min()};
  return kChoices[random.below(3)];
}

std::int64_t skewed_id(const RoutingSpec& spec, RandomBits& random) {
  const float u = random.unit();
  const auto id = static_cast<std::int64_t>(static_cast<float>(spec.num_experts) * u * u * u * u);
  return std::min<std::int64_t>(id, spec.num_experts - 1);
}

std::vector<std::int64_t> ids_of_token(const RoutingSpec& spec, RandomBits& random) {
  std::vector<std::int64_t> ids = distinct_ids(spec, random);
  const std::vector<std::int64_t> distinct = ids;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    switch (spec.kind) {
      case RoutingKind::kSkewed:
        ids[k] = skewed_id(spec, random);
        break;
      case RoutingKind::kAllToOne:
        ids[k] =
            static_cast<std::int64_t>(spec.seed % static_cast<std::uint64_t>(spec.num_experts));
        break;
      case RoutingKind::kAllNone:
        ids[k] = negative_id(random);
        break;
      case RoutingKind::kSomeNone:
        if (random.below(3) == 0) ids[k] = negative_id(random);
        break;
      case RoutingKind::kDuplicates:
        ids[k] =
            distinct[static_cast<std::size_t>(random.below(std::min<std::int64_t>(3, spec.top_k)))];
        break;
      case RoutingKind::kOneExpertPerToken:
        if (k != ids.size() / 2) ids[k] = -1;
        break;
      case RoutingKind::kUniform:
      case RoutingKind::kZeroTokens:
      case RoutingKind::kOneToken:
      case RoutingKind::kUneven:
        break;
    }
  }
  return ids;
}

}  // namespace

const std::vector<RoutingKind>& all_routings() {
  static const std::vector<RoutingKind> kAll = {
      RoutingKind::kUniform,          RoutingKind::kSkewed,   RoutingKind::kAllToOne,
      RoutingKind::kAllNone,          RoutingKind::kSomeNone, RoutingKind::kDuplicates,
      RoutingKind::kZeroTokens,       RoutingKind::kOneToken, RoutingKind::kUneven,
      RoutingKind::kOneExpertPerToken};
  return kAll;
}

const char* name_of(RoutingKind kind) {
  switch (kind) {
    case RoutingKind::kUniform:
      return "uniform";
    case RoutingKind::kSkewed:
      return "skewed";
    case RoutingKind::kAllToOne:
      return "all_to_one";
    case RoutingKind::kAllNone:
      return "all_none";
    case RoutingKind::kSomeNone:
      return "some_none";
    case RoutingKind::kDuplicates:
      return "duplicates";
    case RoutingKind::kZeroTokens:
      return "zero_tokens";
    case RoutingKind::kOneToken:
      return "one_token";
    case RoutingKind::kUneven:
      return "uneven";
    case RoutingKind::kOneExpertPerToken:
      return "one_expert_per_token";
  }
  return "unknown";
}

std::vector<RankTokens> make_tokens(const RoutingSpec& spec) {
  std::vector<RankTokens> ranks(static_cast<std::size_t>(spec.num_ranks));
  for (int rank = 0; rank < spec.num_ranks; ++rank) {
    RandomBits random(mix(spec.seed, static_cast<std::uint64_t>(rank), 0x70U));
    RankTokens& tokens = ranks[static_cast<std::size_t>(rank)];
    tokens.num_tokens = num_tokens_of(spec, rank, random);
    for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
      const std::vector<std::int64_t> ids = ids_of_token(spec, random);
      tokens.topk_ids.insert(tokens.topk_ids.end(), ids.begin(), ids.end());
      for (int k = 0; k < spec.top_k; ++k) tokens.topk_weights.push_back(4 * random.unit() - 2);
    }
  }
  return ranks;
}

}  // namespace fanfold::testing
