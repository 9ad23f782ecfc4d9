// SPDX-License-Identifier: Apache-2.0

// What a round must have left, according to the plans of the CPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "gpu/hand_made_rank.h"

namespace fanfold::testing {

void HandMadeRanks::compare(int r) const {
  SCOPED_TRACE("rank " + std::to_string(r));
  check(cudaSetDevice(r));
  ASSERT_EQ(report(r).failure, 0U);
  const exec::DeviceSlot slot = this->slot(r);
  EXPECT_EQ(slot.epoch, epoch_);
  EXPECT_EQ(slot.num_combines, 0U);
  EXPECT_EQ(slot.num_tokens, plans_[static_cast<std::size_t>(r)].num_tokens);
  EXPECT_EQ(slot.next_tile, 0U);
  EXPECT_EQ(slot.num_done, 0U);
  compare_sent(r);
  compare_received(r);
  if (::testing::Test::HasFailure()) return;  // the rest builds on what was compared
  if (round_.is_expert_major) compare_experts(r);
}

void HandMadeRanks::compare_sent(int r) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
  const plan::SendPlan& plan = plans_[static_cast<std::size_t>(r)];
  const std::int64_t per_token = std::min(spec_.top_k, spec_.num_ranks);
  EXPECT_EQ(read(rank.rows_per_rank, spec_.num_ranks), plan.rows_per_rank);
  EXPECT_EQ(read(rank.sent_ids, plan.num_tokens * spec_.top_k), plan.ids);
  EXPECT_EQ(report(r).num_dropped_ids, rank.num_dropped);
  EXPECT_EQ(control(r).num_dropped_ids, rank.num_dropped);
  const std::vector<plan::Target> targets = read(rank.targets, plan.num_tokens * per_token);
  for (std::int64_t token = 0; token < plan.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    const std::int64_t num = plan.target_begin[at + 1] - plan.target_begin[at];
    for (std::int64_t i = 0; i < num; ++i) {
      const plan::Target& got = targets[static_cast<std::size_t>(token * per_token + i)];
      const plan::Target& want = plan.targets[static_cast<std::size_t>(plan.target_begin[at] + i)];
      ASSERT_EQ(got.rank, want.rank) << "token " << token << " target " << i;
      ASSERT_EQ(got.row, want.row) << "token " << token << " target " << i;
    }
    if (num < per_token) {
      ASSERT_EQ(targets[static_cast<std::size_t>(token * per_token + num)].rank, -1);
    }
  }
  if (spec_.has_weights && round_.keeps_weights && !round_.is_routed) {
    std::vector<float> want = round_.tokens[static_cast<std::size_t>(r)].topk_weights;
    want.resize(static_cast<std::size_t>(plan.num_tokens * spec_.top_k));
    EXPECT_EQ(read(rank.sent_weights, plan.num_tokens * spec_.top_k), want);
  }
}

void HandMadeRanks::compare_received(int r) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
  const std::byte* const store = rank.window + store_offset_;
  const std::int64_t m = round_.round_max_tokens;
  const std::int64_t top_k = spec_.top_k;
  const std::int64_t num_rows = spec_.num_ranks * m;
  const auto tokens = read(reinterpret_cast<const std::int32_t*>(store + tokens_offset_), num_rows);
  const auto ids =
      read(reinterpret_cast<const std::int32_t*>(store + ids_offset_), num_rows * top_k);
  const auto weights =
      read(reinterpret_cast<const float*>(store + weights_offset_), num_rows * top_k);
  std::vector<std::vector<std::byte>> payloads;
  for (std::size_t i = 0; i < spec_.row_bytes.size(); ++i) {
    payloads.push_back(read(store + payload_offsets_[i], num_rows * spec_.row_bytes[i]));
  }
  const auto source_rank = read(rank.source_rank, num_rows);
  const auto source_token = read(rank.source_token, num_rows);
  const auto rank_counts = read(rank.rank_counts, spec_.num_ranks);
  const auto token_counts = read(rank.token_counts, spec_.num_ranks);
  std::int32_t total = 0;
  for (int source = 0; source < spec_.num_ranks; ++source) {
    const auto s = static_cast<std::size_t>(source);
    const plan::SendPlan& plan = plans_[s];
    const std::int32_t num =
        is_active(source) ? plan.rows_per_rank[static_cast<std::size_t>(r)] : 0;
    total += num;
    EXPECT_EQ(rank_counts[s], num) << "from " << source;
    EXPECT_EQ(token_counts[s], is_active(source) ? plan.num_tokens : 0) << "of " << source;
    for (std::int64_t i = 0; i < m; ++i) {
      const std::int64_t row = source * m + i;
      const auto at = static_cast<std::size_t>(row);
      const auto first = static_cast<std::size_t>(row * top_k);
      if (i >= num) {
        for (std::int64_t k = 0; k < top_k; ++k) {
          ASSERT_EQ(ids[first + static_cast<std::size_t>(k)], kInvalid) << "row " << row;
        }
        if (!round_.is_expert_major) {
          ASSERT_EQ(source_token[at], -1) << "row " << row;
        }
        continue;
      }
      const std::int32_t token = plan.tokens_for(r)[i];
      ASSERT_EQ(tokens[at], token) << "row " << row;
      if (!round_.is_expert_major) {
        ASSERT_EQ(source_rank[at], source) << "row " << row;
        ASSERT_EQ(source_token[at], token) << "row " << row;
      }
      for (std::int64_t k = 0; k < top_k; ++k) {
        const std::size_t column = first + static_cast<std::size_t>(k);
        ASSERT_EQ(ids[column], plan.ids_of(token)[k]) << "row " << row;
        if (!spec_.has_weights) continue;
        ASSERT_EQ(weights[column],
                  round_.tokens[s].topk_weights[static_cast<std::size_t>(token * top_k + k)])
            << "row " << row;
      }
      for (std::size_t p = 0; p < payloads.size(); ++p) {
        for (std::int64_t b = 0; b < spec_.row_bytes[p]; ++b) {
          ASSERT_EQ(payloads[p][static_cast<std::size_t>(row * spec_.row_bytes[p] + b)],
                    payload_byte(source, token + static_cast<std::int64_t>(epoch_) * 100, p, b))
              << "row " << row << " payload " << p << " byte " << b;
        }
      }
    }
  }
  EXPECT_EQ(read(rank.num_rows, 1)[0], total);
}

void HandMadeRanks::compare_experts(int r) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(r)];
  const std::byte* const store = rank.window + store_offset_;
  const std::int64_t m = round_.round_max_tokens;
  const std::int64_t num_rows = spec_.num_ranks * m;
  const auto num_local =
      static_cast<std::int64_t>(map_.experts_of[static_cast<std::size_t>(r)].size());
  const auto ids =
      read(reinterpret_cast<const std::int32_t*>(store + ids_offset_), num_rows * spec_.top_k);
  const auto weights =
      read(reinterpret_cast<const float*>(store + weights_offset_), num_rows * spec_.top_k);
  const auto rank_counts = read(rank.rank_counts, spec_.num_ranks);
  std::vector<plan::SourceRows> sources;
  for (int source = 0; source < spec_.num_ranks; ++source) {
    const std::int64_t first = source * m * spec_.top_k;
    sources.push_back({ids.data() + first, spec_.has_weights ? weights.data() + first : nullptr,
                       rank_counts[static_cast<std::size_t>(source)]});
  }
  std::vector<std::int32_t> counts(static_cast<std::size_t>(num_local));
  plan::ExpertRows want;
  plan::build_expert_rows(sources, map_, r, spec_.top_k, counts.data(), want);
  EXPECT_EQ(read(rank.expert_counts, num_local), counts);
  std::vector<std::int32_t> offsets{0};
  for (const std::int32_t count : counts) offsets.push_back(offsets.back() + count);
  EXPECT_EQ(read(rank.offsets, num_local + 1), offsets);

  const std::int64_t max_pairs = std::min(spec_.top_k, map_.max_local_experts);
  const auto pairs = read(rank.pairs, num_rows * max_pairs);
  const auto expert_weights = read(rank.expert_weights, num_local * num_rows);
  const auto source_rank = read(rank.source_rank, num_local * num_rows);
  const auto source_token = read(rank.source_token, num_local * num_rows);
  std::vector<std::vector<std::byte>> expanded;
  for (std::size_t p = 0; p < spec_.row_bytes.size(); ++p) {
    expanded.push_back(read(rank.expanded[p], num_local * num_rows * spec_.row_bytes[p]));
  }
  std::size_t row = 0;
  for (int source = 0; source < spec_.num_ranks; ++source) {
    for (std::int64_t i = 0; i < rank_counts[static_cast<std::size_t>(source)]; ++i, ++row) {
      const std::int64_t first = (source * m + i) * max_pairs;
      const std::int64_t num = want.begin[row + 1] - want.begin[row];
      const std::int32_t token = plans_[static_cast<std::size_t>(source)].tokens_for(r)[i];
      for (std::int64_t n = 0; n < num; ++n) {
        const plan::ExpertRow& pair = want.rows[static_cast<std::size_t>(want.begin[row] + n)];
        const plan::ExpertRow& got = pairs[static_cast<std::size_t>(first + n)];
        ASSERT_EQ(got.local_expert, pair.local_expert) << "row " << row << " pair " << n;
        ASSERT_EQ(got.position, pair.position) << "row " << row << " pair " << n;
        ASSERT_EQ(got.weight, pair.weight) << "row " << row << " pair " << n;
        const std::int64_t at = pair.local_expert * num_rows + pair.position;
        if (spec_.has_weights) {
          ASSERT_EQ(expert_weights[static_cast<std::size_t>(at)], pair.weight);
        }
        ASSERT_EQ(source_rank[static_cast<std::size_t>(at)], source);
        ASSERT_EQ(source_token[static_cast<std::size_t>(at)], token);
        for (std::size_t p = 0; p < expanded.size(); ++p) {
          for (std::int64_t b = 0; b < spec_.row_bytes[p]; ++b) {
            ASSERT_EQ(expanded[p][static_cast<std::size_t>(at * spec_.row_bytes[p] + b)],
                      payload_byte(source, token + static_cast<std::int64_t>(epoch_) * 100, p, b))
                << "row " << row << " payload " << p << " byte " << b;
          }
        }
      }
      if (num < max_pairs) {
        ASSERT_EQ(pairs[static_cast<std::size_t>(first + num)].local_expert, -1) << "row " << row;
      }
    }
  }
  for (std::int64_t expert = 0; expert < num_local; ++expert) {
    for (std::int64_t i = counts[static_cast<std::size_t>(expert)]; i < num_rows; ++i) {
      ASSERT_EQ(source_token[static_cast<std::size_t>(expert * num_rows + i)], -1);
    }
  }
}

void expect_no_reports() {
  for (const cudasim::Report& report : cudasim::reports()) {
    ADD_FAILURE() << report.kind << ": " << report.text;
  }
}

}  // namespace fanfold::testing
