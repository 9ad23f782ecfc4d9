// SPDX-License-Identifier: Apache-2.0
#pragma once

// From received rows (one per token and rank) to rows per local expert.

#include <cstdint>
#include <vector>

#include "plan/expert_map.h"

namespace fanfold::plan {

/// One (token, local expert) pair.
struct ExpertRow {
  std::int32_t local_expert;
  std::int32_t position;  // among the expert's rows, dense from 0
  float weight;           // merged over repeats; 1 when no weights travelled
};

/// The pairs of all received rows, by row, in order of the first column that names the expert.
struct ExpertRows {
  std::vector<std::int64_t> begin;  // [rows+1]; rows run over sources, then their rows
  std::vector<ExpertRow> rows;

  struct LocalId {
    std::int32_t column;
    std::int32_t local_expert;
  };
  std::vector<LocalId> local_ids = {};       // scratch [K]: of one row
  std::vector<std::int64_t> last_pair = {};  // scratch [L]: the last pair of each local expert
};

/// Received ids and weights of one source: `ids` and `weights` [num_rows, K]; `weights` may be
/// null.
struct SourceRows {
  const std::int32_t* ids;
  const float* weights;
  std::int64_t num_rows;
};

/// Lays out the rows of every source (index = rank) for `rank`'s experts: order (source, row)
/// within an expert. Writes the rows of each local expert to `expert_counts` [L].
void build_expert_rows(const std::vector<SourceRows>& sources, const ExpertMap& map, int rank,
                       int top_k, std::int32_t* expert_counts, ExpertRows& out);

/// Only the counts: [L] (token, local expert) pairs.
void count_expert_rows(const std::vector<SourceRows>& sources, const ExpertMap& map, int rank,
                       int top_k, std::int32_t* expert_counts);

}  // namespace fanfold::plan
