// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/format.h"
#include "cpu/backend.h"
#include "fanfold/error.h"

namespace fanfold::cpu {
namespace {

/// Waits for one flag and returns it when it agrees with ours.
exec::FlagFields wait_flag(const exec::Context& context, const exec::FlagLine& line,
                           const exec::FlagFields& mine, const comm::WaitFor& target,
                           base::Deadline deadline) {
  const bool is_waited_for = !exec::has_arrived(line, mine.epoch);
  context.control->wait([&] { return exec::has_arrived(line, mine.epoch); }, target, deadline);
  const exec::FlagFields got = exec::read(line);
  if (is_waited_for && context.distances != nullptr) {
    context.distances[target.rank].add(base::now_ns() - got.sent_ns);
  }
  context.hook->step();
  const std::string difference = exec::difference(mine, context.rank, got, target.rank);
  if (!difference.empty()) {
    throw InvalidArgument(base::str(context.control->what(), ": ", target.phase, " of round ",
                                    target.round, " differs between ranks: ", difference,
                                    "; call reset() on every rank"));
  }
  return got;
}

void pad_ids(const exec::DispatchRecvParams& params, int source) {
  const exec::RowArrays& arrays = params.arrays;
  std::int32_t* rows = params.topk_ids + source * arrays.round_max_tokens * arrays.top_k;
  std::fill(rows + std::int64_t{params.rank_counts[source]} * arrays.top_k,
            rows + arrays.round_max_tokens * arrays.top_k, params.invalid_expert_id);
}

}  // namespace

// Waits in the order in which peers send: the next rank pushes to this one last.
void dispatch_recv(const exec::Context& context, const exec::DispatchRecvParams& params) {
  for (int i = 0; i < context.num_ranks; ++i) {
    const int source = (context.rank + context.num_ranks - i) % context.num_ranks;
    params.rank_counts[source] = 0;
    params.token_counts[source] = 0;
    if (source == context.rank) {
      params.rank_counts[source] = params.plan->rows_per_rank[static_cast<std::size_t>(source)];
      params.token_counts[source] = static_cast<std::int32_t>(params.plan->num_tokens);
    } else if (context.control->is_active(source)) {
      const exec::FlagFields got =
          wait_flag(context, *params.flags[source], params.fields,
                    comm::WaitFor{source, "dispatch", params.round}, params.deadline);
      params.rank_counts[source] = static_cast<std::int32_t>(got.num_rows);
      params.token_counts[source] = static_cast<std::int32_t>(got.num_tokens);
    }
    if (params.topk_ids != nullptr) pad_ids(params, source);
  }
}

void wait_flags(const exec::Context& context, const exec::WaitFlagsParams& params) {
  for (int i = 1; i < context.num_ranks; ++i) {
    const int source = (context.rank + context.num_ranks - i) % context.num_ranks;
    if (!(*params.active)[static_cast<std::size_t>(source)]) continue;
    wait_flag(context, *params.flags[source], params.fields,
              comm::WaitFor{source, params.phase, params.round}, params.deadline);
  }
}

}  // namespace fanfold::cpu
