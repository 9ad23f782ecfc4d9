// SPDX-License-Identifier: Apache-2.0

// Layout gathered: rows and results in memory that all ranks reach (see gathering.h).

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/format.h"
#include "base/mapping.h"
#include "comm/communicator_impl.h"
#include "exchange/gathering.h"
#include "fanfold/error.h"

namespace fanfold::exchange {

Gathering::Gathering(Setup setup, base::Deadline deadline)
    : Collective(std::move(setup), deadline),
      kernels_(base::kernels(base::isa_from_name(config().test_knobs.isa.c_str()))),
      shares_memory_(setup_.communicator->group().shares_memory()) {
  if (setup_.workspace_of != nullptr) {
    const plan::Workspace& owner = setup_.workspace_of->workspace();
    if (workspace_.block_stride > owner.block_stride) {
      throw InvalidArgument(base::str(
          "workspace_of: gathered rows and results of a slot: needed ", workspace_.block_stride,
          " bytes, ", setup_.workspace_of->what(), " has ", owner.block_stride,
          "; give the first of them layout gathered and the larger sizes (hidden, top_k, "
          "max_tokens_per_rank, dispatch_row_bytes, combine_row_bytes)"));
    }
    workspace_.block_stride = owner.block_stride;
  }
  Kept kept{{}, {}, local_, {}};
  if (has_shared_blocks()) {
    kept.windows = shared().windows;
    kept.memory = shared().memory;
    for (const auto& window : kept.windows) {
      blocks_.push_back(window->data() + workspace_.block_offset);
    }
    push_targets_.resize(blocks_.size());
  } else if (is_gathered()) {
    kept.own_blocks = shared().own_blocks;
    blocks_.assign(static_cast<std::size_t>(num_ranks()), kept.own_blocks.get());
    on_all_ranks([this] {
      home_ = base::map_private(workspace_.max_tokens_per_rank * num_ranks() *
                                workspace_.rows_per_token * workspace_.wire_row_bytes);
    });
  }
  kept_ = std::make_shared<Kept>(std::move(kept));
}

void Gathering::close(base::Deadline deadline) {
  kept_.reset();  // what is left of it are the callers' views
  Collective::close(deadline);
}

void Gathering::detach() noexcept {
  kept_.reset();
  Collective::detach();
}

bool Gathering::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  const auto inside = [&](const std::byte* block) {
    return at >= block && at < block + workspace_.block_stride * workspace_.max_in_flight;
  };
  return Collective::owns(data) || std::any_of(blocks_.begin(), blocks_.end(), inside);
}

void Gathering::poison_block(const Slot& slot, std::int64_t begin, std::int64_t end,
                             int value) const {
  if (is_gathered() && config().debug_poison) poison(block_base(slot) + begin, end - begin, value);
}

/// Peers write here only after the head of this rank's next dispatch into the slot.
void Gathering::release(Slot& slot) {
  Collective::release(slot);
  poison_block(slot, 0, workspace_.block_combine_offset, 0xCD);
}

/// Every rank has the rows of all tokens.
void Gathering::name_rows_by_token(plan::SendPlan& plan) const {
  for (std::int64_t token = 0; token < plan.num_tokens; ++token) {
    for (std::int64_t i = plan.target_begin[static_cast<std::size_t>(token)];
         i < plan.target_begin[static_cast<std::size_t>(token) + 1]; ++i) {
      plan.targets[static_cast<std::size_t>(i)].row = static_cast<std::int32_t>(token);
    }
  }
}

/// Writes this rank's rows to their places in all blocks: to peers past the cache, but for a few.
/// Ordinary stores into lines that a distant core holds crawl, and the ranks do not know here who
/// is near.
void Gathering::push_payloads(const Slot& slot) {
  constexpr std::int64_t kFewBytes = std::int64_t{16} << 10;
  std::int64_t bytes = 0;  // for one rank
  for (const PayloadSpec& spec : slot.payloads) bytes += slot.plan().num_tokens * spec.row_bytes;
  const bool streams = config().test_knobs.streaming_stores && bytes > kFewBytes;
  const comm::Channel::Copy copy = streams ? kernels_.copy_streaming : &copy_bytes;
  for (std::size_t i = 0; i < slot.payloads.size(); ++i) {
    const PayloadSpec& spec = slot.payloads[i];
    const std::int64_t first =
        spec.gathered_offset + token_begin_[static_cast<std::size_t>(rank_)] * spec.stride_bytes;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      push_targets_[static_cast<std::size_t>(rank)] = block_of(slot, rank) + first;
    }
    push_rows(spans_[index_targets_.size() + i], spec.stride_bytes, copy);
    hook_.step();
  }
}

/// Each row is loaded once and written everywhere while it is in the cache, in turns of this many
/// bytes (as cpu/dispatch_send.cpp does). Helpers fence their own streaming stores.
void Gathering::push_rows(const RowSpan& rows, std::int64_t stride_bytes,
                          comm::Channel::Copy copy) {
  constexpr std::int64_t kTurnBytes = 1024;
  const bool dense = rows.is_dense() && stride_bytes == rows.row_bytes;
  const auto push = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t run = dense ? end - begin : 1;
    for (std::int64_t row = begin; row < end; row += run) {
      const std::byte* from = rows.rows + row * rows.stride_bytes;
      const std::int64_t length = run * rows.row_bytes;
      for (std::int64_t at = 0; at < length; at += kTurnBytes) {
        const std::int64_t bytes = std::min(kTurnBytes, length - at);
        for (int i = 1; i <= num_ranks(); ++i) {
          const int rank = (rank_ + i) % num_ranks();
          std::byte* to = push_targets_[static_cast<std::size_t>(rank)] + row * stride_bytes + at;
          (rank == rank_ ? &copy_bytes : copy)(to, from + at, bytes);
        }
      }
    }
  };
  exec::for_ranges(workers_.get(), rows.num_rows, rows.row_bytes * num_ranks(), push);
}

/// Results that lie elsewhere, or are of another type than what travels, move into this rank's
/// block: those of the tokens that were routed here, in runs of consecutive tokens.
void Gathering::put_results(const Slot& slot, const exec::CombineSendParams& params) {
  std::byte* const results = results_of(slot, rank_);
  if (params.y == results && params.y_dtype == params.combine_dtype) return;
  const std::vector<std::int32_t>& tokens = picked(slot);
  exec::GatherRowsParams rows{};
  rows.source = params.y;
  rows.row_bytes = params.hidden * size_of(params.y_dtype);
  rows.source_stride_bytes = rows.row_bytes;
  rows.target_stride_bytes = params.row_bytes;
  rows.source_dtype = params.y_dtype;
  rows.target_dtype = params.combine_dtype;
  for (std::size_t begin = 0, end = 0; begin < tokens.size(); begin = end) {
    for (end = begin + 1; end < tokens.size() && tokens[end] == tokens[end - 1] + 1;) ++end;
    rows.indices = tokens.data() + begin;
    rows.num_rows = static_cast<std::int64_t>(end - begin);
    rows.target = results + tokens[begin] * params.row_bytes;
    backend_->gather_rows(rows);
  }
}

/// Adds the rows of this rank's tokens where the ranks' experts have put them.
void Gathering::pull_results(const Slot& slot, const CombineCall& call, const CallHead& head,
                             exec::SumRowsParams& params) {
  // Release of the results: this step. Acquire: its end.
  exchange_heads(slot, head, call.deadline);
  const std::int64_t first = std::accumulate(slot.token_counts.begin(),
                                             slot.token_counts.begin() + rank_, std::int64_t{0});
  for (int rank = 0; rank < num_ranks(); ++rank) {
    sources_[static_cast<std::size_t>(rank)] = results_of(slot, rank) + first * params.row_bytes;
  }
  params.sources = sources_.data();
  backend_->sum_rows(params);
  hook_.step();
  // The round goes on: nobody may write its results anew before everyone has pulled these.
  if (!call.inputs->release) exchange_heads(slot, head, call.deadline);
}

}  // namespace fanfold::exchange
