// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cpu/backend.h"

namespace fanfold::cpu {

void expand_rows(const exec::Context& context, const exec::ExpandRowsParams& params) {
  const plan::ExpertRows& map = *params.expert_rows;
  std::size_t row = 0;
  for (int source = 0; source < context.num_ranks; ++source) {
    const std::int64_t first = source * params.round_max_tokens;
    for (std::int64_t i = 0; i < params.rank_counts[source]; ++i, ++row) {
      for (std::int64_t pair = map.begin[row]; pair < map.begin[row + 1]; ++pair) {
        const plan::ExpertRow& to = map.rows[static_cast<std::size_t>(pair)];
        const std::int64_t at = to.local_expert * params.rows_per_expert + to.position;
        for (const auto& payload : params.payloads) {
          std::memcpy(payload.target + at * payload.stride_bytes,
                      payload.source + (first + i) * payload.stride_bytes,
                      static_cast<std::size_t>(payload.row_bytes));
        }
        if (params.weights != nullptr) params.weights[at] = to.weight;
      }
    }
  }
}

}  // namespace fanfold::cpu
