// SPDX-License-Identifier: Apache-2.0
#pragma once

// How kernels begin, end, tell peers that a phase is complete, wait for them, and fail.
//
// Memory order of one flag, from the writer of a row to its reader on another device:
//   writers of all blocks   st16, ...
//   each block              __syncthreads, then num_done by atom_add_acq_rel_gpu (is_last_block)
//   the last block          the last num_done, __syncthreads, fence_acq_rel_sys, epoch by
//                           st_relaxed_sys (announce)
//   the waiting thread      epoch by ld_acquire_sys (await)
//   the readers             the end of the waiting kernel, or __syncthreads behind `await`
// Flag lines need no clearing: the epoch of a slot only grows.

#include <cstddef>

#include "exec/device_params.h"
#include "gpu/device/device.cuh"
#include "gpu/kernels/faults.cuh"

namespace fanfold::gpu {

constexpr int kThreads = 256;  // of every block
constexpr int kWarps = kThreads / 32;

/// What a block knows from its start, in shared memory.
struct Known {
  // Of the tables that the host changes only while the device is idle.
  std::byte* windows[exec::kMaxDeviceRanks];
  bool is_active[exec::kMaxDeviceRanks];
  std::uint32_t generation;
  std::uint32_t placement_version;
  std::uint32_t mask_digest;
  // As the kernel before has left it.
  std::uint32_t has_failed;
  std::uint64_t epoch;
  std::uint32_t num_combines;
  std::int32_t num_tokens;
};
static_assert(exec::kMaxDeviceRanks <= kThreads);

/// Waits for the kernel before it, and meanwhile for what does not depend on that one: a round of
/// few tokens is a chain of waits for memory, each of which shows. Null, for all threads, once
/// kernels have failed: then they do nothing, and all that they would have written stays as it is.
__device__ inline const Known* begin(const exec::DeviceRound& round) {
  FANFOLD_SHARED(Known, known);
  const int rank = static_cast<int>(threadIdx.x);
  const bool is_rank = rank < round.num_ranks;
  std::byte* const window = is_rank ? round.windows[rank] : nullptr;
  const bool is_active = is_rank && round.is_active[rank] != 0;
  const std::uint32_t generation = round.control->generation;
  const std::uint32_t placement_version = round.control->placement_version;
  const std::uint32_t mask_digest = round.control->mask_digest;
  if (!has(Fault::kDoesNotWaitForKernel)) grid_dependency_wait();
  if (rank == 0) {
    const std::uint32_t has_failed = ld_relaxed_gpu(&round.control->has_failed);
    known.epoch = round.slot->epoch;
    known.num_combines = round.slot->num_combines;
    known.num_tokens = round.slot->num_tokens;
    known.has_failed = has_failed;
    known.generation = generation;
    known.placement_version = placement_version;
    known.mask_digest = mask_digest;
  }
  if (is_rank) {
    known.windows[rank] = window;
    known.is_active[rank] = is_active;
  }
  __syncthreads();
  return known.has_failed == 0 ? &known : nullptr;
}

/// Counts this block as done; whether it was the last of the grid, whose threads then know all that
/// the others wrote before they called this. All threads call it, once.
__device__ inline bool is_last_block(std::uint32_t* num_done) {
  FANFOLD_SHARED(std::uint32_t, is_last);
  if (!has(Fault::kNoBarrierBeforeCount)) __syncthreads();
  if (gridDim.x == 1) return true;
  if (threadIdx.x == 0) {
    const std::uint32_t before = has(Fault::kRelaxedCount) ? atom_add_relaxed_gpu(num_done, 1U)
                                                           : atom_add_acq_rel_gpu(num_done, 1U);
    is_last = before + 1 == gridDim.x ? 1 : 0;
  }
  __syncthreads();
  return is_last != 0;
}
__device__ inline bool is_last_block(exec::DeviceSlot* slot) {
  return is_last_block(&slot->num_done);
}

/// The last block leaves the counters as the next kernel of the slot expects them.
__device__ inline void reset_counters(exec::DeviceSlot* slot) {
  if (threadIdx.x != 0) return;
  slot->next_tile = 0;
  slot->num_done = 0;
}

__device__ inline std::uint64_t* line_of(const Known& known, const exec::DeviceFlags& flags,
                                         int window, int source) {
  auto* const lines = reinterpret_cast<std::uint64_t*>(known.windows[window] + flags.offset);
  return lines + std::ptrdiff_t{source} * exec::kFlagWords;
}

/// Where this rank writes its line for `peer`.
__device__ inline std::uint64_t* line_to(const exec::DeviceRound& round, const Known& known,
                                         const exec::DeviceFlags& flags, int peer) {
  const bool is_staged = round.route == exec::DeviceRoute::kBlocks;
  return line_of(known, flags, peer,
                 is_staged && !has(Fault::kStagesInOwnBlock) ? peer : round.rank);
}

/// The epoch of the combine under way, or of the release, of the slot's round; as
/// exchange::Slot::combine_epoch.
__device__ inline std::uint64_t combine_epoch(const Known& known) {
  return known.epoch + (std::uint64_t{known.num_combines} << 48);
}

/// What this rank's line says, but for the counts.
__device__ inline exec::FlagFields fields_of(const Known& known, const exec::DeviceFlags& flags,
                                             std::uint64_t epoch) {
  exec::FlagFields fields = flags.fields;
  fields.epoch = epoch;
  fields.generation = known.generation;
  fields.placement_version = known.placement_version;
  fields.mask_digest = known.mask_digest;
  return fields;
}

/// Raises this rank's flag in every active peer's window; where all ranks get the same, in its own,
/// from where it is carried. All threads of one block call it, behind a barrier that all the
/// announced writes have passed. `rows_per_rank` [R] may be null.
__device__ inline void announce(const exec::DeviceRound& round, const Known& known,
                                const exec::DeviceFlags& flags, std::uint64_t epoch,
                                const std::int32_t* rows_per_rank, std::int32_t num_tokens) {
  exec::FlagFields fields = fields_of(known, flags, epoch);
  fields.num_tokens = static_cast<std::uint32_t>(num_tokens);
  const bool is_gathered = round.route == exec::DeviceRoute::kGather;
  for (int peer = static_cast<int>(threadIdx.x); peer < round.num_ranks; peer += kThreads) {
    if ((peer == round.rank) != is_gathered || !known.is_active[peer]) continue;
    std::uint64_t* const line = line_to(round, known, flags, peer);
    fields.num_rows =
        rows_per_rank == nullptr ? 0 : static_cast<std::uint32_t>(rows_per_rank[peer]);
    fields.sent_ns = static_cast<std::int64_t>(globaltimer_ns());
    if (has(Fault::kEpochBeforeWords)) {
      fence_acq_rel_sys();
      st_relaxed_sys(line, epoch);
    }
    for (int i = 1; i < exec::kFlagWords; ++i) st_relaxed_sys(line + i, flag_word(fields, i));
    // One for the lanes of a warp; a release store each would cost as many.
    if (has(Fault::kFenceOfDevice)) {
      fence_acq_rel_gpu();
    } else if (!has(Fault::kNoFenceBeforeEpoch)) {
      fence_acq_rel_sys();
    }
    st_relaxed_sys(line, epoch);
  }
}

/// Stops this and all later kernels, and tells the host why. The first to fail has the word.
__device__ inline void fail(const exec::DeviceRound& round, const exec::DeviceFlags& flags,
                            exec::DeviceFailure failure, int peer, const exec::FlagFields& mine,
                            const exec::FlagFields& got) {
  if (atom_cas_acq_rel_gpu(&round.control->has_failed, 0U, 1U) != 0) return;
  exec::DeviceReport* const report = round.report;
  st_relaxed_sys(&report->phase, static_cast<std::uint32_t>(flags.phase));
  st_relaxed_sys(&report->peer, static_cast<std::uint32_t>(peer));
  st_relaxed_sys(&report->slot, static_cast<std::uint32_t>(round.slot_index));
  st_relaxed_sys(&report->epoch, mine.epoch);
  st_relaxed_sys(&report->timeout_ns, round.timeout_ns);
  for (int i = 0; i < exec::kFlagWords; ++i) {
    st_relaxed_sys(&report->mine[i], flag_word(mine, i));
    st_relaxed_sys(&report->got[i], flag_word(got, i));
  }
  st_release_sys(&report->failure, static_cast<std::uint32_t>(failure));
}

/// Whether two lines agree in all that must be equal.
__device__ inline bool agree(const exec::FlagFields& mine, const exec::FlagFields& got) {
  return flag_word(mine, 1) == flag_word(got, 1) && mine.round_max_tokens == got.round_max_tokens &&
         mine.num_payloads == got.num_payloads && mine.digest == got.digest &&
         flag_word(mine, 5) == flag_word(got, 5) && mine.routing == got.routing;
}

__device__ inline bool has_arrived(const std::uint64_t* line, std::uint64_t epoch) {
  std::uint64_t seen = 0;
  if (has(Fault::kRelaxedWait)) {
    seen = ld_relaxed_sys(line);
  } else if (has(Fault::kAcquireOfDevice)) {
    seen = ld_acquire_gpu(line);
  } else {
    seen = ld_acquire_sys(line);
  }
  return seen == epoch || (has(Fault::kAnyEpoch) && seen != 0);
}

__device__ inline exec::FlagFields read_line(const std::uint64_t* line, std::uint64_t epoch) {
  std::uint64_t words[exec::kFlagWords];
  words[0] = epoch;
  for (int i = 1; i < exec::kFlagWords; ++i) words[i] = ld_relaxed_sys(line + i);
  return exec::flag_fields(words);
}

/// Waits for `peer`'s flag; false when it did not come, or says another thing than this rank's. A
/// collective has brought what the peer has: there is nothing to wait for.
__device__ inline bool await_peer(const exec::DeviceRound& round, const Known& known,
                                  const exec::DeviceFlags& flags, const exec::FlagFields& mine,
                                  int peer, exec::FlagFields* got) {
  constexpr unsigned kLooks = 64;  // between two looks at the host's memory
  const std::uint64_t* const line = line_of(known, flags, round.rank, peer);
  const std::uint64_t start = globaltimer_ns();
  for (unsigned look = 1; !has_arrived(line, mine.epoch); ++look) {
    if (round.route != exec::DeviceRoute::kWindows) {
      const exec::FlagFields other = read_line(line, ld_relaxed_sys(line));
      fail(round, flags, exec::DeviceFailure::kDiffers, peer, mine, other);
      return false;
    }
    if (look % kLooks == 0) {
      if (ld_relaxed_gpu(&round.control->has_failed) != 0) return false;
      if (ld_relaxed_sys(round.abort_any) == 1 + mine.generation) {
        fail(round, flags, exec::DeviceFailure::kAborted, peer, mine, mine);
        return false;
      }
    }
    if (globaltimer_ns() - start > round.timeout_ns) {
      fail(round, flags, exec::DeviceFailure::kTimeout, peer, mine, mine);
      return false;
    }
  }
  *got = read_line(line, mine.epoch);
  if (agree(mine, *got)) return true;
  fail(round, flags, exec::DeviceFailure::kDiffers, peer, mine, *got);
  return false;
}

/// Waits for every active peer's flag; false, for all threads, when kernels have failed. All
/// threads of one block call it. `counts` without `rank_counts`: only the flags. `num_tokens`: this
/// rank's.
__device__ inline bool await(const exec::DeviceRound& round, const Known& known,
                             const exec::DeviceFlags& flags, std::uint64_t epoch,
                             const exec::DeviceCounts& counts, std::int32_t num_tokens) {
  FANFOLD_SHARED(std::uint32_t, has_failed);
  const exec::FlagFields mine = fields_of(known, flags, epoch);
  for (int peer = static_cast<int>(threadIdx.x); peer < round.num_ranks; peer += kThreads) {
    std::int32_t num_rows = 0;
    std::int32_t their_tokens = 0;
    if (peer == round.rank) {
      num_rows = counts.rank_counts == nullptr ? 0 : counts.rows_per_rank[peer];
      their_tokens = num_tokens;
    } else if (known.is_active[peer] &&
               !(has(Fault::kSkipsLastPeer) && peer == round.num_ranks - 1)) {
      exec::FlagFields got;
      if (!await_peer(round, known, flags, mine, peer, &got)) break;
      num_rows = static_cast<std::int32_t>(got.num_rows);
      their_tokens = static_cast<std::int32_t>(got.num_tokens);
    }
    if (counts.rank_counts == nullptr) continue;
    counts.rank_counts[peer] = num_rows;
    counts.token_counts[peer] = their_tokens;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    has_failed = ld_relaxed_gpu(&round.control->has_failed);
    if (counts.rank_counts != nullptr && has_failed == 0) {
      std::int32_t num_rows = 0;
      for (int peer = 0; peer < round.num_ranks; ++peer) num_rows += counts.rank_counts[peer];
      *counts.num_rows = num_rows;
    }
  }
  __syncthreads();
  return has_failed == 0;
}

}  // namespace fanfold::gpu
